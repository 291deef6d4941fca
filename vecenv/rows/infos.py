"""Copies the infos of envs; builds, splits, selects and combines batched infos, Gymnasium's format for N envs.

Batched infos hold an array `[N, ...]` under each key, or a dict of the same format, and under `_key` the mask `bool[N]`
of the envs that have the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from vecenv.rows.checks import NUMBERS

_CONSTANT = NUMBERS | {complex, str, bytes, type(None)}
"""Exact types whose values cannot change."""

_PYTHONS = (np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.bool_))
"""The dtypes of Python's numbers."""

Infos = list[tuple[int, dict[str, Any]]]
"""Infos of single envs, each with the index of its env."""


def copied(value: Any) -> Any:
    """Returns a copy of an info or a frame, which does not change when the env changes its objects.

    An object that cannot be copied is returned itself. `deepcopy` would return the same for every value, but takes
    several times as long for the usual dicts of numbers and arrays.
    """
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind is dict:
        # A call per constant would take most of the time.
        return {key: item if type(item) in _CONSTANT else copied(item) for key, item in value.items()}
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if kind is list or kind is tuple:
        return kind(map(copied, value))
    try:
        return deepcopy(value)
    except Exception:  # for example a lock, which cannot be pickled for the pipe either
        return value


def merge_infos(infos: Infos, num_envs: int) -> dict[str, Any]:
    """Returns the batched infos of N envs, equal to the result of `add_info` for each of `infos` in order.

    Keys under which all values have the same numeric type are converted at once, which is ten times as fast.
    """
    envs = [env for env, _ in infos]
    keys = infos[0][1].keys()
    if all(info.keys() == keys for _, info in infos):  # the usual case
        columns = {key: (envs, [info[key] for _, info in infos]) for key in keys}
    else:
        columns = {}
        for env, info in infos:
            for key, value in info.items():
                of_key = columns.setdefault(key, ([], []))
                of_key[0].append(env)
                of_key[1].append(value)
    merged: dict[str, Any] = {}
    if any(isinstance(key, str) and key[:1] == "_" for key in columns):  # it may be the name of a mask
        for env, info in infos:
            add_info(merged, info, env, num_envs)
        return merged
    everyone = np.ones(num_envs, dtype=np.bool_) if envs == list(range(num_envs)) else None
    for key, (envs_with_key, values) in columns.items():
        whole = everyone is not None and envs_with_key is envs
        array = None if key == "final_obs" else _as_array(values)
        if array is not None:
            if not whole:
                merged[key] = np.zeros((num_envs, *array.shape[1:]), array.dtype)
                merged[key][envs_with_key] = array
            else:
                merged[key] = array
        elif all(type(value) is dict for value in values) and key != "final_obs":
            merged[key] = merge_infos([*zip(envs_with_key, values, strict=True)], num_envs)
        else:
            for env, value in zip(envs_with_key, values, strict=True):
                add_info(merged, {key: value}, env, num_envs)
            continue
        if whole:  # one object, which is pickled once; `own_masks` gives each key its own
            merged[f"_{key}"] = everyone
        else:
            mask = merged[f"_{key}"] = np.zeros(num_envs, dtype=np.bool_)
            mask[envs_with_key] = True
    return merged


def own_masks(merged: dict[str, Any]) -> dict[str, Any]:
    """Returns batched infos in which no two keys share a mask."""
    owned: dict[str, Any] = {}
    for key, values in merged.items():
        is_mask = isinstance(key, str) and key[:1] == "_" and isinstance(values, np.ndarray)
        owned[key] = own_masks(values) if isinstance(values, dict) else values.copy() if is_mask else values
    return owned


def join_infos(parts: Sequence[tuple[np.ndarray, dict[str, Any]]], num_envs: int) -> dict[str, Any]:
    """Returns the batched infos of all envs from those of several runs of envs, in order."""
    if len(parts) == 1 and len(parts[0][0]) == num_envs:
        return own_masks(parts[0][1])
    first = parts[0][1]
    joined: dict[str, Any] = {}
    if _are_in_order([rows for rows, _ in parts], num_envs) and all(part.keys() == first.keys() for _, part in parts):
        for key, values in first.items():
            columns = [part[key] for _, part in parts]
            if not all(_same_type(column, values) for column in columns):
                break
            joined[key] = np.concatenate(columns)  # half the time of `add_batch`
        else:
            return joined
    joined = {}
    for rows, part in parts:
        add_batch(joined, part, rows, num_envs)
    return joined


def _are_in_order(runs: Sequence[np.ndarray], num_envs: int) -> bool:
    """Returns whether sorted runs of distinct envs are together all envs in order."""
    low = 0
    for rows in runs:
        if rows[0] != low or rows[-1] != low + len(rows) - 1:
            return False
        low += len(rows)
    return low == num_envs


def _as_array(values: Sequence[Any]) -> np.ndarray | None:
    """Returns values of one numeric type and shape as an array of this type, or None for any other values."""
    kind = type(values[0])
    if kind is np.ndarray:
        dtype, shape = values[0].dtype, values[0].shape
        if dtype.kind not in "biufc":
            return None
        alike = all(type(value) is kind and value.dtype == dtype and value.shape == shape for value in values)
        return np.array(values, dtype) if alike else None
    if kind not in (float, int, bool) and not issubclass(kind, np.number):
        return None
    if len(set(map(type, values))) > 1:
        return None
    try:
        array = np.array(values)
    except OverflowError:
        return None
    return array if array.dtype == np.dtype(kind) else None  # an int of more than 64 bits needs another dtype


def add_info(merged: dict[str, Any], info: dict[str, Any], env: int, num_envs: int) -> dict[str, Any]:
    """Adds the info of one env as Gymnasium does, but without changing values to fit the values of other envs.

    Gymnasium takes dtype and shape from the first env that has a key, so an int that comes first truncates later
    floats. Here, numbers get a common dtype (True among ints is 1). If no common dtype can hold all values exactly,
    they become an array of objects. No value raises, and no key is lost, except a key `_x` next to a key `x`, because
    `_x` is the name of the mask of `x`.

    Args:
        merged: The batched infos so far; changed in place.
        info: The info of the env.
        env: Index of the env.
        num_envs: N.

    Returns:
        `merged`.
    """
    for key, value in info.items():
        if isinstance(key, str) and key[:1] == "_" and (key[1:] in info or key[1:] in merged):
            continue  # this name belongs to the mask of the other key
        mask = merged.get(f"_{key}")
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            mask = merged[f"_{key}"] = np.zeros(num_envs, dtype=np.bool_)
        column = merged.get(key)
        if isinstance(value, dict) and key != "final_obs" and (column is None or isinstance(column, dict)):
            merged[key] = add_info(column or {}, value, env, num_envs)
        else:
            if isinstance(column, dict):  # other envs have a dict under this key
                column = _objects(split_infos(column, num_envs), mask)
            merged[key] = column = _with_room(column, None if key == "final_obs" else value, mask)
            try:
                column[env] = value
            except (OverflowError, TypeError, ValueError):  # for example an int of more than 64 bits
                merged[key] = column = _objects(list(column), mask)
                column[env] = value
        mask[env] = True
    return merged


def split_infos(merged: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Returns one dict per env. Elements of float64, int64 and bool vectors become Python numbers."""
    each: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, values in merged.items():
        mask = merged.get(f"_{key}")
        if mask is None:  # `values` is a mask itself
            continue
        if isinstance(values, dict):
            values = split_infos(values, num_envs)
        elif values.ndim == 1 and values.dtype in _PYTHONS:
            values = values.tolist()
        for i in np.flatnonzero(mask).tolist():
            each[i][key] = values[i]
    return each


def select_infos(merged: dict[str, Any], ids: np.ndarray) -> dict[str, Any]:
    """Returns the batched infos of these envs, without keys that none of these envs has."""
    part = {}
    for key, values in merged.items():
        mask = merged.get(f"_{key}")
        if mask is not None and mask[ids].any():
            part[key] = select_infos(values, ids) if isinstance(values, dict) else values[ids]
            part[f"_{key}"] = mask[ids]
    return part


def check_masks(infos: dict[str, Any], num_envs: int) -> None:
    """Raises TypeError if a key other than "final_obs" has no mask `bool[N]`. The message completes a sentence."""
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None and isinstance(key, str) and (key[:1] == "_" or key == "final_obs"):
            continue  # a mask, or observations that are read only where an episode has ended
        if not isinstance(mask, np.ndarray) or mask.dtype.kind != "b" or mask.shape != (num_envs,):
            raise TypeError(
                f"has the key {key!r} without a mask '_{key}', an array bool[{num_envs}] that says which envs have it"
            )
        if isinstance(values, dict):
            check_masks(values, num_envs)


def add_batch(merged: dict[str, Any], part: dict[str, Any], rows: np.ndarray, num_envs: int) -> dict[str, Any]:
    """Adds batched infos of some envs. The result equals that of `add_info` for each of these envs.

    Args:
        merged: The batched infos so far; changed in place.
        part: Batched infos whose arrays are `[len(rows), ...]`.
        rows: Indices of the envs.
        num_envs: N.

    Returns:
        `merged`.
    """
    for key, values in part.items():
        if f"_{key}" not in part:
            continue  # `values` is a mask
        if isinstance(key, str) and key[:1] == "_" and (key[1:] in part or key[1:] in merged):
            continue  # this name belongs to the mask of the other key
        has, mask, column = part[f"_{key}"], merged.get(f"_{key}"), merged.get(key)
        if not isinstance(mask, np.ndarray) or mask.dtype.kind != "b" or mask.shape != (num_envs,):
            mask = np.zeros(num_envs, dtype=np.bool_)
        if isinstance(values, dict) and (column is None or isinstance(column, dict)):
            merged[key] = add_batch(column or {}, values, rows, num_envs)
        elif isinstance(values, np.ndarray) and (column is None or _same_type(column, values)):
            if column is None:
                shape = (num_envs, *values.shape[1:])
                empty = np.full(shape, None) if values.dtype == object else np.zeros(shape, values.dtype)
                merged[key] = column = empty
            column[rows[has]] = values[has]
        else:  # the types, dtypes or shapes of the envs' values differ
            each = split_infos({key: values, f"_{key}": has}, len(rows))
            for k in np.flatnonzero(has).tolist():
                add_info(merged, each[k], int(rows[k]), num_envs)
            continue
        mask[rows[has]] = True
        merged[f"_{key}"] = mask
    return merged


def _same_type(one: Any, other: Any) -> bool:
    arrays = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return arrays and one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


def mask_infos(infos: dict[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Returns batched infos of the envs in this mask, built from an array `[N, ...]` per key; other rows are zero."""
    merged: dict[str, Any] = {}
    if mask.all():
        for key, values in infos.items():
            merged[key], merged[f"_{key}"] = values, mask.copy()
    elif mask.any():
        for key, values in infos.items():
            where = mask.reshape(-1, *[1] * (values.ndim - 1))
            merged[key], merged[f"_{key}"] = np.where(where, values, np.zeros((), values.dtype)), mask.copy()
    return merged


def update_infos(infos: dict[str, Any], others: dict[str, Any]) -> None:
    """Adds batched infos of other envs to `infos`. All values must be arrays."""
    for key, values in others.items():
        if f"_{key}" not in others:
            continue  # `values` is a mask
        mask = others[f"_{key}"]
        if key in infos:
            where = mask.reshape(-1, *[1] * (values.ndim - 1))
            infos[key] = np.where(where, values, infos[key])
            infos[f"_{key}"] = infos[f"_{key}"] | mask
        else:
            infos[key], infos[f"_{key}"] = values, mask


def _with_room(column: np.ndarray | None, value: Any, mask: np.ndarray) -> np.ndarray:
    """Returns a key's values so far, in a dtype that can also hold `value`."""
    number = type(value) in (int, float, bool) or isinstance(value, np.number)
    dtype = np.dtype(type(value)) if number else value.dtype if isinstance(value, np.ndarray) else None
    if column is None:
        if dtype is not None:
            return np.zeros((len(mask), *np.shape(value)), dtype=dtype)
        return np.full(len(mask), fill_value=None, dtype=object)
    if dtype is not None and np.shape(value) == column.shape[1:]:
        if dtype == column.dtype or column.dtype == object:
            return column
        if column.dtype.kind in "biufc" and dtype.kind in "biufc":
            common = np.result_type(column.dtype, dtype)
            # For int64 and uint64, numpy's common dtype is float64, which cannot hold all their values.
            if common.kind in "biuc" or "f" in (column.dtype.kind, dtype.kind):
                return column.astype(common, copy=False)
    if column.dtype == object and column.ndim == 1:
        return column
    return _objects(list(column), mask)


def _objects(values: list[Any], mask: np.ndarray) -> np.ndarray:
    column = np.full(len(values), fill_value=None, dtype=object)
    for i in np.flatnonzero(mask):
        column[i] = values[i]
    return column
