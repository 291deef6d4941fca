"""LocalPool: steps the rows of all envs in this process, in the calling thread."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from gymnasium.error import ResetNeeded

from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows.batch_rows import Batched, BatchRows, make_rows
from vecenv.rows.info_memory import Schema
from vecenv.rows.protocol import EnvDescription, Rows, RowsOptions, StepObjects, combined
from vecenv.workers.pool import EnvRange, late_rows
from vecenv.workers.protocol import BETWEEN_STEPS, Kind, ResetCommand, carry_out


@dataclass
class _SentRows:
    """Rows that were sent but not yet stepped, as arguments for `Rows.step_rows`."""

    slot: int
    orders: list[tuple[int, Any]]


class LocalPool:
    """A `Pool` without worker processes, whose only range holds all envs.

    Exceptions raised by envs propagate unchanged, with a note that names the env. `finish` carries out the command, so
    timeouts have no effect.

    Args:
        env_fns: The functions of all envs, or a `Batched`.
        options: See `RowsOptions`.

    Attributes:
        broken: Whether an env raised during a step or a reset. If so, only `close` is legal.
    """

    pickles_infos = False

    def __init__(self, env_fns: Sequence[Callable] | Batched, options: RowsOptions):
        self.ranges = [EnvRange(0, 0, len(env_fns))]
        self.broken = False
        self._env_fns, self._options = env_fns, options
        self._rows: Rows | None = None  # before `start` and after `close`
        self._command: tuple[Kind, Sequence[Any], int] = (Kind.APPLY, (), 0)  # the arguments of `begin`
        self._sent: deque[_SentRows] = deque()
        self._done: list[tuple[list[int], StepObjects]] = []  # rows and their objects: not yet received

    @property
    def processes(self) -> list[BaseProcess]:
        """An empty list, because there are no workers."""
        return []

    @property
    def envs(self) -> list[Any]:
        """The envs, or the only vector env, which a `Batched` has built."""
        return [] if self._rows is None else self._rows.envs

    def start(self) -> list[EnvDescription]:
        """Builds the envs and returns their description."""
        self._rows = make_rows(self._env_fns, first_env=0, options=self._options)
        return [self._rows.describe()]

    def allocate(self, size: int) -> Block:
        """Allocates `size` bytes of private memory."""
        return Block.private(size)

    def attach(self, block: Block, layout: Layout) -> None:
        """Makes all rows write to a block."""
        if self._rows is not None:  # a copy of a closed pool has no rows
            self._rows.bind(block.views(layout))

    def attach_infos(self, block: Block, layout: Layout, schema: Schema) -> None:
        """Makes all rows write infos of this schema to a block."""
        assert self._rows is not None
        self._rows.bind_infos(schema, block.views(layout))

    def run(self, kind: Kind, payloads: Sequence[Any], slot: int = 0, timeout: float | None = None) -> list[Any]:
        """Carries out a command and returns its only result in a list."""
        assert self._rows is not None  # the vector env checks that it is open
        self.broken = kind not in BETWEEN_STEPS  # until the command is done
        try:
            result = carry_out(self._rows, kind, slot, payloads[0])
        except ResetNeeded:
            # A `Batched` raises this before it steps any env. Single envs raise it after others have been stepped.
            self.broken = self.broken and not isinstance(self._rows, BatchRows)
            raise
        self.broken = False
        return [result]

    def reset(self, slot: int, commands: Sequence[ResetCommand], timeout: float | None = None) -> StepObjects:
        """Resets envs."""
        return self.run(Kind.RESET, commands, slot)[0]

    def step(self, slot: int, actions: Sequence[Any] | None, timeout: float | None = None) -> StepObjects:
        """Steps all envs."""
        return self.run(Kind.STEP, actions or (None,), slot)[0]

    def begin(self, kind: Kind, payloads: Sequence[Any], slot: int = 0) -> None:
        """Stores a command for `finish`."""
        self._command = kind, payloads, slot

    def begin_step(self, slot: int, actions: Sequence[Any] | None) -> None:
        """Stores a step for `finish_batch`."""
        # Owner: actions that are not in memory belong to the caller again when this returns, so they are copied.
        self.begin(Kind.STEP, (None,) if actions is None else deepcopy(actions), slot)

    def finish(self, timeout: float | None = None) -> list[Any]:
        """Carries out the stored command."""
        return self.run(*self._command)

    def finish_batch(self, timeout: float | None = None) -> StepObjects:
        """Carries out the stored step or reset."""
        return self.finish()[0]

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        """Stores rows for `receive_rows`."""
        # Owner: actions that are not in memory belong to the caller again when this returns, so they are copied.
        self._sent.append(_SentRows(slot, list(orders) if orders[0][1] is None else deepcopy(list(orders))))

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        """Steps envs in the order in which they were sent, until `min_envs` are done.

        Raises:
            multiprocessing.TimeoutError: If the timeout expires before the next env is stepped. The next call returns
                the envs that are done.
        """
        assert self._rows is not None
        deadline = None if timeout is None else time.monotonic() + timeout
        num_done = sum(len(rows) for rows, _ in self._done)
        while num_done < min_envs:
            if deadline is not None and time.monotonic() >= deadline:
                late = sorted(row for sent in self._sent for row, _ in sent.orders)
                raise multiprocessing.TimeoutError(late_rows(timeout, num_done, min_envs, late))
            self.broken = True  # until the rows are written
            sent = self._sent[0]
            # `step_rows` steps lazily, so the rows that it has not yielded are not stepped.
            rows, objects = next(iter(self._rows.step_rows(sent.slot, sent.orders)))
            del sent.orders[: len(rows)]
            if not sent.orders:
                self._sent.popleft()
            self._done.append((rows, objects))
            num_done += len(rows)
            self.broken = False
        done, self._done = self._done, []
        return [row for rows, _ in done for row in rows], combined((0, objects) for _, objects in done)

    def set_state(self, slot: int, states: Sequence[dict[str, Any]], *, begun: bool) -> None:
        """Restores one state per env."""
        self.run(Kind.SET_STATE, [states], slot)

    def close(self, grace_s: float = 0.0) -> None:
        """Closes all envs, then raises the first exception that one of them raised."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()
