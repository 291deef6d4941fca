"""Envs that render, in a separate module because workers import it and must not load TensorFlow."""

import os
import sys
import time
from types import MappingProxyType

import gymnasium as gym
import numpy as np


class Striped(gym.Env):
    """Draws ten white rows per step taken, and terminates after `length` steps."""

    metadata = MappingProxyType({"render_modes": ["rgb_array"], "render_fps": 10})
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=5, render_mode="rgb_array", drawn=None):
        self.render_mode, self._length, self._drawn, self._steps = render_mode, length, drawn, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        assert "tensorflow" not in sys.modules  # Mesa's OpenGL may crash in a process that has loaded TensorFlow
        return np.zeros(2, np.float32), 1.0, self._steps == self._length, False, {}

    def render(self):
        if self._drawn is not None:
            return self._drawn
        frame = np.zeros((64, 64, 3), np.uint8)
        frame[: 10 * self._steps] = 255
        return frame

    def get_state(self):
        return self._steps

    def set_state(self, state):
        self._steps = state


def nowhere_to_draw():
    return Striped(render_mode=None)


class Raising(Striped):
    def render(self):
        raise RuntimeError("no paint")


class RaisingLater(Striped):
    def step(self, action):
        if self._steps == 3:
            raise ValueError("the brush broke")
        return super().step(action)


class Picky(Striped):
    """Renders only with OSMesa."""

    def render(self):
        if os.environ["MUJOCO_GL"] != "osmesa":
            raise RuntimeError("no EGL")
        return super().render()


class Hanging(Striped):
    def render(self):
        time.sleep(100)
