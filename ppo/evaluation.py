"""evaluation.py: evaluate: the score of a deterministic policy on envs of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ppo.agent import Agent
from ppo.checkpoint import Checkpoints
from ppo.config import Config
from ppo.envs import evaluation_envs
from ppo.run import Run, RunError
from vecenv import AsyncVectorEnv

MAX_ENVS = 32  # evaluated together
SEED_OFFSET = 2**30  # keeps the seeds of evaluation apart from those of training


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


MAX_EPISODE_STEPS = 200_000  # then an episode counts as endless


def evaluate(agent: Agent, envs: AsyncVectorEnv, episodes: int, *, seed: int, timeout_s: float | None) -> Evaluation:
    """Runs episodes with the likeliest action in each state and the normaliser as it is.

    Each env plays its share of the episodes to the end. To take the first that end among all would
    prefer short ones.

    Raises:
        RunError: If an episode does not end.
        multiprocessing.TimeoutError: If an env does not answer for `timeout_s` seconds.
    """
    shares = np.full(envs.num_envs, episodes // envs.num_envs)
    shares[: episodes % envs.num_envs] += 1
    found: list[list[tuple[float, int]]] = [[] for _ in shares]
    envs.reset_async(seed=seed + SEED_OFFSET)
    observations, _ = envs.reset_wait(timeout_s)
    while any(len(of_env) < share for of_env, share in zip(found, shares, strict=True)):
        envs.step_async(agent.act(observations))
        observations, _, terminated, truncated, _ = envs.step_wait(timeout_s)
        if envs.episode_lengths.max() > MAX_EPISODE_STEPS:
            raise RunError(
                f"an episode has not ended after {MAX_EPISODE_STEPS:,} steps, so it has no score: give the env "
                "a time limit (max_episode_steps when it is registered)"
            )
        for i in np.flatnonzero(terminated | truncated):
            if len(found[i]) < shares[i]:
                found[i].append((envs.episode_returns[i], envs.episode_lengths[i]))
    returns, lengths = zip(*(episode for of_env in found for episode in of_env), strict=True)
    return Evaluation(np.array(returns), np.array(lengths))


def evaluate_run(run: Run, episodes: int, *, seed: int | None = None, warn=print) -> Evaluation:
    """Evaluates the newest checkpoint of a run.

    Args:
        run: What `ppo.train` made.
        episodes: How many.
        seed: Of the envs; None for the run's own.
        warn: Told about damaged checkpoints.

    Raises:
        RunError: If the run has no checkpoint that can be read.
    """
    config: Config = run.read_config()
    with evaluation_envs(config, min(episodes, MAX_ENVS)) as envs:
        agent = Agent(config, envs.single_observation_space, envs.single_action_space)
        Checkpoints(run.checkpoints, agent=agent).restore_newest(warn=warn, partial=True)
        return evaluate(
            agent, envs, episodes, seed=config.seed if seed is None else seed, timeout_s=config.step_timeout_s
        )
