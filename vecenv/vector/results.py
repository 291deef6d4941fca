"""ResultAssembler: turns slots of memory and `StepObjects` into the return values of Gymnasium's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vecenv import tree
from vecenv.memory import layout
from vecenv.rows.infos import join_infos, select_infos
from vecenv.rows.messages import NO_OBJECTS, ObjectLeaves, StepObjects
from vecenv.tree import Path

StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]
"""Observations `[N, ...]`, rewards `float64[N]`, terminated `bool[N]`, truncated `bool[N]`, infos."""


class PartialBatch(NamedTuple):
    """The results of M of the N envs, in the order in which they finished. The caller owns all arrays.

    Attributes:
        observations: `[M, ...]`, nested like the observation space.
        rewards: `float64[M]`.
        terminated: `bool[M]`.
        truncated: `bool[M]`.
        infos: As `step` returns them, but with arrays of length M.
        env_ids: `int64[M]`: the envs that these results belong to.
    """

    observations: Any
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    infos: dict[str, Any]
    env_ids: np.ndarray


class ResultAssembler:
    """Assembles the results of `reset`, `step` and `recv`.

    Attributes:
        object_leaves: The newest value of each env, for each leaf of observations and final observations that has no
            fixed shape and therefore no memory.
    """

    def __init__(
        self, space: gym.Space, arrays: Mapping[Path, np.ndarray], *, autoreset_mode: AutoresetMode, copy: bool
    ):
        self.object_leaves: dict[Path, list[Any]] = {}
        self._space, self._arrays = space, arrays
        # Looked up once, because every step reads them.
        self._rewards, self._terminated, self._truncated = (
            arrays[path] for path in (layout.REWARD, layout.TERMINATED, layout.TRUNCATED)
        )
        self._only_observation = arrays.get((layout.OBSERVATION,))
        self._num_envs = self._rewards.shape[1]
        self._same_step = autoreset_mode == AutoresetMode.SAME_STEP
        self._copy = copy
        self._discrete: set[Path] = set()
        for path, leaf in tree.leaves(space):
            if isinstance(leaf, spaces.Discrete):
                self._discrete.add(path)
            if not tree.is_fixed(leaf):
                for field in (layout.OBSERVATION, layout.FINAL_OBSERVATION):
                    self.object_leaves[(field, *path)] = [None] * self._num_envs

    def observations(self, slot: int) -> Any:
        """Returns the observations of a slot: `[N, ...]`, views of the memory, nested like the space."""

        def leaf(path: Path) -> Any:
            array = self._arrays.get((layout.OBSERVATION, *path))
            return tuple(self.object_leaves[(layout.OBSERVATION, *path)]) if array is None else array[slot]

        return tree.nest(self._space, leaf)

    def after_reset(self, slot: int, objects: StepObjects) -> tuple[Any, dict[str, Any]]:
        """Returns the result of `reset`."""
        self._update_object_leaves(objects.leaves)
        return self._returned_observations(slot), self._infos(slot, objects, ())

    def after_step(self, slot: int, objects: StepObjects) -> StepResult:
        """Returns the result of `step`."""
        if objects.leaves:
            self._update_object_leaves(objects.leaves)
        terminated, truncated = self._terminated[slot].copy(), self._truncated[slot].copy()
        ended: Sequence[int] | np.ndarray = np.flatnonzero(terminated | truncated) if self._same_step else ()
        infos = {}
        if len(ended) or objects is not NO_OBJECTS:
            infos = self._infos(slot, objects, ended)
        return self._returned_observations(slot), self._rewards[slot].copy(), terminated, truncated, infos

    def of_envs(self, slot: int, ids: np.ndarray, objects: StepObjects) -> PartialBatch:
        """Returns the result of `recv` for these envs."""

        # Owner: the parent owns these rows again and copies them here. Workers may be writing other rows meanwhile.
        def leaf(path: Path) -> Any:
            array = self._arrays.get((layout.OBSERVATION, *path))
            if array is None:
                values = self.object_leaves[(layout.OBSERVATION, *path)]
                return tuple(deepcopy(values[i]) for i in ids)
            return array[slot, ids]

        self._update_object_leaves(objects.leaves)
        terminated, truncated = self._terminated[slot, ids], self._truncated[slot, ids]
        infos = self._infos(slot, objects, ids[terminated | truncated] if self._same_step else ())
        observations = tree.nest(self._space, leaf)
        infos = select_infos(infos, ids)
        return PartialBatch(observations, self._rewards[slot, ids], terminated, truncated, infos, ids)

    def _update_object_leaves(self, leaves: ObjectLeaves) -> None:
        """Stores the new values of leaves without a fixed shape; envs without a new value keep the old one."""
        for path, values in leaves.items():
            if path[0] == layout.OBSERVATION:
                field = (layout.FINAL_OBSERVATION, *path[1:])
                # An episode that a restart truncated has no final value, so its previous value is used.
                self.object_leaves[field] = list(self.object_leaves[path])
                for row, value in leaves.get(field, {}).items():
                    self.object_leaves[field][row] = value
                for row, value in values.items():
                    self.object_leaves[path][row] = value

    def _returned_observations(self, slot: int) -> Any:
        # Owner: with copy=False the caller may read slot s until it is written again, num_slots steps later.
        if not self._copy:
            return self.observations(slot)
        if self._only_observation is not None:  # faster than traversing a space with one leaf
            return self._only_observation[slot].copy()
        if self.object_leaves:
            return deepcopy(self.observations(slot))
        arrays = self._arrays
        return tree.nest(self._space, lambda path: arrays[(layout.OBSERVATION, *path)][slot].copy())

    def _infos(self, slot: int, objects: StepObjects, ended: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Returns the infos of all envs, with final observations for the envs in `ended`."""
        # Owner: these arrays belong to the caller.
        infos = join_infos(objects.infos, self._num_envs) if objects.infos else {}
        if len(ended):
            finals = np.full(self._num_envs, fill_value=None, dtype=object)
            for i in ended:
                finals[i] = self._final_observation(slot, i, objects.leaves)
            infos["final_obs"] = finals
            infos["_final_obs"] = np.isin(np.arange(self._num_envs), ended)
        return infos

    def _final_observation(self, slot: int, i: int, leaves: ObjectLeaves) -> Any:
        def leaf(path: Path) -> Any:
            field = (layout.FINAL_OBSERVATION, *path)
            if field in self.object_leaves:
                return self.object_leaves[field][i]
            if i in leaves.get(field, ()):
                return leaves[field][i]
            column = self._arrays[field][slot]
            # The env returned an int for a Discrete space. Every other leaf is an array, even without dimensions.
            return int(column[i]) if path in self._discrete else column[i, ...].copy()

        return tree.nest(self._space, leaf)
