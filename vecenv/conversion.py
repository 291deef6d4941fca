"""conversion.py: the engine's two options that change spaces: float32 observations and clipped actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vecenv import layout
from vecenv.layout import Path


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
    bounds = {path: leaf for path, leaf in layout.leaves(space) if isinstance(leaf, spaces.Box)}

    def clip(actions: Any) -> Any:
        def leaf(path: Path) -> Any:
            value = layout.pick(actions, path)
            return np.clip(value, bounds[path].low, bounds[path].high) if path in bounds else value

        return layout.nest(space, leaf)

    return clip
