"""How many env-steps per second does PPO train on, end to end?

Unit: env-steps per second of collecting and learning together, as the median of the rounds of each turn. The rivals
take three turns.
Not measured: start-up and compilation, which the first iteration includes.

The policy and the value function are 64-64 tanh networks, trained on 64 envs. Setting A spends little computation on
each sample: 64 steps, minibatches of 1024, 2 epochs. Setting B spends more: 32 steps, minibatches of 64, 10 epochs.
ppo trains in a separate process, on MuJoCo tasks in C++ or on ordinary Python envs. For comparison, vecenv and EnvPool
step random actions without learning, and so does the physics alone, with one thread per core. SB3 uses 8 envs in its
SubprocVecEnv, the fastest number at this batch size on 2 cores, or 64 C++ envs of `vecenv.make` in
`vecenv.adapters.sb3.VecEnvAdapter`, with one or two torch threads. SBX, the JAX version of SB3, has 64 C++ envs of
`vecenv.make`. tianshou has 64 EnvPool envs and one torch thread. The JAX loop is `jax_loop.py`, with 64 envs of EnvPool
or vecenv.
"""

from __future__ import annotations

import math
import multiprocessing

import pytest

from benchmarks.bench_engine import INSTALL_SB3, INSTALL_TIANSHOU
from benchmarks.bench_mujoco import envpool_async, envpool_sync, physics, random_actions, vecenv_here
from benchmarks.conftest import need
from benchmarks.machine import load_tensorflow
from vecenv import available_cores

NUM_ENVS = 64
SIZES = {"num_envs": NUM_ENVS, "policy_layers": (64, 64), "value_layers": (64, 64)}
SETTINGS = {
    "A": {"num_steps": 64, "minibatch_size": 1024, "epochs": 2},
    "B": {"num_steps": 32, "minibatch_size": 64, "epochs": 10},
}
STEPPING = {
    "vecenv, nothing learned": vecenv_here,
    "EnvPool, nothing learned": envpool_sync,
    "EnvPool async, nothing learned": envpool_async,
    "physics alone": lambda env, num_envs, actions: physics(env, num_envs, actions, num_skipped=3),
}
CHEETAH = ["ppo, 64 envs", "ppo, 64 Python envs", "vecenv, nothing learned", "EnvPool, nothing learned",
           "EnvPool async, nothing learned", "tianshou, 64 envs of EnvPool", "JAX loop, 64 envs of EnvPool",
           "JAX loop, 64 envs of vecenv", "SBX, 64 envs of vecenv"]  # fmt: skip
INSTALL_JAX = "pip install sbx-rl tf_keras"
"""SBX needs JAX, and Keras 2 if TensorFlow is installed."""

SB3 = [f"SB3, {envs}, {threads}" for envs in ("8 envs", "64 envs of vecenv") for threads in ("1 thread", "2 threads")]
PHYSICS = ["ppo, 64 envs", "vecenv, nothing learned", "physics alone"]
CASES = [
    (env, setting, turn, rival)
    for env, setting, rivals in (
        ("HalfCheetah-v5", "A", CHEETAH + SB3),
        ("HalfCheetah-v5", "B", CHEETAH + SB3),
        ("Ant-v5", "A", PHYSICS),
        ("Humanoid-v5", "A", PHYSICS),
    )
    for turn in range(3)
    for rival in rivals
]


@pytest.mark.parametrize(("env", "setting", "turn", "rival"), CASES)
def test_ppo(measure, benchmark, env, setting, turn, rival, tmp_path):
    benchmark.group = f"PPO on {env}, setting {setting}"
    batch, rounds = NUM_ENVS * SETTINGS[setting]["num_steps"], 20 if env == "HalfCheetah-v5" else 8
    if rival in STEPPING:
        actions = random_actions(env, NUM_ENVS, SETTINGS[setting]["num_steps"])
        running = STEPPING[rival](env, NUM_ENVS, actions)
        iterate, close = next(running), lambda: next(running, None)
    elif rival.startswith("SB3"):
        need("stable_baselines3", INSTALL_SB3)
        _, envs, threads = rival.split(", ")
        iterate, close = _sb3(**SETTINGS[setting], on_vecenv="vecenv" in envs, threads=int(threads.split()[0]))
    elif rival.startswith("SBX"):
        need("sbx", INSTALL_JAX)
        iterate, close = _sbx(**SETTINGS[setting])
    elif rival.startswith("JAX"):
        need("optax", INSTALL_JAX)
        if "EnvPool" in rival:
            need("envpool", "pip install envpool")
        iterate, close = _jax(**SETTINGS[setting], on_vecenv="vecenv" in rival)
    elif rival.startswith("tianshou"):
        need("tianshou", INSTALL_TIANSHOU)
        need("envpool", "pip install envpool")
        iterate, close = _tianshou(**SETTINGS[setting])
    else:
        need("tensorflow", "pip install -e '.[ppo]'")
        backend = "python" if "Python" in rival else "auto"
        iterate, close = in_a_process(tmp_path, env=env, backend=backend, **SIZES, **SETTINGS[setting])
    try:
        iterate()
        measure(iterate, rounds=rounds, iterations=1, env_steps=batch, rival=rival, env=env, turn=turn)
    finally:
        close()


def in_a_process(folder, **settings):
    """Starts ppo in a new process.

    Returns:
        A function that runs one iteration there and returns when it is complete, which adds about 0.1 ms; and a
        function that ends the process.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_train, args=(there, folder), kwargs=settings)
    process.start()
    there.close()

    def iterate():
        here.send("iterate")
        here.recv()

    def close():
        here.close()
        process.join()

    return iterate, close


def _train(connection, folder, **settings):
    """Trains, running one iteration for each message."""
    import ppo

    never = 10**9
    # recompute_advantages is off because SB3 does not recompute them.
    config = ppo.Config(
        recompute_advantages=False,
        value_coef=0.5,
        initial_log_std=0.0,
        total_steps=never,
        report_interval=never,
        checkpoint_interval=never,
        **settings,
    )
    load_tensorflow()

    class OnRequest(ppo.Callback):
        def on_start(self, config, env_steps):
            self._wait()

        def on_update(self, report):
            assert math.isfinite(report["grad_norm"])
            connection.send("done")
            self._wait()

        def _wait(self):
            try:
                connection.recv()
            except EOFError:
                raise ppo.StopTraining from None

    ppo.train(config, callbacks=OnRequest(), logdir=folder, progress=False)


def _sb3(num_steps: int, minibatch_size: int, epochs: int, *, on_vecenv: bool, threads: int):
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

    import vecenv
    from vecenv.adapters.sb3 import VecEnvAdapter

    torch.set_num_threads(threads)
    if on_vecenv:
        envs = VecEnvAdapter(vecenv.make("HalfCheetah-v5", NUM_ENVS, vector_kwargs={"autoreset_mode": "SameStep"}))
    else:
        envs = SubprocVecEnv([lambda: gym.make("HalfCheetah-v5")] * 8)
    batch, envs = NUM_ENVS * num_steps, VecNormalize(envs)
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=batch // envs.num_envs,
        batch_size=minibatch_size,
        n_epochs=epochs,
        device="cpu",
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
    )

    def iterate():
        model.learn(batch, reset_num_timesteps=False)

    return iterate, envs.close


def _sbx(num_steps: int, minibatch_size: int, epochs: int):
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


def _jax(num_steps: int, minibatch_size: int, epochs: int, *, on_vecenv: bool):
    import vecenv
    from benchmarks.jax_loop import trainer

    if on_vecenv:
        envs = vecenv.make("HalfCheetah-v5", NUM_ENVS, vector_kwargs={"copy": False})
    else:
        import envpool

        envs = envpool.make_gymnasium("HalfCheetah-v5", num_envs=NUM_ENVS, num_threads=available_cores(), seed=1)
    iterate = trainer(envs, NUM_ENVS, num_steps=num_steps, minibatch_size=minibatch_size, epochs=epochs)
    return iterate, envs.close


def _tianshou(num_steps: int, minibatch_size: int, epochs: int):
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
