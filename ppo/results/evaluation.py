"""Evaluate: the score of a deterministic policy on envs of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from ppo.algorithm.checks import TrainingDiverged
from ppo.envs import EnvSource, evaluation_envs
from ppo.model.agent import HOST, Agent
from ppo.run.checkpoint import Checkpoints
from ppo.run.folder import IMPORTED, Run, RunError
from ppo.seeds import evaluation_seeds
from vecenv import AsyncVectorEnv, SyncVectorEnv

MAX_ENVS = 32  # evaluated together
MAX_EPISODE_STEPS = 200_000  # then an episode counts as endless


@dataclass(frozen=True)
class Evaluation:
    """Returns `float64[E]` and lengths `int64[E]` of E episodes."""

    returns: np.ndarray
    lengths: np.ndarray

    def summary(self) -> dict[str, float | int]:
        """Returns mean and deviation, as plain numbers."""
        return {
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "episodes": len(self.returns),
        }

    def to_json(self) -> dict[str, list[float] | list[int]]:
        """Returns every episode, as plain numbers."""
        return {"returns": self.returns.tolist(), "lengths": self.lengths.tolist()}


def evaluate(
    agent: Agent, envs: AsyncVectorEnv | SyncVectorEnv, episodes: int, *, seed: int, timeout_s: float | None
) -> Evaluation:
    """Runs episodes with the likeliest action in each state and the normaliser as it is.

    Each env plays its share of the episodes to the end. To take the first that end among all would
    prefer short ones.

    Args:
        agent: The agent to evaluate.
        envs: The envs to evaluate in.
        episodes: How many.
        seed: The run's seed, from which the seeds of the envs are derived.
        timeout_s: Seconds to wait for a step.

    Raises:
        RunError: If an episode does not end.
        TrainingDiverged: If a reward is not finite.
        multiprocessing.TimeoutError: If an env does not answer for `timeout_s` seconds.
    """
    shares = np.full(envs.num_envs, episodes // envs.num_envs)
    shares[: episodes % envs.num_envs] += 1
    found: list[list[tuple[float, int]]] = [[] for _ in shares]
    reset, step = _calls(envs, timeout_s)
    observations, state = reset(evaluation_seeds(seed, envs.num_envs))[0], agent.initial_state(envs.num_envs)
    while any(len(of_env) < share for of_env, share in zip(found, shares, strict=True)):
        actions, state = agent.act(observations, state)
        observations, rewards, terminated, truncated, _ = step(actions)
        if not np.isfinite(rewards).all():
            env = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise TrainingDiverged(f"env {env} returned reward {rewards[env]} in an evaluation: fix the env")
        if envs.episode_lengths.max() > MAX_EPISODE_STEPS:
            raise RunError(
                f"an episode has not ended after {MAX_EPISODE_STEPS:,} steps, so it has no score: give the env "
                "a time limit (max_episode_steps when it is registered)"
            )
        ended = np.flatnonzero(terminated | truncated)
        state[ended] = 0.0
        for i in ended:
            if len(found[i]) < shares[i]:
                found[i].append((envs.episode_returns[i], envs.episode_lengths[i]))
    returns, lengths = zip(*(episode for of_env in found for episode in of_env), strict=True)
    return Evaluation(np.array(returns), np.array(lengths))


def evaluate_run(
    run: Run, episodes: int, *, seed: int | None = None, envs: EnvSource = None, warn: Callable[[str], None] = print
) -> Evaluation:
    """Evaluates the newest checkpoint of a run.

    Args:
        run: What `ppo.train` made.
        episodes: How many.
        seed: A seed to use instead of the run's; None for the run's.
        envs: As for `ppo.train`, if the run was not trained on its config's env.
        warn: Told about damaged checkpoints.

    Raises:
        RunError: If the run has no checkpoint that can be read.
    """
    config = run.read_config(imports=IMPORTED if envs is None else ("network",))
    run.check_begun()
    config = config if seed is None else dataclasses.replace(config, seed=seed)
    run.check_given(envs is not None)
    with evaluation_envs(config, envs, min(episodes, MAX_ENVS)) as vector:
        with tf.device(HOST):
            agent = Agent(config, vector.single_observation_space, vector.env_action_space)
        Checkpoints(run.checkpoints, agent=agent).restore_newest(warn=warn, partial=True)
        return evaluate(agent, vector, episodes, seed=config.seed, timeout_s=config.step_timeout_s)


def _calls(envs: AsyncVectorEnv | SyncVectorEnv, timeout_s: float | None) -> tuple[Callable, Callable]:
    """Returns `reset(seeds)` and `step(actions)`, which time out if the envs are in workers."""
    if isinstance(envs, SyncVectorEnv):
        return lambda seeds: envs.reset(seed=seeds), envs.step

    def reset(seeds: list[int]) -> tuple:
        envs.reset_async(seed=seeds)
        return envs.reset_wait(timeout_s)

    def step(actions: np.ndarray) -> tuple:
        envs.step_async(actions)
        return envs.step_wait(timeout_s)

    return reset, step
