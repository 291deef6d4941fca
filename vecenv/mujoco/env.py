"""MujocoVectorEnv: N simulations of one MuJoCo model, stepped in C++ by `mujoco.batch.Batch`.

A task is a subclass with a model, the initial states of episodes, and numpy functions that compute observations and
rewards of all N envs at once. This module is the task's contract and the flow of a step. `Physics` owns the
simulations, `Episodes` the progress of the episodes, and `TaskChecks` checks what the task returns.

Autoreset does not use `vecenv.rows.autoreset`: this vector env also works without rows, and one call resets all envs
whose episodes ended. `BatchRows` keeps the totals of the episodes, and `Restarts` reports cut episodes.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import logger, spaces
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.errors import StateError
from vecenv.mujoco.episodes import Episodes, Generators, Infos, final_columns
from vecenv.mujoco.physics import Model, Physics
from vecenv.mujoco.rendering import RENDER_MODES, BatchRenderer
from vecenv.mujoco.saved_state import check_declares, declared_arrays, restore_states, states_of
from vecenv.mujoco.task_checks import ObservationWriter, TaskChecks
from vecenv.rows.arguments import Seeds, autoreset_mode_of, seed_of_each, split_reset_mask
from vecenv.rows.infos import add_masked_infos, batched_infos, columns_of_mask, masked_infos

Step = tuple[Any, np.ndarray, np.ndarray, np.ndarray, Infos]
"""Observations, rewards, terminated, truncated, infos."""


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
            Look views up in the constructor, because a field has values from the next reset or step on. If a method of
            the task looks one up too late, the reset or step raises `StateError`.
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
    """Default of `default_camera_config`: attributes of `mujoco.MjvCamera`, such as `{"distance": 2.0}`.

    None: a custom task uses its model's camera "track" or one that shows the robot.
    """

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
        _warn_of_misspelled(type(self))
        # Two underscores, because a task may use any other name, such as `_step`.
        self.__creator = os.getpid()
        self.__is_custom = not type(self).__module__.startswith("vecenv.mujoco.")  # not equal to a Gymnasium task
        self.num_envs = num_envs
        self.frame_skip = frame_skip
        self.max_episode_steps = max_episode_steps
        self.autoreset_mode = autoreset_mode_of(autoreset_mode)
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
        options = {"default_camera_config": self.camera, **render_options}
        self.__renderer = BatchRenderer(self.physics, render_mode, options, follows=self.__is_custom)
        self.__episodes = Episodes(num_envs, max_episode_steps, self.autoreset_mode)
        self.steps = self.__episodes.steps
        self.__checks = TaskChecks(type(self).__name__, num_envs, self.physics, trusted=not self.__is_custom)
        self.__everyone = np.ones(num_envs, dtype=np.bool_)
        self.__with_infos = True
        # Looked up once, because every step needs them.
        self.__same_step = self.autoreset_mode == AutoresetMode.SAME_STEP
        self.__has_after_step = type(self).after_step is not MujocoVectorEnv.after_step

    # The spaces are determined when they are first used, because `observe` may need what a task's constructor sets.
    @functools.cached_property
    def single_action_space(self) -> spaces.Space:  # type: ignore[override]
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        if self.__is_custom:  # Gymnasium's tasks take the range of an actuator without limits, which is 0 to 0
            limited = self.model.actuator_ctrllimited.astype(np.bool_)
            low, high = np.where(limited, low, -np.inf), np.where(limited, high, np.inf)
        return spaces.Box(low, high, dtype=np.float32)

    @functools.cached_property
    def single_observation_space(self) -> spaces.Space:  # type: ignore[override]
        return self.__checks.space_of(self.observe())

    @functools.cached_property
    def action_space(self) -> spaces.Space:  # type: ignore[override]
        return batch_space(self.single_action_space, self.num_envs)

    @functools.cached_property
    def observation_space(self) -> spaces.Space:  # type: ignore[override]
        return batch_space(self.single_observation_space, self.num_envs)

    @functools.cached_property
    def __observations(self) -> ObservationWriter:
        return ObservationWriter(self.__checks, self.single_observation_space)

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

        The rewards may be a dict of terms float64[N], which are added up. The info `return/TERM` is then the sum of a
        term over the episode. Infos may be NaN where an env has no value. A task that truncates episodes itself returns
        rewards, terminated, truncated and infos. `before` is the result of `before_step`, and `actions` are `[N, ...]`,
        in the dtype that the caller passed.
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
        self.__assert_open()
        seeds = seed_of_each(seed, self.num_envs)
        _, mask = split_reset_mask(options, self.num_envs)
        if mask is None:
            mask = self.__everyone
        writer = self.__observations  # its first use calls `observe`, so that views looked up there get values below
        self.__begin(mask, seeds)
        self.__saved_arrays()  # raises if one is missing
        known = len(self.physics.batch.derived)
        observations, infos = writer.copy(self.observe(), out), masked_infos(self.__reset_infos(), mask)
        self.__checks.no_late_views(known)
        return observations, infos

    def step(self, actions: Any, *, out: Any = None) -> Step:
        """Steps every env; returns observations [N, ...], rewards, terminated, truncated (all [N]) and infos.

        `vecenv.Batched` describes `out`.
        """
        self.__assert_open()
        actions = self.__checks.actions(actions, range(self.num_envs), self.single_action_space)
        return self.__step(actions, self.__everyone, out)

    def step_rows(self, ids: Sequence[int], actions: Any) -> Step:
        """Steps the envs `ids`, with one action each; returns N rows, of which `ids` and all observations are valid."""
        self.__assert_open()
        given = self.__checks.actions(actions, ids, self.single_action_space)
        chosen = np.zeros(self.num_envs, np.bool_)
        chosen[ids] = True
        actions = np.zeros((self.num_envs, *given.shape[1:]), given.dtype)
        actions[ids] = given
        return self.__step(actions, chosen)

    def __step(self, actions: np.ndarray, chosen: np.ndarray, out: Any = None) -> Step:
        """Steps the chosen envs, `bool[N]`, or begins the next episodes of those whose episodes are over."""
        episodes = self.__episodes
        begins = episodes.due(chosen)
        stepped = chosen if begins is None else chosen & ~begins
        ids = None if np.count_nonzero(stepped) == self.num_envs else np.flatnonzero(stepped)

        before = self.before_step()
        self.__checks.before(before)
        self.__simulate(actions, stepped, ids)
        if begins is not None:
            self.__begin(begins)
        known = len(self.physics.batch.derived)

        outcome = self.__checks.outcome(self.outcome(before, actions), stepped, with_infos=self.__with_infos)
        rewards, terminated, truncated = outcome.rewards, outcome.terminated, episodes.at_limit()
        if outcome.truncated is not None:
            truncated |= outcome.truncated
        if outcome.terms:
            episodes.add_rewards(outcome.terms, stepped)
            if self.__with_infos:
                outcome.infos.update(episodes.return_infos())
        infos = masked_infos(outcome.infos, stepped)
        if ids is not None:
            terminated &= stepped
            truncated &= stepped
        if begins is not None:
            rewards[begins] = 0.0

        if self.__has_after_step and (ids is None or len(ids)):
            changed = np.flatnonzero(stepped) if ids is None else ids
            self.after_step(changed, actions[changed], self.np_random[changed])
            self.__checks.simulations("after_step()", stepped)
        if begins is not None:
            add_masked_infos(infos, self.__reset_infos(), begins)
        observations = self.__observations.copy(self.observe(), out)

        ended = terminated | truncated
        episodes.end(ended, chosen)
        if self.__same_step and np.count_nonzero(ended):
            columns = columns_of_mask(outcome.infos, stepped & ~ended)
            columns += final_columns(outcome.infos, observations, self.single_observation_space, ended)
            self.__begin(ended)
            infos = batched_infos(columns + columns_of_mask(self.__reset_infos(), ended), self.num_envs)
            observations = self.__observations.copy(self.observe(), out)
        self.__checks.no_late_views(known)
        return observations, rewards, terminated, truncated, infos

    def __simulate(self, actions: np.ndarray, stepped: np.ndarray, ids: np.ndarray | None) -> None:
        """Steps the simulations of these envs, which are given as `bool[N]` and as `int64[n]`, or None for all."""
        if ids is None or len(ids):
            rows = slice(None) if ids is None else ids
            controls = self.__checks.controls(self.apply(actions), actions, self.frame_skip, stepped)
            parts = [controls] if controls.ndim == 2 else np.moveaxis(controls, 1, 0)
            for number, part in enumerate(parts, 1):
                self.data.ctrl[rows] = part if ids is None else part[rows]
                refreshes = self.current and number == len(parts) and not self.with_contact_forces
                self.physics.step(self.frame_skip // len(parts), ids, refreshes=refreshes)
            self.__checks.stepped()
            self.__episodes.count_step(ids)
        if self.with_contact_forces:
            self.physics.write_contact_forces(np.flatnonzero(stepped), self.cfrc_ext)
            if self.current:
                self.physics.refresh(ids)

    def __begin(self, mask: np.ndarray, seeds: Sequence[int | None] | None = None) -> None:
        """Resets the simulations of the envs in the mask, `bool[N]`, and begins their episodes."""
        ids = np.flatnonzero(mask)
        rngs = self.__episodes.restart(ids, seeds)
        self.physics.reset(ids)
        self.begin(ids, rngs)
        self.__checks.simulations("begin()", mask)
        self.physics.start(ids)
        if self.with_contact_forces:
            self.physics.write_first_contact_forces(ids, self.cfrc_ext)
        self.__episodes.begin(ids)

    def __reset_infos(self) -> Infos:
        return self.__checks.infos("reset_infos()", self.reset_infos()) if self.__with_infos else {}

    # Like Gymnasium's own vector envs, this returns tuples, although the base class is annotated otherwise.
    @property
    def np_random_seed(self) -> tuple[int | None, ...]:  # type: ignore[override]
        """The seed of each env's generator."""
        return tuple(self.__episodes.seeds)

    @property  # type: ignore[misc]
    def np_random(self) -> Generators:  # type: ignore[override]
        """Each env's generator, or None before its first reset."""
        return Generators(self.__episodes.generators)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env as plain values.

        Raises:
            NotRestorable: If the class does not declare `saved`, or MuJoCo's batch does not expose the model's state.
        """
        self.__assert_open()
        if self.__is_custom:
            check_declares(type(self))
        return states_of(self.physics, self.__episodes, self.__saved_arrays())

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned for envs that were built in the same way."""
        self.__assert_open()
        restore_states(self.physics, self.__episodes, self.__saved_arrays(), states)
        self.__checks.simulations("set_state()", self.__everyone)

    def __saved_arrays(self) -> dict[str, np.ndarray]:
        return {"cfrc_ext": self.cfrc_ext} | declared_arrays(self, self.saved, self.num_envs)

    def drop_infos(self) -> None:
        """Stops computing infos, except final observations.

        Has no effect if a subclass overrides `step`, `step_rows` or `reset`.
        """
        self.__with_infos = not self.hands_over_infos

    @property
    def hands_over_infos(self) -> bool:
        """Whether the infos of `step`, `step_rows` and `reset` are new, because no subclass overrides these methods."""
        names = ("step", "step_rows", "reset")
        return all(getattr(type(self), name) is getattr(MujocoVectorEnv, name) for name in names)

    def render(self) -> tuple[Any, ...]:
        """Returns a frame of each env, in the format of `render_mode`."""
        return tuple(self.render_env(i) for i in range(self.num_envs))

    def render_env(self, env: int) -> Any:
        """Returns a frame of one env."""
        return self.__renderer.render(env)

    @property
    def mujoco_renderer(self) -> MujocoRenderer:
        """Gymnasium's renderer of env 0, whose camera and size can be changed before its first frame."""
        return self.__renderer.renderer(0)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the renderer."""
        self.__renderer.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because MuJoCo's batch cannot: build a new one"
        )

    def __assert_open(self) -> None:
        if self.closed:
            raise gym.error.ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if os.getpid() != self.__creator:  # a fork does not have the threads that step the simulations
            raise StateError(
                f"this `{type(self).__name__}` belongs to process {self.__creator}; this process ({os.getpid()}) is a "
                "fork of it. Build another vector env in this process."
            )


_HOOKS = ("after_step", "apply", "before_step", "begin", "observe", "outcome", "reset_infos")
"""The methods that a task defines, most of which are optional, so that nothing else would notice a wrong name."""


def _warn_of_misspelled(task: type[MujocoVectorEnv]) -> None:
    """Warns of a method whose name is nearly that of a hook that the task does not define."""
    names = {
        name
        for cls in task.__mro__[: task.__mro__.index(MujocoVectorEnv)]
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_")
    }
    for name in sorted(names.difference(dir(MujocoVectorEnv))):
        for hook in difflib.get_close_matches(name, set(_HOOKS) - names, n=1, cutoff=0.8):
            logger.warn(f"{task.__name__}.{name} is not called in a step or a reset. Did you mean {hook!r}?")
