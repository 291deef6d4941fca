"""How well does the engine scale with the number of workers if there are enough cores?

Unit: env-steps per second of all envs together, as the median of the rounds of each turn.
Not measured: contention for memory bandwidth and caches between envs that compute.

Envs only sleep, so two cores can stand in for many. Each worker has four envs, whose steps take 2 ms each. Without any
overhead, a step of all envs would take as long as four steps of one env, for any number of workers. This process
measures that time, which includes the system's delay of each sleep, and records it as `extra_info["ideal_us"]`.
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
    """Sleeps for 2 ms instead of computing."""

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
