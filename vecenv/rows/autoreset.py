"""Episodes: which rows wait for their next episode, which episodes were cut, and the totals of each episode.

`EnvRows` and `BatchRows` both follow these rules. `EnvRows` resets its envs itself, and `BatchRows` leaves resets to
its vector env.

After the last step of an episode
- with `NEXT_STEP`, the row waits: its next step begins an episode instead of stepping the env, with reward 0;
- with `SAME_STEP`, the next episode begins in the same step, and the last observation becomes the final observation;
- with `DISABLED`, the row waits until it is reset. A step raises.

An episode is cut when the process of its env dies. The replacement process takes over the row and reports the cut in
the row's next step, which is truncated and has reward 0, the last good observation, and `worker_restarted` in its info.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.errors import EpisodeOver
from vecenv.memory import layout
from vecenv.spaces import Path

RESTARTED = "worker_restarted"
"""Key of the info of a cut episode."""

Views = Mapping[Path, np.ndarray]
"""The rows of one slot: `[n, *shape]` for every field."""

Numbers = Sequence[int] | np.ndarray
Flags = TypeVar("Flags", bound="list[bool] | np.ndarray")


class Episodes(Generic[Flags]):
    """The state of each row's episode: waiting, cut, return and length.

    Args:
        autoreset_mode: What happens after the last step of an episode.
        waiting: n False values, in a list or an array. `EnvRows` reads one flag at a time, which is several times
            faster in a list; `BatchRows` reads the flags of all rows at once, which is faster in an array.

    Attributes:
        waiting: Whether the row's next step must not step its env, because the episode is over or was cut.
        cut: Waiting rows whose cut episode has not been reported yet.
    """

    def __init__(self, autoreset_mode: AutoresetMode, waiting: Flags):
        self.autoreset_mode = autoreset_mode
        self.waiting: Flags = waiting
        self.cut: set[int] = set()
        self._returns = np.zeros(len(waiting), dtype=np.float64)
        self._lengths = np.zeros(len(waiting), dtype=np.int64)

    def begin(self, rows: Sequence[int]) -> None:
        """Begins an episode in each of these rows, whose envs were just reset."""
        for row in rows:
            self.waiting[row] = False
        self.cut.difference_update(rows)
        self._clear_totals(rows)

    def assert_autoreset(self) -> None:
        """Raises EpisodeOver if a waiting row may not begin its next episode with a step."""
        if self.autoreset_mode == AutoresetMode.DISABLED:
            raise EpisodeOver("its episode is over: reset it with options={'reset_mask': ...}")

    def resume(self, views: Views, over: Sequence[bool]) -> None:
        """Takes over rows from a process that died: all of them wait, and episodes that were not over are cut.

        Args:
            views: The slot with the last good rows, which hold the totals of their episodes.
            over: Whether each row's episode was already over and therefore cannot be cut.
        """
        self.waiting[:] = [True] * len(over)
        self.cut = {row for row, is_over in enumerate(over) if not is_over}
        ended = views[layout.TERMINATED] | views[layout.TRUNCATED]
        self._returns[:] = np.where(ended, 0, views[layout.EPISODE_RETURN])
        self._lengths[:] = np.where(ended, 0, views[layout.EPISODE_LENGTH])

    def report_cut(self, at: Views, last: Views, row: int) -> bool:
        """Writes the step that reports a cut episode; `count` must follow.

        Args:
            at: The slot of this step.
            last: The slot with the row's last good observation.
            row: One of `cut`.

        Returns:
            Whether the next episode begins in the same step. If so, the last observation is the final observation, and
            the caller writes the first observation of the next episode.
        """
        begins = self.autoreset_mode == AutoresetMode.SAME_STEP
        field = layout.FINAL_OBSERVATION if begins else layout.OBSERVATION
        for path, array in last.items():
            if path[0] == layout.OBSERVATION:
                at[(field, *path[1:])][row] = array[row]
            elif path[0] == layout.EPISODE_INFO:
                at[path][row] = np.nan  # the info of the episode's last step is lost
        at[layout.REWARD][row], at[layout.TERMINATED][row], at[layout.TRUNCATED][row] = 0.0, False, True
        self.cut.discard(row)
        self.waiting[row] = not begins
        self._lengths[row] -= 1  # `count` adds this step, although no env took it
        return begins

    def count(self, views: Views, rows: list[int] | slice, began: Numbers, ended: Numbers) -> None:
        """Adds one step to the totals and writes them. The last step of an episode has the totals of that episode.

        Args:
            views: The slot of this step, with its rewards written.
            rows: The rows that were stepped.
            began: Rows that this step reset. For them, the step has no reward and is not counted.
            ended: Rows whose episode ended and whose next episode began, both in this step.
        """
        if isinstance(rows, slice):
            self._returns += views[layout.REWARD]
            self._lengths += 1
        else:
            self._returns[rows] += views[layout.REWARD][rows]
            self._lengths[rows] += 1
        if len(began):
            self._clear_totals(began)
        self.write_totals(views, rows)
        if len(ended):
            self._clear_totals(ended)

    def write_totals(self, views: Views, rows: list[int] | slice = slice(None)) -> None:
        """Writes the totals into the rows of one slot."""
        views[layout.EPISODE_RETURN][rows] = self._returns[rows]
        views[layout.EPISODE_LENGTH][rows] = self._lengths[rows]

    def totals(self, row: int) -> tuple[float, int]:
        """Returns the return and the length of the row's episode so far."""
        return float(self._returns[row]), int(self._lengths[row])

    def restore_totals(self, row: int, totals: tuple[float, int]) -> None:
        """Restores the totals that `totals` returned."""
        self._returns[row], self._lengths[row] = totals

    def _clear_totals(self, rows: Numbers) -> None:
        self._returns[rows], self._lengths[rows] = 0.0, 0


def cut_info(reset_info: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the info of the step that reports a cut episode.

    Args:
        reset_info: With SAME_STEP, the info of the reset that follows in the same step; None otherwise.
    """
    info = {RESTARTED: True}
    return info if reset_info is None else {"final_info": info, **reset_info, **info}
