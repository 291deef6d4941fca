"""LocalPool: steps the rows of all envs in this process, in the calling thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from multiprocessing.process import BaseProcess
from typing import Any

from gymnasium.error import ResetNeeded

from vecenv.batched import Batched
from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows.batch_rows import BatchRows, make_rows
from vecenv.rows.protocol import EnvDescription, RowsOptions, StepObjects, combined
from vecenv.rows.rows import Rows
from vecenv.workers.pool import EnvRange, Failed, NotSent, RowsLate
from vecenv.workers.protocol import BETWEEN_STEPS, Kind, carry_out

_STEP = Kind.STEP  # looking up a member of an Enum takes 50 ns


class LocalPool:
    """A `Pool` without worker processes.

    Exceptions raised by envs propagate unchanged, with a note that names the env. `finish` carries out the command, so
    timeouts have no effect.

    Args:
        env_fns: The functions of all envs, or a `Batched`.
        options: See `RowsOptions`.
    """

    def __init__(self, env_fns: Sequence[Callable] | Batched, options: RowsOptions):
        self.ranges = [EnvRange(0, 0, len(env_fns))]
        self._env_fns, self._options = env_fns, options
        self._rows: Rows | None = None
        self._has_reset = False  # whether an env may be in the middle of an episode
        self._command: tuple[Kind, int, Any] = (Kind.APPLY, 0, None)  # for `finish`
        self._sent: deque[tuple[int, list[tuple[int, Any]]]] = deque()  # slots and orders that are not yet stepped
        self._done: list[tuple[list[int], StepObjects]] = []  # rows that are not yet received, and their objects

    @property
    def processes(self) -> list[BaseProcess]:
        """An empty list, because there are no workers."""
        return []

    @property
    def envs(self) -> list[Any]:
        """The envs, or the vector env that a `Batched` has built."""
        return [] if self._rows is None else self._rows.envs

    def start(self) -> list[EnvDescription]:
        """Builds the envs and describes them."""
        self._rows = make_rows(self._env_fns, first_env=0, options=self._options)
        return [self._rows.describe()]

    def share(self, layout: Layout) -> Block:
        """Returns private memory, to which all rows write from now on."""
        block = Block.private(layout.size)
        self._begun.bind(block.views(layout))
        return block

    def begin(self, kind: Kind, slot: int = 0, payloads: Sequence[Any] | None = None) -> None:
        """Stores a command for `finish`."""
        payload = None
        if payloads is not None:
            payload = _copy(payloads[0]) if kind is _STEP else payloads[0]
        self._command = kind, slot, payload

    def finish(self, timeout: float | None = None) -> list[Any]:
        """Carries out the stored command."""
        kind, slot, payload = self._command
        rows = self._rows
        assert rows is not None
        try:
            if kind is _STEP:
                return [rows.step(slot, payload)]
            self._has_reset = self._has_reset or kind in (Kind.RESET, Kind.SET_STATE)
            return [carry_out(rows, kind, slot, payload)]
        except Exception as error:
            # A `Batched` raises ResetNeeded before it steps any env.
            too_early = isinstance(error, ResetNeeded) and (isinstance(rows, BatchRows) or not self._has_reset)
            if kind in BETWEEN_STEPS or too_early:
                return [Failed(error)]
            raise

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        """Stores rows for `receive_rows`."""
        self._sent.append((slot, list(orders if orders[0][1] is None else _copy(orders))))

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        """Steps envs in the order in which they were sent, until `min_envs` are done.

        Raises:
            RowsLate: If the timeout expires before the next env is stepped.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (num_done := sum(len(rows) for rows, _ in self._done)) < min_envs:
            if deadline is not None and time.monotonic() >= deadline:
                late = sorted(row for _, orders in self._sent for row, _ in orders)
                raise RowsLate(timeout, num_done, min_envs, late)
            slot, orders = self._sent[0]
            # `step_rows` steps lazily, so the rows that it has not yielded are not stepped.
            rows, objects = next(iter(self._begun.step_rows(slot, orders)))
            del orders[: len(rows)]
            if not orders:
                self._sent.popleft()
            self._done.append((rows, objects))
        done, self._done = self._done, []
        return [row for rows, _ in done for row in rows], combined((0, objects) for _, objects in done)

    def close(self, grace_s: float = 0.0) -> None:
        """Closes all envs, then raises the first exception that one of them raised."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()

    @property
    def _begun(self) -> Rows:
        assert self._rows is not None, "the pool has not been started, or is closed"
        return self._rows


def _copy(actions: Any) -> Any:
    # Owner: actions that are not in memory belong to the caller again when the command has been stored.
    try:
        return deepcopy(actions)
    except Exception as error:
        raise NotSent from error
