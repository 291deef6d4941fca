"""EnvRows: steps the envs of a run one by one, resets them, and writes their rows.

Workers and the parent use the same class, with different memory behind the arrays. `BatchRows` has the same methods for
envs that a vector env steps in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vecenv import spaces as tree
from vecenv.memory import layout
from vecenv.rows import agents, checks, episode_infos
from vecenv.rows.actions import clipper, unbounded
from vecenv.rows.autoreset import Episodes, cut_info
from vecenv.rows.checks import FALSE, NUMBERS
from vecenv.rows.info_memory import Infos, InfoWriter, Schema
from vecenv.rows.observations import FloatLeaves, as_float32, observation_writer
from vecenv.rows.other_apis import advice_on, check_env, reset_result
from vecenv.rows.protocol import NO_OBJECTS, EnvDescription, EnvSpaces, ObjectLeaves, RowsOptions, StepObjects
from vecenv.spaces import Path
from vecenv.state import Packer, restore


class EnvRows:
    """The envs `first_env : first_env + n` and the rows of memory that they write.

    Construct it, read its spaces with `describe`, `bind` it to memory that has a field for each leaf of these spaces,
    then reset and step.

    Args:
        env_fns: One function without arguments per env.
        first_env: Index of the first env among all envs of the vector env, for messages.
        options: See `RowsOptions`.

    Attributes:
        failure: For the last exception that an env raised: the env index and the operation, such as "step".
        envs: The envs.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        *,
        first_env: int = 0,
        options: RowsOptions = RowsOptions(),  # noqa: B008  # frozen
    ):
        self.first_env = first_env
        self.failure: tuple[int | None, str] | None = None
        self.envs: list[gym.Env] = []
        for env_fn in env_fns:
            env = self._guarded(len(self.envs), "construction", env_fn)
            self._guarded(len(self.envs), "construction", check_env, env)
            self.envs.append(env)
        env = self.envs[0]
        self._env_observation_space = env.observation_space
        self._options = options
        self._keep_infos, self._check_finite = options.infos, options.finite_observations
        self._clip = clipper(env.action_space) if options.clip_actions else None
        self._action_space = unbounded(env.action_space) if options.clip_actions else env.action_space
        self._batched_action_space = batch_space(self._action_space, len(self.envs))
        self._slots: list[_Slot] = []
        self._last_slot = 0
        self._info_writer: InfoWriter | None = None
        self._objects: ObjectLeaves = {}  # new values of leaves without memory; empty if there are no such leaves
        self._every_row = range(len(self.envs))
        self._episodes = Episodes(options.autoreset_mode, waiting=[False] * len(self.envs))

    def describe(self) -> EnvDescription:
        """Returns the spaces and properties of the envs."""
        runs: list[EnvSpaces] = []
        previous = None
        for i, env in enumerate(self.envs):
            if (env.observation_space, env.action_space) != previous:
                previous = observed, acted = env.observation_space, env.action_space
                if self._options.float32_observations:
                    observed = as_float32(observed)
                if self._options.clip_actions:
                    acted = unbounded(acted)
                runs.append(EnvSpaces(self.first_env + i, observed, acted, env.action_space))
        first = self.envs[0]
        for i, env in enumerate(self.envs):
            agents.check_groups(first.metadata, env.metadata, self.first_env + i)
        fields = {path: (array.dtype, array.shape) for path, array in _agent_fields(first).items()}
        return EnvDescription(
            runs, dict(first.metadata or {}), first.render_mode, steps_subsets=True, agent_fields=fields
        )

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, which must be bound to its own memory."""
        return {**self.__dict__, "_slots": [], "_info_writer": None, "_objects": {}}

    def bind(self, views: Mapping[Path, np.ndarray]) -> None:
        """Sets the memory to write: every field's `[S, n, ...]` for these rows."""
        num_slots = len(views[layout.REWARD])
        self._slots = [_Slot(self, {path: view[slot] for path, view in views.items()}) for slot in range(num_slots)]

    def bind_infos(self, schema: Schema, views: Mapping[Path, np.ndarray]) -> None:
        """Sets the memory for infos of this schema; from now on `step` returns only infos that do not fit it."""
        self._info_writer = InfoWriter(schema, views)

    def reset(
        self,
        slot: int,
        *,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None = None,
        mask: np.ndarray | None = None,
    ) -> StepObjects:
        """Resets every env, or the envs in `mask: bool[n]`, and writes all rows of `slot`."""
        at, keep_infos = self._slots[slot], self._keep_infos
        began: list[int] = []
        infos: Infos = []
        if self._info_writer is not None:
            self._info_writer.clear(slot)
        for i in self._every_row:
            if mask is not None and not mask[i]:
                at.carry_over(i, self._slots[self._last_slot])
                continue
            try:
                observation, info = self._reset(i, seed=seeds[i], options=options)
                at.write(i, observation)
                at.write_agents(i, self.envs[i])
            except BaseException as error:
                self._blame(error, i, "reset")
                raise
            at.rewards[i], at.terminated[i], at.truncated[i] = 0.0, False, False
            began.append(i)
            if info and keep_infos:
                infos.append((i, info))
        self._episodes.begin(began)
        self._episodes.write_totals(at.views)
        self._finish(slot, "reset", slice(None), [])
        return StepObjects(infos, self._new_objects()) if infos or self._objects else NO_OBJECTS

    def step(self, slot: int, actions: Any = None, only: Sequence[int] | None = None) -> StepObjects:
        """Steps every env with the actions stored in `slot` and writes all rows there.

        Args:
            slot: The slot to read and write.
            actions: A batch of actions to use instead of the actions in memory.
            only: Distinct rows to step, with `actions` for these rows; None for all rows.
        """
        at = self._slots[slot]
        write, rewards, has_agents = at.write, at.rewards, bool(at.agents)
        rows, envs = (self._every_row, self.envs) if only is None else (only, [self.envs[i] for i in only])
        index: Any = slice(None) if only is None else list(only)
        at.terminated[index] = at.truncated[index] = False
        # Plain local lists and names: the loop runs once per env and step.
        waiting, keep_infos = self._episodes.waiting, self._keep_infos
        kind: type = float  # of the previous reward
        began: list[int] = []  # rows that this step resets
        ended: list[int] = []  # rows whose episode ends and whose next episode begins, both in this step
        infos: Infos = []
        info_writer = self._info_writer
        if info_writer is not None:
            info_writer.clear(slot, index)
        i = 0
        try:
            for i, env, action in zip(rows, envs, self._actions(at, actions, index), strict=True):
                if waiting[i]:
                    if i in self._episodes.cut:
                        info = self._report_cut(at, i, ended)
                        if keep_infos:
                            infos.append((i, info))
                        continue
                    observation, info = self._begin_episode(at, i, began)
                else:
                    observation, reward, terminated, truncated, info = env.step(action)
                    if type(reward) is not kind:
                        if type(reward) in NUMBERS:
                            kind = type(reward)
                        else:
                            reward = self._checked("reward", reward, checks.number, i)
                    if has_agents:
                        at.write_agents(i, env, observation)
                    try:
                        rewards[i] = reward
                    except (ValueError, OverflowError):  # an int too large for a float64
                        self._checked("reward", reward, checks.number, i)
                        raise
                    match info:
                        case {}:  # matches any mapping, and is the fastest such test
                            pass
                        case _:
                            self._checked("info", info, checks.check_info, i)
                    if (terminated is not False and terminated is not FALSE) or (
                        truncated is not False and truncated is not FALSE
                    ):
                        at.terminated[i] = terminated = self._checked("terminated", terminated, checks.flag, i)
                        at.truncated[i] = truncated = self._checked("truncated", truncated, checks.flag, i)
                        if terminated or truncated:
                            observation, info = self._end_episode(at, i, observation, info, ended)
                write(i, observation)
                if info and keep_infos and (info_writer is None or not info_writer.write(slot, i, info)):
                    infos.append((i, info))
        except BaseException as error:
            self._blame(error, i, "step")
            raise
        self._episodes.count(at.views, index, began, ended)
        self._finish(slot, "step", index, ended)
        return StepObjects(infos, self._new_objects()) if infos or self._objects else NO_OBJECTS

    def step_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> Iterator[tuple[list[int], StepObjects]]:
        """Steps rows, each with its action, or None if the action is stored in memory; yields rows as they finish."""
        for row, action in orders:
            yield [row], self.step(slot, action, [row])

    def resume(self, slot: int, over: Sequence[bool]) -> None:
        """Takes over rows whose process died. Their episodes are truncated at the next step.

        Args:
            slot: The slot with the last good rows.
            over: Whether each row's episode was already over and therefore cannot be cut.
        """
        self._last_slot = slot
        self._episodes.resume(self._slots[slot].views, over)
        for i, env in enumerate(self.envs):
            self._guarded(i, "reset", env.reset)  # `call` and `apply` may use the env before the next step

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Calls the method, or reads the attribute, `name` of every env."""

        def one(env: gym.Env) -> Any:
            attribute = env.get_wrapper_attr(name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        return self.apply(one, self._every_row, f"call({name!r})")

    def apply(self, function: Callable[[gym.Env], Any], rows: Iterable[int], doing: str = "apply") -> list[Any]:
        """Calls `function(env)` for the envs of these rows."""
        return [self._guarded(i, doing, function, self.envs[i]) for i in rows]

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets the attribute `name` of each env to its value."""
        for i, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            self._guarded(i, f"set_attr({name!r})", lambda env, value: env.set_wrapper_attr(name, value), env, value)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env, its wrappers and its row, as plain values."""
        packer, episodes = Packer(), self._episodes
        return [
            {
                "waiting": episodes.waiting[i],
                "cut": i in episodes.cut,
                "totals": episodes.totals(i),
                "env": self._guarded(i, "get_state", packer.env, env),
            }
            for i, env in enumerate(self.envs)
        ]

    def set_state(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned. The rows' data is already stored in `slot`."""
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            self._guarded(i, "set_state", restore, env, state["env"])
            self._episodes.waiting[i] = state["waiting"]
            self._episodes.restore_totals(i, state["totals"])
        self._episodes.cut = {i for i, state in enumerate(states) if state["cut"]}
        self._last_slot = slot
        self._new_objects()

    def close(self) -> None:
        """Closes every env, then raises the first exception that one of them raised."""
        first_error = None
        for i, env in enumerate(self.envs):
            try:
                self._guarded(i, "close", env.close)
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _end_episode(
        self, at: _Slot, i: int, observation: Any, info: dict[str, Any], ended: list[int]
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the observation and info of the last step of an episode. With SAME_STEP, resets the env."""
        for key, column in at.episode_infos:
            value = episode_infos.find(info, key)
            column[i] = self._checked(f"info {key!r}", value, episode_infos.number, i)
        if self._episodes.autoreset_mode != AutoresetMode.SAME_STEP:
            self._episodes.waiting[i] = True
            return observation, info
        at.write_final(i, observation)
        observation, reset_info = self._reset(i)
        ended.append(i)
        return observation, {"final_info": info, **reset_info}

    def _begin_episode(self, at: _Slot, i: int, began: list[int]) -> tuple[Any, dict[str, Any]]:
        """Resets the env of a waiting row; returns the first observation and info of its next episode."""
        self._episodes.assert_autoreset()
        observation, info = self._reset(i)
        at.rewards[i], self._episodes.waiting[i] = 0.0, False
        at.write_agents(i, self.envs[i])
        began.append(i)
        return observation, info

    def _report_cut(self, at: _Slot, i: int, ended: list[int]) -> dict[str, Any]:
        """Writes the row of a cut episode, and with SAME_STEP the first observation of the next; returns the info."""
        last = self._slots[self._last_slot].views
        begins = self._episodes.report_cut(at.views, last, i)
        agents.report_cut(at.views, last, i, begins=begins)
        if not begins:
            return cut_info(None)
        observation, reset_info = self._reset(i)
        at.write(i, observation)
        ended.append(i)
        return cut_info(reset_info)

    def _reset(self, i: int, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        result = self.envs[i].reset(**arguments)
        if type(result) is not tuple or len(result) != 2:
            result = reset_result(self.envs[i], result)
        observation, info = result
        self._checked("info", info, checks.check_info, i, "reset")
        return observation, info

    def _checked(self, name: str, value: Any, check: Callable[[Any], Any], i: int, when: str | None = None) -> Any:
        """Returns `check(value)`, or raises its error with the env and the step added."""
        try:
            return check(value)
        except TypeError as error:
            when = when or f"step {self._episodes.totals(i)[1] + 1} of its episode"
            raise TypeError(
                f"{name} of env {self.first_env + i} at {when} {error}. Fix what the env's reset() and step() return."
            ) from None

    def _actions(self, at: _Slot, actions: Any, index: Any) -> Iterable[Any]:
        if isinstance(index, list) and self._episodes.cut.issuperset(index):
            return [None] * len(index)  # no env is stepped, and after a restart there may be no actions
        # A copy, because an env may keep its action beyond this step, for example for a smoothness cost.
        if actions is None:
            actions = at.copy_actions(index)
        if self._clip is not None:
            actions = self._clip(actions)
        return actions if isinstance(actions, np.ndarray) else iterate(self._batched_action_space, actions)

    def _new_objects(self) -> ObjectLeaves:
        """Returns the new values of leaves that have no memory, and clears them."""
        values = {path: dict(rows) for path, rows in self._objects.items() if rows}
        for rows in self._objects.values():
            rows.clear()
        return values

    def _finish(self, slot: int, doing: str, index: Any, ended: list[int]) -> None:
        """Raises if observations, or the final observations of the rows in `ended`, are not finite."""
        self._last_slot = slot
        if not self._check_finite:
            return
        fault = self._slots[slot].floats.not_finite(index, ended)
        if fault is not None:
            self._blame(fault.error, fault.row, doing)
            raise fault.error

    def _guarded(self, i: int, doing: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except BaseException as error:
            self._blame(error, i, doing)
            raise

    def _blame(self, error: BaseException, i: int, doing: str) -> None:
        self.failure = (self.first_env + i, doing)
        if (advice := advice_on(error)) is not None:
            error.add_note(advice)
        error.add_note(f"raised by env {self.first_env + i} during {doing}")


class _Slot:
    """The rows of one slot, with everything that a step needs precomputed."""

    def __init__(self, rows: EnvRows, views: dict[Path, np.ndarray]):
        self.rewards: Any = views[layout.REWARD].data  # a memoryview sets single numbers faster than an array
        self.terminated = views[layout.TERMINATED]
        self.truncated = views[layout.TRUNCATED]
        self.floats = FloatLeaves(views, rows.first_env)
        self.views = views
        self.episode_infos = list(episode_infos.columns(views).items())
        self.agents = [(path, view) for path, view in views.items() if path[0] == layout.AGENT]
        self._action_space = rows._action_space
        self._only_action = views.get((layout.ACTION,))
        space = rows._env_observation_space
        self.write = observation_writer(space, views, rows._objects, layout.OBSERVATION, rows.first_env)
        self.write_final: Any = None
        if rows._options.autoreset_mode == AutoresetMode.SAME_STEP:
            self.write_final = observation_writer(space, views, rows._objects, layout.FINAL_OBSERVATION, rows.first_env)

    def copy_actions(self, index: Any) -> Any:
        if self._only_action is not None:
            return self._only_action.copy() if isinstance(index, slice) else self._only_action[index]
        return tree.nest(self._action_space, lambda path: self.views[(layout.ACTION, *path)][index].copy())

    def write_agents(self, i: int, env: Any, observation: Any = None) -> None:
        """Writes the results of each agent, if there are several.

        Args:
            i: The row of the env.
            env: The env, which is or wraps an `agents.MultiAgentEnv` if there are several agents.
            observation: The observation of the step, which becomes the final observation of the agents whose episodes
                ended. None after a reset.
        """
        for path, view in self.agents:
            view[i] = env.unwrapped.agent_fields[path]
        if self.agents and observation is not None and self.write_final is not None and env.unwrapped.some_ended:
            self.write_final(i, observation)

    def carry_over(self, i: int, previous: _Slot) -> None:
        """Copies a row of the previous slot, except its action."""
        for path, array in previous.views.items():
            if path[0] != layout.ACTION:
                self.views[path][i] = array[i]


def _agent_fields(env: Any) -> dict[Path, np.ndarray]:
    """Returns the fields of an env with several agents, and {} for any other env."""
    return env.unwrapped.agent_fields if agents.GROUPS in (env.metadata or {}) else {}
