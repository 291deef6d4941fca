"""How much CPU time does a step take in the parent process, and does it grow with envs or with workers?

Unit: env-steps per second of the parent's CPU time. The envs do nothing. They use copy=False, because the cost of
copies always grows with the number of envs.
Not measured: elapsed time and the workers' CPU time.

A process that spins while it waits uses CPU time without doing work, so this benchmark disables spinning by setting an
internal constant of the pipes.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import vecenv
from benchmarks.bench_engine import ENVS
from vecenv.workers import pipes

CASES = [(8, 2), (64, 2), (256, 2), (1024, 2), (4096, 2), (64, 1), (64, 4), (64, 8), (64, 16), (64, 32), (64, 64)]


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize(("num_envs", "num_workers"), CASES)
def test_parent(measure, benchmark, monkeypatch, num_envs, num_workers, turn):
    monkeypatch.setattr(pipes, "SPIN_S", 0.0)
    benchmark.group = "the parent's CPU time for a step (env-steps per CPU second)"
    envs = vecenv.AsyncVectorEnv([ENVS["free float32[17]"]] * num_envs, num_workers=num_workers, copy=False)
    try:
        envs.reset()
        actions = np.zeros((num_envs, 6), np.float32)
        measure(
            lambda: envs.step(actions),
            rounds=15,
            iterations=100,
            env_steps=num_envs,
            rival=f"N={num_envs}, W={num_workers}",
            turn=turn,
        )
    finally:
        envs.close()
