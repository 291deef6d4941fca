"""EpisodeTotals: the running return and length of each episode of some rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vecenv.memory import layout
from vecenv.spaces import Path


class EpisodeTotals:
    """Sums of rewards and counts of steps of the episodes under way: `float64[n]` and `int64[n]`."""

    def __init__(self, num_rows: int):
        self._returns = np.zeros(num_rows, dtype=np.float64)
        self._lengths = np.zeros(num_rows, dtype=np.int64)

    def begin(self, rows: Any) -> None:
        """Sets the totals of these rows to zero."""
        self._returns[rows], self._lengths[rows] = 0.0, 0

    def resume(self, views: Mapping[Path, np.ndarray]) -> None:
        """Takes over what memory shows of one slot, where the totals of episodes that ended are kept no longer."""
        ended = views[layout.TERMINATED] | views[layout.TRUNCATED]
        self._returns[:] = np.where(ended, 0, views[layout.EPISODE_RETURN])
        self._lengths[:] = np.where(ended, 0, views[layout.EPISODE_LENGTH])

    def of(self, row: int) -> tuple[float, int]:
        """Returns return and length of one row."""
        return float(self._returns[row]), int(self._lengths[row])

    def put(self, row: int, totals: tuple[float, int]) -> None:
        """Takes what `of` returned."""
        self._returns[row], self._lengths[row] = totals

    def not_stepped(self, row: int) -> None:
        """Takes back, in advance, the step that `count` will count for a row that takes none."""
        self._lengths[row] -= 1

    def write(self, views: Mapping[Path, np.ndarray], rows: Any = slice(None)) -> None:
        """Writes the totals into the rows of one slot."""
        views[layout.EPISODE_RETURN][rows] = self._returns[rows]
        views[layout.EPISODE_LENGTH][rows] = self._lengths[rows]

    def count(
        self, views: Mapping[Path, np.ndarray], rows: Any, started: Sequence[int] | np.ndarray, ended: Any
    ) -> None:
        """Adds one step of these rows and writes the totals; a last step shows those of its whole episode.

        Args:
            views: Of one slot, rewards already written.
            rows: Which were stepped: a list, or a slice.
            started: Those whose episode begins with this step, which has no reward and is not counted.
            ended: Those whose episode ended in this step and began again.
        """
        if isinstance(rows, slice):
            self._returns += views[layout.REWARD]
            self._lengths += 1
        else:
            self._returns[rows] += views[layout.REWARD][rows]
            self._lengths[rows] += 1
        if len(started):
            self.begin(started)
        self.write(views, rows)
        if len(ended):
            self.begin(ended)
