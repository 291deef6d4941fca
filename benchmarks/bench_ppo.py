"""How many env-steps per second does PPO train on, end to end?

HalfCheetah-v5, ours in C++ and as an ordinary Python env, as SB3 has it; batch 2048, minibatch 64, 10 epochs, two
64-64 tanh networks.
Unit: env-steps per second of collecting and learning together; the median of the rounds of each turn.
Not measured: start-up and compilation, which a first iteration takes before the clock starts.
The rivals take turns (three of them). SB3 has 8 envs, where it is fastest at this batch on 2 cores, and
runs with one torch thread and with two.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.conftest import need

BATCH = 2048
RIVALS = ["ppo, 64 envs", "ppo, 64 Python envs", "SB3, 8 envs, 1 thread", "SB3, 8 envs, 2 threads"]


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("turn", range(3))
def test_ppo(measure, benchmark, rival, turn, tmp_path, request):
    benchmark.group = "PPO on HalfCheetah-v5, batch 2048, minibatch 64, 10 epochs"
    if rival.startswith("SB3"):
        need("stable_baselines3", "pip install torch==2.13.0 stable-baselines3")
        iterate, close = _sb3(threads=int(rival.split()[3]))
    else:
        need("tensorflow", "pip install -e '.[ppo]'")
        iterate, close = _ours(tmp_path, "python" if "Python" in rival else "auto")
    try:
        iterate()
        measure(iterate, rounds=10, iterations=1, env_steps=BATCH, rival=rival, env="HalfCheetah-v5", turn=turn)
    finally:
        close()


def _ours(folder, backend):
    from ppo.commands import load_tensorflow

    load_tensorflow()
    from ppo.callbacks import Callback
    from ppo.config import Config
    from ppo.envs import training_envs
    from ppo.loop import Trainer
    from ppo.run import Run

    # recompute_advantages is off because SB3 does not do it.
    config = Config(
        env="HalfCheetah-v5", backend=backend, recompute_advantages=False, value_coef=0.5, initial_log_std=0.0
    )
    assert config.batch_size == BATCH and config.minibatch_size == 64 and config.epochs == 10
    assert config.policy_layers == config.value_layers == (64, 64)
    envs = training_envs(config, None)
    trainer = Trainer(config, Run.create(folder, "bench", config), envs, Callback())
    trainer.begin()

    def iterate():
        losses = trainer.iterate()
        assert np.isfinite(float(losses["grad_norm"]))  # waits for the update, and checks it

    return iterate, envs.close


def _sb3(threads: int):
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

    torch.set_num_threads(threads)
    envs = VecNormalize(SubprocVecEnv([lambda: gym.make("HalfCheetah-v5")] * 8))
    policy = {"net_arch": [64, 64], "activation_fn": torch.nn.Tanh}
    model = PPO("MlpPolicy", envs, n_steps=BATCH // 8, batch_size=64, n_epochs=10, device="cpu", policy_kwargs=policy)

    def iterate():
        model.learn(BATCH, reset_num_timesteps=False)

    return iterate, envs.close
