"""Episodes: what the next step of each row does, and the totals of each episode.

`EnvRows` and `BatchRows` both follow these rules. `EnvRows` resets its envs itself, and `BatchRows` leaves resets to
its vector env.

After the last step of an episode
- with `NEXT_STEP`, the row's next step begins an episode instead of stepping the env, with reward 0;
- with `SAME_STEP`, the next episode begins in the same step, and the last observation becomes the final observation;
- with `DISABLED`, the row must be reset. The vector env rejects a step.

If the process of an env dies, a new process takes over its rows, and the parent reports that their episodes were cut
(see `vecenv.workers.restarts`). The first step of each row then begins an episode. With `NEXT_STEP` or `DISABLED`, a
row whose episode was cut first skips the step in which the parent reports the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vecenv.rows.episode_infos import parse

STEPS, BEGINS, SKIPS, RESETS = 0, 1, 2, 3
"""What the next step of a row does: step the env, begin an episode, or leave the row to the parent.

In `BatchRows`, a row that BEGINS is reset by its vector env. A row that RESETS was taken over, and begins an episode
with a reset that the vector env would not do by itself.
"""


EVERY = slice(None)
"""The index of all rows, recognized by identity: a whole array is then used itself, because indexing takes time."""


class Columns(NamedTuple):
    """The numbers of the rows of one slot: `[n]` each. Looked up once, because each step needs them."""

    rewards: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray


Numbers = Sequence[int] | np.ndarray


class Episodes:
    """The state of each row's episode: what its next step does, its return and its length.

    Attributes:
        next_step: `STEPS`, `BEGINS`, `SKIPS` or `RESETS` for each row, in a list (`EnvRows`) or an array (`BatchRows`).
        infos: For each info that is summed up, `float64[n, 2]`: the sum over the steps of each row's episode that have
            the info, and the number of these steps.
    """

    def __init__(self, next_step: list[int] | np.ndarray, info_keys: Sequence[str] = ()):
        self.next_step: Any = next_step
        self._returns = np.zeros(len(next_step), dtype=np.float64)
        self._lengths = np.zeros(len(next_step), dtype=np.int64)
        self._ones = np.ones(len(next_step), dtype=np.int64)  # adding it takes half as long as adding the int 1
        summed = {key for key, kind in map(parse, info_keys) if kind != "last"}
        self.infos = {key: np.zeros((len(next_step), 2)) for key in sorted(summed)}

    def begin(self, rows: Sequence[int]) -> None:
        """Begins an episode in each of these rows, whose envs were just reset."""
        for row in rows:
            self.next_step[row] = STEPS
        self._clear_totals(rows)

    def count(self, columns: Columns, rows: Numbers | slice, began: Numbers, ended: Numbers) -> None:
        """Adds one step of these rows to the totals and writes them. The last step has the totals of its episode.

        Args:
            columns: The columns of the slot of this step, with its rewards written.
            rows: The rows that were stepped: numbers, a slice, or `EVERY`.
            began: Rows that this step reset. For them, the step has no reward and is not counted.
            ended: Rows whose episode ended and whose next episode began, both in this step.
        """
        if rows is EVERY:
            self._returns = _sums(self._returns, columns.rewards)
            self._lengths += self._ones
        else:
            self._returns[rows] = _sums(self._returns[rows], columns.rewards[rows])
            self._lengths[rows] += 1
        if len(began):
            self._clear_totals(began)
        self.write_totals(columns, rows)
        if len(ended):
            self._clear_totals(ended)

    def write_totals(self, columns: Columns, rows: Numbers | slice) -> None:
        """Writes the totals into these rows of one slot."""
        if rows is EVERY:
            columns.returns[...], columns.lengths[...] = self._returns, self._lengths
        else:
            columns.returns[rows], columns.lengths[rows] = self._returns[rows], self._lengths[rows]

    def totals(self, row: int) -> tuple[float, int]:
        """Returns the return and the length of the row's episode so far."""
        return float(self._returns[row]), int(self._lengths[row])

    def add_info(self, key: str, rows: Any, values: Any) -> None:
        """Adds the values of an info in these rows, which have just been stepped."""
        self.infos[key][rows, 0] = _sums(self.infos[key][rows, 0], values)
        self.infos[key][rows, 1] += 1

    def write_infos(self, columns: Sequence[tuple[str, str, np.ndarray]], rows: Numbers | slice) -> None:
        """Writes the "sum" or the "mean" of infos over the episodes of these rows so far; NaN where no step had one.

        Order: before `count`, which clears the totals of the episodes that this step ends.
        """
        for key, kind, column in columns:
            totals, counts = self.infos[key][rows].T
            divisors = counts if kind == "mean" else np.minimum(counts, 1)
            column[rows] = np.divide(totals, divisors, out=np.full(len(counts), np.nan), where=counts > 0)

    def info_totals(self, row: int) -> dict[str, list[float]]:
        """Returns the sum and the count of each info in the row's episode so far."""
        return {key: totals[row].tolist() for key, totals in self.infos.items()}

    def restore_totals(self, row: int, totals: tuple[float, int], infos: Mapping[str, Sequence[float]]) -> None:
        """Restores the results of `totals` and `info_totals`.

        An info that was not summed up from the start of the episode is NaN in this episode.
        """
        self._returns[row], self._lengths[row] = totals
        for key, values in self.infos.items():
            values[row] = infos.get(key, (np.nan, 1) if totals[1] else (0, 0))

    def _clear_totals(self, rows: Numbers) -> None:
        self._returns[rows], self._lengths[rows] = 0.0, 0
        for values in self.infos.values():
            values[rows] = 0.0


def _sums(left: Any, right: Any) -> Any:
    """Returns `left + right`, even if a script's `np.seterr` makes numpy raise on overflow or on inf - inf."""
    try:
        return left + right
    except (FloatingPointError, RuntimeWarning):
        with np.errstate(all="ignore"):
            return left + right
