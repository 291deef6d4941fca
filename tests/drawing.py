"""Envs that render, in a separate module because workers import it and must not load TensorFlow."""

import os
import sys
import time
from types import MappingProxyType

import gymnasium as gym
import numpy as np
from gymnasium.envs.mujoco import MujocoEnv


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
        raise RuntimeError("no paint\nand no brush")


class Dying(Striped):
    def step(self, action):
        if self._steps == 3:
            os._exit(3)
        return super().step(action)


class RaisingLater(Striped):
    def step(self, action):
        if self._steps == 3:
            raise ValueError("the brush broke")
        return super().step(action)


class Reusing(Striped):
    """Returns the same array from each call of `render`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._frame = np.zeros((64, 64, 3), np.uint8)

    def render(self):
        self._frame[:] = super().render()
        return self._frame


class Growing(Striped):
    """Draws frames of different heights."""

    def render(self):
        return super().render()[: 8 + 2 * self._steps]


class Picky(Striped):
    """Renders only with OSMesa."""

    def render(self):
        if os.environ["MUJOCO_GL"] != "osmesa":
            raise RuntimeError("no EGL")
        return super().render()


class Hanging(Striped):
    def render(self):
        time.sleep(3)  # longer than the timeout of its test, and shorter than the grace period that follows


RUNNER = """
<mujoco>
  <statistic extent="8" center="0 0 1"/>
  <worldbody>
    <light pos="0 -5 5" dir="0 1 -1" directional="true"/>
    <geom type="plane" size="100 100 1" rgba="0 0 0 1"/>
    <body pos="0 0 1">
      <joint name="run" type="slide" axis="1 0 0"/>
      <geom type="sphere" size="1" rgba="1 0 0 1"/>
      %s
    </body>
  </worldbody>
  <actuator><motor joint="run" ctrlrange="-1 1"/></actuator>
</mujoco>
"""
"""A red ball on a black plane, with a place for further elements of its body."""


class Runner(MujocoEnv):
    """A red ball, which leaves the view of a camera that does not follow it, in five steps."""

    metadata = MappingProxyType({"render_modes": ["rgb_array"], "render_fps": 10})

    def __init__(self, model, **render):
        box = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        super().__init__(str(model), 50, box, render_mode="rgb_array", **render)

    def reset_model(self):
        self.set_state(self.init_qpos, self.init_qvel)
        return self.data.qpos.copy()

    def step(self, action):
        self.set_state(self.data.qpos + 20, self.data.qvel)
        return self.data.qpos.copy(), 1.0, self.data.qpos[0] > 99, False, {}


def seeing(model):
    """Returns a `Runner` whose observations are its frames."""
    return gym.wrappers.AddRenderObservation(Runner(model, width=80, height=60))
