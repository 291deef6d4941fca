"""What a step hands on beside the memory: infos, and the values of loose leaves.

A loose leaf is one without fixed shape (see `layout.is_fixed`). Most steps of most envs have no objects, and
then nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vecenv.memory.layout import Path

Infos = list[tuple[int, dict[str, Any]]]
"""The infos that do not lie in memory, each with the row of its env."""

ObjectLeaves = dict[Path, dict[int, Any]]
"""For each loose leaf of observations and final observations: the new value of each row that has one."""


class StepObjects(NamedTuple):
    """Infos and loose leaves of some rows.

    Attributes:
        infos: Of single rows.
        leaves: Values of leaves without fixed shape.
        batched_infos: Batched infos of rows stepped together (see `vecenv.rows.infos`): the rows' numbers, and
            the infos of those rows alone.
    """

    infos: Infos
    leaves: ObjectLeaves
    batched_infos: Sequence[tuple[np.ndarray, dict[str, Any]]] = ()


NO_OBJECTS = StepObjects([], {})


def combined(parts: Iterable[tuple[int, StepObjects]]) -> StepObjects:
    """Joins the objects of runs of rows, each given with the number of its first row."""
    infos: Infos = []
    loose: ObjectLeaves = {}
    merged = []
    for low, part in parts:
        infos += [(low + row, info) for row, info in part.infos]
        merged += [(low + rows, values) for rows, values in part.batched_infos]
        for path, values in part.leaves.items():
            loose.setdefault(path, {}).update({low + row: value for row, value in values.items()})
    return StepObjects(infos, loose, merged)
