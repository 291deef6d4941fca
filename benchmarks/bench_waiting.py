"""What does it save to stay awake for a millisecond before sleeping (`vecenv.workers.protocol.Waiter`)?

Envs that cost nothing, two workers. Unit: env-steps per second; its inverse times the number of envs is the
time of one step. Not measured: what else could have run on the cores meanwhile.
"""

from __future__ import annotations

import numpy as np
import pytest

import vecenv
from benchmarks.bench_engine import ENVS
from vecenv.workers import pool


@pytest.mark.parametrize("rival", ["awake first", "asleep at once"])
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("num_envs", [2, 64])
def test_waiting(measure, benchmark, monkeypatch, num_envs, turn, rival):
    benchmark.group = f"waiting, {num_envs} envs"
    if rival == "asleep at once":  # as on a machine with fewer cores than workers
        monkeypatch.setattr(pool, "available_cores", lambda: 1)
    actions = np.zeros((num_envs, 6), np.float32)
    with vecenv.AsyncVectorEnv([ENVS["free float32[17]"]] * num_envs, num_workers=2) as envs:
        envs.reset(seed=0)
        np.testing.assert_array_equal(envs.step(actions)[0], np.ones((num_envs, 17), np.float32))
        measure(lambda: envs.step(actions), rounds=15, iterations=200, env_steps=num_envs, rival=rival, turn=turn)
