"""How much faster are partial batches if the duration of an env's step varies by a factor of ten?

Unit: env-steps per second of all envs together. A step sleeps 1 ms with probability 0.9 and 10 ms otherwise; 8 envs run
on 8 workers.
Not measured: contention between envs that compute, because these envs only sleep.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import vecenv

NUM_ENVS = 8


class UnevenEnv(gym.Env):
    """Sleeps 1 ms with probability 0.9, and 10 ms otherwise."""

    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index: int):
        self._random = np.random.default_rng(index)
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        return self._observation, {}

    def step(self, action):
        time.sleep(0.01 if self._random.random() < 0.1 else 0.001)
        return self._observation, 0.0, False, False, {}


def _lock_step(envs: Any) -> int:
    envs.step(np.zeros(NUM_ENVS, np.int64))
    return NUM_ENVS


def _partial(envs: Any) -> int:
    batch = envs.recv(NUM_ENVS // 2)
    envs.send(np.zeros(len(batch.env_ids), np.int64), batch.env_ids)
    return len(batch.env_ids)


RIVALS = {f"vecenv Async, recv({NUM_ENVS // 2})": _partial, "vecenv Async, step": _lock_step}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("turn", range(3))
def test_partial(measure, benchmark, turn, rival):
    benchmark.group = f"steps of 1 ms or 10 ms, {NUM_ENVS} envs"
    envs = vecenv.AsyncVectorEnv([lambda i=i: UnevenEnv(i) for i in range(NUM_ENVS)], num_workers=NUM_ENVS)
    envs.reset()
    if RIVALS[rival] is _partial:
        envs.send(np.zeros(NUM_ENVS, np.int64))

    def run() -> None:
        done = 0
        while done < 100 * NUM_ENVS:
            done += RIVALS[rival](envs)

    try:
        measure(run, rounds=3, iterations=1, env_steps=100 * NUM_ENVS, rival=rival, turn=turn)
        if RIVALS[rival] is _partial:
            envs.recv()
    finally:
        envs.close()
