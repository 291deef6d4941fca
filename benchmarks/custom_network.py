"""Does a custom network learn as fast as the built-in one? `python -m benchmarks.custom_network` prints a table.

Unit: env-steps per second of updates alone, as the median over the rounds, and the median ratio of the custom network's
time to the built-in network's time within a round. The metrics of both must agree before anything is timed.
Not measured: collecting, which calls the same network once per step, and compilation, unless an update repeats it.

Both have a policy and a value function of 64-64 tanh layers with the same initial weights. They learn from the same
noise, as one Box or as a Dict of two keys. This benchmark takes PPO apart, so it uses names of ppo that are not public.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import gymnasium as gym
import numpy as np
import tyro

import ppo
import vecenv
from benchmarks.machine import load_tensorflow


class Noise(gym.Env):
    """Returns noise and rewards an action that follows it."""

    action_space = gym.spaces.Box(-1, 1, (6,), np.float32)

    def __init__(self, keys: int):
        part = gym.spaces.Box(-np.inf, np.inf, (18 // max(1, keys),), np.float32)
        names = "zabc"[:keys]
        self.observation_space = gym.spaces.Dict([(name, part) for name in names]) if keys else part

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        """Begins an episode of 50 steps."""
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        """Returns the next noise."""
        self._steps += 1
        reward = float(action @ self._noise[:6])
        return self._observe(), reward, False, self._steps == 50, {}

    def _observe(self) -> Any:
        self._noise = self.np_random.normal(size=18).astype(np.float32)
        if not isinstance(self.observation_space, gym.spaces.Dict):
            return self._noise
        parts = np.split(self._noise, len(self.observation_space))
        return dict(zip(self.observation_space, parts, strict=True))


def network(inputs: Any, num_outputs: int, seed: int) -> Any:
    """Returns the built-in networks as custom networks."""
    import tensorflow as tf

    from ppo.model.networks import MLP

    keys = list(inputs) if isinstance(inputs, dict) else None
    width = sum(inputs[key].shape[1] for key in keys) if keys else inputs.shape[1]
    mlp = functools.partial(MLP, activation="tanh", rng=np.random.default_rng(seed))

    class Twin(tf.Module):
        def __init__(self, size: int, gain: float, name: str) -> None:
            super().__init__()
            self._mlp = mlp([width, 64, 64, size], output_gain=gain, name=name)

        def __call__(self, seen: Any) -> Any:
            return self._mlp(tf.concat([seen[key] for key in keys], axis=-1) if keys else seen)

    return Twin(num_outputs, ppo.Config(env="").policy_output_gain, "policy"), Twin(1, 1.0, "value")


def main(
    num_envs: int = 64, num_steps: int = 64, minibatch_size: int = 1024, epochs: int = 2, rounds: int = 50
) -> None:
    """Prints the speed of learning with both networks, for each kind of observation.

    Args:
        num_envs: Number of envs.
        num_steps: Steps of a rollout.
        minibatch_size: Samples of a gradient step.
        epochs: Epochs of an update.
        rounds: Number of rounds.
    """
    config = ppo.Config(env="", num_envs=num_envs, num_steps=num_steps, minibatch_size=minibatch_size, epochs=epochs,
                        policy_layers=(64, 64), value_layers=(64, 64), total_steps=10**9)  # fmt: skip
    load_tensorflow()
    print(
        "| observation | built-in, env-steps/s | custom, env-steps/s | custom / built-in, time |\n|---|---:|---:|---:|"
    )
    for name, keys in (("Box", 0), ("Dict of 2 keys", 2)):
        learners = [_learn(config, keys, custom) for custom in (None, f"{__name__}:network")]
        for own, custom in [[next(learner) for learner in learners] for _ in range(2)]:
            for metric, value in own.items():
                np.testing.assert_allclose(custom[metric], value, rtol=1e-2, atol=1e-4, err_msg=metric)
        seconds = np.zeros([rounds, 2])
        for turn in range(rounds):
            for i, learner in enumerate(learners):
                start = time.perf_counter()
                next(learner)
                seconds[turn, i] = time.perf_counter() - start
        own, custom = (num_envs * num_steps / np.median(seconds, axis=0)).tolist()
        print(f"| {name} | {own:,.0f} | {custom:,.0f} | {np.median(seconds[:, 1] / seconds[:, 0]):.2f} |")


def _learn(config: ppo.Config, keys: int, custom: str | None) -> Any:
    """Yields the metrics of one update after another, all on the same rollout."""
    from ppo.algorithm.rollout import LocalCollector
    from ppo.algorithm.update import Learner
    from ppo.model.agent import Agent

    config = dataclasses.replace(config, network=custom)
    make = functools.partial(Noise, keys)
    vector = vecenv.SyncVectorEnv([make] * config.num_envs, **ppo.vector_options(config))
    spaces = (vector.single_observation_space, vector.env_action_space)
    agent, collector = Agent(config, *spaces), LocalCollector(config, vector, {"": spaces})
    collector.use([agent])
    learner = Learner(config, agent)
    collector.begin(0)
    (collected,) = collector.collect(0, 0).collected
    learner.observe(collected)
    number = 0
    while True:
        yield learner.update(collected, number)
        number += 1


if __name__ == "__main__":
    tyro.cli(main)
