"""Options of the engine that change spaces: float32 observations, with their check; clipped actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vecenv import spaces as tree
from vecenv.spaces import Path


def as_float32(space: gym.Space) -> gym.Space:
    """Returns the space with every float64 Box in it turned into a float32 one."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, as_float32(child)) for key, child in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([as_float32(child) for child in space.spaces])
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space


def unbounded(space: gym.Space) -> gym.Space:
    """Returns the space with every float Box in it freed of its bounds."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, unbounded(child)) for key, child in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([unbounded(child) for child in space.spaces])
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return spaces.Box(-np.inf, np.inf, space.shape, space.dtype)
    return space


def clipper(space: gym.Space) -> Callable[[Any], Any]:
    """Returns a function that clips a batch of actions to the bounds of `space`."""
    bounds = {path: leaf for path, leaf in tree.leaves(space) if isinstance(leaf, spaces.Box)}

    def clip(actions: Any) -> Any:
        def leaf(path: Path) -> Any:
            value = tree.pick(actions, path)
            return np.clip(value, bounds[path].low, bounds[path].high) if path in bounds else value

        return tree.nest(space, leaf)

    return clip


def float_leaves(views: Mapping[Path, np.ndarray], name: str) -> list[tuple[str, np.ndarray]]:
    """Returns the leaves of floats of one field, with names for messages."""
    return [
        (tree.name_of(name, path[1:]), array)
        for path, array in views.items()
        if path[0] == name and array.dtype.kind == "f"
    ]


def not_finite(
    groups: Sequence[tuple[Sequence[tuple[str, np.ndarray]], Any]], first_env: int
) -> tuple[int, ValueError] | None:
    """Returns the first row in which a leaf is not finite, with the error that says so; or None.

    Args:
        groups: Leaves `[n, ...]` with their names, as `float_leaves` gives them, and the rows to look at.
        first_env: The env of row 0.
    """
    for leaves, rows in groups:
        for name, column in leaves if isinstance(rows, slice) or len(rows) else ():
            finite = np.isfinite(column[rows])
            if not finite.all():
                first = int(np.argmin(finite.reshape(len(finite), -1).all(axis=1)))
                row = int(np.arange(len(column))[rows][first])
                return row, ValueError(
                    f"{name} of env {first_env + row} is not finite (as float32): {column[row]!r}. "
                    "Fix the env, or clip what it returns, before training on it."
                )
    return None
