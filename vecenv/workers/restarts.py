"""Restarts: the deaths of workers that a pool replaces, and the report of the episodes that they have cut.

The next step of a row whose episode was cut is truncated and has reward 0, the last complete observation, and
`worker_restarted` in its info. The parent writes this step, because it owns the rows of a dead worker.
`vecenv.rows.autoreset` says what the process that takes over the rows does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import NotRestorableNow, WorkerDied
from vecenv.memory import layout
from vecenv.rows.autoreset import BEGINS, SKIPS
from vecenv.rows.infos import Column, columns_of
from vecenv.rows.messages import RowsOptions, StepObjects, combined
from vecenv.tree import Path
from vecenv.workers.pool import CommandFailed, EnvRange
from vecenv.workers.protocol import GET_STATE, RESET, SET_STATE, STEP

if TYPE_CHECKING:
    from vecenv.workers.pending import PendingCommand

RESTARTED = "worker_restarted"
"""Key of the info of a cut episode."""

MAX_DEATHS = 3  # consecutive deaths of one worker, without a reply in between, after which it is not restarted


class Restarts:
    """Counts the deaths of workers, and remembers the episodes that they have cut until a step has reported them.

    Attributes:
        deaths: For each worker, how often it has died since its last reply.
        complete_slot: The slot with the newest complete batch; None before the first reset.
        unreported: The envs whose episode was cut by a death that no step has reported yet.
    """

    def __init__(self, ranges: Sequence[EnvRange], arrays: Mapping[Path, np.ndarray], options: RowsOptions):
        self._ranges = ranges
        self._arrays = {path: array for path, array in arrays.items() if path[0] != layout.ACTION}
        self._same_step = options.autoreset_mode == AutoresetMode.SAME_STEP
        self._with_infos = options.infos
        # The rows in flight between `send` and `recv`, as they were before they were sent.
        self._backup = {path: np.empty_like(array[0]) for path, array in self._arrays.items()}
        self.deaths = [0] * len(ranges)
        self.complete_slot: int | None = None
        self.unreported: set[int] = set()

    def count_death(self, index: int, died: WorkerDied) -> None:
        """Counts a death of a worker. Raises WorkerDied if it has died `MAX_DEATHS` times in a row."""
        self.deaths[index] += 1
        if self.deaths[index] >= MAX_DEATHS:
            raise WorkerDied(f"{died} It died {MAX_DEATHS} times in a row.") from None

    def back_up(self, ids: list[int]) -> None:
        """Copies the rows of these envs, whose next steps overwrite them in place."""
        if self.complete_slot is not None:
            for path, backup in self._backup.items():
                backup[ids] = self._arrays[path][self.complete_slot, ids]

    def cut(self, envs: range, in_flight: Iterable[int]) -> list[int] | None:
        """Cuts the episodes of a dead worker's envs, except those that were already over; restores rows in flight.

        Returns what the next step of each row does, for the process that takes over the rows; None before a reset.
        """
        if self.complete_slot is None:
            return None
        rows = sorted(in_flight)
        for path, backup in self._backup.items():
            # Owner: the parent, because the worker is dead. It may have left these rows half written.
            self._arrays[path][self.complete_slot, rows] = backup[rows]
        slot = self.complete_slot
        ended = self._arrays[layout.TERMINATED][slot] | self._arrays[layout.TRUNCATED][slot]
        over = set() if self._same_step else {env for env in envs if ended[env]}
        self.unreported |= set(envs) - over
        return [BEGINS if env in over or self._same_step else SKIPS for env in envs]

    def report(self, slot: int, envs: Iterable[int]) -> StepObjects | None:
        """Writes the step that reports a cut episode to `slot`, for each of these envs whose cut is unreported.

        With SAME_STEP, the next episode has begun in the same step, and the last observation is the final observation.
        Returns these envs and their infos; None if there are none.
        """
        # Owner: the parent, these envs' rows of the slot.
        cut = sorted(self.unreported.intersection(envs))
        if not cut:
            return None
        self.unreported.difference_update(cut)
        at = {path: array[slot] for path, array in self._arrays.items()}
        last = self._backup  # the rows before they were stepped in place
        if slot != self.complete_slot:
            last = {path: array[self.complete_slot] for path, array in self._arrays.items()}
        # With SAME_STEP, the last slot has the totals of an episode that ended there. The next episode has no steps.
        fresh = last[layout.TERMINATED][cut] | last[layout.TRUNCATED][cut]
        for path in (layout.EPISODE_RETURN, layout.EPISODE_LENGTH):
            at[path][cut] = np.where(fresh, 0, last[path][cut])
        observed = layout.FINAL_OBSERVATION if self._same_step else layout.OBSERVATION
        for path, array in last.items():
            if path[0] == layout.OBSERVATION:
                at[(observed, *path[1:])][cut] = array[cut]
            elif path[0] == layout.EPISODE_INFO:
                at[path][cut] = np.nan  # the info of the episode's last step is lost
        at[layout.REWARD][cut], at[layout.TERMINATED][cut], at[layout.TRUNCATED][cut] = 0.0, False, True
        infos: list[Column] = []
        if self._with_infos:
            info: dict[str, Any] = {RESTARTED: True}
            infos = columns_of([(env, {**info, "final_info": info} if self._same_step else info) for env in cut])
        return StepObjects(infos, {}, cut)

    def finish(self, pending: PendingCommand) -> None:
        """Adds the cut episodes to the replies to a step; after any other command, updates which cuts are unreported.

        Called when all workers have replied. Raises CommandFailed if states cannot be saved because of an unreported
        cut.
        """
        command = pending.command
        self.deaths = [0] * len(self.deaths)
        if command is STEP and self.unreported:
            for run in self._ranges:
                cut = self.report(pending.slot, range(run.low, run.high))
                if cut is not None:
                    reply = pending.replies[run.index]
                    pending.replies[run.index] = combined(part for part in (reply, cut) if part is not None)
        elif command is GET_STATE and self.unreported:
            raise CommandFailed(
                NotRestorableNow("a worker was just restarted: step all its envs before you save their states")
            )
        elif command is SET_STATE:
            accepted = [run for run in self._ranges if run.index not in pending.errors]
            self.unreported.difference_update(env for run in accepted for env in range(run.low, run.high))
            if not pending.errors:  # otherwise, the previous batch stays the newest
                has_batch = pending.payloads[0][0]["row"] is not None  # all of the states have a row, or none
                self.complete_slot = pending.slot if has_batch else None
        elif command is RESET:
            for run, reset in zip(self._ranges, pending.payloads, strict=True):
                envs = np.arange(run.low, run.high)
                self.unreported.difference_update((envs if reset.mask is None else envs[reset.mask]).tolist())
        if command in (STEP, RESET):
            self.complete_slot = pending.slot
