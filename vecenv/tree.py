"""Nested spaces as trees of leaves: the functions that traverse Dict and Tuple spaces, for both vecenv and ppo.

A leaf is a space that is neither a Dict nor a Tuple. Its path is the tuple of keys that leads to it: `("camera", 0)` is
the path of `space["camera"][0]`. The path of a space that is itself a leaf is `()`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.errors import UnsupportedSpace

Path = tuple[Hashable, ...]
"""Keys that lead from a space to one of its leaves."""

FIXED_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Leaves whose samples are arrays of a fixed shape and dtype, which can be stored in shared memory."""


def children(space: Space) -> list[tuple[Hashable, Space]] | None:
    """Returns the members of a Dict or Tuple space with their keys, or None for a leaf."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None


def leaves(space: Space, path: Path = ()) -> list[tuple[Path, Space]]:
    """Returns the leaves of a nested space with their paths, depth first."""
    members = children(space)
    if members is None:
        return [(path, space)]
    return [leaf for key, member in members for leaf in leaves(member, (*path, key))]


def is_fixed(leaf: Space) -> bool:
    """Returns whether a leaf has a fixed shape and dtype and can therefore be stored in memory."""
    return isinstance(leaf, FIXED_SPACES)


def check_fixed(space: Space, reason: str) -> None:
    """Raises UnsupportedSpace if a leaf of `space` has no fixed shape and therefore cannot be stored in memory.

    The message names the leaf and ends with `reason`, a sentence that says what to do instead.
    """
    for path, leaf in leaves(space):
        if not is_fixed(leaf):
            where = name_of("the space", path) if path else "the space itself"
            raise UnsupportedSpace(
                f"{type(leaf).__name__} ({where}) has no fixed shape, so it cannot be stored in shared memory. {reason}"
            )


def check_gymnasium_spaces(space: Space) -> None:
    """Raises UnsupportedSpace if a leaf of `space` is a custom space that cannot be stored in shared memory."""
    for path, leaf in leaves(space):
        if not type(leaf).__module__.startswith("gymnasium.spaces") and not is_fixed(leaf):
            raise UnsupportedSpace(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
                f"`shared_memory=False`, or omit the argument: {name_of('the space', path)} is a "
                f"{type(leaf).__name__}, which cannot be stored in shared memory."
            )


def batched_space(each: Sequence[Space]) -> Space:
    """Returns the batched space of envs whose spaces may differ in their bounds."""
    different = {id(space): space for space in each}.values()  # most envs share one object
    if all(space == each[0] for space in different):
        return batch_space(each[0], len(each))
    return batch_differing_spaces(each)


def enclosing(space: Space, batched: Any) -> Space:
    """Returns the space of one row, with Boxes whose bounds include the bounds of all rows of the batched space."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, enclosing(child, batched[key])) for key, child in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([enclosing(*pair) for pair in zip(space.spaces, batched.spaces, strict=True)])
    if isinstance(space, spaces.Box):
        return spaces.Box(batched.low.min(axis=0), batched.high.max(axis=0), space.shape, space.dtype)
    return space


def can_hold(dtype: Any, values: np.ndarray) -> bool:
    """Returns whether numbers keep their values in a dtype. Floats may be rounded."""
    if np.can_cast(values.dtype, dtype, "same_kind" if np.dtype(dtype).kind in "fc" else "safe"):
        return True
    with np.errstate(invalid="ignore"):
        return values.dtype.kind in "biuf" and np.array_equal(values.astype(dtype), values)


def name_of(root: str, path: Path) -> str:
    """Returns the Python expression for the leaf at `path`, for messages: `root['camera'][0]`."""
    return "".join([root, *(f"[{key!r}]" for key in path)])


def nest(space: Space, leaf: Callable[[Path], Any], path: Path = ()) -> Any:
    """Builds dicts and tuples in the shape of `space`, with `leaf(path)` at each leaf."""
    if isinstance(space, spaces.Dict):
        return {key: nest(child, leaf, (*path, key)) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(nest(child, leaf, (*path, key)) for key, child in enumerate(space.spaces))
    return leaf(path)


def pick(value: Any, path: Path) -> Any:
    """Returns the value at `path` in nested dicts and tuples."""
    for key in path:
        value = value[key]
    return value
