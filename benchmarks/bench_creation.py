"""How long does it take to create 64 HalfCheetah envs, ready to be reset?

Unit: envs per second of creation; closing them is not measured. The rivals take turns. Before the first turn, each is
created once: what a fork server or an import costs once in a program is not what is asked here.
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
