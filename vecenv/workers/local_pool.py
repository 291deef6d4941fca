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
from vecenv.workers.pool import EnvRange, join, late_rows, spread
from vecenv.workers.protocol import BETWEEN_STEPS, Kind, ResetCommand, carry_out


@dataclass
class _SentRows:
    """Rows of one group that were sent but not yet stepped, as arguments for `Rows.step_rows`."""

    group: EnvRange
    slot: int
    orders: list[tuple[int, Any]]


class LocalPool:
    """A `Pool` without worker processes. Its ranges are groups, which threads of the caller may step concurrently.

    Exceptions raised by envs propagate unchanged, with a note that names the env. `finish` carries out the command, so
    timeouts have no effect.

    Args:
        env_fns: The functions of all envs, or a `Batched`.
        num_groups: Number of groups, from 1 to the number of envs.
        options: See `RowsOptions`.

    Raises:
        ValueError: If there are too few envs for the groups.

    Attributes:
        broken: Whether an env raised during a step or a reset. If so, only `close` is legal.
    """

    pickles_infos = False

    def __init__(self, env_fns: Sequence[Callable] | Batched, num_groups: int, options: RowsOptions):
        if not 1 <= num_groups <= len(env_fns):
            raise ValueError(f"num_groups={num_groups} for {len(env_fns)} envs: use 1 to {len(env_fns)} groups")
        self.ranges = spread(len(env_fns), num_groups)
        self.broken = False
        self._env_fns, self._options = env_fns, options
        self._rows: list[Rows] = []
        self._command: tuple[Kind, Sequence[Any], int] = (Kind.APPLY, (), 0)  # the arguments of `begin`
        self._sent: deque[_SentRows] = deque()
        self._done: list[tuple[int, list[int], StepObjects]] = []  # first env, rows, objects: not yet received

    @property
    def processes(self) -> list[BaseProcess]:
        """An empty list, because there are no workers."""
        return []

    @property
    def groups(self) -> list[range]:
        """The envs of each group."""
        return [range(group.low, group.high) for group in self.ranges]

    @property
    def envs(self) -> list[Any]:
        """The envs, or the vector envs that a `Batched` has built."""
        return [env for rows in self._rows for env in rows.envs]

    def start(self) -> list[EnvDescription]:
        """Builds the envs and returns one description per group."""
        for group in self.ranges:
            env_fns = self._env_fns[group.low : group.high]
            self._rows.append(make_rows(env_fns, first_env=group.low, options=self._options))
        return [rows.describe() for rows in self._rows]

    def allocate(self, size: int) -> Block:
        """Allocates `size` bytes of private memory."""
        return Block.private(size)

    def attach(self, block: Block, layout: Layout) -> None:
        """Makes all rows write to a block."""
        for group, rows in zip(self.ranges, self._rows, strict=True):
            rows.bind(block.views(layout, group.low, group.high))

    def attach_infos(self, block: Block, layout: Layout, schema: Schema) -> None:
        """Makes all rows write infos of this schema to a block."""
        for group, rows in zip(self.ranges, self._rows, strict=True):
            rows.bind_infos(schema, block.views(layout, group.low, group.high))

    def run(self, kind: Kind, payloads: Sequence[Any], slot: int = 0, timeout: float | None = None) -> list[Any]:
        """Carries out a command, group by group, and returns one result per group."""
        self.broken = kind not in BETWEEN_STEPS  # until all groups are done
        results: list[Any] = []
        try:
            for rows, payload in zip(self._rows, payloads, strict=True):
                results.append(carry_out(rows, kind, slot, payload))
        except ResetNeeded:
            self.broken = bool(results) or _has_stepped(rows)
            raise
        self.broken = False
        return results

    def reset(self, slot: int, commands: Sequence[ResetCommand], timeout: float | None = None) -> StepObjects:
        """Resets envs."""
        return join(self.ranges, self.run(Kind.RESET, commands, slot))

    def step(self, slot: int, actions: Sequence[Any] | None, timeout: float | None = None) -> StepObjects:
        """Steps all envs."""
        if len(self._rows) > 1:
            return join(self.ranges, self.run(Kind.STEP, actions or [None] * len(self._rows), slot))
        # One group is stepped without `run`, because the overhead of a call matters for cheap envs.
        self.broken = True  # until all rows are written
        try:
            objects = self._rows[0].step(slot, None if actions is None else actions[0])
        except ResetNeeded:
            self.broken = _has_stepped(self._rows[0])
            raise
        self.broken = False
        return objects

    def begin(self, kind: Kind, payloads: Sequence[Any], slot: int = 0) -> None:
        """Stores a command for `finish`."""
        self._command = kind, payloads, slot

    def begin_step(self, slot: int, actions: Sequence[Any] | None) -> None:
        """Stores a step for `finish_batch`."""
        # Owner: actions that are not in memory belong to the caller again when this returns, so they are copied.
        self.begin(Kind.STEP, [None] * len(self._rows) if actions is None else deepcopy(actions), slot)

    def finish(self, timeout: float | None = None) -> list[Any]:
        """Carries out the stored command."""
        return self.run(*self._command)

    def finish_batch(self, timeout: float | None = None) -> StepObjects:
        """Carries out the stored step or reset."""
        return join(self.ranges, self.finish())

    def step_group(self, group: int, slot: int, actions: Any) -> StepObjects:
        """Steps the envs of one group. Threads may step different groups at the same time."""
        rows = self._rows[group]
        try:
            return rows.step(slot, actions)
        except BaseException as error:
            if not isinstance(error, ResetNeeded) or _has_stepped(rows):
                self.broken = True
            raise

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        """Stores rows for `receive_rows`."""
        # Owner: actions that are not in memory belong to the caller again when this returns, so they are copied.
        if orders[0][1] is not None:
            orders = deepcopy(orders)
        for group in self.ranges:
            ours = [(env - group.low, action) for env, action in orders if group.low <= env < group.high]
            if ours:
                self._sent.append(_SentRows(group, slot, ours))

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        """Steps envs in the order in which they were sent, until `min_envs` are done.

        Raises:
            multiprocessing.TimeoutError: If the timeout expires before the next env is stepped. The next call returns
                the envs that are done.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        num_done = sum(len(rows) for _, rows, _ in self._done)
        while num_done < min_envs:
            if deadline is not None and time.monotonic() >= deadline:
                late = sorted(sent.group.low + row for sent in self._sent for row, _ in sent.orders)
                raise multiprocessing.TimeoutError(late_rows(timeout, num_done, min_envs, late))
            self.broken = True  # until the rows are written
            sent = self._sent[0]
            # `step_rows` steps lazily, so the rows that it has not yielded are not stepped.
            rows, objects = next(iter(self._rows[sent.group.index].step_rows(sent.slot, sent.orders)))
            del sent.orders[: len(rows)]
            if not sent.orders:
                self._sent.popleft()
            self._done.append((sent.group.low, rows, objects))
            num_done += len(rows)
            self.broken = False
        done, self._done = self._done, []
        return [low + row for low, rows, _ in done for row in rows], combined((low, o) for low, _, o in done)

    def set_state(self, slot: int, states: Sequence[dict[str, Any]], *, begun: bool) -> None:
        """Restores one state per env."""
        self.run(Kind.SET_STATE, [states[group.rows] for group in self.ranges], slot)

    def close(self, grace_s: float = 0.0) -> None:
        """Closes all envs, then raises the first exception that one of them raised."""
        first_error: Exception | None = None
        while self._rows:
            try:
                self._rows.pop(0).close()
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error


def _has_stepped(rows: Rows) -> bool:
    """Returns whether rows that raised `ResetNeeded` may have stepped envs. A `Batched` raises it before any step."""
    return not isinstance(rows, BatchRows)
