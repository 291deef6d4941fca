"""MujocoVectorEnv: N simulations of one MuJoCo model, stepped in C++ by `mujoco.batch.Batch`.

A task is a subclass with a model, the initial states of episodes, and numpy functions that compute observations and
rewards of all N envs at once. This class implements seeds, time limits, autoreset, infos and rendering.

Autoreset does not use `vecenv.rows.autoreset`: this vector env also works without rows, and one call resets all envs
whose episodes ended. `BatchRows` keeps the totals of the episodes and reports cut episodes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv import tree
from vecenv.errors import StateError
from vecenv.mujoco.generators import Generators
from vecenv.mujoco.physics import INPUTS, Model, Physics
from vecenv.mujoco.rendering import BatchRenderer
from vecenv.mujoco.saved_state import restore_states, saved_arrays, states_of
from vecenv.rows.arguments import Seeds, seed_of_each, split_reset_mask
from vecenv.rows.infos import Column, batched_infos, columns_of_mask, masked_infos

RENDER_MODES = ["human", "rgb_array", "depth_array", "rgbd_tuple"]
Infos = dict[str, Any]
Step = tuple[Any, np.ndarray, np.ndarray, np.ndarray, Infos]
"""Observations, rewards, terminated, truncated, infos."""


class InvalidRow(ValueError):
    """Values of one env are invalid. `vecenv_row` is its index here, from which rows derive the engine's number."""

    def __init__(self, message: str, row: int = 0):  # the default is for unpickling
        super().__init__(message)
        self.vecenv_row = row


class MujocoVectorEnv(VectorEnv):
    """Steps N simulations of one model; a subclass defines the task.

    Only `begin` and `after_step` may change the task's attributes, and only the rows `ids`. The other methods are also
    called for envs that do not step, and more than once for the same step.

    Args:
        num_envs: N.
        xml_file: The model: a path, the name of one of Gymnasium's assets, an `MjSpec`, or an `MjModel`.
        frame_skip: Simulation steps per env step.
        keyframe: Name of the model's keyframe to which simulations are reset. None: the model's defaults.
        max_episode_steps: Steps after which an episode is truncated; None for no limit.
        autoreset_mode: `NEXT_STEP`, `SAME_STEP` or `DISABLED`, as in Gymnasium.
        num_threads: Threads that step the simulations. None: OMP_NUM_THREADS (1 in workers), or one per core.
        render_mode: None, "rgb_array", or another mode of Gymnasium's MujocoRenderer.
        **render_options: `width`, `height`, `camera_id`, `camera_name`, `default_camera_config`, `max_geom`,
            `visual_options`, as in Gymnasium's MujocoEnv.

    Attributes:
        data: qpos, qvel, ctrl and the fields named in `fields`, as `[N, ...]`. Its methods `sensor`, `joint`, `body`,
            `geom`, `site`, `tendon` and `actuator` take a name: `data.sensor("gyro").data` is a view `float64[N, 3]`.
            Look views up in the constructor, because a field has values from the next reset or step on.
        steps: Steps since the episode of each env began, `int64[N]`.
        init_qpos, init_qvel: The positions and velocities to which simulations are reset, `float64[nq]`, `float64[nv]`.
        model: The `mujoco.MjModel` as it was built. The simulations use a copy; see `Physics.expand` for changes.
        physics: The simulations; see `Physics`.
        cfrc_ext: External contact forces on the bodies in the last step, `float64[N, nbody, 6]`, if the class sets
            `with_contact_forces`. After a reset they are 0, unless a sensor makes MuJoCo compute them.
        dt: Seconds of simulation per env step.
        single_action_space: By default, a Box of the actuators' control ranges. A task with another `apply` sets it in
            its constructor.
        single_observation_space: By default, a Box without bounds for each array that `observe` returns.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of MjData that the task reads besides qpos, qvel and ctrl."""

    current: ClassVar[bool] = True
    """Whether positions, velocities and their sensors describe the state after a step, at the cost of `mj_step1`.

    False: they are one simulation step old, as in Gymnasium's tasks. Accelerations, forces and contact sensors always
    describe the last simulation step. qpos and qvel are current in any case.
    """

    with_contact_forces: ClassVar[bool] = False
    """Whether the task reads `cfrc_ext`."""

    camera: ClassVar[dict[str, Any] | None] = None
    """Default of `default_camera_config`. None: the camera of a custom task is its model's "track" or follows it."""

    contacts_listed_of: ClassVar[str | None] = None
    """The model file whose contacts may be listed; see `vecenv.mujoco.contacts`. Subclasses do not inherit it."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Names of the task's attributes that change during episodes: arrays `[N, ...]`, which `get_state` saves.

    Each subclass must declare `saved` itself, including the names from its base classes, even if there are none.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        xml_file: Model,
        frame_skip: int,
        keyframe: str | None = None,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_threads: int | None = None,
        render_mode: str | None = None,
        **render_options: Any,
    ):
        limit = 1 if max_episode_steps is None else max_episode_steps
        for name, value in {"num_envs": num_envs, "frame_skip": frame_skip, "max_episode_steps": limit}.items():
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}={value!r}: it must be a positive integer")
        for former in ("initial_state(rng)", "randomize(env, rng)"):
            if callable(getattr(self, former.split("(")[0], None)):
                raise TypeError(f"{type(self).__name__} defines {former}: define begin(ids, rngs) instead")
        if type(self).observe is MujocoVectorEnv.observe:
            self.observe()  # raises
        self._creator = os.getpid()
        self.num_envs = num_envs
        self.frame_skip = frame_skip
        self.max_episode_steps = max_episode_steps
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        if render_mode not in (None, *RENDER_MODES):
            raise ValueError(f"render_mode={render_mode!r} is unknown: use None or one of {RENDER_MODES}")
        self.render_mode = render_mode
        self.physics = Physics(
            xml_file,
            num_envs,
            num_threads=num_threads,
            fields=self.fields,
            keyframe=keyframe,
            whole=self.with_contact_forces or render_mode is not None,
            list_contacts=type(self).__dict__.get("contacts_listed_of") == xml_file,
        )
        self.model, self.data = self.physics.model, self.physics.data
        self.cfrc_ext = np.zeros((num_envs, self.model.nbody, 6))
        self.init_qpos, self.init_qvel = self.data.qpos[0].copy(), self.data.qvel[0].copy()
        self.dt = self.model.opt.timestep * frame_skip
        self.metadata = {
            "render_modes": RENDER_MODES,
            "render_fps": int(np.round(1.0 / self.dt)),
            "autoreset_mode": self.autoreset_mode,
        }
        self._with_infos = True
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._seeds: list[int | None] = [None] * num_envs
        self._is_custom = not type(self).__module__.startswith("vecenv.mujoco.")  # not equal to a Gymnasium task
        options = {"default_camera_config": self.camera, **render_options}
        self._renderer = BatchRenderer(self.physics, render_mode, options, follows=self._is_custom)
        self._everyone = np.ones(num_envs, dtype=np.bool_)
        self.steps = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.ones(num_envs, dtype=np.bool_)  # whether the episode is over, or the env was never reset
        self._all_begun = False  # whether every env has been reset at least once
        self._returns: dict[str, np.ndarray] = {}  # the sum over the episode of each reward term, float64[N]

    # The spaces are determined when they are first used, because `observe` may need what a task's constructor sets.
    @functools.cached_property
    def single_action_space(self) -> spaces.Space:  # type: ignore[override]
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        if self._is_custom:  # Gymnasium's tasks take the range of an actuator without limits, which is 0 to 0
            limited = self.model.actuator_ctrllimited.astype(np.bool_)
            low, high = np.where(limited, low, -np.inf), np.where(limited, high, np.inf)
        return spaces.Box(low, high, dtype=np.float32)

    @functools.cached_property
    def single_observation_space(self) -> spaces.Space:  # type: ignore[override]
        return self._space_of(self.observe(), "observe()")

    @functools.cached_property
    def action_space(self) -> spaces.Space:  # type: ignore[override]
        return batch_space(self.single_action_space, self.num_envs)

    @functools.cached_property
    def observation_space(self) -> spaces.Space:  # type: ignore[override]
        return batch_space(self.single_observation_space, self.num_envs)

    @functools.cached_property
    def _observed(self) -> list[tuple[tree.Path, str, Any, tuple[int, ...]]]:
        """The path, the name, the dtype and the shape of each array that `observe` returns."""
        leaves: Any = tree.leaves(self.single_observation_space)
        count = self.num_envs
        return [(path, tree.name_of("observation", path), leaf.dtype, (count, *leaf.shape)) for path, leaf in leaves]

    def _space_of(self, observed: Any, method: str) -> spaces.Space:
        if isinstance(observed, dict) and observed:
            return spaces.Dict({key: self._space_of(part, f"{method}[{key!r}]") for key, part in observed.items()})
        array = self._checked_output(method, "float64[N, M]", observed, np.float64)
        if array.ndim < 2:
            raise ValueError(f"{type(self).__name__}.{method} must return float64[N, M], not {list(array.shape)}")
        dtype = np.float32 if np.asarray(observed).dtype == np.float32 else np.float64
        return spaces.Box(-np.inf, np.inf, array.shape[1:], dtype)

    def begin(self, ids: np.ndarray, rngs: Generators) -> None:
        """Begins an episode of each env in `ids`, whose simulations were reset to the keyframe or the model's defaults.

        Override it to write rows `ids` of `data.qpos` and `data.qvel`, of expanded fields (see `Physics.expand`), and
        of the task's own arrays. `ids` are int64[n], and `rngs` their generators: `rngs.uniform(-1, 1, 3)` returns
        float64[n, 3], one row from each env's generator.
        """

    def apply(self, actions: np.ndarray) -> np.ndarray:
        """Returns the controls of a step: [N, nu], or [N, frame_skip, nu] for separate controls of each substep.

        By default, they are the actions, `[N, ...]`, in the dtype that the caller passed.
        """
        return actions

    def after_step(self, ids: np.ndarray, actions: np.ndarray, rngs: Generators) -> None:
        """Changes the envs `ids`, which have just been stepped, between `outcome` and `observe`.

        Override it to draw commands and noise, to push robots, and to update rows `ids` of the task's own arrays. If it
        changes fields such as masses, it must call `physics.batch.set_const(ids)`. The arguments are int64[n], the
        actions `[n, ...]` of these envs, and their generators.
        """

    def observe(self) -> Any:
        """Returns the observations of all envs: float64[N, M] or float32[N, M], or a dict of such arrays."""
        raise NotImplementedError(f"{type(self).__name__} must define observe(), which returns float64[N, M]")

    def before_step(self) -> Any:
        """Returns copies of what `outcome` needs from the state before the step."""
        return None

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[Any, ...]:
        """Returns rewards float64[N], terminated bool[N], and infos: an array [N, ...] for each key.

        Infos may be NaN where an env has no value.
        The rewards may be a dict of terms float64[N], which are added up. The info `return/TERM` is then the sum of a
        term over the episode. A task that truncates episodes itself returns rewards, terminated, truncated and infos.
        `before` is the result of `before_step`, and `actions` are `[N, ...]`, in the dtype that the caller passed.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define outcome(before, actions), which returns rewards, terminated and infos"
        )

    def reset_infos(self) -> Infos:
        """Returns the infos of envs that begin an episode: an array [N, ...] for each key."""
        return {}

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None, out: Any = None) -> tuple[Any, Infos]:
        """Resets every env, or the envs in `options["reset_mask"]`; returns observations [N, ...] and infos.

        Args:
            seed: A seed for each env; an int s gives env i the seed s + i.
            options: `reset_mask: bool[N]` selects envs. Other options are ignored.
            out: See `vecenv.Batched`.
        """
        self._assert_open()
        seeds = seed_of_each(seed, self.num_envs)
        _, mask = split_reset_mask(options, self.num_envs)
        if mask is None:
            mask = self._everyone
        self._reset_rows(np.flatnonzero(mask), seeds)
        return self._observe(out), masked_infos(self._reset_infos(), mask)

    def step(self, actions: Any, *, out: Any = None) -> Step:
        """Steps every env; returns observations [N, ...], rewards, terminated, truncated (all [N]) and infos.

        `vecenv.Batched` describes `out`.
        """
        self._assert_open()
        return self._step(self._checked_actions(actions, range(self.num_envs)), self._everyone, out)

    def step_rows(self, ids: Sequence[int], actions: Any) -> Step:
        """Steps the envs `ids`, with one action each; returns N rows, of which `ids` and all observations are valid."""
        self._assert_open()
        given = self._checked_actions(actions, ids)
        chosen = np.zeros(self.num_envs, np.bool_)
        chosen[ids] = True
        actions = np.zeros((self.num_envs, *given.shape[1:]), given.dtype)
        actions[ids] = given
        return self._step(actions, chosen)

    def _step(self, actions: np.ndarray, chosen: np.ndarray, out: Any = None) -> Step:
        if not self._all_begun:
            raise gym.error.ResetNeeded("Cannot call env.step() before calling env.reset()")
        begins = self._ended & chosen
        some_begin = np.count_nonzero(begins) > 0
        if some_begin and self.autoreset_mode != AutoresetMode.NEXT_STEP:
            raise gym.error.ResetNeeded(f"envs {np.flatnonzero(begins).tolist()} must be reset before they are stepped")
        stepped = chosen & ~begins if some_begin else chosen
        before = self.before_step()
        self._advance(actions, stepped)
        if some_begin:
            self._reset_rows(np.flatnonzero(begins), [None] * self.num_envs)
        rewards, terminated, truncated, infos = self._outcome(before, actions, stepped)
        if some_begin:
            rewards[begins] = 0.0
        if self.max_episode_steps is not None:
            truncated |= self.steps >= self.max_episode_steps
        terminated &= stepped
        truncated &= stepped
        if type(self).after_step is not MujocoVectorEnv.after_step and stepped.any():
            ids = np.flatnonzero(stepped)
            self.after_step(ids, actions[ids], self.np_random[ids])
            self._check_simulations("after_step()", stepped)
        observations = self._observe(out)
        ended = terminated | truncated
        ends_in_place = self.autoreset_mode == AutoresetMode.SAME_STEP
        if ends_in_place and np.count_nonzero(ended):
            columns = columns_of_mask(infos, stepped & ~ended) + self._final_columns(infos, observations, ended)
            self._reset_rows(np.flatnonzero(ended), [None] * self.num_envs)
            infos = batched_infos(columns + columns_of_mask(self._reset_infos(), ended), self.num_envs)
            observations = self._observe(out)
        elif some_begin:
            columns = columns_of_mask(infos, stepped) + columns_of_mask(self._reset_infos(), begins)
            infos = batched_infos(columns, self.num_envs)
        else:
            infos = masked_infos(infos, stepped)
        if not ends_in_place:
            self._ended = np.where(chosen, ended, self._ended)
        return observations, rewards, terminated, truncated, infos

    def _advance(self, actions: np.ndarray, stepped: np.ndarray) -> None:
        """Steps the simulations of these envs."""
        ids = None if np.count_nonzero(stepped) == self.num_envs else np.flatnonzero(stepped)
        rows = slice(None) if ids is None else ids
        if ids is None or len(ids):
            controls = self._controls(actions, stepped)
            parts = [controls] if controls.ndim == 2 else np.moveaxis(controls, 1, 0)
            for number, part in enumerate(parts, 1):
                self.data.ctrl[rows] = part[rows]
                refreshes = self.current and number == len(parts) and not self.with_contact_forces
                self.physics.step(self.frame_skip // len(parts), ids, refreshes=refreshes)
            self.steps[rows] += 1
        if self.with_contact_forces:
            self.physics.write_contact_forces(np.flatnonzero(stepped), self.cfrc_ext)
            if self.current:
                self.physics.refresh(ids)

    def _controls(self, actions: np.ndarray, stepped: np.ndarray) -> np.ndarray:
        """Returns what `apply` returns, checked."""
        returned = self.apply(actions)
        if returned is actions and actions.shape == (self.num_envs, self.model.nu):
            return actions
        substeps = (self.frame_skip,) if np.ndim(returned) == 3 else ()
        shape = (self.num_envs, *substeps, self.model.nu)
        what = "controls float64[N, nu] or float64[N, frame_skip, nu]"
        controls = self._checked_output("apply()", what, returned, np.float64, shape)
        self._check_finite("apply()", "the controls", controls, stepped)
        return controls

    def _final_columns(self, infos: Infos, observations: np.ndarray, ended: np.ndarray) -> list[Column]:
        """Returns `final_info` and `final_obs` of the episodes that ended."""
        envs, finals = np.flatnonzero(ended), []
        for i in envs:
            copies = {path: tree.pick(observations, path)[i].copy() for path, *_ in self._observed}
            finals.append(tree.nest(self.single_observation_space, copies.__getitem__))
        return [Column("final_info", envs, tuple(columns_of_mask(infos, ended))), Column("final_obs", envs, finals)]

    # A task's outputs are checked and copied, because they may be views of data that the next step changes, or arrays
    # that the task reuses.

    def _observe(self, out: Any) -> Any:
        copies, observed = {}, self.observe()
        for path, name, dtype, shape in self._observed:
            try:
                values = tree.pick(observed, path)
            except (KeyError, TypeError, IndexError):
                raise ValueError(
                    f"{type(self).__name__}.observe() must return arrays nested like {self.single_observation_space}"
                ) from None
            values = self._checked_output("observe()", name, values, dtype, shape)
            self._check_finite("observe()", name, values, self._everyone)
            if out is None:
                copies[path] = values.copy()
            else:
                tree.pick(out, path)[...] = values
        return tree.nest(self.single_observation_space, copies.__getitem__) if out is None else out

    def _outcome(
        self, before: Any, actions: np.ndarray, stepped: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Infos]:
        returned = self.outcome(before, actions)
        if not isinstance(returned, tuple) or len(returned) not in (3, 4):
            raise TypeError(f"{type(self).__name__}.outcome() must return rewards, terminated, infos; got {returned!r}")
        rewards, terminated, *rest, infos = returned
        infos = self._infos("outcome()", infos) if self._with_infos else {}
        shape, truncated = (self.num_envs,), np.zeros(self.num_envs, np.bool_)
        if isinstance(rewards, dict):
            rewards = self._sum_of(rewards, stepped)
            if self._with_infos:
                infos |= {f"return/{term}": values.copy() for term, values in self._returns.items()}
        if rest:
            truncated |= self._checked_output("outcome()", "truncated bool[N]", rest[0], np.bool_, shape)
        rewards = self._checked_output("outcome()", "rewards float64[N]", rewards, np.float64, shape)
        self._check_finite("outcome()", "the rewards", rewards, stepped)
        terminated = self._checked_output("outcome()", "terminated bool[N]", terminated, np.bool_, shape)
        return rewards.copy(), terminated.copy(), truncated, infos

    def _sum_of(self, terms: dict[str, Any], stepped: np.ndarray) -> np.ndarray:
        """Returns the sum of the reward terms, and adds those of stepped envs to the returns of their episodes."""
        rewards = np.zeros(self.num_envs)
        for term, values in terms.items():
            name = f"the reward term {term!r}"
            values = self._checked_output("outcome()", f"{name} as float64[N]", values, np.float64, (self.num_envs,))
            self._check_finite("outcome()", name, values, stepped)
            rewards += values  # one by one, so that N has no influence on the rounding
            returns = self._returns.setdefault(term, np.zeros(self.num_envs))
            returns += np.where(stepped, values, 0.0)
        return rewards

    def _reset_infos(self) -> Infos:
        return self._infos("reset_infos()", self.reset_infos()) if self._with_infos else {}

    def _infos(self, method: str, infos: Infos) -> Infos:
        if not isinstance(infos, dict):
            raise TypeError(f"{type(self).__name__}.{method} must return infos as a dict; it returned {infos!r}")
        if odd := [key for key in infos if not isinstance(key, str)]:
            raise TypeError(
                f"{type(self).__name__}.{method} must return infos whose keys are strings; it returned {odd}"
            )
        return {
            key: self._checked_output(method, f"info {key!r} [N, ...]", values).copy() for key, values in infos.items()
        }

    def _checked_output(
        self, method: str, what: str, values: Any, dtype: Any = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Returns the output of a task's method as an array, converted to `dtype` if given. Copies only to convert.

        Raises ValueError, which names the method, if its shape or the kind of its dtype is wrong.
        """
        try:
            array = np.asarray(values)
        except ValueError:  # lists of different lengths
            array = np.asarray(values, object)
        kinds = "biufcSU" if dtype is None else "b" if dtype is np.bool_ else "biuf"
        if array.dtype.kind not in kinds or (array.shape != shape if shape else array.shape[:1] != (self.num_envs,)):
            n = f", here {shape}" if shape else f" with N={self.num_envs}"
            raise ValueError(
                f"{type(self).__name__}.{method} must return {what}{n}; it returned {array.dtype}{list(array.shape)}"
            )
        if dtype is None or array.dtype == dtype:
            return array
        if not tree.can_hold(dtype, array):
            raise ValueError(
                f"{type(self).__name__}.{method} must return {what}; it returned numbers of {array.dtype} that "
                f"{np.dtype(dtype)} cannot hold"
            )
        return array.astype(dtype)

    def _check_finite(self, method: str, what: str, array: np.ndarray, mask: np.ndarray) -> None:
        """Raises InvalidRow if a method of a custom task gave NaN or an infinite value for an env in the mask."""
        if self._is_custom and not np.isfinite(array).all():
            rows = ~np.isfinite(array.reshape(len(array), -1)).all(axis=1) & mask
            if rows.any():
                env = int(rows.argmax())
                value = "NaN" if np.isnan(array[env]).any() else "an infinite value"
                raise InvalidRow(
                    f"{type(self).__name__}.{method} gave {value} in {what} for its env {env}: {array[env]}", env
                )

    def _check_simulations(self, method: str, mask: np.ndarray) -> None:
        """Raises InvalidRow for such values in a simulation, which MuJoCo would reset without an error."""
        if self._is_custom and not np.isfinite(self.physics.batch.state).all():
            for name in INPUTS:
                self._check_finite(method, f"data.{name}", self.physics.batch.bind(name), mask)
        for name, values in self.physics.varied.items():
            self._check_finite(method, f"the model's {name}", values, mask)

    def _reset_rows(self, ids: np.ndarray, seeds: Sequence[int | None]) -> None:
        for i in ids.tolist():
            if seeds[i] is not None or self._generators[i] is None:
                self._generators[i], self._seeds[i] = seeding.np_random(seeds[i])
        self.physics.reset(ids)
        self.steps[ids], self._ended[ids] = 0, False
        for returns in self._returns.values():
            returns[ids] = 0.0
        self.begin(ids, self.np_random[ids])
        mask = np.zeros(self.num_envs, np.bool_)
        mask[ids] = True
        self._check_simulations("begin()", mask)
        self.physics.start(ids)
        if not self._all_begun:
            saved_arrays(self)  # raises
            self._all_begun = None not in self._generators
        if self.with_contact_forces:
            self.physics.write_first_contact_forces(ids, self.cfrc_ext)

    def _checked_actions(self, actions: Any, ids: Sequence[int]) -> np.ndarray:
        actions = np.ascontiguousarray(actions)  # the memory order determines the order of summation
        if (of_one := self.single_action_space.shape) is None:
            raise TypeError(
                f"{type(self).__name__} has the action space {self.single_action_space}, but its actions must be arrays"
            )
        shape = (len(ids), *of_one)
        if actions.shape != shape:
            raise ValueError(f"actions have shape {actions.shape}, but these envs need {shape}")
        if actions.dtype.kind not in "biuf":
            raise ValueError(f"actions have dtype {actions.dtype}, but must be numbers")
        invalid = ~np.isfinite(actions) if self._is_custom else np.isnan(actions)  # Gymnasium's tasks clip infinity
        if np.count_nonzero(invalid):
            at = int(invalid.reshape(len(ids), -1).any(axis=1).argmax())
            raise InvalidRow(
                f"the action for env {ids[at]} of this {type(self).__name__} is NaN or infinite: {actions[at]}. "
                "No env was stepped.",
                ids[at],
            )
        return actions

    # Like Gymnasium's own vector envs, this returns tuples, although the base class is annotated otherwise.
    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed of each env's generator."""
        return tuple(self._seeds)

    @property  # type: ignore[misc]
    def np_random(self) -> Generators:  # type: ignore[override]
        """Each env's generator, or None before its first reset."""
        return Generators(self._generators)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env as plain values.

        Raises:
            NotRestorable: If the class does not declare `saved`, or MuJoCo's batch does not expose the model's state.
        """
        self._assert_open()
        return states_of(self)

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned for envs that were built in the same way."""
        self._assert_open()
        restore_states(self, states)
        self._check_simulations("set_state()", self._everyone)

    def drop_infos(self) -> None:
        """Stops computing infos, except final observations and for overrides of `step`, `step_rows` and `reset`."""
        names = ("step", "step_rows", "reset")
        self._with_infos = any(getattr(type(self), name) is not getattr(MujocoVectorEnv, name) for name in names)

    def render(self) -> tuple[Any, ...]:
        """Returns a frame of each env, in the format of `render_mode`."""
        return tuple(self.render_env(i) for i in range(self.num_envs))

    def render_env(self, env: int) -> Any:
        """Returns a frame of one env."""
        return self._renderer.render(env)

    @property
    def mujoco_renderer(self) -> MujocoRenderer:
        """Gymnasium's renderer of env 0, whose camera and size can be changed before its first frame."""
        return self._renderer.renderer(0)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the renderer."""
        self._renderer.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because MuJoCo's batch cannot: build a new one"
        )

    def _assert_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if os.getpid() != self._creator:  # a fork does not have the threads that step the simulations
            raise StateError(
                f"this `{type(self).__name__}` belongs to process {self._creator}; this process ({os.getpid()}) is a "
                "fork of it. Build another vector env in this process."
            )
