"""How many env-steps per second does PPO train on images, end to end?

Unit: env-steps per second of collecting and learning together, as the median of the rounds of each turn. Each rival
takes three turns.
Not measured: start-up and compilation, which the first iteration includes.

All train the CNN of Mnih et al. (2015) with the same batch, minibatches and epochs: 16 envs x 32 steps and minibatches
of 128 on examples.catch, 8 envs x 128 steps and minibatches of 256 on Pong (the settings of CleanRL's ppo_atari.py), 4
epochs each. Random images of two other sizes measure only speed; there is nothing to learn. ppo steps catch and random
images in worker processes and Pong in ale-py's vector env in C++. SB3 steps catch and random images in its own process
and Pong, with the same frames, in 8 processes. "torch" is a bare loop in torch, with the order of operations of
CleanRL's ppo_atari.py; like CleanRL, it steps the envs in its own process. SB3 and torch run with one and with two
threads.
"""

from __future__ import annotations

import pytest

from benchmarks.bench_engine import INSTALL_SB3
from benchmarks.conftest import need
from benchmarks.processes import SB3_SETTINGS, in_a_process, ppo_in_a_process

INSTALL_TORCH = "pip install torch"

# Settings that the rivals share, under their names in `ppo.Config`.
TASKS = {
    "catch": {
        "env": "examples.catch:Catch-v0",
        "env_kwargs": {},
        "num_envs": 16,
        "num_steps": 32,
        "minibatch_size": 128,
    },
    "Pong": {
        "env": "vecenv.atari:Atari/Pong-v5",
        "env_kwargs": {"repeat_action_probability": 0.0},
        "num_envs": 8,
        "num_steps": 128,
        "minibatch_size": 256,
    },
    "noise 64x64x3": {  # the size of procgen's and crafter's images
        "env": "benchmarks.noise:Noise-v0",
        "env_kwargs": {"shape": (64, 64, 3)},
        "num_envs": 16,
        "num_steps": 32,
        "minibatch_size": 128,
    },
    "noise 210x160x3": {  # the size of raw Atari frames
        "env": "benchmarks.noise:Noise-v0",
        "env_kwargs": {"shape": (210, 160, 3)},
        "num_envs": 8,
        "num_steps": 16,
        "minibatch_size": 64,
    },
}
EPOCHS = 4
RIVALS = [
    "ppo", "ppo, images divided by 255",
    "SB3, 1 thread", "SB3, 2 threads", "torch, 1 thread", "torch, 2 threads",
]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "turn", "rival"), [(task, turn, rival) for task in TASKS for turn in range(3) for rival in RIVALS]
)
def test_images(measure, benchmark, task, turn, rival, tmp_path):
    benchmark.group = f"PPO on {task}, the CNN of Mnih et al."
    settings = TASKS[task]
    if rival.startswith("SB3"):
        need("stable_baselines3", INSTALL_SB3)
        iterate, close = in_a_process(_sb3, task=task, threads=int(rival.split()[1]))
    elif rival.startswith("torch"):
        need("torch", INSTALL_TORCH)
        iterate, close = in_a_process(_torch, task=task, threads=int(rival.split()[1]))
    else:
        need("tensorflow", "pip install -e '.[ppo]'")
        iterate, close = ppo_in_a_process(
            tmp_path,
            **SB3_SETTINGS,
            **settings,
            epochs=EPOCHS,
            policy_layers=(),
            value_layers=(),
            normalize_observations="255" not in rival,
        )
    batch = settings["num_envs"] * settings["num_steps"]
    try:
        iterate()
        rounds = 3 if task == "Pong" else 6
        measure(iterate, rounds=rounds, iterations=1, env_steps=batch, rival=rival, env=task, turn=turn)
    finally:
        close()


def _sb3(task: str, threads: int):
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    torch.set_num_threads(threads)
    settings = TASKS[task]
    kind = SubprocVecEnv if task == "Pong" else DummyVecEnv
    envs = kind([lambda: gym.make(settings["env"], **settings["env_kwargs"])] * settings["num_envs"])
    model = PPO(
        "CnnPolicy", envs, n_steps=settings["num_steps"], batch_size=settings["minibatch_size"], n_epochs=EPOCHS,
        device="cpu",
    )  # fmt: skip

    def iterate():
        model.learn(settings["num_envs"] * settings["num_steps"], reset_num_timesteps=False)

    return iterate, envs.close


def _torch(task: str, threads: int):
    import gymnasium as gym
    import numpy as np
    import torch
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from torch import nn
    from torch.distributions import Categorical

    torch.set_num_threads(threads)
    settings = TASKS[task]
    num_envs, num_steps = settings["num_envs"], settings["num_steps"]
    fns = [lambda: gym.make(settings["env"], **settings["env_kwargs"])] * num_envs
    envs = SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)

    def images(observations: np.ndarray) -> torch.Tensor:  # float32[N, C, H, W]
        channels_first = observations if task == "Pong" else np.moveaxis(observations, -1, 1)
        return torch.as_tensor(channels_first, dtype=torch.float32)

    now = images(envs.reset(seed=0)[0])
    body = nn.Sequential(
        nn.Conv2d(now.shape[1], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1),
        nn.ReLU(), nn.Flatten(), nn.LazyLinear(512), nn.ReLU(),
    )  # fmt: skip
    body(now)  # gives the lazy layer its size
    actor, critic = nn.Linear(512, int(envs.single_action_space.n)), nn.Linear(512, 1)
    parameters = [*body.parameters(), *actor.parameters(), *critic.parameters()]
    adam = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)

    def predict(observations: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        features = body(observations / 255.0)
        return Categorical(logits=actor(features)), critic(features)[:, 0]

    def iterate() -> None:
        nonlocal now
        seen = torch.zeros(num_steps, *now.shape)
        actions, log_probs, values, rewards, ended = torch.zeros(5, num_steps, num_envs)
        with torch.no_grad():
            for t in range(num_steps):
                seen[t] = now
                policy, values[t] = predict(now)
                actions[t] = action = policy.sample()
                log_probs[t] = policy.log_prob(action)
                observations, reward, terminated, truncated, _ = envs.step(action.numpy())
                now, rewards[t] = images(observations), torch.as_tensor(reward)
                ended[t] = torch.as_tensor(terminated | truncated)
            advantages = torch.zeros_like(values)
            following, advantage = predict(now)[1], torch.zeros(num_envs)
            for t in reversed(range(num_steps)):
                goes_on = 1.0 - ended[t]
                advantage = rewards[t] + 0.99 * goes_on * following - values[t] + 0.99 * 0.95 * goes_on * advantage
                advantages[t], following = advantage, values[t]
        batch = [part.flatten(0, 1) for part in (seen, actions, log_probs, advantages, advantages + values, values)]
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(batch[0])).split(settings["minibatch_size"]):
                observations, action, log_prob, advantage, returns, old = (part[rows] for part in batch)
                policy, value = predict(observations)
                ratio = (policy.log_prob(action) - log_prob).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1)).mean()
                clipped = old + (value - old).clamp(-0.1, 0.1)
                value_loss = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
                adam.zero_grad()
                (surrogate - 0.01 * policy.entropy().mean() + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                adam.step()

    return iterate, envs.close
