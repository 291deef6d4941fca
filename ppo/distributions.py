"""distributions.py: what a policy's outputs mean: Gaussian for Box actions, categorical for Discrete.

Each is a class of pure functions on the network's outputs, so that the rollout draws all its noise at
once and the update computes log-probabilities for a whole batch.
"""

from __future__ import annotations

import math
from typing import Protocol

import gymnasium as gym
import numpy as np
import tensorflow as tf

import vecenv


class Distribution(Protocol):
    """Functions of `outputs: float32[..., num_outputs]`, what the policy network gives."""

    num_outputs: int
    has_log_std: bool

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        """Draws what `sample` needs for a batch of this shape; the same seed gives the same noise."""

    def sample(self, outputs: tf.Tensor, log_std: tf.Tensor | None, noise: tf.Tensor) -> tf.Tensor:
        """Returns actions, in the dtype and shape of the action space."""

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the likeliest actions."""

    def log_prob(self, outputs: tf.Tensor, log_std: tf.Tensor | None, actions: tf.Tensor) -> tf.Tensor:
        """Returns the logarithm of the density, or probability, of the actions: float32[...]."""

    def entropy(self, outputs: tf.Tensor, log_std: tf.Tensor | None) -> tf.Tensor:
        """Returns the entropy in nats: float32[...]."""

    def kl(
        self, old_outputs: tf.Tensor, old_log_std: tf.Tensor | None, outputs: tf.Tensor, log_std: tf.Tensor | None
    ) -> tf.Tensor:
        """Returns KL(old || new) in nats: float32[...]."""


class DiagonalGaussian:
    """Independent normal distributions; their deviation does not depend on the state.

    log p(a) = sum_i -(a_i - mean_i)^2 / (2 std_i^2) - log std_i - log(2 pi) / 2
    """

    has_log_std = True

    def __init__(self, space: gym.spaces.Box):
        self._shape = list(space.shape)
        self._dtype = space.dtype
        self.num_outputs = int(np.prod(space.shape))

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_normal([*shape, self.num_outputs], seed)

    def sample(self, outputs: tf.Tensor, log_std: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self._as_action(outputs + tf.exp(log_std) * noise)

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        return self._as_action(outputs)

    def log_prob(self, outputs: tf.Tensor, log_std: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
        actions = tf.reshape(tf.cast(actions, tf.float32), tf.shape(outputs))
        z = (actions - outputs) * tf.exp(-log_std)
        return tf.reduce_sum(-0.5 * tf.square(z) - log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self, outputs: tf.Tensor, log_std: tf.Tensor) -> tf.Tensor:
        per_sample = tf.reduce_sum(log_std + 0.5 * math.log(2 * math.pi * math.e))
        return tf.broadcast_to(per_sample, tf.shape(outputs)[:-1])

    def kl(self, old_outputs: tf.Tensor, old_log_std: tf.Tensor, outputs: tf.Tensor, log_std: tf.Tensor) -> tf.Tensor:
        # sum_i log(std / old_std) + (old_std^2 + (old_mean - mean)^2) / (2 std^2) - 1/2
        squares = tf.exp(2.0 * old_log_std) + tf.square(old_outputs - outputs)
        return tf.reduce_sum(log_std - old_log_std + 0.5 * squares * tf.exp(-2.0 * log_std) - 0.5, axis=-1)

    def _as_action(self, flat: tf.Tensor) -> tf.Tensor:
        batch = tf.shape(flat)[:-1]
        actions = tf.ensure_shape(
            tf.reshape(flat, tf.concat([batch, self._shape], axis=0)), [*flat.shape[:-1], *self._shape]
        )
        return tf.cast(actions, self._dtype)


class Categorical:
    """One of n choices; the outputs are their logits. Action `start + k` is choice k."""

    has_log_std = False

    def __init__(self, space: gym.spaces.Discrete):
        self.num_outputs = int(space.n)
        self._start = int(space.start)
        self._dtype = space.dtype

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        # Gumbel noise: the largest of logits + noise is a sample of their softmax.
        tiny = np.finfo(np.float32).tiny
        uniform = tf.random.stateless_uniform([*shape, self.num_outputs], seed, minval=tiny)
        return -tf.math.log(-tf.math.log(uniform))

    def sample(self, outputs: tf.Tensor, log_std: None, noise: tf.Tensor) -> tf.Tensor:
        return self.mode(outputs + noise)

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.argmax(outputs, axis=-1) + self._start, self._dtype)

    def log_prob(self, outputs: tf.Tensor, log_std: None, actions: tf.Tensor) -> tf.Tensor:
        choice = tf.one_hot(tf.cast(actions, tf.int64) - self._start, self.num_outputs)
        return tf.reduce_sum(tf.nn.log_softmax(outputs) * choice, axis=-1)

    def entropy(self, outputs: tf.Tensor, log_std: None) -> tf.Tensor:
        log_probs = tf.nn.log_softmax(outputs)
        return -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=-1)

    def kl(self, old_outputs: tf.Tensor, old_log_std: None, outputs: tf.Tensor, log_std: None) -> tf.Tensor:
        old, new = tf.nn.log_softmax(old_outputs), tf.nn.log_softmax(outputs)
        return tf.reduce_sum(tf.exp(old) * (old - new), axis=-1)


def for_space(space: gym.Space) -> Distribution:
    """Returns the distribution for an action space.

    Raises:
        vecenv.UnsupportedSpace: If there is none.
    """
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return DiagonalGaussian(space)
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(space)
    raise vecenv.UnsupportedSpace(
        f"ppo has no policy for the action space {space}: it needs a Box of floats or a Discrete"
    )
