"""The `Pool` protocol: how a vector env reaches the rows of its envs, in worker processes or in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows.info_memory import Schema
from vecenv.rows.protocol import NO_OBJECTS, EnvDescription, StepObjects, combined
from vecenv.workers.protocol import Kind, ResetCommand


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
    """Spreads N envs over workers as evenly as possible.

    Args:
        num_envs: N.
        num_workers: W, from 1 to N.
        at_most: An upper limit on W.
    """
    if not 1 <= num_workers <= num_envs:
        raise ValueError(
            f"num_workers={num_workers} for {num_envs} envs: a worker needs at least one env. "
            f"Use 1 to {num_envs}, None for one worker per core, or 0 to step them in this process."
        )
    if at_most is not None:
        num_workers = min(num_workers, at_most)
    return [EnvRange(w, num_envs * w // num_workers, num_envs * (w + 1) // num_workers) for w in range(num_workers)]


def join(ranges: Sequence[EnvRange], results: Sequence[StepObjects | None]) -> StepObjects:
    """Joins the objects of all ranges; None stands for no objects."""
    if not any(results):
        return NO_OBJECTS
    if len(results) == 1:
        return results[0] or NO_OBJECTS
    parts = [(run.low, part) for run, part in zip(ranges, results, strict=True) if part and part is not NO_OBJECTS]
    return combined(parts) if parts else NO_OBJECTS


def late_rows(timeout: float | None, num_done: int, min_envs: int, late: Sequence[int]) -> str:
    """Returns the message of the error that `recv` raises after a timeout."""
    return (
        f"The call to `recv` has timed out after {timeout} second(s): {num_done} of {min_envs} envs are done, "
        f"no answer yet from envs {late}. You may call `recv` again."
    )


class Pool(Protocol):
    """The rows of all envs of a vector env, in ranges that are stepped independently of each other.

    A command can be run in two halves. No other command is legal between the halves, or between `send_rows` and the
    `receive_rows` that returns the last of these rows. The vector env checks this.

    Attributes:
        ranges: The envs of each worker, in order; a single range without workers.
        broken: Whether envs may be in an unknown state, or replies may be pending that nobody will read. If so, only
            `close` is legal.
        pickles_infos: Whether infos travel pickled through a pipe. Storing them in memory is faster then.
    """

    ranges: list[EnvRange]
    broken: bool
    pickles_infos: bool

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes; empty if there are none."""

    def start(self) -> list[EnvDescription]:
        """Builds the envs and returns one description per range."""

    def allocate(self, size: int) -> Block:
        """Allocates `size` bytes that all rows can reach."""

    def attach(self, block: Block, layout: Layout) -> None:
        """Makes all rows write to a block; the pool owns the block from now on."""

    def attach_infos(self, block: Block, layout: Layout, schema: Schema) -> None:
        """Makes all rows write infos of this schema to a block, within the timeout of the last `finish`."""

    def run(self, kind: Kind, payloads: Sequence[Any], slot: int = 0, timeout: float | None = None) -> list[Any]:
        """Runs a command, with one payload per range (see `vecenv.workers.protocol`); returns one result per range."""

    def reset(self, slot: int, commands: Sequence[ResetCommand], timeout: float | None = None) -> StepObjects:
        """Resets envs and writes the batch to `slot`, which then belongs to the caller."""

    def step(self, slot: int, actions: Sequence[Any] | None, timeout: float | None = None) -> StepObjects:
        """Steps all envs and writes the batch to `slot`, which then belongs to the caller.

        Args:
            slot: The slot, which holds the actions.
            actions: One batch of actions per range if they do not fit in memory, else None.
            timeout: Maximum wait in seconds; None for no limit.
        """

    def begin(self, kind: Kind, payloads: Sequence[Any], slot: int = 0) -> None:
        """Does the first half of `run` or `reset`."""

    def begin_step(self, slot: int, actions: Sequence[Any] | None) -> None:
        """Does the first half of `step`."""

    def finish(self, timeout: float | None = None) -> list[Any]:
        """Does the second half of `run`."""

    def finish_batch(self, timeout: float | None = None) -> StepObjects:
        """Does the second half of `reset` or `step`."""

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        """Begins to step some envs, each given with its action, or None if the action is stored in memory."""

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        """Waits for `min_envs` of the envs sent, and returns all that are done, in the order in which they finished."""

    def set_state(self, slot: int, states: Sequence[dict[str, Any]], *, begun: bool) -> None:
        """Restores one state per env. If `begun`, the envs have been reset and their rows are stored in `slot`."""

    def close(self, grace_s: float) -> None:
        """Closes the envs; waits at most `grace_s` seconds for worker processes to exit before it kills them."""
