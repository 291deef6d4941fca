"""An env that returns precomputed images of any size, so a step costs almost nothing: `benchmarks.noise:Noise-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Noise(gym.Env):
    """Returns one of eight random images at each step. The time limit truncates its episodes.

    Args:
        shape: Height, width and channels of an image.
    """

    def __init__(self, shape: tuple[int, int, int]):
        self.observation_space = spaces.Box(0, 255, tuple(shape), np.uint8)
        self.action_space = spaces.Discrete(6)
        self._images = np.random.default_rng(0).integers(0, 256, (8, *shape), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._images[0], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step = (self._step + 1) % len(self._images)
        return self._images[self._step], float(action == 0), False, False, {}


gym.register("Noise-v0", Noise, max_episode_steps=1000)
