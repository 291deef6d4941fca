"""Clipped actions: the action space without its bounds, and the function that clips a batch to the bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vecenv import spaces as tree
from vecenv.spaces import Path


def unbounded(space: gym.Space) -> gym.Space:
    """Returns the space without the bounds of its float Boxes."""
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
