"""Pure arithmetic: spaces -> fields (name, dtype, shape, aligned offset) of one memory block.

A block holds `S` slots of `N` rows. A field is one leaf of a space, or one number per env, for all
slots and rows: an array `[S, N, *shape]`. A field is named by its path, a tuple such as
`("observation",)` for a plain Box or `("observation", "camera", 0)` for a leaf of a nested space.

Every field, and every slot of every field, starts at a multiple of 64 bytes, because TensorFlow
aliases only memory that does. A leaf without fixed shape (Text, Sequence, Graph, OneOf, a space of the user's own)
has no field: it is "loose" and travels in the pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from vecenv.errors import UnsupportedSpace

ALIGNMENT = 64  # bytes; Eigen's and XLA's strictest demand on a buffer that they do not copy

Path = tuple[Hashable, ...]

FIXED_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

OBSERVATION = "observation"
ACTION = "action"
FINAL_OBSERVATION = "final_observation"
REWARD: Path = ("reward",)
TERMINATED: Path = ("terminated",)
TRUNCATED: Path = ("truncated",)
EPISODE_RETURN: Path = ("episode_return",)
EPISODE_LENGTH: Path = ("episode_length",)


@dataclass(frozen=True)
class Field:
    """One array `dtype[S, N, *shape]` in a block.

    Attributes:
        dtype: Of the elements.
        shape: Of one row, so `()` for one number per env.
        offset: Bytes from the start of the block to slot 0, a multiple of 64.
        stride: Bytes from one slot to the next, a multiple of 64.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """Where each field lies in a block of `size` bytes."""

    num_slots: int
    num_envs: int
    fields: Mapping[Path, Field]
    size: int


def leaves(space: Space, path: Path = ()) -> list[tuple[Path, Space]]:
    """Returns the leaves of a nested space with their paths, depth first."""
    if isinstance(space, spaces.Dict):
        children: list[tuple[Hashable, Space]] = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        children = list(enumerate(space.spaces))
    else:
        return [(path, space)]
    return [leaf for key, child in children for leaf in leaves(child, (*path, key))]


def is_fixed(leaf: Space) -> bool:
    """Returns whether a leaf has a fixed shape and dtype, so that it can lie in memory."""
    return isinstance(leaf, FIXED_SPACES)


def check_fixed(space: Space, reason: str) -> None:
    """Raises if a leaf of `space` has no fixed shape, where only memory will do.

    Raises:
        UnsupportedSpace: Naming the leaf, and `reason`: a sentence that says who wants it and what else to do.
    """
    for path, leaf in leaves(space):
        if not is_fixed(leaf):
            where = name_of("the space", path) if path else "the space itself"
            raise UnsupportedSpace(
                f"{type(leaf).__name__} ({where}) has no fixed shape, so it cannot lie in shared memory. {reason}"
            )


def check_gymnasium_spaces(space: Space) -> None:
    """Raises if a leaf of `space` is of a type that is not Gymnasium's own.

    Raises:
        UnsupportedSpace: A ValueError, as in Gymnasium.
    """
    for path, leaf in leaves(space):
        if not type(leaf).__module__.startswith("gymnasium.spaces") and not is_fixed(leaf):
            raise UnsupportedSpace(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
                f"`shared_memory=False`, or leave the argument away: {name_of('the space', path)} is a "
                f"{type(leaf).__name__}, which travels in the pipe."
            )


def name_of(root: str, path: Path) -> str:
    """Returns how one would write the leaf at `path` in Python, for messages: `root['camera'][0]`."""
    return "".join([root, *(f"[{key!r}]" for key in path)])


def nest(space: Space, leaf: Callable[[Path], Any], path: Path = ()) -> Any:
    """Builds dicts and tuples in the shape of `space`, with `leaf(path)` at each leaf."""
    if isinstance(space, spaces.Dict):
        return {key: nest(child, leaf, (*path, key)) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(nest(child, leaf, (*path, key)) for key, child in enumerate(space.spaces))
    return leaf(path)


def pick(value: Any, path: Path) -> Any:
    """Returns what lies at `path` in nested dicts and tuples."""
    for key in path:
        value = value[key]
    return value


def env_fields(
    observation_space: Space, action_space: Space, *, final_observation: bool
) -> dict[Path, tuple[np.dtype, tuple[int, ...]]]:
    """Returns dtype and row shape of every field that an env of these single spaces needs; loose leaves have none.

    Args:
        observation_space: Of one env, as it is written to memory.
        action_space: Of one env.
        final_observation: Whether the last observation of an episode is kept apart, as
            SAME_STEP autoreset needs because the first one of the next episode takes its place.
    """
    rows: dict[Path, tuple[np.dtype, tuple[int, ...]]] = {}
    names = [(OBSERVATION, observation_space), (ACTION, action_space)]
    if final_observation:
        names.append((FINAL_OBSERVATION, observation_space))
    for name, space in names:
        for path, leaf in leaves(space):
            if is_fixed(leaf):
                rows[(name, *path)] = (np.dtype(leaf.dtype), tuple(leaf.shape or ()))
    rows[REWARD] = (np.dtype(np.float64), ())
    rows[TERMINATED] = (np.dtype(np.bool_), ())
    rows[TRUNCATED] = (np.dtype(np.bool_), ())
    rows[EPISODE_RETURN] = (np.dtype(np.float64), ())
    rows[EPISODE_LENGTH] = (np.dtype(np.int64), ())
    return rows


def plan(rows: Mapping[Path, tuple[np.dtype, tuple[int, ...]]], *, num_slots: int, num_envs: int) -> Layout:
    """Lays the fields out one after the other, each slot of each field aligned to 64 bytes."""
    fields = {}
    offset = 0
    for path, (dtype, shape) in rows.items():
        stride = align(num_envs * dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
        fields[path] = Field(dtype=dtype, shape=shape, offset=offset, stride=stride)
        offset += num_slots * stride
    return Layout(num_slots=num_slots, num_envs=num_envs, fields=fields, size=offset)


def align(size: int) -> int:
    """Rounds `size` up to a multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT
