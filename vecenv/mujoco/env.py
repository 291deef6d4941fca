"""MujocoVectorEnv: N simulations of one MuJoCo model, stepped in C++ by `mujoco.batch.Batch`.

A task is a subclass with a model file, the initial state of an episode, and numpy functions that compute observations
and rewards of all N envs at once. This class implements seeds, time limits, autoreset, infos and rendering.

Autoreset does not use `vecenv.rows.autoreset`: this vector env also works without rows, and one call resets all envs
whose episodes ended. `BatchRows` keeps the totals of the episodes and reports cut episodes.
"""

from __future__ import annotations

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

from vecenv.errors import StateError
from vecenv.mujoco.physics import Physics
from vecenv.mujoco.rendering import BatchRenderer
from vecenv.mujoco.state import restore_states, states_of
from vecenv.rows.arguments import seed_of_each, split_reset_mask
from vecenv.rows.infos import mask_infos, update_infos

Infos = dict[str, Any]
Step = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Infos]
"""Observations, rewards, terminated, truncated, infos."""


class MujocoVectorEnv(VectorEnv):
    """Steps N simulations of one model; a subclass defines the task.

    Args:
        num_envs: N.
        xml_file: MJCF model, as in Gymnasium's envs: the name of one of Gymnasium's assets, or a path.
        frame_skip: Simulation steps per env step.
        max_episode_steps: Steps after which an episode is truncated; None for no limit.
        autoreset_mode: `NEXT_STEP`, `SAME_STEP` or `DISABLED`, as in Gymnasium.
        num_threads: Threads that step the simulations. None: the value of the environment variable OMP_NUM_THREADS,
            which is 1 in workers, or one thread per core if it is not set.
        render_mode: None, "rgb_array", or another mode of Gymnasium's MujocoRenderer.
        **render_options: `width`, `height`, `camera_id`, `camera_name`, `default_camera_config`, `max_geom`,
            `visual_options`, as in Gymnasium's MujocoEnv.

    Attributes:
        data: qpos, qvel, ctrl and the fields named in `fields`, as `float64[N, ...]`, current after each step.
        model: The `mujoco.MjModel` as it was built. The simulations use a copy; see `Physics.expand` for changes.
        physics: The simulations, see `Physics`.
        cfrc_ext: External contact forces on the bodies in the last step, `float64[N, nbody, 6]`, if the class sets
            `with_contact_forces`. After a reset they are 0, unless a sensor makes MuJoCo compute them.
        dt: Seconds of simulation per env step.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of MjData that the task reads besides qpos, qvel and ctrl."""

    with_contact_forces: ClassVar[bool] = False
    """Whether the task reads `cfrc_ext`."""

    camera: ClassVar[dict[str, Any] | None] = None
    """Default of `default_camera_config`."""

    contacts_listed_of: ClassVar[str | None] = None
    """The model file whose contacts may be listed, see `vecenv.mujoco.contacts`. Subclasses do not inherit it."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Names of the task's attributes that change during episodes: arrays `[N, ...]`, which `get_state` saves.

    Each subclass must declare `saved` itself, including the names from its base classes, even if there are none.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        xml_file: str,
        frame_skip: int,
        max_episode_steps: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_threads: int | None = None,
        render_mode: str | None = None,
        **render_options: Any,
    ):
        for name, value in (
            ("num_envs", num_envs),
            ("frame_skip", frame_skip),
            ("max_episode_steps", max_episode_steps),
        ):
            if not (name == "max_episode_steps" and value is None) and (
                not isinstance(value, (int, np.integer)) or value < 1
            ):
                raise ValueError(f"{name}={value!r}: it must be a positive integer")
        self._creator = os.getpid()
        self.num_envs = num_envs
        self.frame_skip = frame_skip
        self.max_episode_steps = max_episode_steps
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.render_mode = render_mode
        self.physics = Physics(
            xml_file,
            num_envs,
            num_threads=num_threads,
            fields=self.fields,
            whole=self.with_contact_forces or render_mode is not None,
            list_contacts=type(self).__dict__.get("contacts_listed_of") == xml_file,
        )
        self.model, self.data = self.physics.model, self.physics.data
        self.cfrc_ext = np.zeros((num_envs, self.model.nbody, 6))
        self.init_qpos, self.init_qvel = self.model.qpos0.copy(), np.zeros(self.model.nv)
        self.dt = self.model.opt.timestep * frame_skip
        self.metadata = {
            "render_modes": ["human", "rgb_array", "depth_array", "rgbd_tuple"],
            "render_fps": int(np.round(1.0 / self.dt)),
            "autoreset_mode": self.autoreset_mode,
        }
        options = {"default_camera_config": self.camera, **render_options}
        self._with_infos = True
        self._renderer = BatchRenderer(self.physics, render_mode, options)
        self._generators: list[np.random.Generator | None] = [None] * num_envs
        self._seeds: list[int | None] = [None] * num_envs
        self._everyone = np.ones(num_envs, dtype=np.bool_)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.ones(num_envs, dtype=np.bool_)  # whether the episode is over, or the env was never reset
        self._all_begun = False  # whether every env has been reset at least once
        self._set_spaces()

    def _set_spaces(self) -> None:
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        observed = self._checked_output("observe()", "float64[N, M]", self.observe(), np.float64)
        if observed.ndim != 2:
            raise ValueError(f"{type(self).__name__}.observe() must return float64[N, M], not {list(observed.shape)}")
        size = self._size = observed.shape[1]
        self.single_action_space = spaces.Box(low, high, dtype=np.float32)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def initial_state(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns a random state in which one env begins an episode: qpos float64[nq] and qvel float64[nv]."""
        raise NotImplementedError(f"{type(self).__name__} must define initial_state(rng), which returns qpos and qvel")

    def randomize(self, env: int, rng: np.random.Generator) -> None:
        """Changes the model of one env before each of its episodes.

        Override it to write row `env` of fields that the constructor has expanded, see `Physics.expand`. The env's seed
        determines the samples of `rng`, so they do not depend on the number of workers.
        """

    def observe(self) -> np.ndarray:
        """Returns the observations of all envs: float64[N, M]."""
        raise NotImplementedError(f"{type(self).__name__} must define observe(), which returns float64[N, M]")

    def before_step(self) -> Any:
        """Returns copies of what `outcome` needs from the state before the step."""
        return None

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        """Returns rewards float64[N], terminated bool[N], and infos: an array [N, ...] for each key.

        Args:
            before: The result of `before_step`.
            actions: `[N, nu]`, in the dtype that the caller passed.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define outcome(before, actions), which returns rewards, terminated and infos"
        )

    def reset_infos(self) -> Infos:
        """Returns the infos of envs that begin an episode: an array [N, ...] for each key."""
        return {}

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, Infos]:
        """Resets every env, or the envs in `options["reset_mask"]`; returns observations float64[N, M] and infos.

        Args:
            seed: A seed for each env; an int s gives env i the seed s + i.
            options: `reset_mask: bool[N]` selects envs. Other options are ignored.
            out: An array [N, M] of floats, which is filled with the observations and returned.
        """
        self._assert_open()
        seeds = seed_of_each(seed, self.num_envs)
        _, mask = split_reset_mask(options, self.num_envs)
        if mask is None:
            mask = self._everyone
        self._reset_rows(np.flatnonzero(mask), seeds)
        return self._observe(out), mask_infos(self._reset_infos(), mask)

    def step(self, actions: Any, *, out: np.ndarray | None = None) -> Step:
        """Steps every env; returns observations float64[N, M], rewards, terminated, truncated (all [N]), infos.

        Args:
            actions: `[N, nu]`.
            out: An array [N, M] of floats, which is filled with the observations and returned.
        """
        self._assert_open()
        return self._step(self._checked_actions(actions, range(self.num_envs)), self._everyone, out)

    def step_rows(self, ids: Sequence[int], actions: Any) -> Step:
        """Steps the envs `ids`, with one action each.

        The results have rows for all N envs. Only the rows of `ids` are meaningful, except that the observations of
        every env are current.
        """
        self._assert_open()
        given = self._checked_actions(actions, ids)
        chosen = np.zeros(self.num_envs, np.bool_)
        chosen[ids] = True
        actions = np.zeros((self.num_envs, self.model.nu), given.dtype)
        actions[ids] = given
        return self._step(actions, chosen)

    def _step(self, actions: np.ndarray, chosen: np.ndarray, out: np.ndarray | None = None) -> Step:
        if not self._all_begun:
            raise gym.error.ResetNeeded("Cannot call env.step() before calling env.reset()")
        begins = self._ended & chosen
        some_begin = bool(begins.any())
        if some_begin and self.autoreset_mode != AutoresetMode.NEXT_STEP:
            raise gym.error.ResetNeeded(f"envs {np.flatnonzero(begins).tolist()} must be reset before they are stepped")
        stepped = chosen & ~begins if some_begin else chosen
        before = self.before_step()
        self._advance(actions, stepped)
        if some_begin:
            self._reset_rows(np.flatnonzero(begins), [None] * self.num_envs)
        rewards, terminated, infos = self._outcome(before, actions)
        if some_begin:
            rewards[begins] = 0.0
        terminated &= stepped
        truncated = np.zeros(self.num_envs, np.bool_)
        if self.max_episode_steps is not None:
            truncated = stepped & (self._steps >= self.max_episode_steps)
        infos = mask_infos(infos, stepped)
        if some_begin:
            update_infos(infos, mask_infos(self._reset_infos(), begins))
        observations = self._observe(out)
        ended = terminated | truncated
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            if ended.any():
                infos = self._final_infos(infos, observations, ended)
                self._reset_rows(np.flatnonzero(ended), [None] * self.num_envs)
                update_infos(infos, mask_infos(self._reset_infos(), ended))
                observations = self._observe(out)
        else:
            self._ended = np.where(chosen, ended, self._ended)
        return observations, rewards, terminated, truncated, infos

    def _advance(self, actions: np.ndarray, stepped: np.ndarray) -> None:
        """Steps the simulations of these envs."""
        ids = None if stepped.all() else np.flatnonzero(stepped)
        rows = slice(None) if ids is None else ids
        if ids is None or len(ids):
            self.data.ctrl[rows] = actions[rows]
            self.physics.step(self.frame_skip, ids)
            self._steps[rows] += 1
        if self.with_contact_forces:
            self.physics.write_contact_forces(np.flatnonzero(stepped), self.cfrc_ext)

    def _final_infos(self, infos: Infos, observations: np.ndarray, ended: np.ndarray) -> Infos:
        """Returns the infos of a step, with `final_info` and `final_obs` for the episodes that ended."""
        values: Infos = {key: column for key, column in infos.items() if not key.startswith("_")}
        result = mask_infos(values, ~ended) if not ended.all() else {}
        result["final_info"], result["_final_info"] = mask_infos(values, ended), ended.copy()
        final_obs = np.full(self.num_envs, None, dtype=object)
        for i in np.flatnonzero(ended):
            final_obs[i] = observations[i].copy()
        result["final_obs"], result["_final_obs"] = final_obs, ended.copy()
        return result

    # A task's outputs are checked and copied, because they may be views of data that the next step changes, or arrays
    # that the task reuses.

    def _observe(self, out: np.ndarray | None) -> np.ndarray:
        shape = (self.num_envs, self._size)
        observed = self._checked_output("observe()", "float64[N, M]", self.observe(), np.float64, shape)
        if out is None:
            return observed.copy()
        out[...] = observed
        return out

    def _outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        returned = self.outcome(before, actions)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise TypeError(f"{type(self).__name__}.outcome() must return rewards, terminated, infos; got {returned!r}")
        rewards, terminated, infos = returned
        shape = (self.num_envs,)
        return (
            self._checked_output("outcome()", "rewards float64[N]", rewards, np.float64, shape).copy(),
            self._checked_output("outcome()", "terminated bool[N]", terminated, np.bool_, shape).copy(),
            self._infos("outcome()", infos) if self._with_infos else {},
        )

    def _reset_infos(self) -> Infos:
        return self._infos("reset_infos()", self.reset_infos()) if self._with_infos else {}

    def _infos(self, method: str, infos: Infos) -> Infos:
        return {
            key: self._checked_output(method, f"info {key!r} [N, ...]", values).copy() for key, values in infos.items()
        }

    def _checked_output(
        self, method: str, what: str, values: Any, dtype: Any = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Returns the output of a task's method as an array, converted to `dtype` if given. Copies only to convert.

        Raises:
            ValueError: If its shape or the kind of its dtype is wrong; the message names the method.
        """
        array = np.asarray(values)
        kinds = "b" if dtype is np.bool_ else "biuf" if dtype is np.float64 else "biufcSU"
        if array.dtype.kind not in kinds or (array.shape != shape if shape else array.shape[:1] != (self.num_envs,)):
            n = f", here {shape}" if shape else f" with N={self.num_envs}"
            raise ValueError(
                f"{type(self).__name__}.{method} must return {what}{n}; it returned {array.dtype}{list(array.shape)}"
            )
        return array if dtype is None else array.astype(dtype, copy=False)

    def _reset_rows(self, ids: np.ndarray, seeds: Sequence[int | None]) -> None:
        for i in ids.tolist():
            if seeds[i] is not None or self._generators[i] is None:
                self._generators[i], self._seeds[i] = seeding.np_random(seeds[i])
        if type(self).randomize is not MujocoVectorEnv.randomize:
            for i in ids.tolist():
                self.randomize(i, self._generators[i])
            self.physics.batch.set_const(ids)
        qpos, qvel = np.empty((len(ids), self.model.nq)), np.empty((len(ids), self.model.nv))
        for row, i in enumerate(ids.tolist()):
            state = self.initial_state(self._generators[i])
            if [np.shape(part) for part in state] != [qpos.shape[1:], qvel.shape[1:]]:
                raise ValueError(
                    f"{type(self).__name__}.initial_state() must return qpos float64[{self.model.nq}] and qvel "
                    f"float64[{self.model.nv}]; it returned shapes {[np.shape(part) for part in state]}"
                )
            qpos[row], qvel[row] = state
        self.physics.reset(ids, qpos, qvel)
        self._steps[ids], self._ended[ids] = 0, False
        self._all_begun = self._all_begun or None not in self._generators
        if self.with_contact_forces:
            self.physics.write_first_contact_forces(ids, self.cfrc_ext)

    def _checked_actions(self, actions: Any, ids: Sequence[int]) -> np.ndarray:
        actions = np.ascontiguousarray(actions)  # the memory order determines the order of summation
        if actions.shape != (len(ids), self.model.nu):
            raise ValueError(f"actions have shape {actions.shape}, but these envs need {(len(ids), self.model.nu)}")
        if np.isnan(actions).any():
            at = int(np.argmax(np.isnan(actions).any(axis=1)))
            raise ValueError(f"the action for env {ids[at]} is NaN: {actions[at]}. No env was stepped.")
        return actions

    # Like Gymnasium's own vector envs, this returns tuples, although the base class is annotated otherwise.
    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed of each env's generator."""
        return tuple(self._seeds)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator | None, ...]:  # type: ignore[override]
        """Each env's generator."""
        return tuple(self._generators)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env as plain values: its simulation, its generator and the step of its episode.

        Raises:
            NotRestorable: If the class does not declare `saved`, or the model has a state that MuJoCo's batch does not
                expose.
        """
        self._assert_open()
        return states_of(self)

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned for envs that were built in the same way."""
        self._assert_open()
        restore_states(self, states)

    def drop_infos(self) -> None:
        """Stops computing infos, except final observations.

        Has no effect if a subclass overrides `step`, `step_rows` or `reset`, because the override may read the infos.
        """
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
