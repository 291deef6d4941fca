"""BatchRows: a run of envs that one vector env steps in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv import tree
from vecenv.errors import NotRestorable
from vecenv.memory import layout
from vecenv.rows import checks, episode_infos
from vecenv.rows.action_spaces import clipper
from vecenv.rows.autoreset import BEGINS, EVERY, RESETS, SKIPS, STEPS
from vecenv.rows.batched import ADVICE, Batched
from vecenv.rows.copies import copied
from vecenv.rows.env_rows import EnvRows
from vecenv.rows.infos import check_masks, columns_of_batch
from vecenv.rows.messages import NO_OBJECTS, EnvDescription, ResetCommand, RowsOptions, StepObjects, combined
from vecenv.rows.observations import fitted
from vecenv.rows.rows import Rows, Slot
from vecenv.state.envs import check_classes, has_state_methods
from vecenv.state.plain import pack, unpack
from vecenv.tree import Path

PER_ENV_ATTRIBUTES = ("render", "np_random", "np_random_seed")
"""Attributes of a vector env that hold one value per env. All other attributes hold one value for all its envs."""


def make_rows(
    env_fns: Sequence[Callable] | Batched, first_env: int, options: RowsOptions, next_step: Sequence[int] | None = None
) -> Rows:
    """Returns the rows of envs that are not built yet: `BatchRows` for a `Batched`, `EnvRows` for functions."""
    kind = BatchRows if isinstance(env_fns, Batched) else EnvRows
    return kind(env_fns, first_env, options, next_step)  # type: ignore[arg-type]


class _BatchSlot(Slot):
    def __init__(self, views: dict[Path, np.ndarray], observation_space: gym.Space, action_space: gym.Space):
        super().__init__(views, observation_space, action_space)
        self.observations = tree.nest(observation_space, lambda path: views[(layout.OBSERVATION, *path)])


class BatchRows(Rows):
    """The envs `first_env : first_env + n`, which one vector env steps in one call and resets itself.

    This class checks the results and writes them to the rows. It takes the arguments of `EnvRows`, with a `Batched`
    instead of functions.
    """

    _env: Any  # exists once the rows are built
    _slots: list[_BatchSlot]

    def __init__(self, batched: Batched, first_env: int, options: RowsOptions, next_step: Sequence[int] | None):
        super().__init__(first_env, options, np.array(next_step or [STEPS] * len(batched), np.int8))
        self._batched, self._taken_over = batched, bool(next_step)
        self._numbers = np.arange(self._count)
        self._resets_next = options.autoreset_mode == AutoresetMode.NEXT_STEP
        # The vector env does not know that rows that were taken over must begin an episode.
        self._episodes.next_step[self._episodes.next_step == BEGINS] = RESETS

    def build(self) -> EnvDescription:
        options = self._options
        env = self._env = self._guarded(None, "construction", self._batched.build, options.autoreset_mode)
        self.envs.append(env)
        del self._batched  # it may hold a lot of data
        self._returns = f"{type(env).__name__} returns"
        # A MuJoCo task computes its spaces from its first observations.
        for name in ("single_observation_space", "single_action_space"):
            tree.check_fixed(self._guarded(None, "construction", getattr, env, name), ADVICE)
        self._steps_subsets = hasattr(env, "step_rows")
        self._accepts_out = _has_parameter(env.step, "out") and _has_parameter(env.reset, "out")
        self._clip = clipper(env.single_action_space) if options.clip_actions else None
        self._observed = [path for path, _ in tree.leaves(env.single_observation_space)]
        # These check the class, because a wrapper may forward the attributes but use the infos itself.
        if not options.infos and not options.info_keys and hasattr(type(env), "drop_infos"):
            env.drop_infos()
        self._passes_infos = options.here and hasattr(type(env), "hands_over_infos") and env.hands_over_infos
        if self._taken_over:
            self._guarded(None, "reset", env.reset)  # `call` may use the envs before their next step
        spaces = [self._spaces(env.single_observation_space, env.single_action_space)] * self._count
        return EnvDescription(spaces, dict(env.metadata), env.render_mode, steps_subsets=self._steps_subsets)

    def _slot_of(self, views: dict[Path, np.ndarray]) -> _BatchSlot:
        return _BatchSlot(views, self._env.single_observation_space, self._env.single_action_space)

    def reset(self, slot: int, command: ResetCommand) -> StepObjects:
        return self._guarded(None, "reset", self._reset, self._slots[slot], command)

    def _reset(self, at: _BatchSlot, command: ResetCommand) -> StepObjects:
        options, mask = command.options, command.mask
        rows = EVERY if mask is None else np.flatnonzero(mask)
        if mask is not None:
            if not mask.any():
                return NO_OBJECTS
            options = {**(options or {}), "reset_mask": mask}
        how: dict[str, Any] = {"options": options}
        if self._accepts_out and mask is None:
            how["out"] = at.observations
        seed = None if all(one is None for one in command.seeds) else command.seeds
        try:
            observations, infos = self._env.reset(seed=seed, **how)
        except (TypeError, ValueError, AssertionError, gym.error.Error) as error:
            if seed is not None and not self._accepts_out:  # an env with `out` was written for this contract
                error.add_note(f"{type(self._env).__name__} must accept a list of seeds, see vecenv.Batched. {ADVICE}")
            raise
        objects = self._checked("info", infos, self._objects_of, None, "reset", rows)
        self._write_observations(at, observations, rows)
        at.columns.rewards[rows], at.terminated[rows], at.truncated[rows] = 0.0, False, False
        self._episodes.begin(self._numbers[rows].tolist())
        self._episodes.write_totals(at.columns, rows)
        if self._checks_finite:
            self._check_finite(at, rows, [])
        return objects

    def step(self, slot: int, actions: Any = None, only: Sequence[int] | None = None) -> StepObjects:
        at = self._slots[slot]
        try:
            if only is None and not self._some_wait_for_reset():
                return self._step_all(at, actions)
            return self._step_some(at, actions, list(range(self._count) if only is None else only))
        except BaseException as error:
            self._blame(error, None, "step")
            raise

    def _some_wait_for_reset(self) -> bool:
        """Returns whether rows that were taken over have not begun an episode."""
        return self._taken_over and bool((self._episodes.next_step >= SKIPS).any())

    def _step_all(self, at: _BatchSlot, actions: Any) -> StepObjects:
        actions = self._actions(at, actions, EVERY)
        if not self._accepts_out:
            return self._write_step(at, self._env.step(actions), EVERY)
        # Owner: the vector env, all rows of the slot, until its step returns.
        return self._write_step(at, self._env.step(actions, out=at.observations), EVERY)

    def step_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> Iterator[tuple[list[int], StepObjects]]:
        """Steps the rows in one call and yields all of them at once."""
        rows = [row for row, _ in orders]
        actions = None
        if orders[0][1] is not None:
            actions = self._nested(lambda path: np.concatenate([tree.pick(action, path) for _, action in orders]))
        yield rows, self.step(slot, actions, rows)

    def _step_some(self, at: _BatchSlot, actions: Any, rows: list[int]) -> StepObjects:
        """Steps some rows. Rows that were taken over begin an episode or skip this step instead."""
        next_step = self._episodes.next_step
        stepped = [row for row in rows if next_step[row] < SKIPS]
        begins = np.isin(self._numbers, rows) & (next_step == RESETS)
        for row in rows:
            if next_step[row] == SKIPS:
                next_step[row] = RESETS
        objects = NO_OBJECTS
        if stepped:
            if not self._steps_subsets:
                raise NotImplementedError(
                    f"{type(self._env).__name__} steps all its envs at once: to step some of them, it needs "
                    "step_rows(ids, actions), see vecenv.Batched"
                )
            if actions is not None and len(stepped) < len(rows):
                chosen, given = [rows.index(row) for row in stepped], actions
                actions = self._nested(lambda path: tree.pick(given, path)[chosen])
            # No `out`: these envs do not own the remaining rows of the slot.
            result = self._env.step_rows(stepped, self._actions(at, actions, stepped))
            objects = self._write_step(at, result, stepped)
        if begins.any():
            first = self._reset(at, ResetCommand([None] * self._count, None, None if begins.all() else begins))
            objects = combined([objects, first])
        return objects

    def _write_step(self, at: _BatchSlot, result: tuple, rows: list[int] | slice) -> StepObjects:
        """Writes the result of a step into these rows; returns the infos that do not fit the memory."""
        episodes = self._episodes
        observations, rewards, terminated, truncated, infos = result
        if self._passes_infos and isinstance(rows, slice):
            # Owner: the caller, who gets the dict and the arrays that the vector env has made for this step.
            objects = StepObjects((), {}, batched=infos) if self._keep_infos else NO_OBJECTS
        else:
            objects = self._checked("info", infos, self._objects_of, None, "step", rows)
        self._write_observations(at, observations, rows)
        at.columns.rewards[rows] = self._column("reward", rewards, rows, checks.number, "biuf")
        terminated = at.terminated[rows] = self._column("terminated", terminated, rows, checks.flag, "b")
        truncated = at.truncated[rows] = self._column("truncated", truncated, rows, checks.flag, "b")
        numbers, over = self._numbers[rows], terminated | truncated
        began = ended = numbers[:0]
        if self._same_step:
            ended = numbers[over]
            self._write_finals(at, infos, ended)
        elif self._resets_next:
            # The next step of each of these rows is STEPS or BEGINS.
            began = numbers[episodes.next_step[rows].nonzero()]
            episodes.next_step[rows] = over  # BEGINS where an episode is over
        if at.last_infos or at.summed_infos:
            self._write_episode_infos(at, infos, np.setdiff1d(numbers, began), numbers[over])
            episodes.write_infos(at.summed_infos, rows)
        episodes.count(at.columns, rows, began, ended)
        if self._checks_finite:
            self._check_finite(at, rows, ended)
        return objects

    def _column(self, name: str, values: Any, rows: Any, check: Callable[[Any], Any], kinds: str) -> np.ndarray:
        """Returns the rewards or flags of these rows. Checks each value unless the dtype's kind is in `kinds`."""
        array = np.asarray(values)
        if array.shape != (self._count,):
            raise ValueError(
                f"{type(self._env).__name__} returned {name} of shape {array.shape} for {self._count} envs: "
                "fix its step()"
            )
        if array.dtype.kind in kinds:
            return array[rows]
        numbers = self._numbers[rows].tolist()
        return np.array([self._checked(name, array[row], check, row) for row in numbers])

    def _write_observations(self, at: _BatchSlot, observations: Any, rows: Any) -> None:
        # Owner: this process, these rows of the slot, until it replies to the command in progress.
        if observations is at.observations:
            return  # the vector env has already written them; see `out` in Batched
        for path in self._observed:
            values, column = tree.pick(observations, path), at.views[(layout.OBSERVATION, *path)]
            name = tree.name_of(layout.OBSERVATION, path)
            if np.shape(values) != column.shape:  # numpy would broadcast one row over all rows
                raise ValueError(
                    f"{type(self._env).__name__} returned {name} of shape {np.shape(values)}, but its space says "
                    f"{column.shape}: fix its reset() and step()"
                )
            given = np.asarray(values)[rows]
            with np.errstate(all="ignore"):  # values may be rounded to 0 or inf
                column[rows] = fitted(given, column.dtype, given.shape, name, type(self._env).__name__)

    def _write_finals(self, at: _BatchSlot, infos: dict[str, Any], ended: np.ndarray) -> None:
        if not len(ended):
            return
        finals = infos.get("final_obs")
        if finals is None:
            raise ValueError(
                f"{type(self._env).__name__} ended episodes of envs {(self.first_env + ended).tolist()} in SAME_STEP "
                "mode without infos['final_obs'], which must hold their last observations"
            )
        for path in self._observed:
            column, name = at.views[(layout.FINAL_OBSERVATION, *path)], tree.name_of("final observation", path)
            for row in ended.tolist():
                value = tree.pick(finals[row], path)
                with np.errstate(all="ignore"):
                    column[row] = fitted(value, column.dtype, column.shape[1:], name, self._who(row))

    def _write_episode_infos(
        self, at: _BatchSlot, infos: dict[str, Any], stepped: np.ndarray, over: np.ndarray
    ) -> None:
        """Adds up the selected infos of the rows that were stepped, and writes the values that need no sum."""
        final = infos.get("final_info") if self._same_step else infos
        running = np.setdiff1d(stepped, over)
        for key in self._episodes.infos:
            for source, rows in ((infos, running), (final, over)):
                if (found := episode_infos.find_rows(source, key, rows)) is not None:
                    self._episodes.add_info(key, *found)
                    continue
                for row in rows.tolist():
                    if (value := episode_infos.find_in_batch(source, key, row)) is not episode_infos.MISSING:
                        self._episodes.add_info(key, row, self._info_number(key, value, row, self._when(row)))
        for key, column in at.last_infos:
            if (found := episode_infos.find_rows(infos, key, running)) is not None:
                column[running] = np.nan
                column[found[0]] = found[1]
            else:
                for row in running.tolist():
                    column[row] = episode_infos.number_so_far(episode_infos.find_in_batch(infos, key, row))
            for row in over.tolist():
                value = episode_infos.find_in_batch(final, key, row)
                column[row] = self._info_number(key, value, row, self._when(row))

    def _when(self, row: int) -> str:
        """Names the step that was just taken, also if its episode is over."""
        return f"step {self._episodes.totals(row)[1] + 1} of its episode"

    def _objects_of(self, infos: Any, rows: Any) -> StepObjects:
        """Checks the infos of a call, and returns the infos of these rows.

        Final observations are omitted, because they travel through memory.
        """
        checks.check_info(infos)
        if not self._keep_infos:
            check_masks(infos, self._count)
            return NO_OBJECTS
        some = None if isinstance(rows, slice) or len(rows) == self._count else self._numbers[rows]
        # Owner: the copies belong to the caller. The vector env may reuse its own dicts and arrays.
        columns = columns_of_batch(infos, self._count, self.first_env, some, omit="final_obs")
        return StepObjects(columns, {}) if columns else NO_OBJECTS

    def _actions(self, at: _BatchSlot, actions: Any, rows: Any) -> Any:
        if actions is None:
            actions = at.copy_actions(rows)
        return actions if self._clip is None else self._clip(actions)

    def _nested(self, leaf: Callable[[Path], Any]) -> Any:
        """Builds a batch of actions, nested like their space."""
        return tree.nest(self._env.single_action_space, leaf)

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Calls the method, or reads the attribute, `name` of the vector env; repeats a result that is not per env."""

        def read() -> Any:
            attribute = self._attribute(name)
            result = attribute(*args, **kwargs) if callable(attribute) else attribute
            return copied(result) if name == "render" else result  # as in EnvRows

        result = self._guarded(None, f"call({name!r})", read)
        per_env = name in PER_ENV_ATTRIBUTES and isinstance(result, tuple)
        return list(result) if per_env else [result] * self._count

    def apply(self, function: Callable[[Any], Any], rows: Iterable[int]) -> list[Any]:
        """Raises TypeError unless `rows` is empty, because there is no single env to call `function` with."""
        if not list(rows):
            return []
        raise TypeError(f"{type(self._env).__name__} steps all its envs at once, so there is no single env. {ADVICE}")

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of the vector env. All values are equal."""

        def write() -> None:
            self._attribute(name)
            setattr(self._env, name, values[0])

        self._guarded(None, f"set_attr({name!r})", write)

    def get_state(self) -> list[dict[str, Any]]:
        return self._guarded(None, "get_state", self._states)

    def _states(self) -> list[dict[str, Any]]:
        name = type(self._env).__qualname__
        if not has_state_methods(self._env):
            raise NotRestorable(
                f"{name} steps all its envs in one call, but does not define get_state() and set_state(states), which "
                "return and restore one state per env. Define both (see docs/engine.md), or build single envs."
            )
        if self._some_wait_for_reset():
            raise NotRestorable(f"the process of {name} was just restarted: step its envs before you save their states")
        states = self._env.get_state()
        if not isinstance(states, (list, tuple)) or len(states) != self._count:
            raise ValueError(
                f"{name}.get_state() must return a list of {self._count} states, one for each env, but it returned "
                f"{checks.shown(states)}"
            )
        return [
            self._state_of_row(i, [{"class": name, "state": pack(state, f"{name}.get_state()[{i}]")}])
            for i, state in enumerate(states)
        ]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        for state in states:
            check_classes(self._env, state["env"])
        self._guarded(
            None, "set_state", lambda: self._env.set_state([unpack(state["env"][0]["state"]) for state in states])
        )
        self._restore_rows(states)

    def close(self) -> None:
        for env in self.envs:
            self._guarded(None, "close", env.close)

    def _attribute(self, name: str) -> Any:
        if not hasattr(self._env, name):
            raise AttributeError(
                f"{type(self._env).__name__}, which steps all its envs at once, has no {name!r}. {ADVICE}"
            )
        return getattr(self._env, name)


def _has_parameter(function: Callable, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of extension modules have no signature
        return False
