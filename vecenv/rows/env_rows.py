"""EnvRows: steps a run of envs and writes their rows; the only home of autoreset of single envs.

The serial env and every worker run this same class; only the memory behind the arrays differs. For envs that are
stepped all in one call, and reset themselves, there is `batch_rows.BatchRows` with the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vecenv import spaces as tree
from vecenv.errors import EpisodeOver
from vecenv.memory import layout
from vecenv.rows import checks as results
from vecenv.rows.autoreset import EpisodeTotals
from vecenv.rows.checks import FALSE, NUMBERS
from vecenv.rows.conversion import as_float32, clipper, float_leaves, not_finite, unbounded
from vecenv.rows.info_memory import Infos, InfoWriter, Schema
from vecenv.rows.observations import observation_writer
from vecenv.rows.protocol import NO_OBJECTS, EnvDescription, EnvSpaces, ObjectLeaves, RowsOptions, StepObjects
from vecenv.spaces import Path
from vecenv.state import Packer, restore

RESTARTED = "worker_restarted"  # key of the info of an episode that was cut because its process died


def cut_info(reset_info: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the info of an episode that was cut; with SAME_STEP joined to that of the reset which followed."""
    info = {RESTARTED: True}
    return info if reset_info is None else {"final_info": info, **reset_info, **info}


class EnvRows:
    """The envs `first_env : first_env + n` and the rows of memory that they write.

    Construct it, read its spaces, `bind` it to memory of that layout, then reset and step.

    Args:
        env_fns: One function per env, without arguments.
        first_env: Index of the first env among all, for messages.
        options: See `RowsOptions`.

    Attributes:
        failure: `(env index, "reset" or "step" or ...)` of the last exception that an env raised.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        *,
        first_env: int = 0,
        options: RowsOptions = RowsOptions(),  # noqa: B008  # frozen
    ):
        self.first_env = first_env
        self.autoreset_mode = options.autoreset_mode
        self.failure: tuple[int | None, str] | None = None
        self.envs: list[gym.Env] = []
        for env_fn in env_fns:
            self.envs.append(self._guarded(len(self.envs), "construction", env_fn))
        env = self.envs[0]
        self._env_observation_space = env.observation_space
        self._clip = clipper(env.action_space) if options.clip_actions else None
        self._check_finite = options.float32_observations
        self._convert = (
            as_float32 if options.float32_observations else _as_it_is,
            unbounded if options.clip_actions else _as_it_is,
        )
        self.action_space = self._convert[1](env.action_space)
        self._infos = options.infos
        self._batched_action_space = batch_space(self.action_space, len(self.envs))
        self._slots: list[_Slot] = []
        self._last_slot = 0
        self._info_rows: InfoWriter | None = None
        self._loose: ObjectLeaves = {}  # new values of leaves that have no memory; empty where all have
        self._every_row = range(len(self.envs))
        self._waiting = [False] * len(self.envs)  # not to be stepped: the episode is over, or was cut
        self._cut: set[int] = set()  # of those, rows that have yet to tell that their episode was cut
        self._totals = EpisodeTotals(len(self.envs))

    def describe(self) -> EnvDescription:
        """Returns the spaces and properties of the envs."""
        runs: list[EnvSpaces] = []
        previous = None
        for i, env in enumerate(self.envs):
            if previous is None or (env.observation_space, env.action_space) != previous:
                previous = (env.observation_space, env.action_space)
                observed, acted = (convert(space) for convert, space in zip(self._convert, previous, strict=True))
                runs.append(EnvSpaces(self.first_env + i, observed, acted, env.action_space))
        first = self.envs[0]
        return EnvDescription(runs, dict(first.metadata), first.render_mode, steps_subsets=True)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy needs, which must then be bound to memory of its own."""
        return {**self.__dict__, "_slots": [], "_info_rows": None, "_loose": {}}

    def bind(self, views: Mapping[Path, np.ndarray]) -> None:
        """Takes the memory to write: every field's `[S, n, ...]` for these rows."""
        num_slots = len(views[layout.REWARD])
        self._slots = [_Slot(self, {path: view[slot] for path, view in views.items()}) for slot in range(num_slots)]

    def bind_infos(self, schema: Schema, views: Mapping[Path, np.ndarray]) -> None:
        """Takes the memory for infos of this schema; from now on `step` returns only others."""
        self._info_rows = InfoWriter(schema, views)

    def reset(
        self,
        slot: int,
        *,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None = None,
        mask: np.ndarray | None = None,
    ) -> StepObjects:
        """Resets the envs (of `mask: bool[n]` only, if given) and writes all rows of `slot`."""
        at = self._slots[slot]
        infos: Infos = []
        if self._info_rows is not None:
            self._info_rows.clear(slot)
        for i in self._every_row:
            if mask is not None and not mask[i]:
                at.carry_over(i, self._slots[self._last_slot])
                continue
            try:
                observation, info = self._reset(i, seed=seeds[i], options=options)
                at.write(i, observation)
            except BaseException as error:
                self._blame(error, i, "reset")
                raise
            at.rewards[i], at.terminated[i], at.truncated[i] = 0.0, False, False
            self._waiting[i] = False
            self._cut.discard(i)
            self._totals.begin(i)
            if info and self._infos:
                infos.append((i, info))
        self._totals.write(at.views)
        self._finish(slot, "reset", slice(None), [])
        return StepObjects(infos, self._take_loose()) if infos or self._loose else NO_OBJECTS

    def step(self, slot: int, actions: Any = None, only: Sequence[int] | None = None) -> StepObjects:
        """Steps every env with the actions that lie in `slot` and writes all its rows there.

        Args:
            slot: Where to read and to write.
            actions: A batch of actions to use instead, if theirs do not fit the memory.
            only: Rows to step, each once, if not all of them; `actions` are then theirs.
        """
        at = self._slots[slot]
        write, rewards = at.write, at.rewards
        rows, envs = (self._every_row, self.envs) if only is None else (only, [self.envs[i] for i in only])
        index: Any = slice(None) if only is None else list(only)
        at.terminated[index] = at.truncated[index] = False
        waiting, keep_infos = self._waiting, self._infos
        kind: type = float  # of the previous reward
        started: list[int] = []  # rows whose episode begins,
        ended: list[int] = []  # or ended and began again, in this step
        infos: Infos = []
        info_rows = self._info_rows
        if info_rows is not None:
            info_rows.clear(slot, index)
        i = 0
        try:
            for i, env, action in zip(rows, envs, self._actions(at, actions, index), strict=True):
                if waiting[i]:
                    if i in self._cut:
                        info = self._end_cut_episode(at, i, ended)
                        if keep_infos:
                            infos.append((i, info))
                        continue
                    observation, info = self._restart(at, i, started)
                else:
                    observation, reward, terminated, truncated, info = env.step(action)
                    if type(reward) is not kind:
                        if type(reward) in NUMBERS:
                            kind = type(reward)
                        else:
                            reward = self._checked("reward", reward, results.number, i)
                    try:
                        rewards[i] = reward
                    except (ValueError, OverflowError):  # an int that is too large for a float64
                        self._checked("reward", reward, results.number, i)
                        raise
                    match info:
                        case {}:  # any mapping; this is the fastest test for one
                            pass
                        case _:
                            self._checked("info", info, results.check_info, i)
                    if (terminated is not False and terminated is not FALSE) or (
                        truncated is not False and truncated is not FALSE
                    ):
                        at.terminated[i] = terminated = self._checked("terminated", terminated, results.flag, i)
                        at.truncated[i] = truncated = self._checked("truncated", truncated, results.flag, i)
                        if terminated or truncated:
                            observation, info = self._end_episode(at, i, observation, info, ended)
                write(i, observation)
                if info and keep_infos and (info_rows is None or not info_rows.write(slot, i, info)):
                    infos.append((i, info))
        except BaseException as error:
            self._blame(error, i, "step")
            raise
        self._totals.count(at.views, index, started, ended)
        self._finish(slot, "step", index, ended)
        return StepObjects(infos, self._take_loose()) if infos or self._loose else NO_OBJECTS

    def step_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> Iterator[tuple[list[int], StepObjects]]:
        """Steps some rows, each given with its action if that is not in memory; yields those that are done."""
        for row, action in orders:
            yield [row], self.step(slot, action, [row])

    def resume(self, slot: int, over: Sequence[bool]) -> None:
        """Takes the place of rows whose process died: their episodes are cut at the next step.

        Args:
            slot: Where the last good rows lie.
            over: Of each row, whether its episode was over already, so that there is none to cut.
        """
        self._last_slot = slot
        self._totals.resume(self._slots[slot].views)
        for i, env in enumerate(self.envs):
            self._guarded(i, "reset", env.reset)  # so that calls of its methods find it in order
        self._waiting = [True] * len(self.envs)
        self._cut = {i for i, is_over in enumerate(over) if not is_over}

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
        packer = Packer()
        return [
            {
                "waiting": self._waiting[i],
                "cut": i in self._cut,
                "totals": self._totals.of(i),
                "env": self._guarded(i, "get_state", packer.env, env),
            }
            for i, env in enumerate(self.envs)
        ]

    def set_state(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        """Restores what `get_state` returned; the rows' data is stored in `slot`."""
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            self._guarded(i, "set_state", restore, env, state["env"])
            self._waiting[i] = state["waiting"]
            self._totals.put(i, state["totals"])
        self._cut = {i for i, state in enumerate(states) if state["cut"]}
        self._last_slot = slot
        self._take_loose()

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
        """Returns what the step that ended an episode must report, after the reset that SAME_STEP requires."""
        if self.autoreset_mode != AutoresetMode.SAME_STEP:
            self._waiting[i] = True
            return observation, info
        at.write_final(i, observation)
        observation, reset_info = self._reset(i)
        ended.append(i)
        return observation, {"final_info": info, **reset_info}

    def _restart(self, at: _Slot, i: int, started: list[int]) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode, and returns its first observation and info."""
        if self.autoreset_mode == AutoresetMode.DISABLED:
            raise EpisodeOver("its episode is over: reset it with options={'reset_mask': ...}")
        observation, info = self._reset(i)
        at.rewards[i], self._waiting[i] = 0.0, False
        started.append(i)
        return observation, info

    def _reset(self, i: int, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.envs[i].reset(**arguments)
        self._checked("info", info, results.check_info, i, "reset")
        return observation, info

    def _checked(self, name: str, value: Any, check: Callable[[Any], Any], i: int, when: str | None = None) -> Any:
        """Returns the value that a check from `results` returns, or raises its error with env and step added."""
        try:
            return check(value)
        except TypeError as error:
            when = when or f"step {self._totals.of(i)[1] + 1} of its episode"
            raise TypeError(
                f"{name} of env {self.first_env + i} at {when} {error}. Fix what the env's reset() and step() return."
            ) from None

    def _end_cut_episode(self, at: _Slot, i: int, ended: list[int]) -> dict[str, Any]:
        """Truncates an episode whose env is gone, with its last good observation; returns the info."""
        self._cut.discard(i)
        last = self._slots[self._last_slot]
        info = cut_info(None)
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            at.carry_over(i, last, layout.FINAL_OBSERVATION)
            observation, reset_info = self._reset(i)
            at.write(i, observation)
            info = cut_info(reset_info)
            self._waiting[i] = False
            ended.append(i)
        else:
            at.carry_over(i, last)
        at.rewards[i], at.terminated[i], at.truncated[i] = 0.0, False, True
        self._totals.not_stepped(i)
        return info

    def _actions(self, at: _Slot, actions: Any, index: Any) -> Iterable[Any]:
        if isinstance(index, list) and self._cut.issuperset(index):
            return [None] * len(index)  # these are not stepped, and after a restart may have no action
        # A copy, because an env may keep its action (for a smoothness cost, say) beyond this step.
        if actions is None:
            actions = at.copy_actions(index)
        if self._clip is not None:
            actions = self._clip(actions)
        return actions if isinstance(actions, np.ndarray) else iterate(self._batched_action_space, actions)

    def _take_loose(self) -> ObjectLeaves:
        taken = {path: dict(values) for path, values in self._loose.items() if values}
        for values in self._loose.values():
            values.clear()
        return taken

    def _finish(self, slot: int, doing: str, index: Any, ended: list[int]) -> None:
        """Raises if observations, or the final ones of the rows that `ended`, are not finite as float32."""
        self._last_slot = slot
        if not self._check_finite:
            return
        at = self._slots[slot]
        fault = not_finite([(at.float_leaves, index), (at.final_float_leaves, ended)], self.first_env)
        if fault is not None:
            self._blame(fault[1], fault[0], doing)
            raise fault[1]

    def _guarded(self, i: int, doing: str, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except BaseException as error:
            self._blame(error, i, doing)
            raise

    def _blame(self, error: BaseException, i: int, doing: str) -> None:
        self.failure = (self.first_env + i, doing)
        error.add_note(f"raised by env {self.first_env + i} during {doing}")


class _Slot:
    """The rows of one slot, with everything that a step needs ready made."""

    def __init__(self, rows: EnvRows, views: dict[Path, np.ndarray]):
        self.rewards: Any = views[
            layout.REWARD
        ].data  # a memoryview, which takes a single number faster than an array does
        self.terminated = views[layout.TERMINATED]
        self.truncated = views[layout.TRUNCATED]
        self.float_leaves = float_leaves(views, layout.OBSERVATION)
        self.final_float_leaves = float_leaves(views, layout.FINAL_OBSERVATION)
        self.views = views
        self._action_space = rows.action_space
        self._only_action = views.get((layout.ACTION,))
        space = rows._env_observation_space
        self.write = observation_writer(space, views, rows._loose, layout.OBSERVATION, rows.first_env)
        if rows.autoreset_mode == AutoresetMode.SAME_STEP:
            self.write_final = observation_writer(space, views, rows._loose, layout.FINAL_OBSERVATION, rows.first_env)

    def copy_actions(self, index: Any) -> Any:
        if self._only_action is not None:
            return self._only_action.copy() if isinstance(index, slice) else self._only_action[index]
        return tree.nest(self._action_space, lambda path: self.views[(layout.ACTION, *path)][index].copy())

    def carry_over(self, i: int, previous: _Slot, to: str | None = None) -> None:
        """Copies a row of `previous`: all of it but the action; or its observation alone, into the field `to`."""
        for path, array in previous.views.items():
            if to is not None and path[0] == layout.OBSERVATION:
                self.views[(to, *path[1:])][i] = array[i]
            elif to is None and path[0] != layout.ACTION:
                self.views[path][i] = array[i]


def _as_it_is(space: gym.Space) -> gym.Space:
    return space
