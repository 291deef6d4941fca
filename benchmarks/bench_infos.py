"""How much do infos cost? Each info of HalfCheetah holds four numbers.

Unit: env-steps per second of all envs together. The runs with and without infos take turns.
Not measured: creation and the policy.
"""

from __future__ import annotations

import numpy as np
import pytest

import vecenv
from benchmarks.bench_engine import ENVS

NUM_ENVS = 64


@pytest.mark.parametrize("infos", [True, False], ids=["infos", "no infos"])
@pytest.mark.parametrize("turn", range(5))
def test_infos(measure, benchmark, turn, infos):
    benchmark.group = f"HalfCheetah-v5, {NUM_ENVS} envs, with and without infos"
    envs = vecenv.AsyncVectorEnv([ENVS["HalfCheetah-v5"]] * NUM_ENVS, infos=infos)
    try:
        envs.reset(seed=1)
        envs.action_space.seed(1)
        actions = [envs.action_space.sample() for _ in range(16)]
        for batch in actions:
            *_, returned = envs.step(batch)
        assert ("x_velocity" in returned) == infos and np.all(returned.get("_x_velocity", True))
        step = iter(range(10**9))
        measure(
            lambda: envs.step(actions[next(step) % 16]),
            rounds=15,
            iterations=50,
            env_steps=NUM_ENVS,
            rival="infos" if infos else "infos=False",
            turn=turn,
        )
    finally:
        envs.close()
