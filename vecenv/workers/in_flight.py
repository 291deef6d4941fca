"""RowsInFlight: envs that workers step one by one, between `send` and `recv` of a parallel vector env."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from vecenv.memory import layout
from vecenv.memory.actions import ActionWriter
from vecenv.rows.protocol import StepObjects, combined
from vecenv.spaces import Path
from vecenv.workers.local_pool import LocalPool
from vecenv.workers.pool import WorkerPool
from vecenv.workers.processes import EnvRange
from vecenv.workers.protocol import Kind

Resume = Callable[[EnvRange], Any]
"""Returns what a worker that was started again must know of its episodes."""


class RowsInFlight:
    """Which envs were sent to their workers, and which have come back.

    Args:
        pool: The workers.
        writer: Knows how actions are nested.
        arrays: Every field's `dtype[S, N, *shape]`.
        keep: Whether to keep a copy of rows while they are under way, because their worker may die, leave
            them half written, and be started again.
    """

    def __init__(
        self,
        pool: WorkerPool | LocalPool,
        writer: ActionWriter,
        arrays: Mapping[Path, np.ndarray],
        *,
        keep: bool,
    ):
        self._pool, self._writer, self._arrays = pool, writer, arrays
        self._slot = 0
        self._waiting: set[int] = set()  # envs that have not come back
        # Until receive() takes them: first env of the worker, its rows that are done, their objects.
        self._arrived: list[tuple[int, list[int], Any]] = []
        self._num_arrived = 0
        self._kept: dict[Path, np.ndarray] = {}
        if keep:
            self._kept = {path: array[0].copy() for path, array in arrays.items() if path[0] != layout.ACTION}

    def send(self, slot: int, env_ids: Sequence[int], unfit: Any, resume: Resume) -> None:
        """Has these envs stepped, with the actions in `slot` or those that did not fit there."""
        ids = list(env_ids)
        messages: list[tuple[int, Any]] = []
        for worker in self._pool.workers:
            orders = [
                (i - worker.low, None if unfit is None else self._writer.of_rows(unfit, [k]))
                for k, i in enumerate(ids)
                if worker.low <= i < worker.high
            ]
            if orders:
                messages.append((worker.index, self._pool.message(Kind.STEP_ROWS, slot, orders)))
        # All messages are encoded, so from here on all go or the pool is broken.
        for path, kept in self._kept.items():
            kept[ids] = self._arrays[path][slot, ids]
        self._slot = slot
        for index, message in messages:
            receiver: Any = self._pool.workers[index]  # of the kind that this pool has
            self._waiting.update(i for i in ids if receiver.low <= i < receiver.high)
            self._pool.tell_rows(receiver, message, partial(self._revive, resume), self._on_answer)

    def receive(self, min_envs: int, timeout: float | None, resume: Resume) -> tuple[list[int], StepObjects]:
        """Waits for `min_envs` envs; returns all that have come back, in that order, and their objects.

        Raises:
            multiprocessing.TimeoutError: If they have not; what has come back is kept for the next call.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        now = time.monotonic()
        revive = partial(self._revive, resume)
        while self._waiting and self._pool.some_answers(now, revive, self._on_answer):
            pass  # what has come already
        while self._num_arrived < min_envs:
            if not self._pool.some_answers(deadline, revive, self._on_answer):
                raise multiprocessing.TimeoutError(
                    f"The call to `recv` has timed out after {timeout} second(s): {self._num_arrived} of {min_envs} "
                    f"envs are done, no answer yet from envs {sorted(self._waiting)}. You may call it again."
                )
        arrived, self._arrived, self._num_arrived = self._arrived, [], 0
        return [low + row for low, rows, _ in arrived for row in rows], combined(
            (low, answer) for low, _, answer in arrived if answer is not None
        )

    def _on_answer(self, worker: EnvRange, rows: list[int], answer: Any) -> bool:
        envs = {worker.low + row for row in rows}
        if not envs <= self._waiting:
            return False
        self._waiting -= envs
        self._arrived.append((worker.low, rows, answer))
        self._num_arrived += len(rows)
        return True

    def _revive(self, resume: Resume, worker: EnvRange) -> tuple[Any, Any]:
        """Returns what a worker that was started again must be told: its rows under way are cut, not stepped."""
        rows = [i - worker.low for i in range(worker.low, worker.high) if i in self._waiting]
        undone = [worker.low + row for row in rows]
        for path, kept in self._kept.items():
            # Owner: the parent, as the worker is dead. It may have left these rows half written.
            self._arrays[path][self._slot, undone] = kept[undone]
        orders = self._pool.message(Kind.STEP_ROWS, self._slot, [(row, None) for row in rows]) if rows else None
        return resume(worker), orders
