"""Envs for the tests of ppo. Workers import this module, so it must not import TensorFlow, which takes seconds."""

import os
import time

import gymnasium as gym
import numpy as np

from tests.helpers import CountingEnv


def make_cartpole():
    return gym.make("CartPole-v1")


class InfoEnv(CountingEnv):
    """Its info "steps" is the length of the episode so far. Only every fourth episode has the info "rare"."""

    def step(self, action):
        *results, info = super().step(action)
        rare = {"rare": 7} if self.episode % 4 == 3 else {}
        return *results, {**info, "nested": {"long": self.steps >= 4}, **rare}


class Seeded(gym.Wrapper):
    """Appends each seed to a file."""

    def __init__(self, file):
        super().__init__(gym.make("CartPole-v1"))
        self._file = file

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            with self._file.open("a") as file:
                file.write(f"{seed}\n")
        return self.env.reset(seed=seed, options=options)


class RewardTurnsBad(gym.Env):
    """Returns a reward of 1 for 100 steps and `bad` thereafter; its observations are always valid."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, bad):
        self._bad, self._steps = bad, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        reward = self._bad if self._steps > 100 else 1.0
        return np.ones(2, np.float32), reward, False, self._steps % 20 == 0, {}


def raises_value_error():
    raise ValueError("the motor is on fire")


def kills_the_worker():
    os._exit(3)


class Fails(RewardTurnsBad):
    """An env that fails in a given way in its `at`-th step."""

    def __init__(self, fails, at=20):
        super().__init__(1.0)
        self._fails, self._at = fails, at

    def step(self, action):
        if self._steps == self._at - 1:
            self._fails()
        return super().step(action)


def hangs():
    time.sleep(60)


class Unwilling(RewardTurnsBad):
    """An env whose get_state() fails in a given way."""

    def __init__(self, fails):
        super().__init__(1.0)
        self._fails = fails

    def get_state(self):
        self._fails()

    def set_state(self, state):
        raise AssertionError("there is no state to restore")
