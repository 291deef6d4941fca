"""Copies an env's observation into its row of memory, after checking that it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np

from vecenv import spaces as tree
from vecenv.rows.protocol import ObjectLeaves
from vecenv.spaces import Path

Write = Callable[[int, Any], None]
"""`write(row, observation)`."""


def observation_writer(
    space: gym.Space, views: Mapping[Path, np.ndarray], loose: ObjectLeaves, name: str, first_env: int
) -> Write:
    """Returns the function that writes an observation.

    Args:
        space: Of the envs' observations.
        views: The rows of one slot: `[n, *shape]` for every field.
        loose: Where values of leaves that have no field are put, as copies.
        name: Of the field, "observation" or "final_observation".
        first_env: Index of the env of row 0, for messages.
    """
    writers = []
    for path, leaf in tree.leaves(space):
        if tree.is_fixed(leaf):
            writers.append((path, _row_writer(leaf, views[(name, *path)], path, first_env)))
        else:
            writers.append((path, _loose_writer(loose.setdefault((name, *path), {}))))
    if len(writers) == 1 and writers[0][0] == ():
        return writers[0][1]

    def write(i: int, observation: Any) -> None:
        for path, write_leaf in writers:
            try:
                value = tree.pick(observation, path)
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"env {first_env + i} returned an observation without {tree.name_of('', path)}, which its "
                    "observation space has"
                ) from error
            write_leaf(i, value)

    return write


def _loose_writer(rows: dict[int, Any]) -> Write:
    def write(i: int, value: Any) -> None:
        rows[i] = deepcopy(value)  # the env may go on writing into its own

    return write


def _row_writer(space: gym.Space, array: np.ndarray, path: Path, first_env: int) -> Write:
    dtype, shape = np.dtype(space.dtype), array.shape[1:]
    rows = [array[i, ...] for i in range(len(array))]
    ndarray = np.ndarray  # looked up once, because `write` runs once per env and step

    def write(i: int, value: Any) -> None:
        # Without this check numpy would silently stretch a value of shape (1,) over the row.
        if type(value) is not ndarray or value.dtype is not dtype or value.shape != shape:
            value = _checked(value, dtype, shape, path, first_env + i)
        rows[i][...] = value

    return write


def _checked(value: Any, dtype: np.dtype, shape: tuple[int, ...], path: Path, env: int) -> np.ndarray:
    """Returns `value` as an array that fits, or raises an error that names env and key."""
    name = tree.name_of("observation", path)
    given = np.asarray(value)
    if given.shape != shape:
        raise ValueError(
            f"{name} of env {env} has shape {given.shape}, but its space says {shape}. "
            "Fix the env's observation_space or what its reset() and step() return."
        )
    if given.dtype == dtype or np.can_cast(given.dtype, dtype, "same_kind"):
        return given
    converted = given.astype(dtype) if given.dtype.kind in "biuf" else None
    if converted is None or not np.array_equal(converted, given):
        raise TypeError(
            f"{name} of env {env} has dtype {given.dtype}, which does not fit its space's {dtype} without loss. "
            "Fix the env's observation_space or what its reset() and step() return."
        )
    return converted
