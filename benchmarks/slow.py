"""Envs whose step takes milliseconds: `benchmarks.slow:Millisecond-v0` keeps a core busy, `Sleeping-v0` sleeps."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Millisecond(gym.Env):
    """Observations are zeros. Episodes never terminate; the time limit truncates them."""

    observation_space = spaces.Box(-1.0, 1.0, (17,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (6,), np.float32)

    def __init__(self, step_ms: float = 1.0):
        self._step_s = 1e-3 * step_ms

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(17, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.wait()
        return np.zeros(17, np.float32), 0.0, False, False, {}

    def wait(self) -> None:
        """Keeps the core busy."""
        end = time.perf_counter() + self._step_s
        while time.perf_counter() < end:
            pass


class Sleeping(Millisecond):
    """Sleeps, so that a few cores can stand in for many."""

    def wait(self) -> None:
        """Sleeps."""
        time.sleep(self._step_s)


gym.register("Millisecond-v0", Millisecond, max_episode_steps=1000)
gym.register("Sleeping-v0", Sleeping, max_episode_steps=1000)
