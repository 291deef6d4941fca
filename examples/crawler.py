"""A custom robot: a body with one arm learns to pull itself along the floor.

Train it:  python -m ppo train --env examples.crawler:Crawler-v0 --total-steps 200000 --logdir runs
"""

from pathlib import Path

import gymnasium as gym
import numpy as np

from vecenv.mujoco import MujocoVectorEnv


class Crawler(MujocoVectorEnv):
    """Rewards forward speed. Each method handles many envs at once."""

    saved = ()  # the task has no arrays

    def __init__(self, num_envs, **kwargs):
        model = Path(__file__).with_name("crawler.xml")
        super().__init__(num_envs, **{"xml_file": model, "frame_skip": 5, **kwargs})

    def begin(self, ids, rngs):  # the envs `ids` begin an episode; `rngs` are their random generators
        self.data.qpos[ids] += rngs.uniform(-0.05, 0.05, self.model.nq)

    def observe(self):  # float64[N, 9]: everything except the distance traveled
        return np.concatenate([self.data.qpos[:, 1:], self.data.qvel], axis=1)

    def before_step(self):
        return self.data.qpos[:, 0].copy()

    def outcome(self, before, actions):  # rewards float64[N], terminated bool[N], infos of arrays [N, ...]
        speed = (self.data.qpos[:, 0] - before) / self.dt
        rewards = speed - 0.01 * np.square(actions).sum(axis=1)
        return rewards, np.zeros(self.num_envs, bool), {"speed": speed}


gym.register("Crawler-v0", vector_entry_point=Crawler, max_episode_steps=200)
