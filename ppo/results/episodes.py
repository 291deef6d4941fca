"""What all evaluations share: the number of episodes of each env, and the length after which an episode is endless."""

from __future__ import annotations

import numpy as np

from ppo.run.folder import RunError

MAX_EPISODE_STEPS = 200_000
"""Number of steps after which an episode counts as endless."""


def quotas_of(episodes: int, num_envs: int) -> np.ndarray:
    """Returns how many episodes to play in each env, `int64[num_envs]`.

    The numbers are fixed in advance. Counting the first episodes to finish would bias the score towards short episodes.
    """
    return episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)


def check_length(longest: int) -> None:
    """Raises `RunError` if the longest episode that has not ended is longer than `MAX_EPISODE_STEPS`."""
    if longest > MAX_EPISODE_STEPS:
        raise RunError(
            f"an episode has not ended after {MAX_EPISODE_STEPS:,} steps, so it has no score. Give the env "
            "a time limit (max_episode_steps when it is registered)."
        )
