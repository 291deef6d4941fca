"""Envs for the tests of ppo. Workers import this module, so it must not import TensorFlow, which takes seconds."""

import contextlib
import os
import time
from copy import deepcopy
from types import MappingProxyType
from typing import ClassVar

import gymnasium as gym
import numpy as np

from tests.helpers import CountingEnv
from vecenv.tree import leaves, pick


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

    def get_state(self):
        return self._steps

    def set_state(self, state):
        self._steps = state


def raises_value_error():
    raise ValueError("the motor is on fire")


def kills_the_worker():
    os._exit(3)


class TurnsBad(gym.Env):
    """Returns an invalid observation, reward or mask at step 70."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, fault):
        self._fault, self._steps = fault, 0
        leaves = {"place": gym.spaces.Box(-1, 1, (2,)), "action_mask": gym.spaces.MultiBinary(3)}
        self.observation_space = gym.spaces.Dict(leaves)

    def reset(self, *, seed=None, options=None):
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        ends = self._steps % 10 == 0
        fault = self._fault if self._steps == 70 else None
        return self._observe(fault), float("inf") if fault == "reward" else 1.0, False, ends, {}

    def _observe(self, fault=None):
        place = np.array([0, np.nan if fault == "observation" else 1], np.float32)
        return {"place": place, "action_mask": np.zeros(3, np.int8) if fault == "mask" else np.ones(3, np.int8)}


class Fails(RewardTurnsBad):
    """An env that fails in a given way in its `at`-th step."""

    def __init__(self, fails, at=20):
        super().__init__(1.0)
        self._fails, self._at = fails, at

    def step(self, action):
        if self._steps == self._at - 1:
            self._fails()
        return super().step(action)


class KillsOnce(CountingEnv):
    """Kills its worker in its third step while a file exists, and deletes the file first unless `again` is set."""

    def __init__(self, flag, index=0, again=False):
        super().__init__(index, length=5)
        self._flag, self._again = flag, again

    def step(self, action):
        if self.steps == 2 and self._flag.exists():
            with contextlib.suppress(FileNotFoundError):  # another worker deleted the file first
                if not self._again:
                    self._flag.unlink()
                kills_the_worker()
        return super().step(action)


class StrictTaxi(gym.Wrapper):
    """Taxi, which raises if an action is masked. Its mask is missing in the info of an episode's last step."""

    def __init__(self):
        super().__init__(gym.make("Taxi-v4", max_episode_steps=20))

    def reset(self, *, seed=None, options=None):
        observation, info = self.env.reset(seed=seed, options=options)
        self._mask = info["action_mask"]
        return observation, info

    def step(self, action):
        if not self._mask[action]:
            raise ValueError(f"action {action} is masked")
        *results, terminated, truncated, info = self.env.step(action)
        self._mask = info.pop("action_mask") if terminated or truncated else info["action_mask"]
        return *results, terminated, truncated, info


def make_failing(at=10**9):
    return Fails(raises_value_error, at)


def hangs():
    time.sleep(4)  # longer than the timeout of its test, and shorter than the grace period that follows


class Unwilling(RewardTurnsBad):
    """An env whose get_state() fails in a given way: always, or once a file exists, which it deletes."""

    def __init__(self, fails, flag=None):
        super().__init__(1.0)
        self._fails, self._flag = fails, flag

    def get_state(self):
        if self._flag is not None:
            if not self._flag.exists():
                return
            self._flag.unlink()
        self._fails()

    def set_state(self, state):
        raise AssertionError("there is no state to restore")


class Counted(gym.Env):
    """Counts its instances."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    open, most, built = 0, 0, 0

    def __init__(self):
        Counted.built += 1
        Counted.open += 1
        Counted.most = max(Counted.most, Counted.open)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}

    def close(self):
        Counted.open -= 1


class Broken(Counted):
    """Raises in `close`, or at the end of a data set in its fifth step."""

    def __init__(self, when):
        super().__init__()
        self._data, self._when = iter(range(4)), when

    def step(self, action):
        if self._when == "step":
            next(self._data)
        return super().step(action)

    def close(self):
        super().close()
        if self._when == "close":
            raise OSError("still busy")


class Recorder(gym.Env):
    """Shows random observations of any space, and records them with the actions that it receives.

    Episodes last `LENGTH` steps. The reward tells apart the entries of the action.

    Attributes:
        made: The envs of this process, the newest last.
        episodes: The observation and the action of each step, by episode.
    """

    LENGTH = 12
    metadata = MappingProxyType({"render_modes": ["rgb_array"], "render_fps": 10})
    render_mode = "rgb_array"
    made: ClassVar[list["Recorder"]] = []

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = deepcopy((observation_space, action_space))
        self.episodes = []
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.episodes.append([])
        self._seen = self._observe()
        return self._seen, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.episodes[-1].append((self._seen, deepcopy(action)))
        self._seen = self._observe()
        entries = np.concatenate([np.ravel(pick(action, path)) for path, _ in leaves(self.action_space)])
        reward = float(entries @ np.arange(1, 1 + len(entries)))
        return self._seen, reward, len(self.episodes[-1]) == self.LENGTH, False, {}

    def render(self):
        return np.zeros((64, 64, 3), np.uint8)

    def _observe(self):
        observation = self.observation_space.sample()
        if "action_mask" in observation:
            observation["action_mask"][[0, -1]] = 1  # allows an action of each of two choices
        return observation
