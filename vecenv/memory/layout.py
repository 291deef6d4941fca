"""The layout of one memory block: spaces become fields, each with a name, dtype, shape and aligned offset.

A block holds `S` slots of `N` rows. A field is an array `[S, N, *shape]`: one leaf of a space, or one number per env,
for all slots and rows. Its name is a path, such as `("observation",)` for a plain Box or
`("observation", "camera", 0)` for a leaf of a nested space.

Every field, and every slot of every field, starts at a multiple of 64 bytes, because TensorFlow aliases only aligned
memory. A leaf without a fixed shape (Text, Sequence, Graph, OneOf, custom spaces) has no field. It is an object leaf,
whose values travel through the pipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import Space

from vecenv.tree import Path, is_fixed, leaves

ALIGNMENT = 64  # bytes; the strictest requirement of Eigen and XLA for buffers that they do not copy

OBSERVATION = "observation"
ACTION = "action"
FINAL_OBSERVATION = "final_observation"
EPISODE_INFO = "episode_info"
REWARD: Path = ("reward",)
TERMINATED: Path = ("terminated",)
TRUNCATED: Path = ("truncated",)
EPISODE_RETURN: Path = ("episode_return",)
EPISODE_LENGTH: Path = ("episode_length",)

RowFields = dict[Path, tuple[np.dtype, tuple[int, ...]]]
"""The dtype of each field, and the shape of one row."""


@dataclass(frozen=True)
class Field:
    """One array `dtype[S, N, *shape]` in a block: slot s begins at byte `offset + s * stride`, a multiple of 64."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """The fields of a block of `size` bytes, which has `num_slots` slots of `num_envs` rows."""

    num_slots: int
    num_envs: int
    fields: Mapping[Path, Field]
    size: int


def env_fields(
    observation_space: Space, action_space: Space, *, final_observation: bool, info_keys: Sequence[str] = ()
) -> RowFields:
    """Returns the dtype and row shape of every field that an env with these spaces needs.

    SAME_STEP needs a field for the final observation, because the first observation of the next episode overwrites the
    last observation. Each of `info_keys` has a field for its value in an episode.
    """
    rows: RowFields = {}
    names = [(OBSERVATION, observation_space), (ACTION, action_space)]
    if final_observation:
        names.append((FINAL_OBSERVATION, observation_space))
    for name, space in names:
        for path, leaf in leaves(space):
            if is_fixed(leaf):
                rows[(name, *path)] = (np.dtype(leaf.dtype), tuple(leaf.shape or ()))
    numbers: dict[Path, type] = {REWARD: np.float64, TERMINATED: np.bool_, TRUNCATED: np.bool_}
    numbers |= {EPISODE_RETURN: np.float64, EPISODE_LENGTH: np.int64}
    numbers |= {(EPISODE_INFO, key): np.float64 for key in info_keys}
    return rows | {path: (np.dtype(kind), ()) for path, kind in numbers.items()}


def plan(rows: RowFields, *, num_slots: int, num_envs: int) -> Layout:
    """Returns a layout with one field after the other, each slot of each field aligned to 64 bytes."""
    fields = {}
    offset = 0
    for path, (dtype, shape) in rows.items():
        size = num_envs * dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        stride = -(-size // ALIGNMENT) * ALIGNMENT  # rounded up
        fields[path] = Field(dtype=dtype, shape=shape, offset=offset, stride=stride)
        offset += num_slots * stride
    return Layout(num_slots=num_slots, num_envs=num_envs, fields=fields, size=offset)
