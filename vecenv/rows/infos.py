"""Infos of single envs to Gymnasium's merged infos, and back.

Merged infos hold for each key an array `[N, ...]` (or again a dict), and under `_key` a mask `bool[N]` of the envs that
have it.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def add_info(merged: dict[str, Any], info: dict[str, Any], env: int, num_envs: int) -> dict[str, Any]:
    """Adds one env's info as Gymnasium does, but cuts or stretches no value to fit those of other envs.

    Gymnasium takes dtype and shape from the first env that has a key, so an int that comes first truncates later
    floats. Here numbers get a common dtype (True among ints is 1). Values without a common dtype, or that it cannot
    hold exactly, become an array of objects. No value raises. None is lost, except a key `_x` next to a key `x`,
    because `_x` is the name of the mask of `x`.

    Args:
        merged: What there is so far; it is changed.
        info: Of the env.
        env: Its number.
        num_envs: N.
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
            if isinstance(column, dict):  # a dict for one env and something else for another
                column = _objects(split_infos(column, num_envs), mask)
            merged[key] = column = _with_room(column, None if key == "final_obs" else value, mask)
            try:
                column[env] = value
            except (OverflowError, TypeError, ValueError):  # such as an int of more than 64 bits
                merged[key] = column = _objects(list(column), mask)
                column[env] = value
        mask[env] = True
    return merged


def split_infos(merged: dict[str, Any], num_envs: int, only: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Takes merged infos apart: one dict for each env, which is empty outside of the mask `only`."""
    each: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, values in merged.items():
        mask = merged.get(f"_{key}")
        if mask is None:  # a mask itself
            continue
        if isinstance(values, dict):
            values = split_infos(values, num_envs, only)
        for i in np.flatnonzero(mask if only is None else mask & only).tolist():
            each[i][key] = values[i]
    return each


def select_infos(merged: dict[str, Any], ids: np.ndarray) -> dict[str, Any]:
    """Returns the merged infos of these envs alone, without keys that none of them has."""
    part = {}
    for key, values in merged.items():
        mask = merged.get(f"_{key}")
        if mask is not None and mask[ids].any():
            part[key] = select_infos(values, ids) if isinstance(values, dict) else values[ids]
            part[f"_{key}"] = mask[ids]
    return part


def add_batch(merged: dict[str, Any], part: dict[str, Any], rows: np.ndarray, num_envs: int) -> dict[str, Any]:
    """Adds the merged infos of some envs alone; the outcome is that of `add_info` for each of them.

    Args:
        merged: What there is so far; it is changed.
        part: Merged infos whose arrays are `[len(rows), ...]`.
        rows: The envs' numbers.
        num_envs: N.
    """
    for key, values in part.items():
        if f"_{key}" not in part:
            continue  # a mask
        has = part[f"_{key}"]
        column = merged.get(key)
        if isinstance(values, dict) and (column is None or isinstance(column, dict)):
            merged[key] = add_batch(column or {}, values, rows, num_envs)
        elif isinstance(values, np.ndarray) and (column is None or _alike(column, values)):
            if column is None:
                empty = None if values.dtype == object else 0
                merged[key] = column = np.full((num_envs, *values.shape[1:]), empty, dtype=values.dtype)
            column[rows[has]] = values[has]
        else:  # envs that do not agree on what the key is
            for k in np.flatnonzero(has).tolist():
                add_info(
                    merged, {key: split_infos({key: values, f"_{key}": has}, len(rows))[k][key]}, int(rows[k]), num_envs
                )
        merged.setdefault(f"_{key}", np.zeros(num_envs, dtype=np.bool_))[rows[has]] = True
    return merged


def _alike(column: Any, values: np.ndarray) -> bool:
    return isinstance(column, np.ndarray) and column.dtype == values.dtype and column.shape[1:] == values.shape[1:]


def mask_infos(infos: dict[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Merges infos that are arrays `[N, ...]` already, of the envs of this mask; elsewhere they are zero."""
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
    """Puts the merged infos of other envs into `infos`."""
    for key, values in others.items():
        if f"_{key}" not in others:
            continue  # a mask
        mask = others[f"_{key}"]
        if key in infos:
            where = mask.reshape(-1, *[1] * (values.ndim - 1))
            infos[key] = np.where(where, values, infos[key])
            infos[f"_{key}"] = infos[f"_{key}"] | mask
        else:
            infos[key], infos[f"_{key}"] = values, mask


def _with_room(column: np.ndarray | None, value: Any, mask: np.ndarray) -> np.ndarray:
    """Returns a key's values so far, if need be of another dtype, with room for `value`."""
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
            if common.kind in "biuc" or "f" in (column.dtype.kind, dtype.kind):  # not int64 and uint64 as float64
                return column.astype(common, copy=False)
    if column.dtype == object and column.ndim == 1:
        return column
    return _objects(list(column), mask)


def _objects(values: list[Any], mask: np.ndarray) -> np.ndarray:
    column = np.full(len(values), fill_value=None, dtype=object)
    for i in np.flatnonzero(mask):
        column[i] = values[i]
    return column
