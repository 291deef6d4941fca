"""Copies the infos of envs; builds, splits, selects and combines batched infos, Gymnasium's format for N envs.

Batched infos hold an array `[N, ...]` under each key, or a dict of the same format, and under `_key` the mask `bool[N]`
of the envs that have the key. On their way from the rows to the vector env they are `RowInfos`.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from copy import deepcopy
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from vecenv.rows.checks import NUMBERS, shown

_CONSTANT = NUMBERS | {complex, str, bytes, type(None)}
"""Exact types whose values cannot change."""

_NUMERIC = "biufc"
"""The kinds of numeric dtypes."""

_PYTHONS = (np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.bool_))
"""The dtypes of Python's numbers."""

Infos = list[tuple[int, dict[str, Any]]]
"""Infos of single envs, each with the index of its env."""


class RowInfos(NamedTuple):
    """The infos of M rows.

    Attributes:
        rows: The rows, in order.
        complete: The numbers `[M, ...]` under each key that all rows have.
        partial: The batched infos of these rows under all other keys.
    """

    rows: list[int]
    complete: dict[Any, np.ndarray]
    partial: dict[str, Any]

    @classmethod
    def of_batch(cls, rows: list[int], infos: dict[str, Any]) -> RowInfos:
        """Returns a copy of the batched infos of these rows. Raises TypeError if `check_batched` does."""
        complete: dict[Any, np.ndarray] = {}
        partial: dict[str, Any] = {}
        count = len(rows)
        for key, values in infos.items():
            mask = infos.get(f"_{key}")
            if _is_mask(key) and (mask is None or key[1:] in infos):
                continue  # `values` is a mask itself
            # A complete column of numbers is valid, and needs no slower check.
            if _is_complete(mask, count) and _is_numeric(values, count) and not _is_mask(key):
                complete[key] = values.copy()
            else:
                own = {key: values} if mask is None else {key: values, f"_{key}": mask}
                check_batched(own, count, with_values=True)
                partial |= copied(own)
        return cls(rows, complete, partial)

    def batched(self, without: Container[Any] = ()) -> dict[str, Any]:
        """Returns the batched infos of these rows, except under the keys in `without`."""
        infos, mask = {}, np.ones(len(self.rows), np.bool_)
        for key, values in self.complete.items():
            if key not in without:
                infos[key], infos[f"_{key}"] = values, mask.copy()
        return infos | self.partial

    def __reduce__(self) -> tuple:
        # Raw bytes, because numpy's own pickling takes four times as long for many small arrays. From a bytearray, the
        # unpickled arrays are writable: the caller of `join_infos` owns them.
        complete = [(key, array.dtype.str, array.shape, bytearray(array)) for key, array in self.complete.items()]
        return _unpickled, (self.rows, complete, self.partial)


def _unpickled(rows: list[int], complete: list[tuple[Any, str, tuple[int, ...], bytearray]], partial: dict) -> RowInfos:
    arrays = {key: np.frombuffer(data, dtype).reshape(shape) for key, dtype, shape, data in complete}
    return RowInfos(rows, arrays, partial)


def copied(value: Any) -> Any:
    """Returns a copy of an info or a frame, which does not change when the env changes its objects.

    An object that cannot be copied is returned itself. `deepcopy` would return the same for every value, but takes
    several times as long for the usual dicts of numbers and arrays.
    """
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind is dict:
        if _CONSTANT.issuperset(map(type, value.values())):  # the usual info
            return value.copy()
        return {key: copied(item) for key, item in value.items()}
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if kind is list or kind is tuple:
        return kind(map(copied, value))
    try:
        return deepcopy(value)
    except Exception:  # for example a lock, which cannot be pickled for the pipe either
        return value


def merge_infos(infos: Infos) -> RowInfos:
    """Merges the infos of different rows. The result, batched, equals that of `add_info` for each of them in order.

    Keys under which all values have the same numeric type are converted at once, which is ten times as fast.
    """
    infos = sorted(infos, key=itemgetter(0))  # a step of some rows may visit them in any order
    rows, each = [row for row, _ in infos], [info for _, info in infos]
    columns: dict[Any, tuple[Any, Any]] = {}  # the places of the rows that have the key, and their values
    everyone = range(len(rows))
    if len({tuple(info) for info in each}) == 1:  # the usual case: all have the same keys
        columns = {
            key: (everyone, values)
            for key, values in zip(each[0], zip(*[info.values() for info in each], strict=True), strict=True)
        }
    else:
        for k, info in enumerate(each):
            for key, value in info.items():
                places, values = columns.setdefault(key, ([], []))
                places.append(k)
                values.append(value)
    complete: dict[Any, np.ndarray] = {}
    partial: dict[str, Any] = {}
    if any(map(_is_mask, columns)):  # it may be the name of the mask of another key
        for k, info in enumerate(each):
            add_info(partial, info, k, len(rows))
        return RowInfos(rows, complete, partial)
    for key, (places, values) in columns.items():
        array = None if key == "final_obs" else _as_array(values)
        if array is not None and len(places) == len(rows):
            complete[key] = array
            continue
        part: Any = array
        if array is None and all(type(value) is dict for value in values) and key != "final_obs":
            part = merge_infos([*zip(places, values, strict=True)]).batched()
        if part is not None:
            add_batch(partial, {key: part, f"_{key}": np.ones(len(places), np.bool_)}, places, len(rows))
            continue
        for k, value in zip(places, values, strict=True):
            add_info(partial, {key: value}, k, len(rows))
    return RowInfos(rows, complete, partial)


def join_infos(parts: Sequence[RowInfos], num_envs: int) -> dict[str, Any]:
    """Returns the batched infos of N envs from those of disjoint rows. The caller owns all arrays."""
    if len(parts) == 1 and len(parts[0].rows) == num_envs:
        return parts[0]._replace(partial=_cleared(parts[0].partial)).batched()
    joined: dict[str, Any] = {}
    if [row for part in parts for row in part.rows] == [*range(num_envs)]:
        for key, values in parts[0].complete.items():
            columns = [part.complete[key] for part in parts if key in part.complete]
            if len(columns) == len(parts) and all(_same_type(column, values) for column in columns):
                joined[key], joined[f"_{key}"] = np.concatenate(columns), np.ones(num_envs, np.bool_)
    whole = set(joined)
    for part in parts:
        if part.partial or len(whole) < 2 * len(part.complete):
            add_batch(joined, part.batched(without=whole), part.rows, num_envs)
    return joined


def _is_complete(mask: Any, count: int) -> bool:
    """Returns whether this is a mask `bool[N]` that is True for all N rows."""
    if type(mask) is not np.ndarray or mask.shape != (count,) or mask.dtype.kind != "b":
        return False
    return np.count_nonzero(mask) == count  # for N = 8, `mask.all()` takes five times as long


def _is_numeric(values: Any, count: int) -> bool:
    """Returns whether this is a numeric array `[N, ...]`."""
    return type(values) is np.ndarray and values.dtype.kind in _NUMERIC and values.shape[:1] == (count,)


def _is_mask(key: Any) -> bool:
    """Returns whether a key is named like a mask."""
    return isinstance(key, str) and key[:1] == "_"


def _as_array(values: Sequence[Any]) -> np.ndarray | None:
    """Returns values of one numeric type and shape as an array of this type, or None for any other values."""
    kind = type(values[0])
    if kind is np.ndarray:
        dtype, shape = values[0].dtype, values[0].shape
        if dtype.kind not in _NUMERIC:
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
    `_x` is the name of the mask of `x`. Changes `merged`, and returns it.
    """
    for key, value in info.items():
        if _is_mask(key) and (key[1:] in info or key[1:] in merged):
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


def check_batched(infos: dict[str, Any], num_envs: int, *, with_values: bool) -> None:
    """Raises TypeError if a key other than "final_obs" has no mask `bool[N]`. The message completes a sentence.

    With `with_values`, each value must also be an array `[N, ...]` or a dict. Infos that are dropped need not be.
    """
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None and (_is_mask(key) or key == "final_obs"):
            continue  # a mask, or observations that are read only where an episode has ended
        if not isinstance(mask, np.ndarray) or mask.dtype.kind != "b" or mask.shape != (num_envs,):
            raise TypeError(
                f"has the key {key!r} without a mask '_{key}', an array bool[{num_envs}] that says which envs have it"
            )
        if isinstance(values, dict):
            check_batched(values, num_envs, with_values=with_values)
        elif with_values and (not isinstance(values, np.ndarray) or values.shape[:1] != (num_envs,)):
            raise TypeError(f"has {shown(values)} under the key {key!r}, which must be an array [{num_envs}, ...]")


def add_batch(merged: dict[str, Any], part: dict[str, Any], rows: Any, num_envs: int) -> dict[str, Any]:
    """Adds batched infos of the envs `rows` to `merged`, which it returns, as `add_info` does for each of them."""
    places = np.asarray(rows)
    for key, values in part.items():
        if f"_{key}" not in part:
            continue  # `values` is a mask
        if _is_mask(key) and (key[1:] in part or key[1:] in merged):
            continue  # this name belongs to the mask of the other key
        has, mask, column = part[f"_{key}"], merged.get(f"_{key}"), merged.get(key)
        if not isinstance(mask, np.ndarray) or mask.dtype.kind != "b" or mask.shape != (num_envs,):
            mask = np.zeros(num_envs, dtype=np.bool_)
        if isinstance(values, dict) and (column is None or isinstance(column, dict)):
            merged[key] = add_batch(column or {}, values, rows, num_envs)
        elif isinstance(values, np.ndarray) and (column is None or _same_type(column, values)):
            if column is None:
                merged[key] = column = _empty((num_envs, *values.shape[1:]), values.dtype)
            column[places[has]] = values[has]
        else:  # the types, dtypes or shapes of the envs' values differ
            each = split_infos({key: values, f"_{key}": has}, len(rows))
            for k in np.flatnonzero(has).tolist():
                add_info(merged, each[k], int(places[k]), num_envs)
            continue
        mask[places[has]] = True
        merged[f"_{key}"] = mask
    return merged


def _same_type(one: Any, other: Any) -> bool:
    arrays = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return arrays and one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


def mask_infos(infos: dict[str, Any], mask: np.ndarray, merged: dict[str, Any] | None = None) -> dict[str, Any]:
    """Adds the infos of the envs in this mask, an array `[N, ...]` under each key, to `merged`, and returns it.

    A mask of all envs adds the arrays themselves, so another call with the same `merged` would write to them.
    """
    merged = {} if merged is None else merged
    count = np.count_nonzero(mask)
    for key, values in infos.items() if count else ():
        if _is_mask(key) and (key[1:] in infos or key[1:] in merged):
            continue  # this name belongs to the mask of the other key
        column = merged.get(key)
        if column is None:
            merged[key], merged[f"_{key}"] = values if count == len(mask) else _only(values, mask), mask.copy()
        elif _same_type(column, values):
            column[mask] = values[mask]
            merged[f"_{key}"] |= mask
        else:
            rows = np.flatnonzero(mask)
            add_batch(merged, {key: values[rows], f"_{key}": np.ones(count, np.bool_)}, rows, len(mask))
    return merged


def _cleared(infos: dict[str, Any]) -> dict[str, Any]:
    """Returns batched infos with 0, or None among objects, for envs without a value."""
    cleared = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is not None and not (_is_mask(key) and key[1:] in infos):
            cleared[key] = _cleared(values) if isinstance(values, dict) else _only(values, mask)
            cleared[f"_{key}"] = mask.copy()  # a vector env may use one mask for several keys
    return cleared


def _only(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns a copy of an array `[N, ...]` with 0, or None among objects, outside of the mask."""
    only = _empty(values.shape, values.dtype)
    only[mask] = values[mask]
    return only


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, None) if dtype.kind == "O" else np.zeros(shape, dtype)


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
        if column.dtype.kind in _NUMERIC and dtype.kind in _NUMERIC:
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
