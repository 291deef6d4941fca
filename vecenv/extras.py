"""extras.py: what a step hands on beside the memory: infos, and the values of loose leaves.

A loose leaf is one without fixed shape (see `layout.is_fixed`). Most steps of most envs have no extras, and
then nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vecenv.layout import Path

Infos = list[tuple[int, dict[str, Any]]]
"""The infos that do not lie in memory, each with the row of its env."""

Loose = dict[Path, dict[int, Any]]
"""For each loose leaf of observations and final observations: the new value of each row that has one."""


class Extras(NamedTuple):
    """Infos and loose leaves of some rows.

    Attributes:
        infos: Of single rows.
        loose: Values of leaves without fixed shape.
        parts: Infos of rows that were stepped together, merged already (see `merging`): the rows' numbers, and the
            infos of those rows alone.
    """

    infos: Infos
    loose: Loose
    parts: Sequence[tuple[np.ndarray, dict[str, Any]]] = ()


NOTHING = Extras([], {})


def gathered(parts: Iterable[tuple[int, Extras]]) -> Extras:
    """Joins the extras of runs of rows, each given with the number of its first row."""
    infos: Infos = []
    loose: Loose = {}
    merged = []
    for low, part in parts:
        infos += [(low + row, info) for row, info in part.infos]
        merged += [(low + rows, values) for rows, values in part.parts]
        for path, values in part.loose.items():
            loose.setdefault(path, {}).update({low + row: value for row, value in values.items()})
    return Extras(infos, loose, merged)
