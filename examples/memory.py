r"""CartPole without velocities: only a policy with memory can balance it.

Train it:  python -m ppo train --env examples.memory:HiddenVelocity-v0 --recurrent gru --total-steps 300000 \
               --num-steps 64 --minibatch-size 512 --learning-rate 1e-3 --logdir runs
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


class HiddenVelocity(gym.ObservationWrapper):
    """Observations are the cart's position and the pole's angle: `float32[2]`."""

    SHOWN = (0, 2)

    def __init__(self, env: gym.Env):
        super().__init__(env)
        space = env.observation_space
        self.observation_space = gym.spaces.Box(space.low[[*self.SHOWN]], space.high[[*self.SHOWN]], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Returns the visible entries."""
        return observation[[*self.SHOWN]]


def make(**kwargs) -> gym.Env:
    """Returns the env, built with CartPole's arguments."""
    return HiddenVelocity(CartPoleEnv(**kwargs))


gym.register("HiddenVelocity-v0", entry_point=make, max_episode_steps=500)
