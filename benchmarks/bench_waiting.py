"""How much faster are steps if a waiting process spins for a millisecond before it sleeps?

Unit: env-steps per second of all envs together, on two workers with envs that do nothing.
Not measured: the work that other processes could do on the cores during the spinning.

The engine spins only if every worker has a core. This benchmark disables spinning by reporting a single core to the
pool, which is internal to the engine.
"""

from __future__ import annotations

import numpy as np
import pytest

import vecenv
from benchmarks.bench_engine import ENVS
from vecenv.workers import process_pool


@pytest.mark.parametrize("rival", ["spin, then sleep", "sleep at once"])
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("num_envs", [2, 64])
def test_waiting(measure, benchmark, monkeypatch, num_envs, turn, rival):
    benchmark.group = f"waiting, {num_envs} envs"
    if rival == "sleep at once":  # as on a machine with fewer cores than workers
        monkeypatch.setattr(process_pool, "available_cores", lambda: 1)
    actions = np.zeros((num_envs, 6), np.float32)
    with vecenv.AsyncVectorEnv([ENVS["free float32[17]"]] * num_envs, num_workers=2) as envs:
        envs.reset(seed=0)
        np.testing.assert_array_equal(envs.step(actions)[0], np.ones((num_envs, 17), np.float32))
        measure(lambda: envs.step(actions), rounds=15, iterations=200, env_steps=num_envs, rival=rival, turn=turn)
