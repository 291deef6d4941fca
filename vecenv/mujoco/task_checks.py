"""Checks of everything that passes between a task and its vector env: actions, outputs of methods, simulations.

Outputs of custom tasks are also copied, because they may be views of data that the next step changes, or arrays that
the task reuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces

from vecenv import tree
from vecenv.errors import StateError
from vecenv.mujoco.episodes import Infos
from vecenv.mujoco.physics import INPUTS, Physics
from vecenv.rows.checks import shown


class InvalidRow(ValueError):
    """Values of one env are invalid. `vecenv_row` is its index in this vector env; see `Rows._blame`."""

    def __init__(self, message: str, row: int = 0):  # the default is for unpickling
        super().__init__(message)
        self.vecenv_row = row


class Outcome(NamedTuple):
    """The checked result of a task's `outcome`.

    Attributes:
        rewards: `float64[N]`, which the caller owns.
        terms: The terms of the rewards, `float64[N]`, if the task returned terms.
        terminated: `bool[N]`, which the caller owns.
        truncated: `bool[N]`, or None if the task does not truncate episodes itself.
        infos: `[N, ...]` for each key, which the caller owns; none if they are not wanted.
    """

    rewards: np.ndarray
    terms: dict[str, np.ndarray]
    terminated: np.ndarray
    truncated: np.ndarray | None
    infos: Infos


_RESETS = slice(mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADQACC + 1)
"""The warnings after which MuJoCo resets a simulation to the model's defaults: positions, velocities, accelerations."""


class TaskChecks:
    """Checks the values of a task. Every error names the method that returned or wrote an invalid value.

    Args:
        name: The name of the task's class, for messages.
        num_envs: N.
        physics: The simulations of the task.
        trusted: Whether the task is one of Gymnasium's in this package. Its methods return new arrays of the right
            dtypes and shapes, so they are neither checked nor copied, and they are finite unless the actions are NaN,
            which is always an error. For any other task, NaN and infinite values are errors, except in infos.
    """

    def __init__(self, name: str, num_envs: int, physics: Physics, *, trusted: bool):
        self.name, self.num_envs = name, num_envs
        self._physics, self._trusted = physics, trusted
        self._everyone = np.ones(num_envs, np.bool_)
        self._before_is_checked = False
        self._warnings = physics.batch.warning[:, _RESETS]
        self._may_be_reset = not (trusted or physics.model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_AUTORESET)

    def actions(self, actions: Any, ids: Sequence[int], space: gym.Space) -> np.ndarray:
        """Returns actions for the envs `ids` as an array `[n, ...]` in C order, in the dtype that the caller passed.

        Raises:
            TypeError: If the action space, which a task may set, is not that of arrays.
            ValueError: If the actions have another shape, or are not numbers.
            InvalidRow: If an action is NaN, or infinite although it must be finite.
        """
        actions = np.ascontiguousarray(actions)  # the memory order determines the order of summation
        if space.shape is None:
            raise TypeError(f"{self.name} has the action space {space}, but its actions must be arrays")
        shape = (len(ids), *space.shape)
        if actions.shape != shape:
            raise ValueError(f"actions have shape {actions.shape}, but these envs need {shape}")
        if actions.dtype.kind not in "biuf":
            raise ValueError(f"actions have dtype {actions.dtype}, but must be numbers")
        invalid = np.isnan(actions) if self._trusted else ~np.isfinite(actions)  # Gymnasium's tasks clip infinity
        if np.count_nonzero(invalid):
            at = int(invalid.reshape(len(ids), -1).any(axis=1).argmax())
            raise InvalidRow(
                f"the action for env {ids[at]} of this {self.name} is NaN or infinite: {actions[at]}. "
                "No env was stepped.",
                ids[at],
            )
        return actions

    def before(self, returned: Any) -> None:
        """Raises ValueError if the first result of `before_step()` is, or holds, a view that the step changes."""
        if self._trusted or self._before_is_checked:
            return
        self._before_is_checked = True
        parts = returned.values() if isinstance(returned, dict) else returned
        batch = self._physics.batch
        for part in parts if isinstance(returned, (dict, list, tuple)) else (returned,):
            for values in (batch.state, *batch.derived.values()):
                if isinstance(part, np.ndarray) and np.may_share_memory(part, values):
                    raise ValueError(
                        f"{self.name}.before_step() must return copies, such as self.data.qpos.copy(); it returned a "
                        "view of the simulations, which the step changes"
                    )

    def controls(self, returned: Any, actions: np.ndarray, frame_skip: int, stepped: np.ndarray) -> np.ndarray:
        """Returns the result of `apply(actions)` as controls, `[N, nu]` or `[N, frame_skip, nu]`.

        Does not copy a float64 array.
        """
        num_controls = self._physics.model.nu
        if returned is actions and actions.shape == (self.num_envs, num_controls):
            return actions  # already checked
        substeps = (frame_skip,) if np.ndim(returned) == 3 else ()
        what = "controls float64[N, nu] or float64[N, frame_skip, nu]"
        controls = self._array("apply()", what, returned, np.float64, (self.num_envs, *substeps, num_controls))
        self._check_finite("apply()", "the controls", controls, stepped)
        return controls

    def outcome(self, returned: Any, stepped: np.ndarray, *, with_infos: bool) -> Outcome:
        """Returns the result of `outcome(before, actions)`; rewards must be finite only for envs that were stepped."""
        if self._trusted:
            rewards, terminated, infos = returned
            return Outcome(rewards, {}, terminated, None, infos if with_infos else {})
        if not isinstance(returned, tuple) or len(returned) not in (3, 4):
            raise TypeError(
                f"{self.name}.outcome() must return (rewards, terminated, infos) or (rewards, terminated, truncated, "
                f"infos); it returned {shown(returned)}"
            )
        rewards, terminated, *own, infos = returned
        infos = self.infos("outcome()", infos) if with_infos else {}
        shape = (self.num_envs,)
        terms: dict[str, np.ndarray] = {}
        if isinstance(rewards, dict):
            for term, values in rewards.items():
                what = f"the reward term {term!r}"
                terms[term] = self._array("outcome()", f"{what} as float64[N]", values, np.float64, shape)
                self._check_finite("outcome()", what, terms[term], stepped)
            rewards = np.zeros(shape)
            for values in terms.values():
                rewards += values  # one by one, so that N has no influence on the rounding
        rewards = self._array("outcome()", "rewards float64[N]", rewards, np.float64, shape)
        self._check_finite("outcome()", "the rewards", rewards, stepped)
        terminated = self._array("outcome()", "terminated bool[N]", terminated, np.bool_, shape)
        truncated = self._array("outcome()", "truncated bool[N]", own[0], np.bool_, shape) if own else None
        return Outcome(rewards.copy(), terms, terminated.copy(), truncated, infos)

    def infos(self, method: str, returned: Any) -> Infos:
        """Returns the infos that a method returned, for the caller to own: an array `[N, ...]` for each key."""
        if self._trusted:
            return returned
        if not isinstance(returned, dict):
            raise TypeError(f"{self.name}.{method} must return infos as a dict; it returned {returned!r}")
        if odd := [key for key in returned if not isinstance(key, str)]:
            raise TypeError(f"{self.name}.{method} must return infos whose keys are strings; it returned {odd}")
        return {key: self._array(method, f"info {key!r} [N, ...]", values).copy() for key, values in returned.items()}

    def simulations(self, method: str, mask: np.ndarray) -> None:
        """Raises InvalidRow if a method left NaN or infinity in a simulation, which MuJoCo would silently reset."""
        if self._trusted:
            return
        state = self._physics.batch.state
        if np.count_nonzero(np.isfinite(state)) < state.size:
            for name in INPUTS:
                self._check_finite(method, f"data.{name}", self._physics.batch.bind(name), mask)
        for name, values in self._physics.varied.items():
            self._check_finite(method, f"the model's {name}", values, mask)

    def stepped(self) -> None:
        """Raises InvalidRow if MuJoCo reset a simulation in a step, for which MuJoCo only counts a warning."""
        if self._may_be_reset and np.count_nonzero(self._warnings):
            env, which = (int(at[0]) for at in np.nonzero(self._warnings[..., 1]))
            text = mujoco.mju_warningText(_RESETS.start + which, self._warnings[env, which, 0])
            self._warnings[...] = 0  # MuJoCo keeps the warning until the next reset
            raise InvalidRow(
                f"MuJoCo reset the simulation of env {env} of this {self.name} during a step. {text} Use a smaller "
                "time step or weaker actuators, and give the ctrlrange of position actuators of hinges in radians, "
                'which MuJoCo never converts. With <option><flag autoreset="disable"/></option> in the model, MuJoCo '
                "does not reset it, so that the task can end the episode if `outcome` and `observe` replace NaN.",
                env,
            )

    def no_late_views(self, known: int) -> None:
        """Raises StateError if a method has looked up a field that was not computed, beyond the first `known`."""
        if len(derived := self._physics.batch.derived) > known:
            late = ", ".join(f"data.{name}" for name in list(derived)[known:])
            raise StateError(
                f"{self.name} looks up {late} for the first time after a reset or a step, which has therefore not "
                'computed it: look up views in the constructor, such as self.gyro = self.data.sensor("gyro").data'
            )

    def space_of(self, observed: Any, method: str = "observe()") -> spaces.Space:
        """Returns the space of one env's observations, without bounds, for the result of `observe()`."""
        if isinstance(observed, dict) and observed:
            return spaces.Dict({key: self.space_of(part, f"{method}[{key!r}]") for key, part in observed.items()})
        array = self._array(method, "float64[N, M]", observed, np.float64)
        if array.ndim < 2:
            raise ValueError(f"{self.name}.{method} must return float64[N, M], not {list(array.shape)}")
        dtype = np.float32 if np.asarray(observed).dtype == np.float32 else np.float64
        return spaces.Box(-np.inf, np.inf, array.shape[1:], dtype)

    def observation(self, name: str, values: Any, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Returns one array of the result of `observe()`, which is not copied."""
        array = self._array("observe()", name, values, dtype, shape)
        self._check_finite("observe()", name, array, self._everyone)
        return array

    def _array(
        self, method: str, what: str, values: Any, dtype: Any = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Returns the output of a method as an array, converted to `dtype` if given. Copies only to convert.

        Raises ValueError if its shape or the kind of its dtype is wrong.
        """
        try:
            array = np.asarray(values)
            returned = "None" if values is None else f"{array.dtype}{list(array.shape)}"
        except ValueError as error:
            array, returned = np.empty(0, object), f"no array: {error}"
        if isinstance(values, (list, tuple)) and values and all(map(self._has_rows, values)):
            returned = f"a {type(values).__name__} of {len(values)} arrays, which np.column_stack can join"
        kinds = "biufcSU" if dtype is None else "b" if dtype is np.bool_ else "biuf"
        if array.dtype.kind not in kinds or (array.shape != shape if shape else array.shape[:1] != (self.num_envs,)):
            n = f", here {shape}" if shape else f" with N={self.num_envs}"
            raise ValueError(f"{self.name}.{method} must return {what}{n}; it returned {returned}")
        if dtype is None or array.dtype == dtype:
            return array
        if not tree.can_hold(dtype, array):
            raise ValueError(
                f"{self.name}.{method} must return {what}; it returned numbers of {array.dtype} that "
                f"{np.dtype(dtype)} cannot hold"
            )
        return array.astype(dtype)

    def _has_rows(self, part: Any) -> bool:
        """Returns whether a value is an array with one row per env."""
        return isinstance(part, np.ndarray) and part.shape[:1] == (self.num_envs,)

    def _check_finite(self, method: str, what: str, array: np.ndarray, mask: np.ndarray) -> None:
        """Raises InvalidRow if values must be finite, but a method gave another value for an env in the mask."""
        # `all` takes longer than `count_nonzero` for small arrays.
        if not self._trusted and np.count_nonzero(np.isfinite(array)) < array.size:
            rows = ~np.isfinite(array.reshape(len(array), -1)).all(axis=1) & mask
            if rows.any():
                env = int(rows.argmax())
                value = "NaN" if np.isnan(array[env]).any() else "an infinite value"
                raise InvalidRow(
                    f"{self.name}.{method} gave {value} in {what} for its env {env}: {array[env]}. Fix this method, or "
                    "end the episode earlier.",
                    env,
                )


class ObservationWriter:
    """Checks what `observe` returns, and copies it.

    Args:
        checks: The checks of the task.
        space: The space of one env's observations.
    """

    def __init__(self, checks: TaskChecks, space: gym.Space):
        self._checks, self._space = checks, space
        leaves: Any = tree.leaves(space)
        # Looked up once, because every step needs them: path, name, dtype, shape.
        self._leaves = [
            (path, tree.name_of("observation", path), leaf.dtype, (checks.num_envs, *leaf.shape))
            for path, leaf in leaves
        ]

    def copy(self, observed: Any, out: Any = None) -> Any:
        """Returns a copy of the observations, or writes them to `out`, arrays nested like the space, and returns it."""
        copies = {}
        for path, name, dtype, shape in self._leaves:
            try:
                values = tree.pick(observed, path)
            except (KeyError, TypeError, IndexError):
                raise ValueError(
                    f"{self._checks.name}.observe() must return arrays nested like {self._space}"
                ) from None
            array = self._checks.observation(name, values, dtype, shape)
            if out is None:
                copies[path] = array.copy()
            else:
                tree.pick(out, path)[...] = array
        return tree.nest(self._space, copies.__getitem__) if out is None else out
