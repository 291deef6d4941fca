"""The data that a vector env and its rows exchange: options, descriptions and step results.

Arrays of a fixed shape are stored in memory. Everything else travels as `StepObjects`: infos, and the values of object
leaves (Text, Sequence, Graph, OneOf and custom spaces; see `vecenv.tree.is_fixed`). Most steps of most envs have no
objects, so nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.rows.infos import Column, packed, unpacked
from vecenv.tree import Path


@dataclass(frozen=True)
class RowsOptions:
    """Options of a vector env that its rows implement; see `AsyncVectorEnv`.

    With `own_copies`, each env gets copies of its function and of the arguments that it shares with other envs.
    With `here`, the rows are all envs of a vector env in the same process.
    """

    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP
    clip_actions: bool = False
    float32_observations: bool = False
    finite_observations: bool = False
    infos: bool = True
    info_keys: tuple[str, ...] = ()
    own_copies: bool = False
    here: bool = False


@dataclass(frozen=True)
class EnvSpaces:
    """The spaces of an env: of observations in memory, of actions, and of actions clipped by `clip_actions`."""

    observation_space: gym.Space
    action_space: gym.Space
    env_action_space: gym.Space


@dataclass(frozen=True)
class EnvDescription:
    """The spaces of a run of envs, one object for equal neighbors, and the properties of the first env.

    `steps_subsets` says whether a subset of the envs can be stepped.
    """

    spaces: list[EnvSpaces]
    metadata: dict[str, Any]
    render_mode: str | None
    steps_subsets: bool


@dataclass(frozen=True)
class ResetCommand:
    """Resets envs: one seed per env, the options of `reset`, and the mask `bool[n]` of the envs to reset or None."""

    seeds: list[int | None]
    options: dict[str, Any] | None
    mask: np.ndarray | None


ObjectLeaves = dict[Path, dict[int, Any]]
"""For each object leaf of observations and final observations: the new value of each env that has one."""


class StepObjects(NamedTuple):
    """What a step or a reset of some envs returns besides the memory that it writes.

    Attributes:
        infos: The infos, in columns.
        leaves: The values of object leaves.
        cut: The envs whose episodes ended because their process died (see `vecenv.workers.restarts`).
        batched: Instead of `infos`, the batched infos of a step of all envs in this process. The receiver owns them.
    """

    infos: Sequence[Column]
    leaves: ObjectLeaves
    cut: Sequence[int] = ()
    batched: dict[str, Any] | None = None

    def __reduce__(self) -> tuple:
        return _unpickled, (packed(self.infos), self.leaves, self.cut)


def _unpickled(infos: Sequence[tuple], leaves: ObjectLeaves, cut: Sequence[int]) -> StepObjects:
    return StepObjects(unpacked(infos), leaves, cut)


NO_OBJECTS = StepObjects((), {})


def combined(parts: Iterable[StepObjects]) -> StepObjects:
    """Combines the objects of steps of several envs, or returns `NO_OBJECTS` if there are none."""
    infos: list[Column] = []
    leaves: ObjectLeaves = {}
    cut: list[int] = []
    for part in parts:
        infos += part.infos
        cut += part.cut
        for path, values in part.leaves.items():
            leaves.setdefault(path, {}).update(values)
    return StepObjects(infos, leaves, cut) if infos or leaves or cut else NO_OBJECTS
