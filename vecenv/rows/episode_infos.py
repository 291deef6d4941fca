"""Selected info values of an episode, stored in memory as one float64 per env.

Each step of an episode writes the values so far; the last step writes the values of the whole episode. In rows that
have not been stepped since a reset, the memory is undefined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vecenv.rows import checks

MISSING = object()
"""The result of a lookup that finds nothing."""


def parse(name: str) -> tuple[str, str]:
    """Returns the key of an info, and which of its values in an episode counts: "last", "sum" or "mean".

    "KEY:sum" and "KEY:mean" combine the values of all steps that have the key. Any other name is a key whose value at
    the last step counts. "KEY:last" is the same as "KEY", for keys that end in ":sum" or ":mean".
    """
    key, colon, kind = name.rpartition(":")
    return (key, kind) if colon and kind in ("last", "sum", "mean") else (name, "last")


def find(info: Any, key: str) -> Any:
    """Returns the value under `key` in an info, or under `inner` in the dict `outer` for "outer/inner", or MISSING."""
    if not isinstance(info, Mapping):
        return MISSING
    if key in info:
        return info[key]
    outer, _, inner = key.partition("/")
    return find(info.get(outer), inner) if inner else MISSING


def find_in_batch(infos: Any, key: str, row: int) -> Any:
    """Returns the value that `find` returns for one row of batched infos (see `vecenv.rows.infos`).

    An array of dicts, which some vector envs return as `final_info`, counts as batched infos. A key without a mask
    counts as present in every row, and a scalar is the value of every row.
    """
    if infos is None:
        return MISSING
    if not isinstance(infos, Mapping):
        return find(infos[row], key)
    outer, _, inner = (key, "", "") if key in infos else key.partition("/")
    mask = infos.get(f"_{outer}")
    if outer not in infos or (mask is not None and not mask[row]):
        return MISSING
    values = infos[outer]
    if inner:
        return find_in_batch(values, inner, row)
    return values if isinstance(values, Mapping) or np.ndim(values) == 0 else values[row]


def find_rows(infos: Any, key: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the given rows that have a value in batched infos, and their values.

    None if the values are not an array of numbers `[N]` under the key itself: use `find_in_batch`, which is slower.
    """
    values = infos.get(key) if isinstance(infos, Mapping) else None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "biuf":
        return None
    present = rows[np.asarray(infos[f"_{key}"], np.bool_)[rows]] if f"_{key}" in infos else rows
    return present, values[present].astype(np.float64)


def number_so_far(value: Any) -> float:
    """Returns a value before the end of an episode as a float, or NaN if it is not a number.

    A value that is not a number is an error only in the last step of an episode.
    """
    try:
        return number(value)
    except TypeError:
        return np.nan


def number(value: Any) -> float:
    """Returns a value as a float, NaN for MISSING, or raises TypeError as `checks.number` does."""
    if value is MISSING:
        return np.nan
    if isinstance(value, np.ndarray) and value.size > 1:  # `checks.number` would give advice on rewards
        raise TypeError(f"is {checks.shown(value)}, not a real number, as info_keys requires")
    try:
        return checks.number(value)
    except TypeError as error:
        raise TypeError(f"{error}, as info_keys requires") from None
