"""What do more workers give, if there are cores for them?

Envs only sleep, so that two cores can stand for many: each worker has four, whose steps take 2 ms each. If nothing else
cost time, a step of all would take as long as the four, however many workers there are. That time is measured in this
process, with what the system adds to each sleep, and stands in `extra_info["ideal_us"]`.
Unit: env-steps per second; the median of the rounds of each turn.
Not measured: memory bandwidth and caches, which envs that compute share.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import vecenv
from benchmarks.slow import Millisecond

ENVS_PER_WORKER = 4
SLEEP_S = 2e-3


class Sleeping(Millisecond):
    """Sleeps instead."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(SLEEP_S)
        return np.zeros(17, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16, 32, 64])
def test_size(measure, benchmark, num_workers, turn):
    benchmark.group = f"sleeping envs, {ENVS_PER_WORKER} of 2 ms for each worker"
    num_envs = ENVS_PER_WORKER * num_workers
    ideal_us = 1e6 * np.median([_four_steps() for _ in range(20)])
    with vecenv.AsyncVectorEnv([Sleeping] * num_envs, num_workers=num_workers) as envs:
        envs.reset()
        actions = np.zeros((num_envs, 6), np.float32)
        extra = {"rival": f"W={num_workers}, N={num_envs}", "turn": turn, "ideal_us": float(ideal_us)}
        measure(lambda: envs.step(actions), rounds=5, iterations=20, env_steps=num_envs, **extra)


def _four_steps() -> float:
    env, start = Sleeping(), time.perf_counter()
    for _ in range(ENVS_PER_WORKER):
        env.step(env.action_space.low)
    return time.perf_counter() - start
