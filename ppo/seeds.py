"""Independent random streams for every use of randomness in a run, derived from the run's seed.

Each stream is a `numpy.random.SeedSequence` with its own key, so runs with neighboring seeds are independent. A seed
depends only on its own key: the seed of env i does not depend on the number of envs or workers.
"""

from __future__ import annotations

import enum
import secrets

import numpy as np


class _Purpose(enum.IntEnum):
    """First word of each key. Never renumber: that would change every run."""

    ENVS = 0
    EVALUATION = 1
    NETWORK = 2
    SAMPLING = 3
    SHUFFLING = 4
    EVALUATION_NOISE = 5


_HALF = 2**30  # smaller seeds are for training, larger ones for evaluation; all fit into an int32


def env_seeds(seed: int, num_envs: int, *, env_steps: int) -> list[int]:
    """Returns one seed for each training env.

    The env-steps taken before the envs are reset are part of the key, so a resumed run does not repeat its first
    episodes.
    """
    return [_number(seed, _Purpose.ENVS, env_steps, i) % _HALF for i in range(num_envs)]


def evaluation_seeds(seed: int, num_envs: int) -> list[int]:
    """Returns one seed for each evaluation env. No training env has any of these seeds."""
    return [_HALF + _number(seed, _Purpose.EVALUATION, i) % _HALF for i in range(num_envs)]


def evaluation_rng(seed: int) -> np.random.Generator:
    """Returns the generator of the seeds of the action noise in an evaluation with sampled actions."""
    return np.random.default_rng(_stream(seed, _Purpose.EVALUATION_NOISE))


def fresh_seed() -> int:
    """Returns an unpredictable seed, which a setting can hold."""
    return secrets.randbelow(2**31)


def network_seed(seed: int) -> int:
    """Returns the seed of the initial weights, which fits into an int32."""
    return _number(seed, _Purpose.NETWORK) % 2**31


def sampling_seed(seed: int, rollout: int) -> np.ndarray:
    """Returns the seed of a rollout's action noise, `int32[2]`, for TensorFlow's stateless operations."""
    return _stream(seed, _Purpose.SAMPLING, rollout).generate_state(2).view(np.int32)


def shuffling_rng(seed: int, update: int) -> np.random.Generator:
    """Returns the generator that shuffles the samples of an update."""
    return np.random.default_rng(_stream(seed, _Purpose.SHUFFLING, update))


def _stream(seed: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=key)


def _number(seed: int, *key: int) -> int:
    return int(_stream(seed, *key).generate_state(1)[0])
