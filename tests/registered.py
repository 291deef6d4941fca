"""Envs that a command can name as "tests.registered:Raising-v0"."""

import gymnasium as gym
import numpy as np

from tests.helpers import CountingEnv


class RaisingEnv(CountingEnv):
    """Raises a TypeError at step 20, as a buggy env might."""

    def __init__(self):
        super().__init__(0, length=100)

    def step(self, action):
        if self.steps == 20:
            raise TypeError("unsupported operand")
        return super().step(action)


gym.register("Raising-v0", entry_point=RaisingEnv)


class UnseededEnv(CountingEnv):
    """Ignores the seed, as a buggy env might."""

    def __init__(self):
        super().__init__(0)

    def _observe(self):
        return super()._observe() + np.random.default_rng().random()


gym.register("Unseeded-v0", entry_point=UnseededEnv)


class LonelyEnv(CountingEnv):
    """Allows one instance per process, like an emulator with global state."""

    owner = None

    def __init__(self):
        super().__init__(0, length=5)
        if LonelyEnv.owner is not None:
            raise RuntimeError("this process already has an emulator")
        LonelyEnv.owner = self

    def close(self):
        if LonelyEnv.owner is self:
            LonelyEnv.owner = None


gym.register("Lonely-v0", entry_point=LonelyEnv)
