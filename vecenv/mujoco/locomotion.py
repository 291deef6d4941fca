"""Gymnasium's locomotion tasks, v5: HalfCheetah, Hopper, Walker2d, Swimmer and Ant."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.mujoco import ant_v5, half_cheetah_v5, hopper_v5, swimmer_v5, walker2d_v5

from vecenv.mujoco.episodes import Infos
from vecenv.mujoco.gymnasium_task import GymnasiumTask, position_infos, sum_of_squares, within


class _Runner(GymnasiumTask):
    """A task that rewards speed along x and penalizes large actions."""

    skipped = 1

    def before_step(self) -> np.ndarray:
        return self.data.qpos[:, 0].copy()

    def ctrl_cost(self, actions: np.ndarray) -> np.ndarray:
        """Returns the cost of the actions: [N], in the dtype of the actions."""
        return self.args.ctrl_cost_weight * np.square(actions).sum(axis=1)


class HalfCheetah(_Runner):
    """`HalfCheetah-v5`."""

    gymnasium_class = half_cheetah_v5.HalfCheetahEnv
    contacts_listed_of = "half_cheetah.xml"
    normal_velocities = True

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        x = self.data.qpos[:, 0].copy()
        velocity = (x - before) / self.dt
        forward, cost = self.args.forward_reward_weight * velocity, self.ctrl_cost(actions)
        infos = {"x_position": x, "x_velocity": velocity, "reward_forward": forward, "reward_ctrl": -cost}
        return forward - cost, np.zeros(self.num_envs, np.bool_), infos

    def reset_infos(self) -> Infos:
        return {"x_position": self.data.qpos[:, 0].copy()}


class Swimmer(_Runner):
    """`Swimmer-v5`."""

    gymnasium_class = swimmer_v5.SwimmerEnv
    skipped = 2

    def before_step(self) -> np.ndarray:
        return self.data.qpos[:, :2].copy()

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self.data.qpos[:, :2] - before) / self.dt
        forward, cost = self.args.forward_reward_weight * velocity[:, 0], self.ctrl_cost(actions)
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


class _Legs(_Runner):
    """The base of Hopper and Walker2d."""

    def healthy(self) -> np.ndarray:
        """Returns which envs are healthy: bool[N]."""
        qpos, args = self.data.qpos, self.args
        return within(qpos[:, 1], args.healthy_z_range) & within(qpos[:, 2], args.healthy_angle_range)

    def observe(self) -> np.ndarray:
        return np.concatenate([self.positions(), np.clip(self.data.qvel, -10, 10)], axis=1)

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self.data.qpos[:, 0] - before) / self.dt
        healthy = self.healthy()
        forward, survive = self.args.forward_reward_weight * velocity, healthy * self.args.healthy_reward
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

    gymnasium_class = hopper_v5.HopperEnv
    contacts_listed_of = "hopper.xml"

    def healthy(self) -> np.ndarray:
        state = np.concatenate([self.data.qpos[:, 2:], self.data.qvel], axis=1)
        return within(state, self.args.healthy_state_range).all(axis=1) & super().healthy()


class Walker2d(_Legs):
    """`Walker2d-v5`."""

    gymnasium_class = walker2d_v5.Walker2dEnv
    contacts_listed_of = "walker2d_v5.xml"


class Ant(_Runner):
    """`Ant-v5`."""

    gymnasium_class = ant_v5.AntEnv
    contacts_listed_of = "ant.xml"
    fields = ("xpos",)
    with_contact_forces = True
    current = False
    skipped = 2
    normal_velocities = True

    def __init__(self, num_envs: int = 1, **kwargs: Any):
        super().__init__(num_envs, **kwargs)
        self._main_body = self.model.body(self.args.main_body).id

    def healthy(self) -> np.ndarray:
        """Returns which envs are healthy: bool[N]."""
        state = np.concatenate([self.data.qpos, self.data.qvel], axis=1)
        (low, high), z = self.args.healthy_z_range, state[:, 2]
        return np.isfinite(state).all(axis=1) & (low <= z) & (z <= high)

    def contact_forces(self) -> np.ndarray:
        """Returns the clipped contact forces, float64[N, nbody, 6]."""
        return np.clip(self.cfrc_ext, *self.args.contact_force_range)

    def observe(self) -> np.ndarray:
        parts = [self.positions(), self.data.qvel]
        if self.args.include_cfrc_ext_in_observation:
            parts.append(self.contact_forces()[:, 1:].reshape(self.num_envs, -1))
        return np.concatenate(parts, axis=1)

    def before_step(self) -> np.ndarray:
        return self.data.xpos[:, self._main_body, :2].copy()

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self.data.xpos[:, self._main_body, :2] - before) / self.dt
        healthy = self.healthy()
        forward, survive = velocity[:, 0] * self.args.forward_reward_weight, healthy * self.args.healthy_reward
        ctrl = self.ctrl_cost(actions)
        contact = self.args.contact_cost_weight * sum_of_squares(self.contact_forces())
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
