"""Gymnasium's locomotion tasks, v5: HalfCheetah, Hopper, Walker2d, Swimmer and Ant.

Formulas, defaults, names and orders of summation match `gymnasium.envs.mujoco`, so results are equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.mujoco import ant_v5, half_cheetah_v5, hopper_v5, walker2d_v5

from vecenv.mujoco.env import Infos, MujocoVectorEnv
from vecenv.mujoco.generators import Generators

Range = tuple[float, float]


class _Runner(MujocoVectorEnv):
    """A task that rewards speed along x and penalizes large actions."""

    skipped = 1  # leading positions that exclude_current_positions_from_observation omits
    normal_velocities = False  # whether the noise of initial velocities is normal instead of uniform

    def __init__(
        self,
        num_envs: int = 1,
        *,
        forward_reward_weight: float,
        ctrl_cost_weight: float,
        reset_noise_scale: float,
        exclude_current_positions_from_observation: bool = True,
        **kwargs: Any,
    ):
        self._forward_reward_weight = forward_reward_weight
        self._ctrl_cost_weight = ctrl_cost_weight
        self._noise = reset_noise_scale
        self._from = self.skipped * bool(exclude_current_positions_from_observation)
        super().__init__(num_envs, **kwargs)

    def begin(self, ids: np.ndarray, rngs: Generators) -> None:
        self.data.qpos[ids] = self.init_qpos + rngs.uniform(-self._noise, self._noise, self.model.nq)
        if self.normal_velocities:
            self.data.qvel[ids] = self.init_qvel + self._noise * rngs.standard_normal(self.model.nv)
        else:
            self.data.qvel[ids] = self.init_qvel + rngs.uniform(-self._noise, self._noise, self.model.nv)

    def observe(self) -> np.ndarray:
        return np.concatenate([self.data.qpos[:, self._from :], self.data.qvel], axis=1)

    def before_step(self) -> np.ndarray:
        return self.data.qpos[:, 0].copy()

    def ctrl_cost(self, actions: np.ndarray) -> np.ndarray:
        """Returns the cost of the actions: [N], in the dtype of the actions."""
        return self._ctrl_cost_weight * np.square(actions).sum(axis=1)


class HalfCheetah(_Runner):
    """`HalfCheetah-v5`."""

    camera = half_cheetah_v5.DEFAULT_CAMERA_CONFIG
    contacts_listed_of = "half_cheetah.xml"
    normal_velocities = True

    def __init__(self, num_envs: int = 1, *, xml_file: str = "half_cheetah.xml", frame_skip: int = 5, **kwargs: Any):
        defaults = {"forward_reward_weight": 1.0, "ctrl_cost_weight": 0.1, "reset_noise_scale": 0.1}
        super().__init__(num_envs, xml_file=xml_file, frame_skip=frame_skip, **{**defaults, **kwargs})

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        x = self.data.qpos[:, 0].copy()
        velocity = (x - before) / self.dt
        forward, cost = self._forward_reward_weight * velocity, self.ctrl_cost(actions)
        infos = {"x_position": x, "x_velocity": velocity, "reward_forward": forward, "reward_ctrl": -cost}
        return forward - cost, np.zeros(self.num_envs, np.bool_), infos

    def reset_infos(self) -> Infos:
        return {"x_position": self.data.qpos[:, 0].copy()}


class Swimmer(_Runner):
    """`Swimmer-v5`."""

    skipped = 2

    def __init__(self, num_envs: int = 1, *, xml_file: str = "swimmer.xml", frame_skip: int = 4, **kwargs: Any):
        defaults = {"forward_reward_weight": 1.0, "ctrl_cost_weight": 1e-4, "reset_noise_scale": 0.1}
        super().__init__(num_envs, xml_file=xml_file, frame_skip=frame_skip, **{**defaults, **kwargs})

    def before_step(self) -> np.ndarray:
        return self.data.qpos[:, :2].copy()

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self.data.qpos[:, :2] - before) / self.dt
        forward, cost = self._forward_reward_weight * velocity[:, 0], self.ctrl_cost(actions)
        infos = {
            **self.reset_infos(),
            "x_velocity": velocity[:, 0],
            "y_velocity": velocity[:, 1],
            "reward_forward": forward,
            "reward_ctrl": -cost,
        }
        return forward - cost, np.zeros(self.num_envs, np.bool_), infos

    def reset_infos(self) -> Infos:
        return position_infos(self.data.qpos)


class _Healthy(_Runner):
    """A task that rewards a healthy robot and may end the episode when the robot is unhealthy."""

    def __init__(
        self, num_envs: int = 1, *, healthy_reward: float, terminate_when_unhealthy: bool = True, **kwargs: Any
    ):
        self._healthy_reward = healthy_reward
        self._terminate_when_unhealthy = terminate_when_unhealthy
        super().__init__(num_envs, **kwargs)

    def healthy(self) -> np.ndarray:
        """Returns which envs are healthy: bool[N]."""
        raise NotImplementedError

    def terminated(self, healthy: np.ndarray) -> np.ndarray:
        """Returns which episodes end: bool[N]."""
        return ~healthy & bool(self._terminate_when_unhealthy)


class _Legs(_Healthy):
    """The base of Hopper and Walker2d."""

    def __init__(self, num_envs: int, **kwargs: Any):
        defaults = {
            "forward_reward_weight": 1.0,
            "ctrl_cost_weight": 1e-3,
            "healthy_reward": 1.0,
            "reset_noise_scale": 5e-3,
        }
        super().__init__(num_envs, **{**defaults, **kwargs})

    def observe(self) -> np.ndarray:
        velocities = np.clip(self.data.qvel, -10, 10)
        return np.concatenate([self.data.qpos[:, self._from :], velocities], axis=1)

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self.data.qpos[:, 0] - before) / self.dt
        healthy = self.healthy()
        forward, survive = self._forward_reward_weight * velocity, healthy * self._healthy_reward
        cost = self.ctrl_cost(actions)
        infos = {
            **self.reset_infos(),
            "x_velocity": velocity,
            "reward_forward": forward,
            "reward_ctrl": -cost,
            "reward_survive": survive,
        }
        return forward + survive - cost, self.terminated(healthy), infos

    def reset_infos(self) -> Infos:
        qpos = self.data.qpos
        return {"x_position": qpos[:, 0].copy(), "z_distance_from_origin": qpos[:, 1] - self.init_qpos[1]}


class Hopper(_Legs):
    """`Hopper-v5`."""

    camera = hopper_v5.DEFAULT_CAMERA_CONFIG
    contacts_listed_of = "hopper.xml"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        xml_file: str = "hopper.xml",
        frame_skip: int = 4,
        healthy_state_range: Range = (-100.0, 100.0),
        healthy_z_range: Range = (0.7, float("inf")),
        healthy_angle_range: Range = (-0.2, 0.2),
        **kwargs: Any,
    ):
        self._state, self._z, self._angle = healthy_state_range, healthy_z_range, healthy_angle_range
        super().__init__(num_envs, xml_file=xml_file, frame_skip=frame_skip, **kwargs)

    def healthy(self) -> np.ndarray:
        qpos, qvel = self.data.qpos, self.data.qvel
        state = np.concatenate([qpos[:, 2:], qvel], axis=1)
        in_range = ((self._state[0] < state) & (state < self._state[1])).all(axis=1)
        return in_range & within(qpos[:, 1], self._z) & within(qpos[:, 2], self._angle)


class Walker2d(_Legs):
    """`Walker2d-v5`."""

    camera = walker2d_v5.DEFAULT_CAMERA_CONFIG
    contacts_listed_of = "walker2d_v5.xml"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        xml_file: str = "walker2d_v5.xml",
        frame_skip: int = 4,
        healthy_z_range: Range = (0.8, 2.0),
        healthy_angle_range: Range = (-1.0, 1.0),
        **kwargs: Any,
    ):
        self._z, self._angle = healthy_z_range, healthy_angle_range
        super().__init__(num_envs, xml_file=xml_file, frame_skip=frame_skip, **kwargs)

    def healthy(self) -> np.ndarray:
        return within(self.data.qpos[:, 1], self._z) & within(self.data.qpos[:, 2], self._angle)


class Ant(_Healthy):
    """`Ant-v5`."""

    camera = ant_v5.DEFAULT_CAMERA_CONFIG
    contacts_listed_of = "ant.xml"
    fields = ("xpos",)
    with_contact_forces = True
    current = False
    skipped = 2
    normal_velocities = True

    def __init__(
        self,
        num_envs: int = 1,
        *,
        xml_file: str = "ant.xml",
        frame_skip: int = 5,
        contact_cost_weight: float = 5e-4,
        main_body: int | str = 1,
        healthy_z_range: Range = (0.2, 1.0),
        contact_force_range: Range = (-1.0, 1.0),
        include_cfrc_ext_in_observation: bool = True,
        **kwargs: Any,
    ):
        self._contact_cost_weight, self._z, self._force_range = (
            contact_cost_weight,
            healthy_z_range,
            contact_force_range,
        )
        self._with_forces = include_cfrc_ext_in_observation
        defaults = {
            "forward_reward_weight": 1,
            "ctrl_cost_weight": 0.5,
            "healthy_reward": 1.0,
            "reset_noise_scale": 0.1,
        }
        super().__init__(num_envs, xml_file=xml_file, frame_skip=frame_skip, **{**defaults, **kwargs})
        self._main_body = self.model.body(main_body).id

    def healthy(self) -> np.ndarray:
        state = np.concatenate([self.data.qpos, self.data.qvel], axis=1)
        z = state[:, 2]
        return np.isfinite(state).all(axis=1) & (self._z[0] <= z) & (z <= self._z[1])

    def contact_forces(self) -> np.ndarray:
        """Returns the clipped contact forces, float64[N, nbody, 6]."""
        return np.clip(self.cfrc_ext, *self._force_range)

    def observe(self) -> np.ndarray:
        parts = [self.data.qpos[:, self._from :], self.data.qvel]
        if self._with_forces:
            parts.append(self.contact_forces()[:, 1:].reshape(self.num_envs, -1))
        return np.concatenate(parts, axis=1)

    def _xy(self) -> np.ndarray:
        return self.data.xpos[:, self._main_body, :2].copy()

    def before_step(self) -> np.ndarray:
        return self._xy()

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self._xy() - before) / self.dt
        healthy = self.healthy()
        forward, survive = velocity[:, 0] * self._forward_reward_weight, healthy * self._healthy_reward
        ctrl = self.ctrl_cost(actions)
        contact = self._contact_cost_weight * sum_of_squares(self.contact_forces())
        infos = {
            **self.reset_infos(),
            "x_velocity": velocity[:, 0],
            "y_velocity": velocity[:, 1],
            "reward_forward": forward,
            "reward_ctrl": -ctrl,
            "reward_contact": -contact,
            "reward_survive": survive,
        }
        return (forward + survive) - (ctrl + contact), self.terminated(healthy), infos

    def reset_infos(self) -> Infos:
        return position_infos(self.data.qpos)


def within(values: np.ndarray, bounds: Range) -> np.ndarray:
    """Returns which values lie strictly between the bounds."""
    return (bounds[0] < values) & (values < bounds[1])


def norm(vectors: np.ndarray) -> np.ndarray:
    """Returns the norm of each row of `[N, k]`, summed in the same order as by `np.linalg.norm` for one vector."""
    vectors = np.ascontiguousarray(vectors)
    return np.sqrt(np.vecdot(vectors, vectors))


def sum_of_squares(values: np.ndarray) -> np.ndarray:
    """Returns the sum of squares over all axes except the first, in numpy's order of summation for a single env."""
    return np.square(values).reshape(len(values), -1).sum(axis=1)


def position_infos(qpos: np.ndarray) -> Infos:
    """Returns the infos about the position of a robot that moves in the plane."""
    return {
        "x_position": qpos[:, 0].copy(),
        "y_position": qpos[:, 1].copy(),
        "distance_from_origin": norm(qpos[:, :2]),
    }
