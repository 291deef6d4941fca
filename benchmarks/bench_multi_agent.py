"""How fast are PettingZoo envs, alone and in training?

Unit: without learning, agent-steps per second: a step of an env with three agents is three agent-steps. In training,
env-steps per second of collecting and learning together: a step of an env counts once. Figures are medians of the
rounds of each turn. The rivals take three turns.
Not measured: creation, start-up and compilation; envs whose agents leave before the episode ends.

All rivals run 16 envs of mpe2's simple_spread_v3, which has three agents and episodes of 25 steps. vecenv and SuperSuit
start one worker per core. AgileRL starts one process per env. The plain loop steps all envs in this process and returns
the results as arrays.

Without learning, all rivals take the same random actions and reset an env in the step that ends its episode. For
vecenv, this requires `autoreset_mode="SameStep"`. By default, it resets an env in the next call, in which no agent
moves. Every rival is first checked to return the same observations, rewards and flags as the plain loop, until after
the first reset.

In training, ppo and SB3 train one policy for all agents, with two 64-64 tanh networks, 128 steps, minibatches of 256
and 10 epochs. SB3 trains on SuperSuit's vector env, as in PettingZoo's tutorials, because it then learns from one row
per agent, as ppo does, with equal settings. Two differences remain. SuperSuit does not tell SB3 that the episodes are
truncated, so SB3 does not bootstrap from their last observations. And SB3's envs have no seeds, because SuperSuit's
vector envs have no method `seed`, which SB3 would call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_engine import INSTALL_SB3
from benchmarks.conftest import need
from benchmarks.processes import SB3_SETTINGS, in_a_process, ppo_in_a_process
from vecenv import available_cores

INSTALL_ENV = "pip install mpe2 'pettingzoo>=1.25'"
INSTALL_AGILERL = "pip install torch==2.13.0 agilerl"
INSTALL_SUPERSUIT = "pip install supersuit"

ENV, NUM_ENVS, AGENTS, EPISODE = "simple_spread_v3", 16, ("agent_0", "agent_1", "agent_2"), 25
NUM_ROWS = NUM_ENVS * len(AGENTS)
SEEDS = tuple(range(NUM_ENVS))
SETTINGS = {"num_envs": NUM_ENVS, "num_steps": 128, "minibatch_size": 256, "epochs": 10}


@dataclass
class Rival:
    """A vector env, and functions that convert between its values and arrays with one row per agent, `[M * K, ...]`.

    Attributes:
        envs: The vector env of M envs with K agents.
        actions: Converts actions, `int64[M * K]`, to the argument of `envs.step`.
        rows: Converts observations, rewards or flags to an array `[M * K, ...]`.
        seed: The argument of `envs.reset`.
        seeds: The seed that each env gets from `seed`.
    """

    envs: Any
    actions: Callable[[np.ndarray], Any] = lambda actions: actions
    rows: Callable[[Any], np.ndarray] = lambda values: values
    seed: int | Sequence[int] = SEEDS
    seeds: Sequence[int] = SEEDS


class Loop:
    """Steps the envs one after the other. Observations, rewards and flags are arrays `[M * K, ...]`."""

    def __init__(self, env_fns: list):
        self._envs = [env_fn() for env_fn in env_fns]

    def reset(self, *, seed: Sequence[int]) -> tuple[np.ndarray, list]:
        observations, infos = zip(*(env.reset(seed=s) for env, s in zip(self._envs, seed, strict=True)), strict=True)
        return _gather(observations), list(infos)

    def step(self, actions: list[dict[str, int]]) -> tuple:
        results = []
        for env, chosen in zip(self._envs, actions, strict=True):
            observations, *others = env.step(chosen)
            if not env.agents:
                observations, _ = env.reset()
            results.append((observations, *others))
        *arrays, infos = zip(*results, strict=True)
        return (*map(_gather, arrays), list(infos))

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _gather(values: Sequence[dict[str, Any]]) -> np.ndarray:
    return np.array([of_agent[agent] for of_agent in values for agent in AGENTS])


def _dicts(rows: np.ndarray) -> list[dict[str, int]]:
    return [dict(zip(AGENTS, row, strict=True)) for row in rows.reshape(NUM_ENVS, -1).tolist()]


def _loop(env_fns: list) -> Rival:
    return Rival(Loop(env_fns), _dicts)


def _vecenv(env_fns: list) -> Rival:
    from vecenv.adapters.pettingzoo import ParallelVectorEnv

    return Rival(ParallelVectorEnv(env_fns, infos=False, autoreset_mode="SameStep"))


def _agilerl(env_fns: list) -> Rival:
    need("agilerl", INSTALL_AGILERL)
    from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv

    def actions(rows: np.ndarray) -> dict[str, np.ndarray]:
        return {agent: rows[k :: len(AGENTS)] for k, agent in enumerate(AGENTS)}

    def rows(values: dict[str, np.ndarray]) -> np.ndarray:
        together = np.stack([values[agent] for agent in AGENTS], axis=1)  # [M, K, ...]
        return together.reshape(NUM_ROWS, *together.shape[2:])

    return Rival(AsyncPettingZooVecEnv(env_fns), actions, rows)


def _supersuit(env_fns: list) -> Rival:
    # Worker w gives its env k the seed `seed + w + k`, so envs of different workers have equal seeds.
    of_worker = -(-NUM_ENVS // available_cores())
    seeds = [m // of_worker + m % of_worker for m in range(NUM_ENVS)]
    return Rival(_supersuit_envs(env_fns[0], "gymnasium"), seed=0, seeds=seeds)


def _supersuit_envs(env_fn: Callable[[], Any], base_class: str) -> Any:
    need("supersuit", INSTALL_SUPERSUIT)
    from supersuit import concat_vec_envs_v1, pettingzoo_env_to_vec_env_v1

    env = pettingzoo_env_to_vec_env_v1(env_fn())
    return concat_vec_envs_v1(env, NUM_ENVS, num_cpus=available_cores(), base_class=base_class)


RIVALS = {"vecenv": _vecenv, "AgileRL": _agilerl, "SuperSuit": _supersuit, "plain loop": _loop}
LEARNERS = ["ppo", "SB3 on SuperSuit, 1 thread", "SB3 on SuperSuit, 2 threads"]


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("turn", range(3))
def test_multi_agent(measure, benchmark, turn, rival):
    benchmark.group = f"agent-steps of {ENV}, {NUM_ENVS} envs"
    env_fns = [_env_fn()] * NUM_ENVS
    made = RIVALS[rival](env_fns)
    try:
        samples = np.random.default_rng(0).integers(5, size=(2 * EPISODE, NUM_ROWS))
        _check(made, env_fns, samples)
        batches = itertools.cycle([made.actions(sample) for sample in samples])
        measure(
            lambda: made.envs.step(next(batches)),
            rounds=15,
            iterations=2 * EPISODE,  # every round includes two resets of each env
            env_steps=NUM_ROWS,
            env=ENV,
            num_envs=NUM_ENVS,
            num_workers=getattr(made.envs, "num_workers", None),
            rival=rival,
            turn=turn,
        )
    finally:
        made.envs.close()


@pytest.mark.parametrize("rival", LEARNERS)
@pytest.mark.parametrize("turn", range(3))
def test_multi_agent_training(measure, benchmark, turn, rival, tmp_path):
    benchmark.group = f"PPO on {ENV}, env-steps"
    env_fn = _env_fn()
    if rival == "ppo":
        need("tensorflow", "pip install -e '.[ppo]'")
        layers = {"policy_layers": (64, 64), "value_layers": (64, 64)}
        settings = {**SB3_SETTINGS, **layers, **SETTINGS}
        iterate, close = ppo_in_a_process(tmp_path, env=f"pettingzoo:mpe2.{ENV}", **settings)
    else:
        need("stable_baselines3", INSTALL_SB3)
        iterate, close = in_a_process(_sb3, env_fn=env_fn, threads=int(rival.split()[3]))
    try:
        iterate()
        batch = NUM_ENVS * SETTINGS["num_steps"]
        measure(iterate, rounds=5, iterations=1, env_steps=batch, rival=rival, env=ENV, turn=turn)
    finally:
        close()


def _env_fn() -> Callable[[], Any]:
    need("mpe2", INSTALL_ENV)
    from mpe2 import simple_spread_v3

    return functools.partial(simple_spread_v3.parallel_env, max_cycles=EPISODE)


def _check(rival: Rival, env_fns: list, samples: np.ndarray) -> None:
    """Asserts that a rival returns the same rows as the plain loop, until after the first reset of the envs."""
    loop = Loop(env_fns)
    expected, _ = loop.reset(seed=rival.seeds)
    observations, _ = rival.envs.reset(seed=rival.seed)
    np.testing.assert_array_equal(rival.rows(observations), expected)
    for sample in samples[: EPISODE + 3]:
        *results, _ = rival.envs.step(rival.actions(sample))
        *expected_results, _ = loop.step(_dicts(sample))
        for result, wanted in zip(map(rival.rows, results), expected_results, strict=True):
            np.testing.assert_array_equal(result, wanted.astype(result.dtype))
    loop.close()


def _sb3(env_fn: Callable[[], Any], threads: int) -> tuple[Callable[[], None], Callable[[], None]]:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(threads)
    envs = VecNormalize(_supersuit_envs(env_fn, "stable_baselines3"))
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=SETTINGS["num_steps"],
        batch_size=SETTINGS["minibatch_size"],
        n_epochs=SETTINGS["epochs"],
        device="cpu",
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
    )

    def iterate():
        model.learn(NUM_ROWS * SETTINGS["num_steps"], reset_num_timesteps=False)

    return iterate, envs.close
