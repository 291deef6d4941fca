r"""The quadruped on rough ground. The level of an env rises when its robot succeeds and drops when the robot falls.

Train it:  python -m ppo train --config quadruped --env examples.rough:RoughQuadruped-v0 --eval-env-kwargs level=4 \
    --info-metrics level error/velocity error/yaw --logdir runs
"""

import gymnasium as gym
import mujoco
import numpy as np

from vecenv.robots.quadruped import MODEL, Quadruped

CELL = 0.25  # meters between two heights
LANE = 24  # rows of heights in the lane of a level
BORDER = 40  # rows and columns of flat ground around the lanes
BUMPS = np.array([0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1])  # the highest bumps of each level, in meters


class RoughQuadruped(Quadruped):
    """Level i is the i-th lane of one height field, which all envs share. The policy does not see the ground.

    Args:
        level: The level of all episodes. None: each env begins at level 0. Its level rises after an episode that lasts
            until the time limit with a mean velocity error below 0.4 m/s, and falls after an episode that ends early.
    """

    saved = (*Quadruped.saved, "levels", "succeeded")

    def __init__(self, num_envs, *, xml_file=None, level=None, **kwargs):
        bumps = np.random.default_rng(0).uniform(0, 1, (LANE * len(BUMPS),) * 2) * np.repeat(BUMPS, LANE)[:, None]
        self.ground = np.pad(bumps, BORDER)
        spec = mujoco.MjSpec.from_file(str(xml_file or MODEL))
        for geom in spec.worldbody.geoms:
            spec.delete(geom)
        rows, highest = len(self.ground), self.ground.max()
        size = [CELL * (rows - 1) / 2] * 2 + [highest, 1.0]
        spec.add_hfield(name="ground", size=size, nrow=rows, ncol=rows, userdata=(self.ground / highest).ravel())
        field = {"type": mujoco.mjtGeom.mjGEOM_HFIELD, "hfieldname": "ground"}
        spec.worldbody.add_geom(name="floor", **field, contype=1, conaffinity=1)
        super().__init__(num_envs, xml_file=spec, **kwargs)
        self.level = level
        self.levels, self.succeeded = np.full(num_envs, level or 0), np.zeros(num_envs, np.int64)

    def begin(self, ids, rngs):
        super().begin(ids, rngs)
        if self.level is None:
            self.levels[ids] = np.clip(self.levels[ids] + self.succeeded[ids], 0, len(BUMPS) - 1)
        lanes = self.levels[ids] - (len(BUMPS) - 1) / 2
        self.data.qpos[ids, 0] = rngs.uniform(-5, 5)
        self.data.qpos[ids, 1] = lanes * LANE * CELL
        self.data.qpos[ids, 2] += BUMPS[self.levels[ids]]

    def after_step(self, ids, actions, rngs):
        super().after_step(ids, actions, rngs)
        finished = self.steps[ids] == self.max_episode_steps
        tracked = self.errors[ids, 0] < 0.4 * self.steps[ids]
        self.succeeded[ids] = np.where(finished, tracked, -1)  # of the episode if it ends now

    def outcome(self, before, actions):
        rewards, fell, infos = super().outcome(before, actions)
        return rewards, fell, {**infos, "level": self.levels}

    def heights(self):
        last = len(self.ground) - 1
        columns, rows = np.rint(self.data.qpos[:, :2] / CELL + last / 2).astype(int).clip(0, last).T
        return self.data.qpos[:, 2] - self.ground[rows, columns]


gym.register("RoughQuadruped-v0", vector_entry_point=RoughQuadruped, max_episode_steps=1000)
