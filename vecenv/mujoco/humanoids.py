"""Gymnasium's Humanoid and HumanoidStandup, v5. The formulas are Gymnasium's, so results are equal bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.mujoco import humanoid_v5, humanoidstandup_v5

from vecenv.mujoco.env import Infos, MujocoVectorEnv
from vecenv.mujoco.generators import Generators
from vecenv.mujoco.locomotion import Range, norm, sum_of_squares, within


class _Human(MujocoVectorEnv):
    """The base of both tasks: the body and its observations."""

    with_contact_forces = True
    current = False
    fields = ("cinert", "cvel", "qfrc_actuator", "xipos", "ten_length", "ten_velocity")

    def __init__(
        self,
        num_envs: int = 1,
        *,
        ctrl_cost_weight: float = 0.1,
        reset_noise_scale: float = 1e-2,
        exclude_current_positions_from_observation: bool = True,
        include_cinert_in_observation: bool = True,
        include_cvel_in_observation: bool = True,
        include_qfrc_actuator_in_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
        **kwargs: Any,
    ):
        self._ctrl_cost_weight, self._noise = ctrl_cost_weight, reset_noise_scale
        self._from = 2 * bool(exclude_current_positions_from_observation)
        self._with_cinert = include_cinert_in_observation is True
        self._with_cvel = include_cvel_in_observation is True
        self._with_qfrc_actuator = include_qfrc_actuator_in_observation is True
        self._with_cfrc_ext = include_cfrc_ext_in_observation is True
        super().__init__(num_envs, **kwargs)

    def begin(self, ids: np.ndarray, rngs: Generators) -> None:
        self.data.qpos[ids] = self.init_qpos + rngs.uniform(-self._noise, self._noise, self.model.nq)
        self.data.qvel[ids] = self.init_qvel + rngs.uniform(-self._noise, self._noise, self.model.nv)

    def observe(self) -> np.ndarray:
        data, count = self.data, self.num_envs
        parts = [data.qpos[:, self._from :], data.qvel]
        if self._with_cinert:
            parts.append(data.cinert[:, 1:].reshape(count, -1))
        if self._with_cvel:
            parts.append(data.cvel[:, 1:].reshape(count, -1))
        if self._with_qfrc_actuator:
            parts.append(data.qfrc_actuator[:, 6:])
        if self._with_cfrc_ext:
            parts.append(self.cfrc_ext[:, 1:].reshape(count, -1))
        return np.concatenate(parts, axis=1)

    def _costs(self, impact_weight: float, impact_range: Range) -> tuple[np.ndarray, np.ndarray]:
        """Returns the costs of control and of contacts: two float64[N]."""
        ctrl = self._ctrl_cost_weight * sum_of_squares(self.data.ctrl)
        return ctrl, np.clip(impact_weight * sum_of_squares(self.cfrc_ext), *impact_range)

    def _tendons(self) -> Infos:
        return {"tendon_length": self.data.ten_length.copy(), "tendon_velocity": self.data.ten_velocity.copy()}


class Humanoid(_Human):
    """`Humanoid-v5`."""

    camera = humanoid_v5.DEFAULT_CAMERA_CONFIG

    def __init__(
        self,
        num_envs: int = 1,
        *,
        xml_file: str = "humanoid.xml",
        frame_skip: int = 5,
        forward_reward_weight: float = 1.25,
        contact_cost_weight: float = 5e-7,
        contact_cost_range: Range = (-np.inf, 10.0),
        healthy_reward: float = 5.0,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: Range = (1.0, 2.0),
        **kwargs: Any,
    ):
        self._forward_reward_weight, self._healthy_reward = forward_reward_weight, healthy_reward
        self._contact = (contact_cost_weight, contact_cost_range)
        self._terminate_when_unhealthy, self._z = terminate_when_unhealthy, healthy_z_range
        super().__init__(num_envs, xml_file=xml_file, frame_skip=frame_skip, **kwargs)

    def _center_of_mass(self) -> np.ndarray:
        masses, positions = self.physics.varied.get("body_mass"), self.data.xipos
        if masses is not None:
            return (np.einsum("nb,nbj->nj", masses, positions) / masses.sum(axis=1, keepdims=True))[:, :2]
        return (np.einsum("b,nbj->nj", self.model.body_mass, positions) / self.model.body_mass.sum())[:, :2]

    def before_step(self) -> np.ndarray:
        return self._center_of_mass()

    def outcome(self, before: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        velocity = (self._center_of_mass() - before) / self.dt
        healthy = within(self.data.qpos[:, 2], self._z)
        forward, survive = self._forward_reward_weight * velocity[:, 0], healthy * self._healthy_reward
        ctrl, contact = self._costs(*self._contact)
        infos = {
            **self.reset_infos(),
            "x_velocity": velocity[:, 0],
            "y_velocity": velocity[:, 1],
            "reward_survive": survive,
            "reward_forward": forward,
            "reward_ctrl": -ctrl,
            "reward_contact": -contact,
        }
        return (forward + survive) - (ctrl + contact), ~healthy & bool(self._terminate_when_unhealthy), infos

    def reset_infos(self) -> Infos:
        qpos = self.data.qpos
        return {
            "x_position": qpos[:, 0].copy(),
            "y_position": qpos[:, 1].copy(),
            **self._tendons(),
            "distance_from_origin": norm(qpos[:, :2]),
        }


class HumanoidStandup(_Human):
    """`HumanoidStandup-v5`."""

    camera = humanoidstandup_v5.DEFAULT_CAMERA_CONFIG

    def __init__(
        self,
        num_envs: int = 1,
        *,
        xml_file: str = "humanoidstandup.xml",
        frame_skip: int = 5,
        uph_cost_weight: float = 1,
        impact_cost_weight: float = 0.5e-6,
        impact_cost_range: Range = (-np.inf, 10.0),
        **kwargs: Any,
    ):
        self._impact = (impact_cost_weight, impact_cost_range)  # like Gymnasium, ignores uph_cost_weight
        super().__init__(num_envs, xml_file=xml_file, frame_skip=frame_skip, **kwargs)

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        up = (self.data.qpos[:, 2] - 0) / self.model.opt.timestep
        ctrl, impact = self._costs(*self._impact)
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
