"""Restarts: what a pool needs to know in order to replace dead workers and to report the episodes that were cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vecenv.errors import NotRestorableNow, WorkerDied
from vecenv.rows.messages import combined
from vecenv.workers.cuts import CutEpisodes
from vecenv.workers.pool import CommandFailed, EnvRange
from vecenv.workers.protocol import GET_STATE, RESET, SET_STATE, STEP, CommandType

if TYPE_CHECKING:
    from vecenv.workers.pending import PendingCommand

MAX_DEATHS = 3  # consecutive deaths of one worker, without a reply in between, after which it is not restarted


class Restarts:
    """Counts the deaths of workers, and reports the episodes that they have cut."""

    def __init__(self, cuts: CutEpisodes, ranges: Sequence[EnvRange]):
        self.cuts = cuts
        self._ranges = ranges
        self._deaths = [0] * len(ranges)

    def count_death(self, index: int, died: WorkerDied) -> None:
        """Counts a death of a worker. Raises WorkerDied if it has died `MAX_DEATHS` times in a row."""
        self._deaths[index] += 1
        if self._deaths[index] >= MAX_DEATHS:
            raise WorkerDied(f"{died} It died {MAX_DEATHS} times in a row.") from None

    def forget_deaths(self, index: int) -> None:
        """Counts the deaths of a worker from scratch, because it has replied."""
        self._deaths[index] = 0

    def resets(self, command: CommandType[Any, Any], payloads: Sequence[Any] | None) -> Collection[int]:
        """Returns the envs that a command resets, or restores in the middle of an episode."""
        if payloads is None or command not in (RESET, SET_STATE):
            return ()
        envs: set[int] = set()
        for run, payload in zip(self._ranges, payloads, strict=True):
            if command is RESET:
                begins = [payload.mask is None or payload.mask[row] for row in range(run.high - run.low)]
            else:
                begins = [state["row"] is not None for state in payload]
            envs.update(run.low + row for row, begun in enumerate(begins) if begun)
        return envs

    def finish(self, pending: PendingCommand) -> None:
        """Adds the cut episodes to the replies to a step; after any other command, updates which cuts are unreported.

        Called when all workers have replied. Raises CommandFailed if states cannot be saved because of an unreported
        cut.
        """
        command, cuts = pending.command, self.cuts
        self._deaths = [0] * len(self._deaths)
        if command is STEP and cuts.unreported:
            for run in self._ranges:
                cut = cuts.report(pending.slot, range(run.low, run.high))
                if cut is not None:
                    reply = pending.replies[run.index]
                    pending.replies[run.index] = combined(part for part in (reply, cut) if part is not None)
        elif command is GET_STATE and cuts.unreported:
            raise CommandFailed(
                NotRestorableNow("a worker was just restarted: step all its envs before you save their states")
            )
        elif command is SET_STATE:
            failed = pending.errors or {}
            accepted = [run for run in self._ranges if run.index not in failed]
            cuts.unreported.difference_update(env for run in accepted for env in range(run.low, run.high))
            if not failed:  # otherwise, the previous batch stays the newest
                cuts.complete_slot = pending.slot if pending.resets else None
        elif command is RESET:
            cuts.unreported.difference_update(pending.resets)
        if command in (STEP, RESET):
            cuts.complete_slot = pending.slot
