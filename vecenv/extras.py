"""extras.py: what a step hands on beside the memory: infos, and the values of loose leaves.

A loose leaf is one without fixed shape (see `layout.is_fixed`). Most steps of most envs have no extras, and
then nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

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
        merged: Infos of all rows of the vector env, merged already (see `merging`), from rows that have no reason to
            take them apart.
    """

    infos: Infos
    loose: Loose
    merged: dict[str, Any] | None = None


NOTHING = Extras([], {})


def gathered(parts: Iterable[tuple[int, Extras]]) -> Extras:
    """Joins the extras of runs of rows, each given with the number of its first row."""
    infos: Infos = []
    loose: Loose = {}
    for low, part in parts:
        infos += [(low + row, info) for row, info in part.infos]
        for path, values in part.loose.items():
            loose.setdefault(path, {}).update({low + row: value for row, value in values.items()})
    return Extras(infos, loose)
