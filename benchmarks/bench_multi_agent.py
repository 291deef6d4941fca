"""How many steps per second do PettingZoo envs take, without learning and in training?

All rivals run 16 envs of mpe2's simple_spread_v3, which has three agents and episodes of 25 steps. Rivals that are not
in this process have one worker per core, except AgileRL's vector env, which starts one process per env. The rivals take
three turns.
Unit: without learning, agent-steps per second: a step of one env is three agent-steps. In training, env-steps per second
of collecting and learning together, in which a step of all agents of an env counts once.
Not measured: creation, start-up and compilation; the policy, without learning; envs whose agents leave before the
episode ends.

Without learning, all rivals take the same random actions and return their results as arrays. They reset an env in the
step that ends its episode. vecenv does so because of `autoreset_mode="SameStep"`: by default, it would reset in the next
step, so that fewer of its steps would move an env. All rivals are first checked to return the same observations, rewards
and flags as the plain loop, beyond the end of an episode.

In training, ppo and SB3 train one policy for all agents, two 64-64 tanh networks, on 128 steps of each env, with
minibatches of 256 and 10 epochs. SB3 trains on SuperSuit's vector env, as in PettingZoo's tutorials. SB3 represents the
alternatives because it can use the same networks and settings. Two differences remain: SuperSuit does not tell SB3 that
episodes are truncated, so SB3 does not bootstrap from their last observations, and it cannot seed the envs, because
SuperSuit's `seed` fails with Gymnasium 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_engine import INSTALL_SB3
from benchmarks.bench_ppo import in_a_process
from benchmarks.conftest import need
from vecenv import available_cores

NUM_ENVS, AGENTS, EPISODE = 16, ("agent_0", "agent_1", "agent_2"), 25
NUM_ROWS = NUM_ENVS * len(AGENTS)
SEEDS = list(range(1, 1 + NUM_ENVS))
INSTALL_ENV = "pip install mpe2 'pettingzoo>=1.25'"
INSTALL_AGILERL = "pip install torch==2.13.0 agilerl"
INSTALL_SUPERSUIT = "pip install supersuit"


@dataclass
class Rival:
    """A vector env, and how its values relate to arrays with one row per agent, `[M * K, ...]`.

    Attributes:
        envs: The vector env.
        actions: Converts actions, `int64[M * K]`, to the argument of `envs.step`.
        rows: Converts a result of `envs.step` to an array `[M * K, ...]`.
        seed: The argument of `envs.reset`.
        seeds: The seed that each env gets.
    """

    envs: Any
    actions: Callable[[np.ndarray], Any]
    rows: Callable[[Any], np.ndarray]
    seed: int | Sequence[int] = tuple(SEEDS)
    seeds: Sequence[int] = tuple(SEEDS)


def _vecenv() -> Rival:
    from mpe2 import simple_spread_v3

    from vecenv.adapters.pettingzoo import ParallelVectorEnv

    envs = ParallelVectorEnv([simple_spread_v3.parallel_env] * NUM_ENVS, infos=False, autoreset_mode="SameStep")
    return Rival(envs, actions=lambda actions: actions, rows=lambda values: values)


def _agilerl() -> Rival:
    need("agilerl", INSTALL_AGILERL)
    from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv
    from mpe2 import simple_spread_v3

    def rows(by_agent: dict[str, np.ndarray]) -> np.ndarray:
        together = np.stack([by_agent[agent] for agent in AGENTS], axis=1)
        return together.reshape(NUM_ROWS, *together.shape[2:])

    envs = AsyncPettingZooVecEnv([simple_spread_v3.parallel_env] * NUM_ENVS)
    return Rival(envs, lambda actions: {agent: actions[k :: len(AGENTS)] for k, agent in enumerate(AGENTS)}, rows)


def _supersuit() -> Rival:
    need("supersuit", INSTALL_SUPERSUIT)
    envs = _supersuit_envs("gymnasium")
    # Worker w passes `seed + w` to its first env, so several envs get the same seed.
    seeds = [1 + w + k for w, pair in enumerate(zip(envs.idx_starts, envs.idx_starts[1:])) for k in range(_count(pair))]
    return Rival(envs, actions=lambda actions: actions, rows=lambda values: values, seed=1, seeds=seeds)
