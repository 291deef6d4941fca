"""Batches of actions: clipping them to the bounds of the action space, and splitting them into single actions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vecenv import tree
from vecenv.tree import Path


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


def each(space: gym.Space, actions: Any) -> Iterator[Any]:
    """Yields the action of each env of a batch, with the keys of a Dict in the order of the space.

    `gymnasium.vector.utils.iterate` follows the batched space, whose keys may be sorted.
    """
    members = tree.children(space)
    if members is None:
        yield from actions
        return
    keys = [key for key, _ in members]
    for values in zip(*(each(member, actions[key]) for key, member in members), strict=True):
        yield dict(zip(keys, values, strict=True)) if isinstance(space, spaces.Dict) else values
