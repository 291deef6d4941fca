"""ResultAssembler: turns slots of memory and `StepObjects` into what the methods of a vector env return."""

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
from vecenv.state.envs import REBUILD
from vecenv.state.plain import pack, unpack
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
    """Assembles the results of `reset`, `step`, `recv` and `get_state`.

    Attributes:
        object_leaves: The newest value of each env, for each leaf of observations that has no memory, because its shape
            is not fixed.
        row_types: Descriptions of the rows, which must be equal in two vector envs that exchange states.
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
        # Parts of a row's state, by name. No step reads the other fields of an earlier step.
        unsaved = (layout.ACTION, layout.FINAL_OBSERVATION, layout.EPISODE_INFO)
        saved = {path: array for path, array in arrays.items() if path[0] not in unsaved}
        self._saved = {tree.name_of(str(path[0]), path[1:]): array for path, array in saved.items()}
        self._discrete: set[Path] = set()
        for path, leaf in tree.leaves(space):
            if isinstance(leaf, spaces.Discrete):
                self._discrete.add(path)
            if not tree.is_fixed(leaf):
                self.object_leaves[(layout.OBSERVATION, *path)] = [None] * self._num_envs
        self._saved_leaves = {tree.name_of(layout.OBSERVATION, path[1:]): v for path, v in self.object_leaves.items()}
        types = [f"{name} {array.dtype}{list(array.shape[2:])}" for name, array in self._saved.items()]
        leaf_types = [f"{name} object" for name in self._saved_leaves]
        self.row_types = [f"autoreset_mode {autoreset_mode.value}", *types, *leaf_types]

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
        if (infos := objects.batched) is None:
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

    def row(self, i: int, slot: int) -> dict[str, Any]:
        """Returns a copy of row `i` of `slot` and its object leaves, for `get_state`."""
        leaves = {name: pack(values[i], name) for name, values in self._saved_leaves.items()}
        return leaves | {name: np.array(array[slot, i]) for name, array in self._saved.items()}

    def restore_row(self, i: int, slot: int, row: dict[str, Any]) -> None:
        """Writes what `row` returned to row `i` of `slot`."""
        for name, array in self._saved.items():
            array[slot, i] = row[name]
        for name, values in self._saved_leaves.items():
            values[i] = unpack(row[name])

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


def check_states(states: Any, num_envs: int, types: list[str]) -> None:
    """Raises ValueError, naming the difference, if these are not states of `num_envs` envs with rows of these types."""
    if not isinstance(states, (list, tuple)) or len(states) != num_envs:
        found = f"{len(states)} states" if isinstance(states, (list, tuple)) else f"a {type(states).__name__}"
        raise ValueError(f"set_state() needs a list of {num_envs} states, one per env, but got {found}")
    for i, state in enumerate(states):
        if not isinstance(state, dict) or not state.keys() >= {"types", "row", "totals", "env", "begins", "infos"}:
            raise ValueError(f"the state of env {i} was not returned by get_state(). Pass the list unchanged.")
        if set(state["types"]) != set(types):
            saved, here = set(state["types"]) - set(types), set(types) - set(state["types"])
            raise ValueError(f"the state of env {i} has {sorted(saved)}; the vector env has {sorted(here)}. {REBUILD}")
        if (state["row"] is None) != (states[0]["row"] is None):
            raise ValueError(f"only one of envs 0 and {i} had been reset: pass the states of one get_state()")
