"""rows.py: EnvRows: steps a run of envs and writes their rows; the only home of autoreset.

The serial env and every worker run this same class; only the memory behind the arrays differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate

from vecenv import layout
from vecenv.infos import InfoRows, Infos, Schema
from vecenv.layout import Path


class EnvRows:
    """The envs `first_env : first_env + n` and the rows of memory that they write.

    Construct it, read its spaces, `bind` it to memory of that layout, then reset and step.

    Args:
        env_fns: One function per env, without arguments.
        first_env: Index of the first env among all, for messages.
        autoreset_mode: What happens after the last step of an episode.
        clip_actions: Clip Box actions to the env's bounds, all rows in one call, and offer an
            unbounded action space, as `gymnasium.wrappers.ClipAction` does.
        float32_observations: Write float64 observations as float32. Values that are not finite raise.
        infos: Whether to hand on the envs' infos, or to drop them.

    Attributes:
        failure: `(env index, "reset" or "step" or ...)` of the last exception that an env raised.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]],
        *,
        first_env: int = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        clip_actions: bool = False,
        float32_observations: bool = False,
        infos: bool = True,
    ):
        self.first_env = first_env
        self.autoreset_mode = autoreset_mode
        self.failure: tuple[int, str] | None = None
        self.envs: list[gym.Env] = []
        for env_fn in env_fns:
            self._guarded(len(self.envs), "construction", lambda make=env_fn: self.envs.append(make()))
        self._check_spaces()
        env = self.envs[0]
        self._env_observation_space = env.observation_space
        self.observation_space = _as_float32(env.observation_space) if float32_observations else env.observation_space
        self.action_space = _unbounded(env.action_space) if clip_actions else env.action_space
        self._clip = _clipper(env.action_space) if clip_actions else None
        self._check_finite = float32_observations
        self._infos = infos
        self._batched_action_space = batch_space(self.action_space, len(self.envs))
        self._slots: list[_Slot] = []
        self._last_slot = 0
        self._info_rows: InfoRows | None = None
        self._needs_reset = [False] * len(self.envs)
        self._returns = np.zeros(len(self.envs), dtype=np.float64)
        self._lengths = np.zeros(len(self.envs), dtype=np.int64)

    def bind(self, views: Mapping[Path, np.ndarray]) -> None:
        """Takes the memory to write: every field's `[S, n, ...]` for these rows."""
        num_slots = len(views[layout.REWARD])
        self._slots = [_Slot(self, {path: view[slot] for path, view in views.items()}) for slot in range(num_slots)]

    def bind_infos(self, schema: Schema, views: Mapping[Path, np.ndarray]) -> None:
        """Takes the memory for infos of this schema; from now on `step` returns only others."""
        self._info_rows = InfoRows(schema, views)

    def reset(
        self,
        slot: int,
        *,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None = None,
        mask: np.ndarray | None = None,
    ) -> Infos:
        """Resets the envs (of `mask: bool[n]` only, if given) and writes all rows of `slot`."""
        at = self._slots[slot]
        infos: Infos = []
        if self._info_rows is not None:
            self._info_rows.clear(slot)
        for i, env in enumerate(self.envs):
            if mask is not None and not mask[i]:
                at.carry_over(i, self._slots[self._last_slot])
                continue
            try:
                observation, info = env.reset(seed=seeds[i], options=options)
                at.write(i, observation)
            except BaseException as error:
                self._blame(error, i, "reset")
                raise
            at.rewards[i], at.terminated[i], at.truncated[i] = 0.0, False, False
            self._needs_reset[i] = False
            self._returns[i], self._lengths[i] = 0.0, 0
            if info and self._infos:
                infos.append((i, info))
        at.episode_returns[:] = self._returns
        at.episode_lengths[:] = self._lengths
        self._finish(slot, "reset", [])
        return infos

    def step(self, slot: int, actions: Any = None) -> Infos:
        """Steps every env with the actions that lie in `slot` and writes all its rows there.

        Args:
            slot: Where to read and to write.
            actions: A batch of actions to use instead, if theirs is not the dtype of the memory.
        """
        at = self._slots[slot]
        write, rewards = at.write, at.rewards
        at.terminated[:] = False
        at.truncated[:] = False
        waiting, keep_infos = self._needs_reset, self._infos
        started, ended = [], []  # rows whose episode begins, or ended and began again, in this step
        infos: Infos = []
        info_rows = self._info_rows
        if info_rows is not None:
            info_rows.clear(slot)
        i = 0
        try:
            for i, (env, action) in enumerate(zip(self.envs, self._actions(at, actions), strict=True)):
                if waiting[i]:
                    observation, info = self._restart(env)
                    rewards[i] = 0.0
                    waiting[i] = False
                    started.append(i)
                else:
                    observation, rewards[i], terminated, truncated, info = env.step(action)
                    if terminated or truncated:
                        at.terminated[i], at.truncated[i] = terminated, truncated
                        if self.autoreset_mode == AutoresetMode.SAME_STEP:
                            at.write_final(i, observation)
                            observation, reset_info = env.reset()
                            info = {"final_info": info, **reset_info}
                            ended.append(i)
                        else:
                            waiting[i] = True
                write(i, observation)
                if info and keep_infos and (info_rows is None or not info_rows.write(slot, i, info)):
                    infos.append((i, info))
        except BaseException as error:
            self._blame(error, i, "step")
            raise
        self._count(at, started, ended)
        self._finish(slot, "step", ended)
        return infos

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Calls the method, or reads the attribute, `name` of every env."""

        def one(env: gym.Env) -> Any:
            attribute = env.get_wrapper_attr(name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        return [self._guarded(i, f"call({name!r})", lambda env=env: one(env)) for i, env in enumerate(self.envs)]

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets the attribute `name` of each env to its value."""
        for i, (env, value) in enumerate(zip(self.envs, values, strict=True)):
            self._guarded(i, f"set_attr({name!r})", lambda env=env, value=value: env.set_wrapper_attr(name, value))

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

    def _restart(self, env: gym.Env) -> tuple[Any, dict[str, Any]]:
        if self.autoreset_mode == AutoresetMode.DISABLED:
            raise gym.error.ResetNeeded("its episode is over: reset it with options={'reset_mask': ...}")
        return env.reset()

    def _actions(self, at: _Slot, actions: Any) -> Iterable[Any]:
        # A copy, because an env may keep its action (for a smoothness cost, say) beyond this step.
        if actions is None:
            actions = at.copy_actions()
        if self._clip is not None:
            actions = self._clip(actions)
        return actions if isinstance(actions, np.ndarray) else iterate(self._batched_action_space, actions)

    def _count(self, at: _Slot, started: list[int], ended: list[int]) -> None:
        """Writes the running return and length of each episode; a last step shows the totals."""
        self._returns += at.rewards
        self._lengths += 1
        if started:
            self._returns[started] = 0.0
            self._lengths[started] = 0
        at.episode_returns[:] = self._returns
        at.episode_lengths[:] = self._lengths
        if ended:
            self._returns[ended] = 0.0
            self._lengths[ended] = 0

    def _finish(self, slot: int, doing: str, ended: list[int]) -> None:
        """Raises if observations, or the final ones of the rows that `ended`, are not finite as float32."""
        self._last_slot = slot
        if not self._check_finite:
            return
        at = self._slots[slot]
        for leaves, rows in ((at.float_leaves, None), (at.final_float_leaves, ended)):
            for name, column in leaves if rows is None or rows else ():
                values = column if rows is None else column[rows]
                if not np.isfinite(values).all():
                    first = int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1)))
                    i = first if rows is None else rows[first]
                    error = ValueError(
                        f"{name} of env {self.first_env + i} is not finite (as float32): {column[i]!r}. "
                        "Mend the env, or clip what it returns, before training on it."
                    )
                    self._blame(error, i, doing)
                    raise error

    def _check_spaces(self) -> None:
        first = self.envs[0]
        for i, env in enumerate(self.envs):
            for kind in ("observation_space", "action_space"):
                ours, theirs = getattr(env, kind), getattr(first, kind)
                if ours != theirs:
                    raise RuntimeError(different_spaces(kind, self.first_env + i, ours, self.first_env, theirs))

    def _guarded(self, i: int, doing: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:
            self._blame(error, i, doing)
            raise

    def _blame(self, error: BaseException, i: int, doing: str) -> None:
        self.failure = (self.first_env + i, doing)
        error.add_note(f"raised by env {self.first_env + i} during {doing}")


class _Slot:
    """The rows of one slot, with everything that a step needs ready made."""

    def __init__(self, rows: EnvRows, views: dict[Path, np.ndarray]):
        self.rewards = views[layout.REWARD]
        self.terminated = views[layout.TERMINATED]
        self.truncated = views[layout.TRUNCATED]
        self.episode_returns = views[layout.EPISODE_RETURN]
        self.episode_lengths = views[layout.EPISODE_LENGTH]
        self.float_leaves = _float_leaves(views, layout.OBSERVATION)
        self.final_float_leaves = _float_leaves(views, layout.FINAL_OBSERVATION)
        self._views = views
        self._action_space = rows.action_space
        self._only_action = views.get((layout.ACTION,))
        space = rows._env_observation_space
        self.write = _writer(space, views, layout.OBSERVATION, rows.first_env)
        if rows.autoreset_mode == AutoresetMode.SAME_STEP:
            self.write_final = _writer(space, views, layout.FINAL_OBSERVATION, rows.first_env)

    def copy_actions(self) -> Any:
        if self._only_action is not None:
            return self._only_action.copy()
        return layout.nest(self._action_space, lambda path: self._views[(layout.ACTION, *path)].copy())

    def carry_over(self, i: int, previous: _Slot) -> None:
        for path, array in self._views.items():
            if path[0] != layout.ACTION:
                array[i] = previous._views[path][i]


def _float_leaves(views: Mapping[Path, np.ndarray], name: str) -> list[tuple[str, np.ndarray]]:
    """Returns the leaves of floats of one field, with names for messages."""
    return [
        (name + "".join(f"[{key!r}]" for key in path[1:]), array)
        for path, array in views.items()
        if path[0] == name and array.dtype.kind == "f"
    ]


def different_spaces(kind: str, env: int, space: gym.Space, first_env: int, first_space: gym.Space) -> str:
    """Returns the message for two envs whose spaces differ."""
    return (
        f"the {kind} of env {env} differs from that of env {first_env}: {space} against {first_space}. "
        "All envs of one vector env need equal spaces: make them so, or use one vector env for each kind."
    )


def _writer(
    space: gym.Space, views: Mapping[Path, np.ndarray], name: str, first_env: int
) -> Callable[[int, Any], None]:
    """Returns `write(row, observation)`, which copies an observation into memory after checking it."""
    writers = [(path, _leaf_writer(leaf, views[(name, *path)], path, first_env)) for path, leaf in layout.leaves(space)]
    if len(writers) == 1 and writers[0][0] == ():
        return writers[0][1]

    def write(i: int, observation: Any) -> None:
        for path, write_leaf in writers:
            try:
                value = layout.pick(observation, path)
            except (KeyError, IndexError, TypeError) as error:
                where = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"env {first_env + i} returned an observation without {where}, which its observation space has"
                ) from error
            write_leaf(i, value)

    return write


def _leaf_writer(space: gym.Space, array: np.ndarray, path: Path, first_env: int) -> Callable[[int, Any], None]:
    dtype, shape = np.dtype(space.dtype), array.shape[1:]
    rows = [array[i, ...] for i in range(len(array))]

    def write(i: int, value: Any) -> None:
        # Without this check numpy would stretch a value of shape (1,) over the row in silence.
        if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
            value = _checked(value, dtype, shape, path, first_env + i)
        rows[i][...] = value

    return write


def _checked(value: Any, dtype: np.dtype, shape: tuple[int, ...], path: Path, env: int) -> np.ndarray:
    """Returns `value` as an array that fits, or raises an error that names env and key."""
    name = "".join(["observation", *(f"[{key!r}]" for key in path)])
    given = np.asarray(value)
    if given.shape != shape:
        raise ValueError(
            f"{name} of env {env} has shape {given.shape}, but its space says {shape}. "
            "Mend the env's observation_space or what its reset() and step() return."
        )
    if given.dtype == dtype or np.can_cast(given.dtype, dtype, "same_kind"):
        return given
    converted = given.astype(dtype) if given.dtype.kind in "biuf" else None
    if converted is None or not np.array_equal(converted, given):
        raise TypeError(
            f"{name} of env {env} has dtype {given.dtype}, which does not fit its space's {dtype} without loss. "
            "Mend the env's observation_space or what its reset() and step() return."
        )
    return converted


def _as_float32(space: gym.Space) -> gym.Space:
    """Returns the space with every float64 Box in it turned into a float32 one."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _as_float32(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_as_float32(child) for child in space.spaces])
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
    return space


def _unbounded(space: gym.Space) -> gym.Space:
    """Returns the space with every float Box in it freed of its bounds."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _unbounded(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_unbounded(child) for child in space.spaces])
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return spaces.Box(-np.inf, np.inf, space.shape, space.dtype)
    return space


def _clipper(space: gym.Space) -> Callable[[Any], Any]:
    """Returns a function that clips a batch of actions to the bounds of `space`."""
    bounds = {path: leaf for path, leaf in layout.leaves(space) if isinstance(leaf, spaces.Box)}

    def clip(actions: Any) -> Any:
        def leaf(path: Path) -> Any:
            value = layout.pick(actions, path)
            return np.clip(value, bounds[path].low, bounds[path].high) if path in bounds else value

        return layout.nest(space, leaf)

    return clip
