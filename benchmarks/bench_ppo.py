"""How many env-steps per second does PPO train on, end to end?

Unit: env-steps per second of collecting and learning together, as the median of the rounds of each turn. The rivals
take three turns, each in a process of its own.
Not measured: start-up and compilation, which the first iteration includes.

The policy and the value function are 64-64 tanh networks, trained on 64 envs. Setting A spends little computation on
each sample: 64 steps, minibatches of 1024, 2 epochs. Setting B spends more: 32 steps, minibatches of 64, 10 epochs. ppo
trains on MuJoCo tasks in C++ or on ordinary Python envs, with its defaults and normalized advantages, or as SB3 does by
default, without recomputing advantages in each epoch. For comparison, vecenv and EnvPool step envs with random actions
without learning, and so does the physics alone, with one thread per core. SB3 uses 8, 16 or 64 envs in its
SubprocVecEnv or its DummyVecEnv, or 64 C++ envs of `vecenv.make` in `vecenv.adapters.sb3.VecEnvAdapter`, with one or
two torch threads. SBX, the JAX version of SB3, has 64 C++ envs of `vecenv.make`. tianshou has 64 EnvPool envs and one
torch thread. JAX is `jax_loop.py`: a single compiled function that also steps 64 envs of EnvPool, or a loop on the host
over 64 envs of EnvPool or vecenv.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_engine import INSTALL_SB3, INSTALL_TIANSHOU
from benchmarks.bench_mujoco import stepping
from benchmarks.conftest import need
from benchmarks.processes import SB3_SETTINGS, Iteration, in_a_process, ppo_in_a_process
from vecenv import available_cores

NUM_ENVS = 64
SIZES = {"num_envs": NUM_ENVS, "policy_layers": (64, 64), "value_layers": (64, 64)}
SETTINGS = {
    "A": {"num_steps": 64, "minibatch_size": 1024, "epochs": 2},
    "B": {"num_steps": 32, "minibatch_size": 64, "epochs": 10},
}
STEPPING = {
    "vecenv, nothing learned": "vecenv.make",
    "EnvPool, nothing learned": "EnvPool",
    "EnvPool async, nothing learned": "EnvPool async",
    "physics alone": "physics alone, as vecenv steps it",
}
"""Rivals that only step envs, and their names in bench_mujoco.py."""

JAX = ["JAX compiled, 64 envs of EnvPool", "JAX loop, 64 envs of EnvPool", "JAX loop, 64 envs of vecenv"]
PPO = ["ppo, 64 envs", "ppo as SB3, 64 envs", "ppo, 64 Python envs", "ppo as SB3, 64 Python envs"]
INSTALL_JAX = "pip install sbx-rl tf_keras"
"""SBX needs JAX, and Keras 2 if TensorFlow is installed."""

SB3 = [
    *(f"SB3, {n} envs in {kind}, 1 thread" for n in (8, 16, 64) for kind in ("SubprocVecEnv", "DummyVecEnv")),
    *(f"SB3, {envs}, 2 threads" for envs in ("8 envs in SubprocVecEnv", "64 envs of vecenv")),
    "SB3, 64 envs of vecenv, 1 thread",
]
CHEETAH = [*PPO, *list(STEPPING)[:3], *JAX, "SBX, 64 envs of vecenv", "tianshou, 64 envs of EnvPool", *SB3]
PHYSICS = ["ppo, 64 envs", "vecenv, nothing learned", "physics alone"]
CASES = [
    (env, setting, turn, rival)
    for env, setting, rivals in (
        ("HalfCheetah-v5", "A", CHEETAH),
        ("HalfCheetah-v5", "B", CHEETAH),
        ("Ant-v5", "A", PHYSICS),
        ("Humanoid-v5", "A", PHYSICS),
    )
    for turn in range(3)
    for rival in rivals
]
NEEDED = {
    "SB3": ("stable_baselines3", INSTALL_SB3),
    "SBX": ("sbx", INSTALL_JAX),
    "JAX": ("optax", INSTALL_JAX),
    "tianshou": ("tianshou", INSTALL_TIANSHOU),
    "EnvPool": ("envpool", "pip install envpool"),
    "ppo": ("tensorflow", "pip install -e '.[ppo]'"),
}
"""The package that a rival needs if its name contains this word."""


@pytest.mark.parametrize(("env", "setting", "turn", "rival"), CASES)
def test_ppo(measure, benchmark, env, setting, turn, rival, tmp_path):
    benchmark.group = f"PPO on {env}, setting {setting}"
    batch, rounds = NUM_ENVS * SETTINGS[setting]["num_steps"], 20 if env == "HalfCheetah-v5" else 8
    for word, package in NEEDED.items():
        if word in rival:
            need(*package)
    iterate, close = started(rival, env, setting, tmp_path)
    try:
        iterate()
        measure(iterate, rounds=rounds, iterations=1, env_steps=batch, rival=rival, env=env, turn=turn)
    finally:
        close()


def started(rival: str, env: str, setting: str, folder: Path) -> Iteration:
    """Starts a rival in a process of its own."""
    settings, (name, *details) = SETTINGS[setting], rival.split(", ")
    if rival in STEPPING:
        return in_a_process(
            stepping, rival=STEPPING[rival], env_id=env, num_envs=NUM_ENVS, num_steps=settings["num_steps"]
        )
    if name.startswith("ppo"):
        backend = "python" if "Python" in rival else "auto"
        others = SB3_SETTINGS if "as SB3" in rival else {}
        return ppo_in_a_process(folder, env=env, backend=backend, **others, **SIZES, **settings)
    if name == "SB3":
        envs, threads = details
        return in_a_process(_sb3, envs=envs, threads=int(threads.split()[0]), **settings)
    if name.startswith("JAX"):
        return in_a_process(_jax, compiled="compiled" in name, on_vecenv="vecenv" in rival, **settings)
    return in_a_process({"SBX": _sbx, "tianshou": _tianshou}[name], **settings)


def _sb3(num_steps: int, minibatch_size: int, epochs: int, *, envs: str, threads: int) -> Iteration:
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    import vecenv
    from vecenv.adapters.sb3 import VecEnvAdapter

    torch.set_num_threads(threads)
    functions = [lambda: gym.make("HalfCheetah-v5")] * int(envs.split()[0])
    if "vecenv" in envs:
        made = VecEnvAdapter(vecenv.make("HalfCheetah-v5", NUM_ENVS, vector_kwargs={"autoreset_mode": "SameStep"}))
    else:
        made = SubprocVecEnv(functions, start_method="fork") if "Subproc" in envs else DummyVecEnv(functions)
    batch, normalized = NUM_ENVS * num_steps, VecNormalize(made)
    model = PPO(
        "MlpPolicy",
        normalized,
        n_steps=batch // made.num_envs,
        batch_size=minibatch_size,
        n_epochs=epochs,
        device="cpu",
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
    )

    def iterate():
        model.learn(batch, reset_num_timesteps=False)

    return iterate, normalized.close


def _sbx(num_steps: int, minibatch_size: int, epochs: int) -> Iteration:
    import flax.linen
    from sbx import PPO
    from stable_baselines3.common.vec_env import VecNormalize

    import vecenv
    from vecenv.adapters.sb3 import VecEnvAdapter

    envs = VecEnvAdapter(vecenv.make("HalfCheetah-v5", NUM_ENVS, vector_kwargs={"autoreset_mode": "SameStep"}))
    model = PPO(
        "MlpPolicy",
        VecNormalize(envs),
        n_steps=num_steps,
        batch_size=minibatch_size,
        n_epochs=epochs,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": flax.linen.tanh},
    )

    def iterate():
        model.learn(NUM_ENVS * num_steps, reset_num_timesteps=False)

    return iterate, envs.close


def _jax(num_steps: int, minibatch_size: int, epochs: int, *, compiled: bool, on_vecenv: bool) -> Iteration:
    import vecenv
    from benchmarks.jax_loop import compiled_trainer, trainer

    if on_vecenv:
        envs = vecenv.make("HalfCheetah-v5", NUM_ENVS, vector_kwargs={"copy": False})
    else:
        import envpool

        envs = envpool.make_gymnasium("HalfCheetah-v5", num_envs=NUM_ENVS, num_threads=available_cores(), seed=1)
    make = compiled_trainer if compiled else trainer
    iterate = make(envs, NUM_ENVS, num_steps=num_steps, minibatch_size=minibatch_size, epochs=epochs)
    return iterate, envs.close


def _tianshou(num_steps: int, minibatch_size: int, epochs: int) -> Iteration:
    import envpool
    import torch
    from tianshou.algorithm import PPO
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
    from torch.distributions import Independent, Normal

    torch.set_num_threads(1)
    envs = envpool.make_gymnasium("HalfCheetah-v5", num_envs=64, num_threads=available_cores(), seed=1)
    sizes = {"state_shape": envs.observation_space.shape, "hidden_sizes": (64, 64), "activation": torch.nn.Tanh}
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(**sizes), action_shape=envs.action_space.shape, unbounded=True
    )
    policy = ProbabilisticActorPolicy(
        actor=actor, dist_fn=lambda outputs: Independent(Normal(*outputs), 1), action_space=envs.action_space
    )
    algorithm = PPO(
        policy=policy,
        critic=ContinuousCritic(preprocess_net=Net(**sizes)),
        optim=AdamOptimizerFactory(lr=3e-4),
        max_grad_norm=0.5,
        ent_coef=0.0,
        return_scaling=True,
    )
    buffer = VectorReplayBuffer(64 * num_steps, 64)
    collector = Collector(algorithm, envs, buffer)
    collector.reset()

    def iterate():
        with policy_within_training_step(policy):
            with torch.no_grad():
                collector.collect(n_step=64 * num_steps)
            algorithm.update(buffer=buffer, batch_size=minibatch_size, repeat=epochs)
        collector.reset_buffer(keep_statistics=True)

    return iterate, envs.close
