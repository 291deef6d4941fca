"""All randomness of a run, derived from its seed as one independent stream for each purpose.

Streams are keyed by `numpy.random.SeedSequence`, so runs with neighbouring seeds have nothing in common. A seed depends
on its own key alone: env i has the same seed whatever the number of envs or workers.
"""

from __future__ import annotations

import enum

import numpy as np


class _Purpose(enum.IntEnum):
    """First word of each key. Never renumber: it changes every run."""

    ENVS = 0
    EVALUATION = 1
    NETWORK = 2
    SAMPLING = 3
    SHUFFLING = 4


_HALF = 2**30  # seeds below it are for training, the others for evaluation; all fit into an int32


def env_seeds(seed: int, num_envs: int, *, env_steps: int) -> list[int]:
    """Returns the seeds of the envs to train on, one each.

    Args:
        seed: Of the run.
        num_envs: How many.
        env_steps: Steps that the run has taken. Fresh episodes after an interruption must not repeat the first ones.
    """
    return [_number(seed, _Purpose.ENVS, env_steps, i) % _HALF for i in range(num_envs)]


def evaluation_seeds(seed: int, num_envs: int) -> list[int]:
    """Returns the seeds of the envs to evaluate on, one each; no env trains with one of these."""
    return [_HALF + _number(seed, _Purpose.EVALUATION, i) % _HALF for i in range(num_envs)]


def network_seed(seed: int) -> int:
    """Returns the seed of the initial weights, an int32."""
    return _number(seed, _Purpose.NETWORK) % 2**31


def sampling_seed(seed: int, number: int) -> np.ndarray:
    """Returns the seed of the action noise of rollout `number`, `int32[2]`, for TensorFlow's stateless operations."""
    return _stream(seed, _Purpose.SAMPLING, number).generate_state(2).view(np.int32)


def shuffling(seed: int, update: int) -> np.random.Generator:
    """Returns the generator that shuffles an update's samples."""
    return np.random.default_rng(_stream(seed, _Purpose.SHUFFLING, update))


def _stream(seed: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=key)


def _number(seed: int, *key: int) -> int:
    return int(_stream(seed, *key).generate_state(1)[0])
