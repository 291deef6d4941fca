"""A quadruped of 12.8 kg with twelve position servos learns to follow velocity commands.

Train it:  python -m ppo train --config quadruped --logdir runs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from vecenv.mujoco import Generators, Model, MujocoVectorEnv
from vecenv.robots.fitting import LEGS, fitted

MODEL = Path(__file__).with_name("quadruped.xml")
MAX_COMMAND = np.array([1.0, 0.5, 1.0])  # forward and left in m/s, yaw in rad/s
COMMAND_STEPS = 250  # steps between two commands, 5 s
PUSH_STEPS = 300  # steps between two pushes, 6 s
NOISE = np.repeat([0.2, 0.05, 0.01, 1.0], [3, 3, 12, 12])  # of the gyro, gravity, joint positions and velocities
ACTION_SCALE = 0.7  # radians
# Weights of the reward's terms, per second, by their names in legged_gym, which has no slip and pose.
WEIGHTS = {
    "tracking_lin_vel": 1.5,
    "tracking_ang_vel": 1.0,
    "orientation": -4.0,
    "lin_vel_z": -1.0,
    "ang_vel_xy": -0.02,
    "torques": -1e-4,
    "action_rate": -0.005,
    "feet_air_time": 12.0,
    "slip": -0.1,
    "pose": -0.1,
}


class Quadruped(MujocoVectorEnv):
    """Rewards a robot for moving at the commanded velocity. The critic sees more than the robot can measure.

    Observations are a dict: "policy" float32[N, 45], which a robot can measure (gyroscope, gravity, joint positions and
    velocities, commands and the last actions), and "critic" float32[N, 28]. Actions are float32[N, 12] in [-1, 1],
    offsets from the home pose in units of 0.7 rad, at 50 Hz. An episode ends when the robot falls.

    Args:
        xml_file: Another robot with the leg names of quadruped.xml: a path, an MjSpec or an MjModel. `fitting.fitted`
            adds what the model lacks.
        kp: Stiffness in Nm/rad of position servos that replace the robot's actuators.
        reward_weights: Replaces some of `WEIGHTS`.
        noise: Scale of the noise of the sensors.
        randomized: Whether friction, masses, motors and initial states vary, and the robot is pushed.
    """

    fields = ("sensordata", "actuator_force")
    saved = ("commands", "last_actions", "air_time", "noise", "errors")

    def __init__(
        self,
        num_envs: int,
        *,
        xml_file: Model | None = None,
        kp: float | None = None,
        reward_weights: Mapping[str, float] | None = None,
        noise: float = 1.0,
        randomized: bool = True,
        **kwargs: Any,
    ):
        spec = fitted(xml_file or MODEL, kp)
        super().__init__(num_envs, **{"xml_file": spec, "frame_skip": 4, "keyframe": "home", **kwargs})
        model = self.model
        servos = (model.actuator_biasprm[:, 1] < 0).sum()  # they pull joints towards the control
        if model.nu != 12 or servos != 12:
            raise ValueError(
                f"the model has {servos} position actuators among its {model.nu} actuators, but {type(self).__name__} "
                "needs 12 position actuators: set kp=60 to replace the actuators"
            )
        self.weights = {**WEIGHTS, **(reward_weights or {})}
        if unknown := self.weights.keys() - WEIGHTS:
            raise ValueError(f"reward_weights has unknown terms {sorted(unknown)}; the terms are {', '.join(WEIGHTS)}")
        self.noise_scale, self.randomized = noise * NOISE, randomized
        self.single_action_space = gym.spaces.Box(-1, 1, (12,), np.float32)
        joints = model.actuator_trnid[:, 0]
        self.joints, self.dofs = model.jnt_qposadr[joints], model.jnt_dofadr[joints]
        self.home = self.init_qpos[self.joints]
        self.gyro, self.velocity, self.up = (self.data.sensor(name).data for name in ("gyro", "velocity", "up"))
        self.touching = [int(model.sensor(f"{leg}_contact").adr[0]) for leg in LEGS]
        self.foot_velocities = [self.data.sensor(f"{leg}_velocity").data for leg in LEGS]
        self.feet = [int(model.sensor(f"{leg}_contact").objid[0]) for leg in LEGS]
        self.friction, self.masses = self.physics.expand("geom_friction"), self.physics.expand("body_mass")
        self.centers = self.physics.expand("body_ipos")
        self.gains, self.biases = self.physics.expand("actuator_gainprm"), self.physics.expand("actuator_biasprm")
        self.commands, self.errors = np.zeros((num_envs, 3)), np.zeros((num_envs, 2))
        self.last_actions, self.air_time = np.zeros((num_envs, 12)), np.zeros((num_envs, 4))
        self.noise = np.zeros((num_envs, 30))

    def begin(self, ids: np.ndarray, rngs: Generators) -> None:
        self.last_actions[ids] = self.air_time[ids] = self.errors[ids] = 0
        self.commands[ids] = self.draw_commands(rngs)
        self.noise[ids] = self.noise_scale * rngs.uniform(-1, 1, 30)
        if self.randomized:
            trunk, strength = 1, rngs.uniform(0.9, 1.1)
            self.friction[ids[:, None], self.feet, 0] = rngs.uniform(0.4, 1.2)[:, None]
            self.masses[ids, trunk] = self.model.body_mass[trunk] + rngs.uniform(-1, 2)
            self.centers[ids, trunk] = self.model.body_ipos[trunk] + rngs.uniform(-0.03, 0.03, 3)
            self.gains[ids, :, 0] = self.model.actuator_gainprm[:, 0] * strength[:, None]
            self.biases[ids, :, 1] = self.model.actuator_biasprm[:, 1] * strength[:, None]
            self.data.qpos[ids[:, None], self.joints] = self.home + rngs.uniform(-0.2, 0.2, 12)
            self.data.qvel[ids, :6] = rngs.uniform(-0.3, 0.3, 6)

    def apply(self, actions: np.ndarray) -> np.ndarray:
        return self.home + ACTION_SCALE * np.clip(actions, -1, 1)

    def after_step(self, ids: np.ndarray, actions: np.ndarray, rngs: Generators) -> None:
        self.last_actions[ids] = actions
        self.air_time[ids] = np.where(self.contacts()[ids], 0, self.air_time[ids] + self.dt)
        self.errors[ids] += self.tracking_errors()[ids]
        self.noise[ids] = self.noise_scale * rngs.uniform(-1, 1, 30)
        due = self.steps[ids] % COMMAND_STEPS == 0
        self.commands[ids[due]] = self.draw_commands(rngs[due])
        if self.randomized:
            due = self.steps[ids] % PUSH_STEPS == 0
            self.data.qvel[ids[due], :2] += rngs[due].uniform(-0.5, 0.5, 2)

    def observe(self) -> dict[str, np.ndarray]:
        q, qd = self.data.qpos[:, self.joints] - self.home, self.data.qvel[:, self.dofs]
        measured = np.concatenate([self.gyro, -self.up, q, qd], axis=1) + self.noise
        policy = np.concatenate([measured, self.commands, self.last_actions], axis=1)
        friction, mass = self.friction[:, self.feet[0], :1], self.masses[:, 1:2]
        hidden = [self.velocity, self.gyro, self.up, self.heights()[:, None], friction, mass, self.air_time]
        critic = np.concatenate([*hidden, self.contacts(), *(v[:, :2] for v in self.foot_velocities)], axis=1)
        return {"policy": policy.astype(np.float32), "critic": critic.astype(np.float32)}

    def outcome(self, before: Any, actions: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]:
        contacts, errors = self.contacts(), self.tracking_errors()
        landed = contacts & (self.air_time > 0)
        moving = np.abs(self.commands).max(axis=1) > 0.1
        slip = sum(contact * squares(v[:, :2]) for contact, v in zip(contacts.T, self.foot_velocities, strict=True))
        terms = {
            "tracking_lin_vel": np.exp(-np.square(errors[:, 0]) / 0.25),
            "tracking_ang_vel": np.exp(-np.square(errors[:, 1]) / 0.25),
            "orientation": squares(self.up[:, :2]),
            "lin_vel_z": np.square(self.velocity[:, 2]),
            "ang_vel_xy": squares(self.gyro[:, :2]),
            "torques": squares(self.data.actuator_force),
            "action_rate": squares(actions - self.last_actions),
            "feet_air_time": (landed * np.clip(self.air_time - 0.1, 0, 0.3)).sum(axis=1) * moving,
            "slip": slip,
            "pose": squares(self.data.qpos[:, self.joints] - self.home),
        }
        rewards = {name: self.weights[name] * self.dt * term for name, term in terms.items()}
        mean = (self.errors + errors) / self.steps[:, None].clip(1)
        infos = {"error/velocity": mean[:, 0], "error/yaw": mean[:, 1]}
        fell = (self.up[:, 2] < 0.5) | (self.heights() < 0.13)
        return rewards, fell, infos

    def draw_commands(self, rngs: Generators) -> np.ndarray:
        """Returns float64[n, 3]. A tenth of the commands are to stand still."""
        return rngs.uniform(-1, 1, 3) * MAX_COMMAND * (rngs.random(1) > 0.1)

    def heights(self) -> np.ndarray:
        """Returns how high the trunk is above the floor, in meters: float64[N]."""
        return self.data.qpos[:, 2]

    def contacts(self) -> np.ndarray:
        """Returns which feet touch the floor: bool[N, 4]."""
        return self.data.sensordata[:, self.touching] > 0

    def tracking_errors(self) -> np.ndarray:
        """Returns the distances from the commanded velocity in m/s and yaw rate in rad/s: float64[N, 2]."""
        velocity = np.sqrt(squares(self.velocity[:, :2] - self.commands[:, :2]))
        return np.stack([velocity, np.abs(self.gyro[:, 2] - self.commands[:, 2])], axis=1)


def squares(vectors: np.ndarray) -> np.ndarray:
    """Returns the sum of squares of each row, in an order that does not depend on the number of rows."""
    return np.square(np.ascontiguousarray(vectors)).sum(axis=1)


gym.register("Quadruped-v0", vector_entry_point="vecenv.robots:Quadruped", max_episode_steps=1000)
