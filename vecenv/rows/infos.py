"""Infos of envs: columns on their way from the rows to the vector env, which combines them into Gymnasium's format.

Gymnasium's format for N envs, batched infos, is a dict with an array `[N, ...]`, or a dict of the same format, under
each key, and under `_key` the mask `bool[N]` of the envs that have the key.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vecenv.rows.checks import shown
from vecenv.rows.copies import copied

_NUMERIC = "biufc"
"""The kinds of numeric dtypes."""

_PYTHONS = (np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.bool_))
"""The dtypes of Python's numbers."""

_FINAL_OBS = "final_obs"
"""The key of final observations, which are never combined into an array of numbers."""


class Column(NamedTuple):
    """The values of M envs under one key of their infos.

    Attributes:
        key: The key.
        envs: The envs that have the key: a range if their numbers are consecutive.
        values: An array `[M, ...]` of values that have one dtype and shape; a tuple of columns, if all values are
            dicts; or a list of M values.
    """

    key: Any
    envs: Sequence[int] | np.ndarray
    values: np.ndarray | tuple[Column, ...] | list[Any]


def packed(columns: Sequence[Column]) -> list[tuple]:
    """Returns columns in a form that is pickled quickly, for `unpacked`."""
    # Raw bytes, because numpy's own pickling takes four times as long for many small arrays. From a bytearray, the
    # unpickled array is writable: the caller of `batched_infos` may own it.
    return [
        (key, envs, values.dtype.str, values.shape, bytearray(values))
        if type(values) is np.ndarray and values.dtype.kind in _NUMERIC
        else (key, envs, tuple(packed(values)) if type(values) is tuple else values)
        for key, envs, values in columns
    ]


def unpacked(columns: Sequence[tuple]) -> list[Column]:
    """Returns the columns that `packed` was given."""
    return [
        Column(key, envs, np.frombuffer(how[2], how[0]).reshape(how[1]))
        if len(how) == 3
        else Column(key, envs, tuple(unpacked(how[0])) if type(how[0]) is tuple else how[0])
        for key, envs, *how in columns
    ]


def columns_of(infos: Sequence[tuple[int, Mapping[Any, Any]]]) -> list[Column]:
    """Returns the infos of single envs, each given with the number of its env, as columns. Nothing is copied."""
    if len({tuple(info) for _, info in infos}) == 1:  # the usual case: all have the same keys
        envs = _run_of([env for env, _ in infos])
        rows = zip(*[info.values() for _, info in infos], strict=True)
        return [_column(key, envs, values) for key, values in zip(infos[0][1], rows, strict=True)]
    found: dict[Any, tuple[list[int], list[Any]]] = {}
    for env, info in infos:
        for key, value in info.items():
            envs, values = found.setdefault(key, ([], []))
            envs.append(env)
            values.append(value)
    return [_column(key, _run_of(envs), values) for key, (envs, values) in found.items()]


def columns_of_mask(infos: Mapping[Any, np.ndarray], mask: np.ndarray) -> list[Column]:
    """Returns the infos of the envs in a mask `bool[N]`, given as an array `[N, ...]` under each key.

    Columns of all N envs hold the arrays themselves.
    """
    if np.count_nonzero(mask) == len(mask):
        return [Column(key, range(len(mask)), values) for key, values in infos.items()]
    envs = np.flatnonzero(mask)
    return [Column(key, envs, values[envs]) for key, values in infos.items()] if len(envs) else []


def masked_infos(infos: Mapping[Any, np.ndarray], mask: np.ndarray) -> dict[Any, Any]:
    """Returns the batched infos of the columns that `columns_of_mask` returns, in a third of the time.

    Owner: the caller gives up the arrays. Values outside the mask are overwritten.
    """
    result: dict[Any, Any] = {}
    others = None if np.count_nonzero(mask) == len(mask) else np.flatnonzero(~mask)
    for key, values in infos.items() if others is None or len(others) < len(mask) else ():
        if not _names_mask(key, infos):
            if others is not None:
                values[others] = _empty((), values.dtype)
            result[key], result[f"_{key}"] = values, mask.copy()
    return result


def add_masked_infos(batched: dict[Any, Any], infos: Mapping[Any, np.ndarray], mask: np.ndarray) -> None:
    """Adds `masked_infos(infos, mask)` to batched infos of other envs, in place."""
    envs = np.flatnonzero(mask)
    for key, values in infos.items():
        if _names_mask(key, infos) or _names_mask(key, batched):
            continue
        column = batched.get(key)
        if column is None:
            batched |= masked_infos({key: values}, mask)
        elif column.dtype == values.dtype and column.shape == values.shape:
            column[envs] = values[envs]
            batched[f"_{key}"][envs] = True
        else:
            parts = columns_of_mask({key: column}, batched[f"_{key}"]) + columns_of_mask({key: values}, mask)
            batched |= batched_infos(parts, len(mask))


def columns_of_batch(
    infos: Mapping[Any, Any], num_envs: int, first_env: int, rows: np.ndarray | None = None, omit: Any = None
) -> list[Column]:
    """Returns copies of the batched infos of the envs `first_env : first_env + N`, or of some rows of them.

    The key `omit` is only checked. With `rows`, a key that none of them has gets no column.

    Raises TypeError if a key has no mask `bool[N]`, or neither an array `[N, ...]` nor a dict. The message completes a
    sentence.
    """
    columns = []
    for key, values, mask in _entries(infos, num_envs):
        is_dict = isinstance(values, dict)
        if not is_dict and (not isinstance(values, np.ndarray) or values.shape[:1] != (num_envs,)):
            raise TypeError(f"has {shown(values)} under the key {key!r}, which must be an array [{num_envs}, ...]")
        envs: Sequence[int]
        if rows is None and np.count_nonzero(mask) == num_envs:  # for N = 8, `mask.all()` takes five times as long
            own, envs = values, range(first_env, first_env + num_envs)
        else:
            has = np.flatnonzero(mask) if rows is None else rows[mask[rows]]
            own, envs = values if is_dict else values[has], (has + first_env).tolist()
        if key == omit or (rows is not None and not len(envs)):
            continue
        if is_dict:
            columns.append(Column(key, envs, tuple(columns_of_batch(values, num_envs, first_env, rows))))
        else:
            is_copy = own is not values and not own.dtype.hasobject  # some elements of an array
            columns.append(Column(key, envs, own if is_copy else copied(own)))
    return columns


def check_masks(infos: Mapping[Any, Any], num_envs: int) -> None:
    """Raises TypeError as `columns_of_batch` does, if a key of batched infos has no mask."""
    for _, values, _ in _entries(infos, num_envs):
        if isinstance(values, dict):
            check_masks(values, num_envs)


def batched_infos(columns: Iterable[Column], num_envs: int, positions: np.ndarray | None = None) -> dict[Any, Any]:
    """Returns the batched infos of N envs. The caller owns all arrays.

    The result is the same as Gymnasium's, except that no value is changed to fit the values of other envs. Gymnasium
    takes dtype and shape from the first env that has a key, so an int that comes first truncates later floats. Here,
    numbers get a common dtype (True among ints is 1). If no common dtype can hold all values, they become an array of
    objects.

    Args:
        columns: The columns, with at most one value per key and env.
        num_envs: N.
        positions: The index in the batch of each env; None if it is the env's number.
    """
    by_key: dict[Any, list[Column]] = {}
    for column in columns:
        by_key.setdefault(column[0], []).append(column)
    infos: dict[Any, Any] = {}
    everyone = np.ones(num_envs, np.bool_)
    for key, parts in by_key.items():
        if _names_mask(key, by_key):
            continue
        if len(parts) == 1 and positions is None:
            _, envs, values = parts[0]
            if type(values) is np.ndarray and type(envs) is range and len(envs) == num_envs:
                infos[key], infos[f"_{key}"] = values, everyone.copy()  # the array itself becomes the caller's
                continue
        mask = np.zeros(num_envs, np.bool_)
        places: list[Any] = []
        for _, envs, _ in parts:
            at: Any = slice(envs.start, envs.stop) if type(envs) is range else envs
            at = at if positions is None else positions[at]
            mask[at] = True
            places.append(at)
        if type(parts[0][2]) is tuple and all(type(values) is tuple for _, _, values in parts):
            infos[key] = batched_infos([inner for _, _, inners in parts for inner in inners], num_envs, positions)
        else:
            infos[key] = _combined(parts, places, num_envs, as_objects=key == _FINAL_OBS)
        infos[f"_{key}"] = mask
    return infos


def split_infos(infos: Mapping[Any, Any], num_envs: int) -> list[dict[Any, Any]]:
    """Returns one dict per env. Elements of float64, int64 and bool vectors become Python numbers."""
    each: list[dict[Any, Any]] = [{} for _ in range(num_envs)]
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None or _names_mask(key, infos):
            continue
        values = split_infos(values, num_envs) if isinstance(values, dict) else _elements(values)
        for i in np.flatnonzero(mask).tolist():
            each[i][key] = values[i]
    return each


def _names_mask(key: Any, keys: Container[Any]) -> bool:
    """Returns whether a key is `_x` next to a key `x`. This name belongs to the mask of `x`."""
    return isinstance(key, str) and key[:1] == "_" and key[1:] in keys


def _entries(infos: Mapping[Any, Any], num_envs: int) -> Iterator[tuple[Any, Any, np.ndarray]]:
    """Yields the keys of batched infos with their values and masks; raises TypeError if there is no mask `bool[N]`."""
    for key, values in infos.items():
        if _names_mask(key, infos):
            continue
        mask = infos.get(f"_{key}")
        if mask is None and (key == _FINAL_OBS or (isinstance(key, str) and key[:1] == "_")):
            continue  # observations that are read only where an episode has ended, or the mask of an absent key
        if not isinstance(mask, np.ndarray) or mask.dtype.kind != "b" or mask.shape != (num_envs,):
            raise TypeError(
                f"has the key {key!r} without a mask '_{key}', an array bool[{num_envs}] that says which envs have it"
            )
        yield key, values, mask


def _run_of(envs: list[int]) -> Sequence[int]:
    """Returns the numbers of envs as a range if they are consecutive."""
    run = range(envs[0], envs[0] + len(envs))
    return run if envs[-1] == run[-1] and envs == list(run) else envs


def _column(key: Any, envs: Sequence[int], values: Sequence[Any]) -> Column:
    if key != _FINAL_OBS:
        if (array := _as_array(values)) is not None:
            return Column(key, envs, array)
        if all(isinstance(value, dict) for value in values):
            return Column(key, envs, tuple(columns_of([*zip(envs, values, strict=True)])))
    return Column(key, envs, list(values))


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


def _combined(parts: Sequence[Column], places: Sequence[Any], num_envs: int, *, as_objects: bool) -> np.ndarray:
    """Returns the values of one key as an array `[N, ...]`, with 0, or None among objects, for the remaining envs."""
    first: Any = parts[0].values
    if type(first) is np.ndarray:
        dtype, shape = first.dtype, first.shape[1:]
        array = _empty((num_envs, *shape), dtype)
        for at, (_, _, own) in zip(places, parts, strict=True):
            if type(own) is not np.ndarray or own.dtype != dtype or own.shape[1:] != shape:
                break
            array[at] = own
        else:
            return array
    values = [value for part in parts for value in _values_of(part)]
    everyone = np.arange(num_envs)
    at_each = [place for at in places for place in everyone[at].tolist()]
    if not as_objects and (type_ := _common_type(values)) is not None:
        array = _empty((num_envs, *type_[1]), type_[0])
        try:
            for place, value in zip(at_each, values, strict=True):
                array[place] = value
            return array
        except (OverflowError, TypeError, ValueError):  # for example an int of more than 64 bits
            pass
    objects = np.full(num_envs, None)
    for place, value in zip(at_each, values, strict=True):
        objects[place] = value if as_objects else _plain(value)
    return objects


def _common_type(values: Iterable[Any]) -> tuple[np.dtype, tuple[int, ...]] | None:
    """Returns the dtype and the shape of an array element that can hold each of these values; None for objects."""
    dtypes, shapes = set(), set()
    for value in values:
        if isinstance(value, np.ndarray):
            dtypes.add(value.dtype)
        elif type(value) in (float, int, bool) or isinstance(value, np.number):
            dtypes.add(np.dtype(type(value)))
        else:
            return None
        shapes.add(np.shape(value))
    if len(shapes) > 1:
        return None
    dtype, kinds = dtypes.copy().pop(), {dtype.kind for dtype in dtypes}
    if len(dtypes) > 1:
        # numpy's common dtype of int64 and uint64 is float64, which cannot hold all their values.
        dtype = np.result_type(*dtypes) if kinds <= set(_NUMERIC) else None
        if dtype is None or (dtype.kind == "f" and "f" not in kinds):
            return None
    return dtype, shapes.pop()


def _values_of(column: Column) -> list[Any]:
    """Returns the values of a column as a list."""
    _, envs, values = column
    if type(values) is tuple:
        each: dict[int, dict[Any, Any]] = {env: {} for env in envs}
        for inner in values:
            for env, value in zip(inner.envs, _values_of(inner), strict=True):
                each[env][inner.key] = value
        return list(each.values())
    return _elements(values) if isinstance(values, np.ndarray) else values  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    """Converts a value as `_values_of` does: the result must not depend on whether it was in an array."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.number) or (type(value) is np.ndarray and not value.shape):
        value = np.asarray(value)
        return _elements(value[None])[0] if value.dtype.kind in _NUMERIC else value
    return value


def _elements(values: np.ndarray) -> list[Any]:
    """Returns the elements of an array, as Python numbers if it is a float64, int64 or bool vector."""
    return values.tolist() if values.ndim == 1 and values.dtype in _PYTHONS else list(values)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.full(shape, None) if dtype.kind == "O" else np.zeros(shape, dtype)
