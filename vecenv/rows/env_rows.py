"""EnvRows: steps the envs of a run one by one, resets them, and writes their rows.

Workers and the parent use the same class, with different memory behind the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from vecenv.memory import layout
from vecenv.rows import checks, episode_infos
from vecenv.rows.action_spaces import clipper, each, unbounded
from vecenv.rows.autoreset import BEGINS, EVERY, SKIPS, STEPS
from vecenv.rows.checks import FALSE, NUMBERS
from vecenv.rows.copies import copied, copiers
from vecenv.rows.infos import columns_of
from vecenv.rows.messages import (
    NO_OBJECTS,
    EnvDescription,
    EnvSpaces,
    ObjectLeaves,
    ResetCommand,
    RowsOptions,
    StepObjects,
)
from vecenv.rows.observations import Write, observation_writer
from vecenv.rows.other_apis import advice_on, check_env, reset_result, takes_options
from vecenv.rows.rows import Rows, Slot
from vecenv.state.envs import check_classes, layers_of, restore, state_of
from vecenv.tree import Path


class EnvRows(Rows):
    """The envs `first_env : first_env + n`, stepped one by one. `Episodes` describes `next_step`."""

    _slots: list[_EnvSlot]

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        first_env: int,
        options: RowsOptions,
        next_step: Sequence[int] | None,
    ):
        super().__init__(first_env, options, list(next_step or [STEPS] * len(env_fns)))
        self._env_fns, self._taken_over = env_fns, bool(next_step)
        self._object_leaves: ObjectLeaves = {}  # new values since the last reply
        self._every_row = range(len(env_fns))

    def build(self) -> EnvDescription:
        options, builders = self._options, self._copiers(self._env_fns)
        self._env_fns = ()  # it may hold a lot of data
        found: dict[
            int, tuple[Any, int]
        ] = {}  # by id: the innermost env, kept so that its id is not reused, and its row
        for i in self._every_row:
            env = self._guarded(i, "construction", lambda i: builders[i]()(), i)
            self._guarded(i, "construction", check_env, env)
            inner = _innermost(env)
            if (row := found.setdefault(id(inner), (inner, i))[1]) != i:
                self._guarded(i, "construction", _refuse_shared, env, self.first_env + row)
            self.envs.append(env)
        env = self.envs[0]
        self._observation_space = env.observation_space
        self._clip = clipper(env.action_space) if options.clip_actions else None
        self._action_space = unbounded(env.action_space) if options.clip_actions else env.action_space
        self._takes_options = [all(map(takes_options, [*layers_of(env), _innermost(env)])) for env in self.envs]
        for i, env in enumerate(self.envs if self._taken_over else ()):
            self._guarded(i, "reset", env.reset)  # `call` and `apply` may use the env before its next step
        spaces: list[EnvSpaces] = []
        previous = None
        for env in self.envs:
            equal = (env.observation_space, env.action_space) == previous
            previous = env.observation_space, env.action_space
            spaces.append(spaces[-1] if equal else self._spaces(*previous))
        first = self.envs[0]
        metadata, render_mode = getattr(first, "metadata", None), getattr(first, "render_mode", None)
        return EnvDescription(spaces, dict(metadata or {}), render_mode, steps_subsets=True)

    def _slot_of(self, views: dict[Path, np.ndarray]) -> _EnvSlot:
        return _EnvSlot(self, views)

    def reset(self, slot: int, command: ResetCommand) -> StepObjects:
        at, keep_infos, mask = self._slots[slot], self._keep_infos, command.mask
        (options,) = self._copiers([command.options])
        rows = list(self._every_row) if mask is None else np.flatnonzero(mask).tolist()
        infos: list[tuple[int, dict[str, Any]]] = []
        for i in rows:
            try:
                given = {} if not command.options and not self._takes_options[i] else {"options": options()}
                observation, info = self._reset(i, seed=command.seeds[i], **given)
                at.write(i, observation)
            except BaseException as error:
                self._blame(error, i, "reset")
                raise
            at.rewards[i], at.terminated[i], at.truncated[i] = 0.0, False, False
            if info and keep_infos:
                infos.append((self.first_env + i, copied(info)))
        self._episodes.begin(rows)
        self._episodes.write_totals(at.columns, rows)
        if self._checks_finite:
            self._guarded(None, "reset", self._check_finite, at, rows, [])
        return self._objects_of(infos)

    def step(self, slot: int, actions: Any = None, only: range | None = None) -> StepObjects:
        """Steps all rows, or the rows `only`."""
        at = self._slots[slot]
        write, rewards = at.write, at.rewards
        if only is None:
            rows, envs, index = self._every_row, self.envs, EVERY
            at.terminated.fill(False)  # takes half as long as assigning to a slice
            at.truncated.fill(False)
        else:
            index = slice(only.start, only.stop)  # takes a tenth of the time of indexing with a list
            rows, envs = only, self.envs[index]
            at.terminated[index] = at.truncated[index] = False
        # Plain local lists and names: the loop runs once per env and step.
        next_step, keep_infos, summed = self._episodes.next_step, self._keep_infos, self._episodes.infos
        last_infos = at.last_infos
        kind: type = float  # of the previous reward
        began: list[int] = []  # rows that this step resets
        ended: list[int] = []  # rows whose episode ends and whose next episode begins, both in this step
        skipped: list[int] = []  # rows that the parent writes later
        infos: list[tuple[int, dict[str, Any]]] = []
        first_env = self.first_env
        i = 0
        try:
            for i, env, action in zip(rows, envs, self._actions(at, actions, index), strict=True):
                if next_step[i]:
                    if next_step[i] == SKIPS:
                        rewards[i], next_step[i] = 0.0, BEGINS
                        skipped.append(i)
                        continue
                    observation, info = self._begin_episode(at, i, began)
                else:
                    observation, reward, terminated, truncated, info = env.step(action)
                    if type(reward) is not kind:
                        if type(reward) in NUMBERS:
                            kind = type(reward)
                        else:
                            reward = self._checked("reward", reward, checks.number, i)
                    try:
                        rewards[i] = reward
                    except (ValueError, OverflowError):  # an int too large for a float64
                        self._checked("reward", reward, checks.number, i)
                        raise
                    match info:
                        case {}:  # any mapping; 20 ns faster than `type(info) is dict`, which is 3% of an empty step
                            pass
                        case _:
                            self._checked("info", info, checks.check_info, i)
                    for key in summed or ():
                        if (value := episode_infos.find(info, key)) is not episode_infos.MISSING:
                            self._episodes.add_info(key, i, self._info_number(key, value, i))
                    for key, column in last_infos:
                        column[i] = episode_infos.number_so_far(episode_infos.find(info, key))
                    if (terminated is not False and terminated is not FALSE) or (
                        truncated is not False and truncated is not FALSE
                    ):
                        at.terminated[i] = terminated = self._checked("terminated", terminated, checks.flag, i)
                        at.truncated[i] = truncated = self._checked("truncated", truncated, checks.flag, i)
                        if terminated or truncated:
                            observation, info = self._end_episode(at, i, observation, info, ended)
                write(i, observation)
                if info and keep_infos:
                    # Copied before another env is stepped, which may share objects with this one.
                    infos.append((first_env + i, copied(info)))
        except BaseException as error:
            self._blame(error, i, "step")
            raise
        self._episodes.write_infos(at.summed_infos, index)
        self._episodes.count(at.columns, index, began, ended)
        if self._checks_finite:
            written = [i for i in rows if i not in skipped] if skipped else index
            self._guarded(None, "step", self._check_finite, at, written, ended)
        return self._objects_of(infos) if infos or self._object_leaves else NO_OBJECTS

    def step_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> Iterator[tuple[list[int], StepObjects]]:
        for row, action in orders:
            yield [row], self.step(slot, action, range(row, row + 1))

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        (own_arguments,) = self._copiers([(args, kwargs)])

        def one(env: gym.Env) -> Any:
            args, kwargs = own_arguments()
            attribute = getattr(env, "get_wrapper_attr", partial(getattr, env))(name)
            result = attribute(*args, **kwargs) if callable(attribute) else attribute
            return copied(result) if name == "render" else result  # the env may draw its next frame into the same array

        return self.apply(one, self._every_row, f"call({name!r})")

    def apply(self, function: Callable[[gym.Env], Any], rows: Iterable[int], doing: str = "apply") -> list[Any]:
        return [self._guarded(i, doing, function, self.envs[i]) for i in rows]

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        def one(env: gym.Env, value: Callable[[], Any]) -> None:
            getattr(env, "set_wrapper_attr", partial(setattr, env))(name, value())

        for i, (env, value) in enumerate(zip(self.envs, self._copiers(values), strict=True)):
            self._guarded(i, f"set_attr({name!r})", one, env, value)

    def get_state(self) -> list[dict[str, Any]]:
        return [self._state_of_row(i, self._guarded(i, "get_state", state_of, env)) for i, env in enumerate(self.envs)]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        for check in (check_classes, restore):  # no env changes if one is of another class
            for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
                self._guarded(i, "set_state", check, env, state["env"])
        self._restore_rows(states)
        self._objects_of([])

    def close(self) -> None:
        first_error = None
        for i, env in enumerate(self.envs):
            try:
                self._guarded(i, "close", getattr(env, "close", lambda: None))
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _blame(self, error: BaseException, row: int | None, doing: str) -> None:
        super()._blame(error, row, doing)
        if (advice := advice_on(error)) is not None:
            error.add_note(advice)

    def _copiers(self, values: Sequence[Any]) -> list[Callable[[], Any]]:
        """Returns a function for each value that returns the value itself, or a copy of it with `own_copies`."""
        if self._options.own_copies:
            return copiers(values)
        return [lambda value=value: value for value in values]  # type: ignore[misc]

    def _end_episode(
        self, at: _EnvSlot, i: int, observation: Any, info: dict[str, Any], ended: list[int]
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the observation and info of the last step of an episode. With SAME_STEP, resets the env."""
        for key, column in at.last_infos:
            column[i] = self._info_number(key, episode_infos.find(info, key), i)
        if not self._same_step:
            self._episodes.next_step[i] = BEGINS
            return observation, info
        at.write_final(i, observation)
        final_info = copied(info) if self._keep_infos else {}  # before the reset, which may return the same dict
        observation, reset_info = self._reset(i)
        ended.append(i)
        return observation, {"final_info": final_info, **reset_info}

    def _begin_episode(self, at: _EnvSlot, i: int, began: list[int]) -> tuple[Any, dict[str, Any]]:
        """Resets an env and returns the first observation and info of its next episode."""
        observation, info = self._reset(i)
        at.rewards[i], self._episodes.next_step[i] = 0.0, STEPS
        began.append(i)
        return observation, info

    def _reset(self, i: int, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        result = self.envs[i].reset(**arguments)
        if type(result) is not tuple or len(result) != 2:
            result = reset_result(self.envs[i], result)
        observation, info = result
        self._checked("info", info, checks.check_info, i, "reset")
        return observation, info

    def _actions(self, at: _EnvSlot, actions: Any, index: slice) -> Iterable[Any]:
        if index is not EVERY and all(begins := self._episodes.next_step[index]):
            return [None] * len(begins)  # no env is stepped, and after a restart there may be no actions
        given = actions is not None
        if not given:
            actions = at.copy_actions(index)
        if self._clip is not None:
            actions = self._clip(actions)
        if isinstance(actions, np.ndarray):
            return actions
        one_by_one = each(self._action_space, actions)
        # All are copied before the first is used, because an env may change an object that is in several actions.
        return [copied(action) for action in one_by_one] if given and self._options.own_copies else one_by_one

    def _objects_of(self, infos: list[tuple[int, dict[str, Any]]]) -> StepObjects:
        """Returns the infos of these envs and the new values of object leaves; clears these values."""
        leaves = {
            path: {self.first_env + row: value for row, value in rows.items()}
            for path, rows in self._object_leaves.items()
            if rows
        }
        for rows in self._object_leaves.values():
            rows.clear()
        return StepObjects(columns_of(infos), leaves) if infos or leaves else NO_OBJECTS


class _EnvSlot(Slot):
    write_final: Write  # exists with SAME_STEP

    def __init__(self, rows: EnvRows, views: dict[Path, np.ndarray]):
        space, first_env = rows._observation_space, rows.first_env
        super().__init__(views, space, rows._action_space)
        self.rewards: Any = views[layout.REWARD].data  # a memoryview sets single numbers faster than an array
        self.write = observation_writer(space, views, rows._object_leaves, layout.OBSERVATION, first_env)
        if rows._same_step:
            self.write_final = observation_writer(
                space, views, rows._object_leaves, layout.FINAL_OBSERVATION, first_env
            )


def _innermost(env: Any) -> Any:
    """Returns an env without its wrappers and without the adapter of a PettingZoo env."""
    inner = getattr(env, "unwrapped", env)
    return inner.get_wrapper_attr("unwrapped") if isinstance(inner, gym.Env) else inner


def _refuse_shared(env: Any, other: int) -> None:
    raise ValueError(
        f"the function returned {env}, which is also env {other}. Two envs that share their state would return wrong "
        "data: build a new env in each call, for example `lambda: gym.make(...)`."
    )
