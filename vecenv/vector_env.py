"""PooledVectorEnv: what serial and parallel group: slots, checks of actions, Gymnasium's return values.

A subclass moves rows; this class owns the memory seen from the caller's side, and chooses slots.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv import spaces as tree
from vecenv.errors import EpisodeOver, SharedMemoryFull, StateError
from vecenv.memory import layout
from vecenv.memory.actions import ActionWriter
from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows import info_memory
from vecenv.rows.arguments import Seeds
from vecenv.rows.batch_spaces import ObservationMode, check_observation_mode, combine_spaces
from vecenv.rows.info_memory import Schema
from vecenv.rows.infos import add_batch, add_info, split_infos
from vecenv.rows.protocol import EnvSpaces, ObjectLeaves, StepObjects
from vecenv.spaces import Path
from vecenv.state import saved_rows


class PooledVectorEnv(VectorEnv):
    """A Gymnasium vector env whose batches lie in one block of `num_slots` slots.

    Attributes:
        arrays: Every field's `dtype[S, N, *shape]`, named by path (see `vecenv.memory.layout`): the memory
            itself. Slot `s` belongs to the envs from the call of a step into it to its return, and
            to the caller otherwise.
        env_action_space: Of one env as it has it: with the bounds to which `clip_actions` clips.
        slabs: The same memory as contiguous `dtype[S, padded row length]`, for code that aliases it.
        num_slots: S. `step` writes into one slot after the other, round and round.
        info_lists: Whether `reset` and `step` return infos as a list of one dict for each env, as the envs gave
            them, and not merged. Each info of an env that SAME_STEP has reset then has `final_obs`. May be set.
    """

    def __init__(
        self,
        *,
        num_envs: int,
        num_slots: int,
        copy: bool,
        observation_mode: ObservationMode,
        autoreset_mode: str | AutoresetMode,
        infos: bool,
    ):
        if num_slots < 2:
            raise ValueError(f"num_slots={num_slots}, but a batch must outlive the next step: use 2 or more")
        check_observation_mode(observation_mode)
        self.num_envs = num_envs
        self.num_slots = num_slots
        self.copy = copy
        self.observation_mode = observation_mode
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.infos = infos
        self.info_lists = False
        self.arrays: dict[Path, np.ndarray] = {}
        self.slabs: dict[Path, np.ndarray] = {}
        self._creator = os.getpid()
        self._slot = 0
        self._begun = False  # whether the envs have been reset, so that what lies in `_slot` means something
        self._loose: dict[Path, list[Any]] = {}  # the newest value of each env, for leaves without fixed shape
        self._info_views: dict[Path, np.ndarray] | None = None
        self._info_schema: Schema = {}
        self._learns_parts = True  # whether memory serves infos better that rows have merged: not in the same process
        self._learning_steps = info_memory.LEARNING_STEPS if infos else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_spaces(self, runs: Sequence[EnvSpaces], metadata: Mapping[str, Any], render_mode: str | None) -> None:
        name = type(self).__name__
        observed, batched, acted = combine_spaces(runs, self.observation_mode, self.num_envs, name)
        self.single_observation_space, self.observation_space = observed, batched
        self.single_action_space, self.action_space = acted, batch_space(acted, self.num_envs)
        self.env_action_space = runs[0].env_action_space
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = render_mode
        self._action_writer = ActionWriter(acted)
        self._discrete_observations = set()
        for path, leaf in tree.leaves(observed):
            if isinstance(leaf, spaces.Discrete):
                self._discrete_observations.add(path)
            if not tree.is_fixed(leaf):
                for field in (layout.OBSERVATION, layout.FINAL_OBSERVATION):
                    self._loose[(field, *path)] = [None] * self.num_envs

    def _plan(self) -> Layout:
        rows = layout.env_fields(
            self.single_observation_space,
            self.single_action_space,
            final_observation=self.autoreset_mode == AutoresetMode.SAME_STEP,
        )
        return layout.plan(rows, num_slots=self.num_slots, num_envs=self.num_envs)

    def _take_memory(self, block: Block, plan: Layout) -> None:
        self.arrays = block.views(plan)
        self.slabs = block.slabs(plan)

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every env, or those of `options["reset_mask"]`; returns observations and infos."""
        raise NotImplementedError

    def reset_slot(self, slot: int, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> StepObjects:
        """Resets the envs and leaves the batch in `slot`; returns what does not lie there."""
        raise NotImplementedError

    def step_slot(self, slot: int, actions: Any = None) -> StepObjects:
        """Steps the envs with the actions in `slot` and leaves the batch there; returns what does not lie there."""
        raise NotImplementedError

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env."""
        raise NotImplementedError

    def apply(self, function: Callable[[gym.Env], Any], env_ids: Sequence[int] | None = None) -> list[Any]:
        """Calls `function(env)` for these envs, or for all, where they are; returns the results in their order."""
        raise NotImplementedError

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the whole state of each env, for `set_state` and `vecenv.state.save`.

        That is what lies in the env and its wrappers, their random generators, what autoreset will do next, the
        episode's return and length, and the newest observation. The envs are not changed.

        Raises:
            NotRestorable: If the state of an env cannot be restored exactly; the message names the attribute. The
                vector env can be used as before.
        """
        return self.get_state_slot(self._slot)

    def get_state_slot(self, slot: int) -> list[dict[str, Any]]:
        """Returns what `get_state` does, but with the observations that lie in `slot`."""
        self._assert_idle("get_state")
        common = {"format": saved_rows.STATE_FORMAT, "autoreset_mode": self.autoreset_mode.value}
        states = self._get_states()
        rows: list[dict[str, Any] | None] = [None] * self.num_envs
        if self._begun:
            where = {"slot": self._slot, "observed": slot}
            rows = [saved_rows.take(self.arrays, self._loose, i, **where) for i in range(self.num_envs)]
        return [{**common, "row": row, **state} for row, state in zip(rows, states, strict=True)]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Puts all envs into the states that `get_state` of a vector env returned that was built in the same way.

        From then on this one does what that one did: `observations` are what the next actions answer, and no `reset`
        is needed. The number of workers may differ.

        Raises:
            ValueError: If number, spaces or options do not fit, and then nothing was changed; or the envs differ.
            NotRestorable: If an env has no place for a part of its state. Some envs have theirs then and some do not,
                so reset them all before they are used, or close.
        """
        self.set_state_slot(self._next_slot(), states)

    def set_state_slot(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        """Does what `set_state` does, with the observations in `slot`."""
        self._assert_idle("set_state")
        saved_rows.check(states, self.num_envs, self.autoreset_mode.value, self.arrays, self._loose)
        self._slot, self._begun = slot, states[0]["row"] is not None
        for i, state in enumerate(states if self._begun else ()):
            # Owner: the caller; the workers take over the rows of `slot` with the message that brings their states.
            saved_rows.put(self.arrays, self._loose, i, slot, state["row"])
        self._set_states(slot, states)

    def _get_states(self) -> list[dict[str, Any]]:
        """Returns what the rows say of each env's state."""
        raise NotImplementedError

    def _set_states(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        """Gives the rows what `_get_states` returned, and more; their memory has been written."""
        raise NotImplementedError

    @property
    def episode_returns(self) -> np.ndarray:
        """Sum of rewards of each env's episode so far, at its last step the total: float64[N], a copy."""
        return self.arrays[layout.EPISODE_RETURN][self._slot].copy()

    @property
    def episode_lengths(self) -> np.ndarray:
        """Steps of each env's episode so far, at its last step the total: int64[N], a copy."""
        return self.arrays[layout.EPISODE_LENGTH][self._slot].copy()

    # Gymnasium's own vector envs have tuples here too, not to be set, which its base class does not allow for.
    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Each env's generator (of a parallel vector env: a copy)."""
        return self.get_attr("np_random")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns the attribute `name` of every env."""
        return self.call(name)

    def render(self) -> tuple[Any, ...] | None:
        """Returns what `render()` of every env gives."""
        return self.call("render")

    @property
    def observations(self) -> Any:
        """The newest batch of observations: `[N, ...]`, views of the memory, nested as the space is."""
        return self._batch(self._slot)

    def _batch(self, slot: int) -> Any:
        def leaf(path: Path) -> Any:
            array = self.arrays.get((layout.OBSERVATION, *path))
            return tuple(self._loose[(layout.OBSERVATION, *path)]) if array is None else array[slot]

        return tree.nest(self.single_observation_space, leaf)

    def _assert_open(self) -> None:
        if self.closed:
            raise StateError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._broken:
            raise StateError(
                f"`{type(self).__name__}` was broken by an earlier fault. Call `close()` and build a new one."
            )

    @property
    def _broken(self) -> bool:
        """Whether a fault has left envs in an unknown state, so that only `close` is legal."""
        raise NotImplementedError

    def _break(self) -> None:
        """Makes every call except `close` illegal."""
        raise NotImplementedError

    def _assert_idle(self, name: str) -> None:
        """Raises if the envs cannot be used now, by the method `name`."""
        self._assert_open()

    @property
    def groups(self) -> list[range]:
        """Runs of envs that threads of the caller may step at once, by `step_group`; one if none may."""
        return [range(self.num_envs)]

    def step_group(self, group: int, slot: int, actions: Any = None) -> StepObjects:
        """Does for one of `groups` what `step_slot` does for all.

        Nothing else may be called until all of them are in the same slot.

        Raises:
            ValueError: If there is no such group; or autoreset is disabled, as nobody would tell whose episode is over.
        """
        raise ValueError("no groups: build the envs as vecenv.AsyncVectorEnv(..., num_workers=0, num_groups=...)")

    def put_actions(self, actions: Any, slot: int, env_ids: range | None = None) -> Any:
        """Checks actions for all envs, or for a run of them, and writes them into `slot`.

        Returns:
            None; or the actions, if they do not fit the memory.

        Raises:
            ValueError: If the shape is wrong or an action is NaN; the message names the env.
            TypeError: If the dtype is of another kind, such as floats for a Discrete space.
            EpisodeOver: If autoreset is disabled and an env's episode is over.
        """
        if env_ids is None:
            env_ids = range(self.num_envs)
            self._assert_not_over(env_ids)
        return self._action_writer.put(actions, self.arrays, slot, env_ids)

    def _assert_not_over(self, env_ids: Sequence[int]) -> None:
        """Raises if an episode of these envs is over and nobody will reset it."""
        if self.autoreset_mode == AutoresetMode.DISABLED:
            ended = self.arrays[layout.TERMINATED][self._slot] | self.arrays[layout.TRUNCATED][self._slot]
            over = [i for i in env_ids if ended[i]]
            if over and self._begun:
                raise EpisodeOver(
                    f"the episodes of envs {over} are over, and autoreset is disabled: reset them with "
                    "options={'reset_mask': ...}. No env was stepped."
                )

    def _next_slot(self) -> int:
        return (self._slot + 1) % self.num_slots

    def _reset_result(self, objects: StepObjects) -> tuple[Any, dict[str, Any]]:
        try:
            self._absorb(objects.leaves)
            infos: Any = self._list(objects, []) if self.info_lists else self._merge(objects)
            return self._returned_observations(), infos
        except BaseException:
            self._break()
            raise

    def _step_result(self, objects: StepObjects) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        try:
            return self._result_of_step(objects)
        except BaseException:  # if Ctrl-C loses a step's result, the end of an episode may be lost with it
            self._break()
            raise

    def _result_of_step(self, objects: StepObjects) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        slot = self._slot
        self._absorb(objects.leaves)
        terminated = self.arrays[layout.TERMINATED][slot].copy()
        truncated = self.arrays[layout.TRUNCATED][slot].copy()
        ended: np.ndarray | Sequence[int] = ()
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            ended = np.flatnonzero(terminated | truncated)
        if self.info_lists:
            infos: Any = self._list(objects, ended)
        else:
            infos = self._merge(objects)
            self._add_final_observations(infos, ended)
        if self._learning_steps:
            self._learn_infos(objects)
        return self._returned_observations(), self.arrays[layout.REWARD][slot].copy(), terminated, truncated, infos

    def _list(self, objects: StepObjects, ended: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
        if self._info_views is None:
            each: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        else:
            each = info_memory.read_info_list(self._info_views, self._info_schema, self._slot)
        for i, info in objects.infos:
            each[i] = info
        for rows, part in objects.batched_infos:
            for i, info in zip(rows.tolist(), split_infos(part, len(rows)), strict=True):
                each[i] = info or each[i]
        for i in ended:
            each[i] = {**each[i], "final_obs": self._final_observation(i)}
        return each

    def _absorb(self, loose: ObjectLeaves) -> None:
        """Takes the new values of leaves without fixed shape; envs without one keep theirs."""
        for path, values in loose.items():
            if path[0] == layout.OBSERVATION:
                field = (layout.FINAL_OBSERVATION, *path[1:])
                # Where a cut episode has no final value, it is the one before.
                self._loose[field] = list(self._loose[path])
                for row, value in loose.get(field, {}).items():
                    self._loose[field][row] = value
                for row, value in values.items():
                    self._loose[path][row] = value

    def _returned_observations(self) -> Any:
        # Owner: with copy=False the caller may read slot s until its turn comes again, num_slots steps later.
        slot, arrays = self._slot, self.arrays
        if not self.copy or self._loose:
            return self._batch(slot) if not self.copy else deepcopy(self._batch(slot))
        return tree.nest(self.single_observation_space, lambda path: arrays[(layout.OBSERVATION, *path)][slot].copy())

    def _add_final_observations(self, merged: dict[str, Any], ended: Sequence[int] | np.ndarray) -> None:
        if len(ended) == 0:
            return
        finals = np.full(self.num_envs, fill_value=None, dtype=object)
        for i in ended:
            finals[i] = self._final_observation(i)
        merged["final_obs"] = finals
        merged["_final_obs"] = np.isin(np.arange(self.num_envs), ended)

    def _final_observation(self, i: int) -> Any:
        return tree.nest(self.single_observation_space, lambda path: self._final_leaf(path, i))

    def _final_leaf(self, path: Path, i: int) -> Any:
        field = (layout.FINAL_OBSERVATION, *path)
        if field in self._loose:
            return self._loose[field][i]
        column = self.arrays[field][self._slot]
        # An array even if it has no dimension; but of a Discrete space a number, as the env returned.
        return int(column[i]) if path in self._discrete_observations else column[i, ...].copy()

    def _merge(self, objects: StepObjects) -> dict[str, Any]:
        merged = {} if self._info_views is None else info_memory.read_infos(self._info_views, self._slot)
        for rows, part in objects.batched_infos:
            # Owner: the infos of all envs at once are the caller's as they are; see Batched.
            whole = not merged and len(rows) == self.num_envs and len(objects.batched_infos) == 1
            merged = part if whole else add_batch(merged, part, rows, self.num_envs)
        for i, info in objects.infos:
            merged = self._add_info(merged, info, i)
        return merged

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        return add_info(vector_infos, env_info, env_num, self.num_envs)

    def _learn_infos(self, objects: StepObjects) -> None:
        """Gives infos a memory of their own once all envs have shown the same numeric keys in a step."""
        self._learning_steps -= 1
        if objects.batched_infos:
            learn = self._learns_parts and not objects.infos
            schema = info_memory.learn_batched_schema(objects.batched_infos, self.num_envs) if learn else None
        else:
            schema = info_memory.learn_schema(objects.infos, self.num_envs)
        if schema is not None:
            self._learning_steps = 0
            plan = layout.plan(info_memory.info_fields(schema), num_slots=self.num_slots, num_envs=self.num_envs)
            # No room for it is no reason to stop a run: the pipe serves as well, only slower.
            self._info_schema = schema
            with contextlib.suppress(SharedMemoryFull):
                self._info_views = self._bind_infos(schema, plan)
                self._info_views[info_memory.PRESENT][:] = False

    def _bind_infos(self, schema: Schema, plan: Layout) -> dict[Path, np.ndarray]:
        """Lets the rows write infos of this schema into a new block; returns the views of all rows."""
        raise NotImplementedError
