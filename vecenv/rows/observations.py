"""Converts observation spaces, and writes checked observations to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_differing_spaces

from vecenv import tree
from vecenv.memory import layout
from vecenv.rows.messages import ObjectLeaves
from vecenv.tree import Path

Write = Callable[[int, Any], None]
"""`write(row, observation)`."""


class Exact(spaces.Box):
    """A Box whose values are neither converted by `float32_observations` nor checked by `finite_observations`."""


batch_differing_spaces.register(Exact, batch_differing_spaces.registry[spaces.Box])  # it looks for the exact class


def as_float32(space: gym.Space) -> gym.Space:
    """Returns the space with each float64 Box, except `Exact`, replaced by a float32 Box."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, as_float32(child)) for key, child in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([as_float32(child) for child in space.spaces])
    if isinstance(space, spaces.Box) and space.dtype == np.float64 and not isinstance(space, Exact):
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space


def observation_writer(
    space: gym.Space,
    views: Mapping[Path, np.ndarray],
    object_leaves: ObjectLeaves,
    field: str,
    first_env: int = 0,
    names: Sequence[str] | None = None,
) -> Write:
    """Returns the function that checks one env's observation and writes it into its row.

    Args:
        space: The observation space of the envs.
        views: The rows of one slot: `[n, *shape]` for every field.
        object_leaves: Receives copies of the values of object leaves, and of numbers in final observations.
        field: "observation" or "final_observation".
        first_env, names: What messages call the rows: these names, or the numbers of the envs.
    """
    if names is None:
        names = [f"env {first_env + i}" for i in range(len(next(iter(views.values()))))]
    writers = []
    for path, leaf in tree.leaves(space):
        if tree.is_fixed(leaf):
            writers.append((path, _row_writer(leaf, views[(field, *path)], path, names)))
        # Gymnasium returns a final observation as the env returned it, and a number may be of several types.
        if not tree.is_fixed(leaf) or (field == layout.FINAL_OBSERVATION and leaf.shape == ()):
            writers.append((path, _object_writer(object_leaves.setdefault((field, *path), {}))))
    if len(writers) == 1 and writers[0][0] == ():
        return writers[0][1]

    def write(i: int, observation: Any) -> None:
        for path, write_leaf in writers:
            try:
                value = tree.pick(observation, path)
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"{names[i]} returned an observation without {tree.name_of('', path)}, which its "
                    "observation space has"
                ) from error
            write_leaf(i, value)

    return write


def _object_writer(values: dict[int, Any]) -> Write:
    def write(i: int, value: Any) -> None:
        values[i] = deepcopy(value)  # the env may change its object later

    return write


def _row_writer(space: gym.Space, array: np.ndarray, path: Path, names: Sequence[str]) -> Write:
    dtype, shape = np.dtype(space.dtype), array.shape[1:]
    rows = [array[i, ...] for i in range(len(array))]
    ndarray = np.ndarray  # a local name, because `write` runs once per env and step

    def write(i: int, value: Any) -> None:
        # Without this check, numpy would silently broadcast a value of shape (1,) over the row. Unpickled dtypes, as in
        # the spaces of an env that is defined in a script, are equal but not identical.
        if type(value) is not ndarray or value.shape != shape or (value.dtype is not dtype and value.dtype != dtype):
            value = fitted(value, dtype, shape, tree.name_of("observation", path), names[i])
        try:
            rows[i][...] = value
        except (FloatingPointError, RuntimeWarning):  # a value that is rounded to 0 or inf, after `np.seterr`
            with np.errstate(all="ignore"):
                rows[i][...] = value

    return write


def fitted(value: Any, dtype: np.dtype, shape: tuple[int, ...], name: str, who: str) -> np.ndarray:
    """Returns an observation as an array that fits the memory, or raises an error with these names."""
    given = np.asarray(value)
    if given.shape != shape:
        has = "is None" if value is None else f"has shape {given.shape}"
        raise ValueError(
            f"{name} of {who} {has}, but its space has shape {shape}. "
            "Fix the env's observation_space or what its reset() and step() return."
        )
    if not tree.can_hold(dtype, given):
        raise TypeError(
            f"{name} of {who} has dtype {given.dtype}, which does not fit its space's {dtype} without loss. "
            "Fix the env's observation_space or what its reset() and step() return."
        )
    return given
