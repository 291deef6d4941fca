"""How long does it take to create 64 HalfCheetah envs that are ready to be reset?

Unit: envs created per second. The rivals take turns.
Not measured: closing the envs, and one-time costs of a program such as imports and the start of a fork server. Each
rival is created once before its first round.
"""

from __future__ import annotations

import functools

import gymnasium as gym
import pytest

import vecenv

NUM_ENVS = 64
MAKE = functools.partial(gym.make, "HalfCheetah-v5")
RIVALS = {
    "vecenv Async, 2 workers": lambda: vecenv.AsyncVectorEnv([MAKE] * NUM_ENVS, num_workers=2),
    "gymnasium Async": lambda: gym.vector.AsyncVectorEnv([MAKE] * NUM_ENVS),
}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("turn", range(3))
def test_creation(measure, benchmark, turn, rival):
    benchmark.group = f"creation of {NUM_ENVS} HalfCheetah-v5 (envs per second)"
    made = []

    RIVALS[rival]().close()
    measure(
        lambda: made.append(RIVALS[rival]()),
        after_each=lambda: made.pop().close(),
        rounds=5,
        iterations=1,
        env_steps=NUM_ENVS,
        rival=rival,
        turn=turn,
    )
