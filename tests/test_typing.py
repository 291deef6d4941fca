"""Tests that the packages' annotations are consistent and that a user's type checker can rely on them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ppo

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[1]

USERS_SCRIPT = """
from pathlib import Path
from typing import Any, assert_type

import gymnasium as gym
import numpy as np

import ppo
import vecenv
from vecenv.ingraph import InGraphVectorEnv, Rollout, Step, slots_for


def make_env() -> gym.Env[np.ndarray, int]:
    return gym.make("CartPole-v1")


class Printer(ppo.Callback):
    def on_report(self, report: dict[str, Any]) -> None:
        print(report["env_steps"])


def random_steps() -> float:
    with vecenv.make("CartPole-v1", num_envs=4, vector_kwargs={"num_slots": slots_for(8)}) as envs:
        assert_type(envs, vecenv.AsyncVectorEnv)
        observations, infos = envs.reset(seed=[0, 1, None, 3])
        assert_type(infos, dict[str, Any])
        observations, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
        assert_type(rewards, np.ndarray)
        assert_type(terminated, np.ndarray)
        envs.send(np.zeros(2, np.int64), env_ids=[0, 1])
        assert_type(envs.recv(), vecenv.PartialBatch)
        vecenv.state.save("states.npz", envs.get_state())
        graph = InGraphVectorEnv(envs, num_steps=8)
        assert_type(graph.step(np.zeros(4, np.int64)), Step)
        assert_type(graph.rollout(), Rollout)
        return float(rewards.mean())


config = ppo.Config(env="CartPole-v1", policy_layers=(32, 32))
vectors: list[gym.vector.VectorEnv[Any, Any, Any]] = [
    vecenv.SyncVectorEnv([make_env] * 4, autoreset_mode="SameStep"),
    vecenv.AsyncVectorEnv([lambda: gym.make("CartPole-v1")], num_workers=1, **ppo.vector_options(config)),
]
result = ppo.train(config, make_env, callbacks=[Printer()], logdir=Path("runs"))
assert_type(result, ppo.Result)
if result.evaluation is not None:
    assert_type(result.evaluation.summary(), dict[str, float | int])
policy = ppo.load_policy(result.path)
assert_type(policy, ppo.Policy)
assert_type(policy(np.zeros(4), deterministic=False), Any)  # an array, or a dict or tuple for a composite action
assert_type(policy.value(np.zeros(4)), np.ndarray)
assert_type(policy.log_prob(np.zeros(4), 0), np.ndarray)
assert_type(ppo.resume(result.path, total_steps=2_000_000, num_workers=0), ppo.Result)
loggers: list[ppo.Callback] = [ppo.callbacks.wandb(project="walkers"), ppo.callbacks.mlflow()]

# Under --strict, an unused `type: ignore` comment is itself an error.
vecenv.make("CartPole-v1", num_envs="4")  # type: ignore[arg-type]
vecenv.SyncVectorEnv([3])  # type: ignore[list-item]
vecenv.AsynchVectorEnv  # type: ignore[attr-defined]
ppo.Config(number_of_envs=4)  # type: ignore[call-arg]
ppo.Configuration  # type: ignore[attr-defined]
ppo.train("CartPole-v1")  # type: ignore[arg-type]
"""


def check(tmp_path, *arguments, cwd):
    """Runs mypy in `cwd`, with this repository's packages importable as if they were installed."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict(tmp_path):
    names = "".join(f"ppo.{name}\n" for name in ppo.__all__)
    (tmp_path / "script.py").write_text(USERS_SCRIPT + names)
    check(tmp_path, "--strict", "--config-file=", "script.py", cwd=tmp_path)
