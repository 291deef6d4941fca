"""The command in progress: what was sent to the workers, and what they have replied so far.

A `ProcessPool` has at most one, from the first frame to the last reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vecenv.rows.messages import StepObjects, combined
from vecenv.workers.faults import worker_failed
from vecenv.workers.messenger import BadMessage, WorkerHandle
from vecenv.workers.protocol import (
    ERROR,
    READY,
    READY_ROWS,
    STEP_ROWS,
    CommandType,
    Kind,
    RowsReply,
    StepRowsCommand,
    encode,
)
from vecenv.workers.restarts import Restarts

_MISSING = object()  # the reply of a worker that has not replied


class PendingCommand:
    """A command to all workers, which send one reply each.

    Attributes:
        command, slot, frames: The command, its slot, and its frames, one per worker.
        payloads: Its payloads, one per worker; empty if it has none.
        replies: The payload of each worker's reply.
        count: The number of workers that have replied.
        errors: The errors of workers, by index. Only a command with `between_steps` collects them; an error in any
            other command is raised at once.
    """

    payloads: Sequence[Any] = ()

    def __init__(self, command: CommandType[Any, Any], slot: int, frames: Sequence[bytes]):
        self.command, self.slot, self.frames = command, slot, frames
        self.replies: list[Any] = [_MISSING] * len(frames)
        self.errors: dict[int, Exception] = {}
        self.count = 0

    def accept(self, worker: WorkerHandle, kind: int, slot: int, payload: Any) -> None:
        """Takes a message of a worker. Raises BadMessage if it is no reply, or the error that it reports."""
        index = worker.index
        if slot != self.slot or kind == READY_ROWS or self.replies[index] is not _MISSING:
            raise BadMessage(worker, f"an unexpected {Kind(kind).name} {slot}")
        if kind == ERROR:
            if not self.command.between_steps:
                raise worker_failed(worker, payload)
            self.errors[index] = worker_failed(worker, payload, broken=False)
        self.replies[index] = payload
        self.count += 1

    def missing(self, workers: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """Returns the workers that have not replied."""
        return [worker for worker in workers if self.replies[worker.index] is _MISSING]

    def in_flight(self, worker: WorkerHandle) -> list[int]:
        """Returns the envs of a worker whose rows it steps in place: none, because a step writes the next slot."""
        return []

    def send_again(self, worker: WorkerHandle) -> bytes:
        """Returns the frame for the process that replaces a dead one, whose reply is void."""
        if self.replies[worker.index] is not _MISSING:
            self.replies[worker.index] = _MISSING
            self.count -= 1
            self.errors.pop(worker.index, None)
        return self.frames[worker.index]


class PendingRows:
    """Steps of some envs, whose rows are done one after the other. Envs can be added while other envs are in flight.

    Attributes:
        slot: The slot whose rows are stepped in place.
        count: The number of rows that are done and were not yet returned.
    """

    command = STEP_ROWS

    def __init__(self, slot: int, restarts: Restarts | None):
        self.slot, self._restarts = slot, restarts
        self._in_flight: set[int] = set()
        self._done: list[tuple[list[int], StepObjects | None]] = []  # envs and their objects
        self.count = 0

    @property
    def envs(self) -> list[int]:
        """The envs in flight."""
        return sorted(self._in_flight)

    def add(self, envs: Iterable[int]) -> None:
        """Adds envs that are sent."""
        self._in_flight.update(envs)

    def accept(self, worker: WorkerHandle, kind: int, slot: int, payload: Any) -> None:
        """Takes a message of a worker. Raises BadMessage if it is no reply, or the error that it reports."""
        if kind == ERROR and slot == self.slot:
            raise worker_failed(worker, payload)
        envs, objects = [], None
        if kind == READY:
            envs, objects = [worker.low + slot], payload
        elif isinstance(payload, RowsReply):
            envs, objects = [worker.low + row for row in payload.rows], payload.objects
        if not envs or not self._in_flight.issuperset(envs):
            raise BadMessage(worker, f"an unexpected {Kind(kind).name} {slot}")
        self._in_flight.difference_update(envs)
        self._done.append((envs, objects))
        self.count += len(envs)
        if self._restarts is not None:
            self._restarts.deaths[worker.index] = 0
            # Order: a cut is reported before the worker of these rows can die again.
            if (cut := self._restarts.report(self.slot, envs)) is not None:
                self._done.append(([], cut))

    def take(self) -> tuple[list[int], StepObjects]:
        """Returns the envs that are done, in the order in which they finished, and their objects; forgets them."""
        done, self._done, self.count = self._done, [], 0
        objects = combined(part for _, part in done if part is not None)
        return [env for envs, _ in done for env in envs], objects

    def in_flight(self, worker: WorkerHandle) -> list[int]:
        """Returns the envs of a worker whose rows it steps in place."""
        return sorted(self._in_flight.intersection(range(worker.low, worker.high)))

    def send_again(self, worker: WorkerHandle) -> bytes | None:
        """Returns the frame for the process that replaces a dead one; None if none of its envs is in flight."""
        # Without the actions, which the first step after a death does not use.
        orders: StepRowsCommand = [(env - worker.low, None) for env in self.in_flight(worker)]
        return encode(Kind.STEP_ROWS, self.slot, orders) if orders else None
