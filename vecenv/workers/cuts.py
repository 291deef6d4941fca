"""CutEpisodes: the parent's report of the episodes that ended because the process of their envs died.

The next step of such a row is truncated and has reward 0, the last complete observation, and `worker_restarted` in its
info. The parent writes this step, because it owns the rows of a dead worker. `vecenv.rows.autoreset` says what the
process that takes over the rows does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.memory import layout
from vecenv.rows.autoreset import BEGINS, SKIPS
from vecenv.rows.infos import Column, columns_of
from vecenv.rows.messages import StepObjects
from vecenv.tree import Path

RESTARTED = "worker_restarted"
"""Key of the info of a cut episode."""


class CutEpisodes:
    """Remembers the episodes that were cut, and reports them.

    Attributes:
        complete_slot: The slot with the newest complete batch; None before the first reset.
        unreported: The envs whose episode was cut by a death that no step has reported yet.
    """

    def __init__(self, arrays: Mapping[Path, np.ndarray], autoreset_mode: AutoresetMode, *, with_infos: bool):
        self._arrays = {path: array for path, array in arrays.items() if path[0] != layout.ACTION}
        self._same_step = autoreset_mode == AutoresetMode.SAME_STEP
        self._with_infos = with_infos
        # The rows in flight between `send` and `recv`, as they were before they were sent.
        self._backup = {path: np.empty_like(array[0]) for path, array in self._arrays.items()}
        self.complete_slot: int | None = None
        self.unreported: set[int] = set()

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
