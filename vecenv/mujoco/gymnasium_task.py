"""GymnasiumTask: the base of the tasks that equal those of `gymnasium.envs.mujoco` bit for bit.

Formulas, names and orders of summation in these tasks are Gymnasium's. Arguments and defaults are read from Gymnasium.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from vecenv.mujoco.env import MujocoVectorEnv
from vecenv.mujoco.episodes import Generators, Infos


class GymnasiumTask(MujocoVectorEnv):
    """A v5 task of Gymnasium. It takes the arguments of Gymnasium's class and of `MujocoVectorEnv`.

    Attributes:
        args: The arguments of Gymnasium's class, such as `args.reset_noise_scale`.
    """

    gymnasium_class: ClassVar[type]
    skipped = 0  # leading positions that exclude_current_positions_from_observation omits
    normal_velocities = False  # whether the noise of initial velocities is normal instead of uniform

    def __init__(self, num_envs: int = 1, **kwargs: Any):
        parameters = inspect.signature(self.gymnasium_class).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        if self.camera is not None:
            defaults["default_camera_config"] = self.camera
        args = {name: kwargs.pop(name, default) for name, default in defaults.items()}
        self.args: Any = SimpleNamespace(**args)
        shared = {name: args[name] for name in ("xml_file", "frame_skip", "default_camera_config")}
        super().__init__(num_envs, **shared, **kwargs)

    def begin(self, ids: np.ndarray, rngs: Generators) -> None:
        noise, model = self.args.reset_noise_scale, self.model
        self.data.qpos[ids] = self.init_qpos + rngs.uniform(-noise, noise, model.nq)
        if self.normal_velocities:
            self.data.qvel[ids] = self.init_qvel + noise * rngs.standard_normal(model.nv)
        else:
            self.data.qvel[ids] = self.init_qvel + rngs.uniform(-noise, noise, model.nv)

    def positions(self) -> np.ndarray:
        """Returns the positions that observations include: float64[N, M]."""
        excludes = self.skipped and self.args.exclude_current_positions_from_observation
        return self.data.qpos[:, self.skipped if excludes else 0 :]

    def observe(self) -> np.ndarray:
        return np.concatenate([self.positions(), self.data.qvel], axis=1)

    def terminated(self, healthy: np.ndarray) -> np.ndarray:
        """Returns which episodes end: bool[N]."""
        return ~healthy & bool(self.args.terminate_when_unhealthy)


def within(values: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
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
    return {"x_position": qpos[:, 0].copy(), "y_position": qpos[:, 1].copy(), "distance_from_origin": norm(qpos[:, :2])}
