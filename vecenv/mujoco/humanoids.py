"""Gymnasium's Humanoid and HumanoidStandup, v5."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.mujoco import humanoid_v5, humanoidstandup_v5

from vecenv.mujoco.episodes import Infos
from vecenv.mujoco.gymnasium_task import GymnasiumTask, position_infos, sum_of_squares, within


class _Human(GymnasiumTask):
    """The base of both tasks: the body and its observations."""

    with_contact_forces = True
    current = False
    fields = ("cinert", "cvel", "qfrc_actuator", "xipos", "ten_length", "ten_velocity")
    skipped = 2

    def observe(self) -> np.ndarray:
        args, data, count = self.args, self.data, self.num_envs
        parts = [self.positions(), data.qvel]
        if args.include_cinert_in_observation is True:
            parts.append(data.cinert[:, 1:].reshape(count, -1))
        if args.include_cvel_in_observation is True:
            parts.append(data.cvel[:, 1:].reshape(count, -1))
        if args.include_qfrc_actuator_in_observation is True:
            parts.append(data.qfrc_actuator[:, 6:])
        if args.include_cfrc_ext_in_observation is True:
            parts.append(self.cfrc_ext[:, 1:].reshape(count, -1))
        return np.concatenate(parts, axis=1)

    def _costs(self, impact_weight: float, impact_range: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the costs of control and of contacts: two float64[N]."""
        ctrl = self.args.ctrl_cost_weight * sum_of_squares(self.data.ctrl)
        return ctrl, np.clip(impact_weight * sum_of_squares(self.cfrc_ext), *impact_range)

    def _tendons(self) -> Infos:
        return {"tendon_length": self.data.ten_length.copy(), "tendon_velocity": self.data.ten_velocity.copy()}


class Humanoid(_Human):
    """`Humanoid-v5`."""

    gymnasium_class = humanoid_v5.HumanoidEnv

    def _center_of_mass(self) -> np.ndarray:
        masses, positions = self.physics.varied.get("body_mass"), self.data.xipos
        if masses is not None:
            return (np.einsum("nb,nbj->nj", masses, positions) / masses.sum(axis=1, keepdims=True))[:, :2]
        return (np.einsum("b,nbj->nj", self.model.body_mass, positions) / self.model.body_mass.sum())[:, :2]

    def before_step(self) -> np.ndarray:
        return self._center_of_mass()

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self._center_of_mass() - before) / self.dt
        healthy = within(self.data.qpos[:, 2], self.args.healthy_z_range)
        forward, survive = self.args.forward_reward_weight * velocity[:, 0], healthy * self.args.healthy_reward
        ctrl, contact = self._costs(self.args.contact_cost_weight, self.args.contact_cost_range)
        infos = {
            **self.reset_infos(),
            "x_velocity": velocity[:, 0],
            "y_velocity": velocity[:, 1],
            "reward_survive": survive,
            "reward_forward": forward,
            "reward_ctrl": -ctrl,
            "reward_contact": -contact,
        }
        return (forward + survive) - (ctrl + contact), self.terminated(healthy), infos

    def reset_infos(self) -> Infos:
        return {**position_infos(self.data.qpos), **self._tendons()}


class HumanoidStandup(_Human):
    """`HumanoidStandup-v5`."""

    gymnasium_class = humanoidstandup_v5.HumanoidStandupEnv

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        up = (self.data.qpos[:, 2] - 0) / self.model.opt.timestep  # like Gymnasium, ignores uph_cost_weight
        ctrl, impact = self._costs(self.args.impact_cost_weight, self.args.impact_cost_range)
        infos = {**self.reset_infos(), "reward_linup": up, "reward_quadctrl": -ctrl, "reward_impact": -impact}
        return up - ctrl - impact + 1, np.zeros(self.num_envs, np.bool_), infos

    def reset_infos(self) -> Infos:
        qpos = self.data.qpos
        return {
            "x_position": qpos[:, 0].copy(),
            "y_position": qpos[:, 1].copy(),
            "z_distance_from_origin": qpos[:, 2] - self.init_qpos[2],
            **self._tendons(),
        }
