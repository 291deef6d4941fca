"""`Pool`: how a vector env reaches the rows of its envs, in worker processes or in its own process."""

from __future__ import annotations

import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows.messages import EnvDescription, StepObjects
from vecenv.workers.protocol import P, R, RowsCommandType


@dataclass(frozen=True)
class EnvRange:
    """The contiguous envs `low:high` of worker `index`."""

    index: int
    low: int
    high: int

    @property
    def rows(self) -> slice:
        """The slice `low:high` of an array with one row per env."""
        return slice(self.low, self.high)


def spread(num_envs: int, num_workers: int, at_most: int | None = None) -> list[EnvRange]:
    """Spreads N envs as evenly as possible over W workers, 1 to N, or over `at_most` workers if W is larger."""
    if not 1 <= num_workers <= num_envs:
        raise ValueError(
            f"num_workers={num_workers} for {num_envs} envs: a worker needs at least one env. "
            f"Use 1 to {num_envs}, None for one worker per core, or 0 to step them in this process."
        )
    if at_most is not None:
        num_workers = min(num_workers, at_most)
    return [EnvRange(w, num_envs * w // num_workers, num_envs * (w + 1) // num_workers) for w in range(num_workers)]


class NotSent(Exception):
    """A command that was not sent, because its payload cannot be encoded. Its argument is the error to raise."""


class CommandFailed(Exception):
    """A command between steps that failed. All envs can still be used. Its argument is the error to raise."""


class RowsLate(multiprocessing.TimeoutError):
    """Fewer rows than requested are done before the timeout. They may still be received."""


class Pool(ABC):
    """The rows of all envs of a vector env, in ranges that are stepped independently of each other.

    No other command is legal between `begin` and `finish`, or between `send_rows` and the `receive_rows` that returns
    the last of these rows. If a method raises anything but `NotSent`, `CommandFailed` or `RowsLate`, envs may be in an
    unknown state, or replies may be pending that nobody will read: only `close` is legal then. The vector env enforces
    these rules.

    Attributes:
        ranges: The envs of each worker, in order. A pool without workers has one range.
        processes: The worker processes; empty if there are none.
        restarts: How often a dead worker was replaced.
    """

    ranges: list[EnvRange]
    processes: list[BaseProcess]
    restarts: int = 0

    @abstractmethod
    def start(self) -> list[EnvDescription]:
        """Builds the envs and returns one description per range.

        Raises EnvError (without workers, the env's own exception), WorkerDied or multiprocessing.TimeoutError.
        """

    @abstractmethod
    def share(self, layout: Layout) -> Block:
        """Returns new memory of this layout, to which all rows write from now on. The pool owns it.

        Raises SharedMemoryFull, or multiprocessing.TimeoutError if a worker does not attach it in time.
        """

    @abstractmethod
    def begin(self, command: RowsCommandType[P, R], slot: int = 0, payloads: Sequence[P] | None = None) -> None:
        """Sends a command to all rows, with one payload per range or none.

        Raises NotSent if a payload cannot be encoded. Nothing was sent then.
        """

    @abstractmethod
    def finish(self, command: RowsCommandType[P, R], timeout: float | None = None) -> list[R]:
        """Waits at most `timeout` seconds for the command that was begun; returns one reply per range.

        The slot of a step or a reset belongs to the caller from here on.

        Raises:
            EnvError: If an env has failed in a step or a reset; raised at once.
            CommandFailed: If a command has failed that leaves no env in the middle of a step; raised when all workers
                have replied.
            WorkerDied: If a process dies; raised at once.
            multiprocessing.TimeoutError: If a reply is missing after `timeout` seconds.
        """

    @abstractmethod
    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        """Begins to step some envs, each given with its action, or None if the action is stored in memory."""

    @abstractmethod
    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        """Waits for `min_envs` of the envs sent, and returns all that are done, in the order in which they finished.

        Raises:
            RowsLate: If fewer are done before the timeout. The next call returns them, too.
        """

    @abstractmethod
    def close(self, grace_s: float) -> None:
        """Closes the envs; waits at most `grace_s` seconds for worker processes to exit before it kills them."""
