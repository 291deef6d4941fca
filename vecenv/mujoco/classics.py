"""Gymnasium's Reacher, Pusher, InvertedPendulum and InvertedDoublePendulum, v5."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium.envs.mujoco import inverted_double_pendulum_v5, inverted_pendulum_v5, pusher_v5, reacher_v5

from vecenv.mujoco.episodes import Generators, Infos
from vecenv.mujoco.gymnasium_task import GymnasiumTask, norm


class _Arm(GymnasiumTask):
    """The base of Reacher and Pusher."""

    fields = ("xpos",)
    current = False

    def body(self, name: str) -> np.ndarray:
        """Returns the position of a body: float64[N, 3]."""
        return self.data.xpos[:, self.model.body(name).id]


class Reacher(_Arm):
    """`Reacher-v5`."""

    gymnasium_class = reacher_v5.ReacherEnv

    def begin(self, ids: np.ndarray, rngs: Generators) -> None:
        qpos = rngs.uniform(-0.1, 0.1, self.model.nq) + self.init_qpos
        for row, rng in zip(qpos, rngs, strict=True):
            while np.linalg.norm(goal := rng.uniform(-0.2, 0.2, 2)) >= 0.2:
                pass
            row[-2:] = goal
        qvel = self.init_qvel + rngs.uniform(-0.005, 0.005, self.model.nv)
        qvel[:, -2:] = 0
        self.data.qpos[ids], self.data.qvel[ids] = qpos, qvel

    def observe(self) -> np.ndarray:
        theta = self.data.qpos[:, :2].copy()
        to_target = (self.body("fingertip") - self.body("target"))[:, :2]
        parts = [np.cos(theta), np.sin(theta), self.data.qpos[:, 2:], self.data.qvel[:, :2], to_target]
        return np.concatenate(parts, axis=1)

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        dist = -norm(self.body("fingertip") - self.body("target")) * self.args.reward_dist_weight
        ctrl = -np.square(actions).sum(axis=1) * self.args.reward_control_weight
        return dist + ctrl, np.zeros(self.num_envs, np.bool_), {"reward_dist": dist, "reward_ctrl": ctrl}


class Pusher(_Arm):
    """`Pusher-v5`."""

    gymnasium_class = pusher_v5.PusherEnv

    def begin(self, ids: np.ndarray, rngs: Generators) -> None:
        for i, rng in zip(ids, rngs, strict=True):
            cylinder = np.zeros(2)
            while np.linalg.norm(cylinder) <= 0.17:
                cylinder = np.concatenate([rng.uniform(-0.3, 0, 1), rng.uniform(-0.2, 0.2, 1)])
            self.data.qpos[i, -4:-2], self.data.qpos[i, -2:] = cylinder, 0
        qvel = self.init_qvel + rngs.uniform(-0.005, 0.005, self.model.nv)
        qvel[:, -4:] = 0
        self.data.qvel[ids] = qvel

    def observe(self) -> np.ndarray:
        positions = [self.body(name) for name in ("tips_arm", "object", "goal")]
        return np.concatenate([self.data.qpos[:, :7], self.data.qvel[:, :7], *positions], axis=1)

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        near = -norm(self.body("object") - self.body("tips_arm")) * self.args.reward_near_weight
        dist = -norm(self.body("object") - self.body("goal")) * self.args.reward_dist_weight
        ctrl = -np.square(actions).sum(axis=1) * self.args.reward_control_weight
        infos = {"reward_dist": dist, "reward_ctrl": ctrl, "reward_near": near}
        return dist + ctrl + near, np.zeros(self.num_envs, np.bool_), infos


class InvertedPendulum(GymnasiumTask):
    """`InvertedPendulum-v5`."""

    gymnasium_class = inverted_pendulum_v5.InvertedPendulumEnv

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        observed = self.observe()
        terminated = ~np.isfinite(observed).all(axis=1) | (np.abs(observed[:, 1]) > 0.2)
        survive = (~terminated).astype(np.int64)
        return survive.astype(np.float64), terminated, {"reward_survive": survive}


class InvertedDoublePendulum(GymnasiumTask):
    """`InvertedDoublePendulum-v5`."""

    gymnasium_class = inverted_double_pendulum_v5.InvertedDoublePendulumEnv
    fields = ("site_xpos", "qfrc_constraint")
    current = False
    normal_velocities = True

    def observe(self) -> np.ndarray:
        angles = self.data.qpos[:, 1:].copy()
        parts = [
            self.data.qpos[:, :1],
            np.sin(angles),
            np.cos(angles),
            np.clip(self.data.qvel, -10, 10),
            np.clip(self.data.qfrc_constraint, -10, 10)[:, :1],
        ]
        return np.concatenate(parts, axis=1)

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, Infos]:
        x, y = self.data.site_xpos[:, 0, 0], self.data.site_xpos[:, 0, 2]
        v1, v2 = self.data.qvel[:, 1], self.data.qvel[:, 2]
        terminated = y <= 1
        distance = 0.01 * _squares(x) + _squares(y - 2)
        velocity = 1e-3 * _squares(v1) + 5e-3 * _squares(v2)
        alive = np.where(terminated, self.args.healthy_reward * 0, self.args.healthy_reward * 1)
        infos = {"reward_survive": alive, "distance_penalty": -distance, "velocity_penalty": -velocity}
        return alive - distance - velocity, terminated, infos


def _squares(values: np.ndarray) -> np.ndarray:
    """Returns squares computed with pow, as numpy does for scalars. `np.square` may differ in the last bit."""
    return np.array([math.pow(value, 2.0) for value in values.tolist()])
