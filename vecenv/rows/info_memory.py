"""Stores infos in memory if they have the same numeric keys at every step, instead of pickling them for the pipe.

The keys are learned from the first steps. An info that does not match the learned schema (another key, a value of
another type, the info of a reset) still travels through the pipe, so no info is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vecenv.spaces import Path

Infos = list[tuple[int, dict[str, Any]]]
"""Infos that are not stored in memory, each with its row."""

Schema = dict[str, tuple[type[Any], np.dtype, tuple[int, ...]]]
"""For each key of an info: the exact type, dtype and shape of its value."""

INFO = "info"
PRESENT: Path = ("info_present",)
"""Field that says whether the row's info is stored in memory."""
LEARNING_STEPS = 3
"""Number of steps in which to look for a common schema. If there is none, infos keep traveling through the pipe."""


def learn_schema(infos: Infos, num_envs: int) -> Schema | None:
    """Returns the schema of the infos if every env has one and all schemas are equal; None otherwise."""
    if len(infos) != num_envs:
        return None
    schemas = [_schema(info) for _, info in infos]
    first = schemas[0]
    return first if first and all(schema == first for schema in schemas) else None


def learn_batched_schema(parts: Sequence[tuple[np.ndarray, dict[str, Any]]], num_envs: int) -> Schema | None:
    """Returns the schema of batched infos if every env has every key; None otherwise.

    Args:
        parts: For each run of rows: the indices of the rows, and their batched infos.
        num_envs: N.
    """
    schemas, count = [], 0
    for rows, part in parts:
        values = {key: value for key, value in part.items() if f"_{key}" in part}
        if not all(part[f"_{key}"].all() and isinstance(value, np.ndarray) for key, value in values.items()):
            return None
        if any(value.dtype.kind not in "biufc" for value in values.values()):
            return None
        schemas.append(
            {
                key: (value.dtype.type if value.ndim == 1 else np.ndarray, value.dtype, value.shape[1:])
                for key, value in values.items()
            }
        )
        count += len(rows)
    complete = count == num_envs and all(schema == schemas[0] for schema in schemas)
    return schemas[0] if complete and schemas[0] else None


def info_fields(schema: Schema) -> dict[Path, tuple[np.dtype, tuple[int, ...]]]:
    """Returns dtype and row shape of the fields that infos of this schema need."""
    rows: dict[Path, tuple[np.dtype, tuple[int, ...]]] = {
        (INFO, key): (dtype, shape) for key, (_, dtype, shape) in schema.items()
    }
    rows[PRESENT] = (np.dtype(np.bool_), ())
    return rows


class InfoWriter:
    """Writes infos of a known schema into the rows of memory, in the process that steps the envs.

    Args:
        schema: Keys, types and shapes of the infos that fit the memory.
        views: Every field's `[S, n, *shape]` for these rows.
    """

    def __init__(self, schema: Schema, views: Mapping[Path, np.ndarray]):
        num_slots = len(views[PRESENT])
        self._size = len(schema)
        self._shapes = {key: shape for key, (_, _, shape) in schema.items()}
        self._columns = [
            [(key, kind, views[(INFO, key)][slot]) for key, (kind, _, _) in schema.items()] for slot in range(num_slots)
        ]
        self._present = views[PRESENT]

    def clear(self, slot: int, rows: Any = slice(None)) -> None:
        """Marks these rows of the slot as having no info in memory."""
        self._present[slot, rows] = False

    def write(self, slot: int, row: int, info: dict[str, Any]) -> bool:
        """Writes an info and marks its row if the info fits the schema. Returns whether it fits."""
        if len(info) != self._size:
            return False
        for key, kind, column in self._columns[slot]:
            value: Any = info.get(key)
            if type(value) is not kind:
                return False
            if kind is np.ndarray and (value.shape != self._shapes[key] or value.dtype != column.dtype):
                return False
            try:
                column[row] = value
            except OverflowError:  # an int that needs more than 64 bits
                return False
        self._present[slot, row] = True
        return True

    def write_rows(self, slot: int, infos: Mapping[str, Any], rows: np.ndarray) -> np.ndarray:
        """Writes the batched infos (see `vecenv.rows.infos`) that fit the schema, and marks their rows.

        Args:
            slot: The slot to write.
            infos: The infos of all n rows.
            rows: `bool[n]`, the rows to write.

        Returns:
            `bool[n]`, the rows that were written.
        """
        fit = rows.copy()
        for key, _, column in self._columns[slot]:
            values = infos.get(key)
            if not isinstance(values, np.ndarray) or values.dtype != column.dtype or values.shape != column.shape:
                return np.zeros(len(rows), np.bool_)
            fit &= infos[f"_{key}"]
        for key in infos:
            if key not in self._shapes and f"_{key}" in infos:
                fit &= ~infos[f"_{key}"]
        index = slice(None) if fit.all() else fit  # a slice is ten times as fast as a mask
        for key, _, column in self._columns[slot]:
            column[index] = infos[key][index]
        self._present[slot, fit] = True
        return fit


def read_infos(views: Mapping[Path, np.ndarray], slot: int) -> dict[str, Any]:
    """Returns copies of the infos of a slot in Gymnasium's format: `key: array[N, ...]` and `_key: bool[N]`."""
    present = views[PRESENT][slot]
    if not present.any():
        return {}
    complete = present.all()
    result: dict[Any, Any] = {}  # keyed by str, although a Path may hold any Hashable
    for path, view in views.items():
        if path != PRESENT:
            values = view[slot].copy()
            if not complete:
                values[~present] = 0
            result[path[1]], result[f"_{path[1]}"] = values, present.copy()
    return result


def read_info_list(views: Mapping[Path, np.ndarray], schema: Schema, slot: int) -> list[dict[str, Any]]:
    """Returns the infos of a slot as the envs returned them, one dict per env; {} for rows without info in memory."""
    present = views[PRESENT][slot].tolist()
    infos: list[dict[str, Any]] = [{} for _ in present]
    for key, (kind, _, _) in schema.items():
        column = views[(INFO, key)][slot]
        plain = column.tolist() if kind in (int, float, bool) else list(column.copy())
        for info, value, is_present in zip(infos, plain, present, strict=True):
            if is_present:
                info[key] = value
    return infos


def _schema(info: dict[str, Any]) -> Schema | None:
    schema: Schema = {}
    for key, value in info.items():
        kind = type(value)
        if not isinstance(key, str):
            return None
        if kind in (int, float, bool) or issubclass(kind, np.number):
            schema[key] = (kind, np.dtype(kind), ())
        elif kind is np.ndarray and value.dtype.kind in "biufc":
            schema[key] = (kind, value.dtype, value.shape)
        else:
            return None
    return schema
