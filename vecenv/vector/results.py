"""ResultAssembler: turns slots of memory and `StepObjects` into the return values of Gymnasium's methods."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vecenv import tree
from vecenv.memory import layout
from vecenv.rows.infos import batched_infos
from vecenv.rows.messages import ObjectLeaves, StepObjects
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
        object_leaves: The newest value of each env, for each leaf of observations that has no memory, because its shape
            is not fixed.
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
        self._everyone = np.arange(self._num_envs)
        self._same_step = autoreset_mode == AutoresetMode.SAME_STEP
        self._copy = copy
        self._discrete: set[Path] = set()
        for path, leaf in tree.leaves(space):
            if isinstance(leaf, spaces.Discrete):
                self._discrete.add(path)
            if not tree.is_fixed(leaf):
                self.object_leaves[(layout.OBSERVATION, *path)] = [None] * self._num_envs

    def observations(self, slot: int) -> Any:
        """Returns the observations of a slot: `[N, ...]`, views of the memory, nested like the space."""

        def leaf(path: Path) -> Any:
            array = self._arrays.get((layout.OBSERVATION, *path))
            return tuple(self.object_leaves[(layout.OBSERVATION, *path)]) if array is None else array[slot]

        return tree.nest(self._space, leaf)

    def after_reset(self, slot: int, objects: StepObjects) -> tuple[Any, dict[str, Any]]:
        """Returns the result of `reset`."""
        self._update_object_leaves(objects.leaves)
        return self._returned_observations(slot), batched_infos(objects.infos, self._num_envs)

    def after_step(self, slot: int, objects: StepObjects) -> StepResult:
        """Returns the result of `step`."""
        terminated, truncated = self._terminated[slot].copy(), self._truncated[slot].copy()
        infos = batched_infos(objects.infos, self._num_envs) if objects.infos else {}
        if self._same_step:
            self._add_final_observations(infos, slot, terminated | truncated, self._everyone, objects.leaves)
        self._update_object_leaves(objects.leaves)
        return self._returned_observations(slot), self._rewards[slot].copy(), terminated, truncated, infos

    def after_recv(self, slot: int, ids: np.ndarray, objects: StepObjects) -> PartialBatch:
        """Returns the result of `recv` for these envs."""

        # Owner: the parent, the rows of these envs, which it copies here. Workers may still write other rows.
        def leaf(path: Path) -> Any:
            array = self._arrays.get((layout.OBSERVATION, *path))
            if array is None:
                values = self.object_leaves[(layout.OBSERVATION, *path)]
                return tuple(deepcopy(values[i]) for i in ids)
            return array[slot, ids]

        terminated, truncated = self._terminated[slot, ids], self._truncated[slot, ids]
        positions = np.empty(self._num_envs, np.int64)
        positions[ids] = np.arange(len(ids))
        infos = batched_infos(objects.infos, len(ids), positions)
        if self._same_step:
            self._add_final_observations(infos, slot, terminated | truncated, ids, objects.leaves)
        self._update_object_leaves(objects.leaves)
        observations = tree.nest(self._space, leaf)
        return PartialBatch(observations, self._rewards[slot, ids], terminated, truncated, infos, ids)

    def _update_object_leaves(self, leaves: ObjectLeaves) -> None:
        """Stores the new values of leaves of observations without memory. Envs without a new value keep the old one."""
        for path, values in leaves.items():
            if path in self.object_leaves:  # otherwise, a final observation
                for env, value in values.items():
                    self.object_leaves[path][env] = value

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

    def _add_final_observations(
        self, infos: dict[str, Any], slot: int, ended: np.ndarray, ids: np.ndarray, leaves: ObjectLeaves
    ) -> None:
        """Adds the final observations of the envs `ids`, `[M]`, where an episode has ended, to their infos.

        Order: before `_update_object_leaves`. The final observation of a cut episode is the previous observation.
        """
        if np.count_nonzero(ended):
            finals = np.full(len(ids), None)
            for k in np.flatnonzero(ended).tolist():
                finals[k] = self._final_observation(slot, ids[k], leaves)
            infos["final_obs"], infos["_final_obs"] = finals, ended

    def _final_observation(self, slot: int, i: int, leaves: ObjectLeaves) -> Any:
        def leaf(path: Path) -> Any:
            field = (layout.FINAL_OBSERVATION, *path)
            if i in leaves.get(field, ()):  # as the env returned it
                return leaves[field][i]
            if field in self._arrays:
                value = self._arrays[field][slot, i, ...]
                return int(value) if path in self._discrete else value.copy()
            # The parent has cut the episode, so the previous observation is the final one.
            return self.object_leaves[(layout.OBSERVATION, *path)][i]

        return tree.nest(self._space, leaf)
