"""Minibatches of an update: single samples, or whole sequences for a recurrent policy."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from ppo.algorithm.rollout import Sequences, flat
from ppo.config import Config
from ppo.model.observations import Inputs
from ppo.seeds import shuffling_rng


class Samples(NamedTuple):
    """The data of a gradient step: `[B, ...]` for a minibatch, `[T * N, ...]` for a whole rollout.

    Attributes:
        inputs: Inputs of the networks.
        actions: The actions, in the form that `Distribution.log_prob` takes.
        old_log_probs: Log-probabilities under the policy that acted.
        start_log_probs: Log-probabilities under the policy at the start of the update.
        start_outputs: Distribution parameters of the policy at the start of the update.
        old_values: Values at the start of the update, as the network returns them.
        advantages: Advantages, not standardized.
        targets: Value targets, in the units of the network.
    """

    inputs: Inputs
    actions: tf.Tensor
    old_log_probs: tf.Tensor
    start_log_probs: tf.Tensor
    start_outputs: tf.Tensor
    old_values: tf.Tensor
    advantages: tf.Tensor
    targets: tf.Tensor


class Minibatches(Protocol):
    """A way of splitting a rollout into minibatches."""

    def arrange(self, samples: Samples) -> Samples:
        """Returns a rollout's samples in the layout that `take` reads."""

    def take(self, arranged: Samples, indices: tf.Tensor) -> tuple[Samples, Sequences | None]:
        """Returns the minibatch with the given indices, and its sequences, or None for single samples."""


class BySample:
    """Splits a rollout into minibatches of single samples, for a policy without memory."""

    def arrange(self, samples: Samples) -> Samples:
        return samples

    def take(self, arranged: Samples, indices: tf.Tensor) -> tuple[Samples, None]:
        return tf.nest.map_structure(lambda column: tf.gather(column, indices), arranged), None


class BySequence:
    """Splits a rollout by env, for a recurrent policy: a minibatch holds all T steps of some envs.

    Args:
        sequences: The sequences of all envs, without the state after the last step.
    """

    def __init__(self, sequences: Sequences):
        self._first, self._state = sequences

    def arrange(self, samples: Samples) -> Samples:
        shape = self._first.shape
        return tf.nest.map_structure(lambda column: tf.reshape(column, [*shape, *column.shape[1:]]), samples)

    def take(self, arranged: Samples, indices: tf.Tensor) -> tuple[Samples, Sequences]:
        columns = tf.nest.map_structure(lambda column: tf.gather(column, indices, axis=1), arranged)
        return flat(columns), Sequences(tf.gather(self._first, indices, axis=1), tf.gather(self._state, indices))


def shuffled(config: Config, update: int) -> np.ndarray:
    """Returns the indices of each minibatch of an update. Every epoch uses every index once.

    The indices are those of samples, `int32[epochs * minibatches, B]`, or, for a recurrent policy, those of envs,
    `int32[epochs * minibatches, B / T]`. NumPy draws them, because sorting random keys under XLA takes an eighth of the
    whole update.
    """
    rng = shuffling_rng(config.seed, update)
    count = config.batch_size if config.recurrent == "none" else config.num_envs
    indices = np.tile(np.arange(count, dtype=np.int32), (config.epochs, 1))
    return rng.permuted(indices, axis=1).reshape(config.epochs * config.num_minibatches, -1)
