"""What a policy's outputs mean: Gaussian for Box actions, choices for discrete ones.

Each is a class of pure functions on the policy's outputs, so that the rollout draws all its noise at
once and the update computes log-probabilities for a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import gymnasium as gym
import numpy as np
import tensorflow as tf
from gymnasium import spaces

import vecenv
from ppo.model.transforms import Clip, Transform, transform_for


class Distribution(Protocol):
    """Functions of `outputs: float32[..., num_outputs]`, what the policy gives.

    Attributes:
        num_outputs: All parameters of one distribution.
        num_free: How many of these, the last ones, need not depend on the state.
        mask_size: Entries of a mask of the actions; None if they cannot be masked.
        mask_groups: Lengths of the runs of entries of which a mask must allow one or more.
    """

    num_outputs: int
    num_free: int
    mask_size: int | None
    mask_groups: Sequence[int]

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        """Draws what `sample` needs for a batch of this shape; the same seed gives the same noise."""

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        """Returns actions, in the dtype and shape of the action space."""

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the likeliest actions (of a squashed Gaussian, the squashed mean)."""

    def samples(self, outputs: tf.Tensor, noise: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
        """Returns what `log_prob` takes for actions that `sample` drew from `outputs` with `noise`.

        These are the actions, or the samples before a transform, which rounded actions do not determine.
        """

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        """Returns the log-density, or log-probability, of the actions that the samples stand for: float32[...]."""

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the entropy in nats: float32[...]."""

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns KL(old || new) in nats: float32[...]."""


class DiagonalGaussian:
    """Independent normal distributions of u, which a `Transform` turns into actions. Outputs: means, then log stds.

    log p(a) = sum_i -(u_i - mean_i)^2 / (2 std_i^2) - log std_i - log(2 pi) / 2 - log |da_i / du_i|
    """

    mask_size: int | None = None
    mask_groups: Sequence[int] = ()

    def __init__(self, space: spaces.Box, transform: Transform):
        self._shape = list(space.shape)
        self._dtype = space.dtype
        self._transform = transform
        self.num_free = int(np.prod(space.shape))
        self.num_outputs = 2 * self.num_free

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_normal([*shape, self.num_free], seed)

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split(outputs)
        return self._as_action(mean + tf.exp(log_std) * noise)

    def samples(self, outputs: tf.Tensor, noise: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
        if isinstance(self._transform, Clip):
            return tf.reshape(tf.cast(actions, tf.float32), tf.shape(noise))
        mean, log_std = self._split(outputs)
        return mean + tf.exp(log_std) * noise

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        return self._as_action(self._split(outputs)[0])

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split(outputs)
        z = (samples - mean) * tf.exp(-log_std)
        density = -0.5 * tf.square(z) - log_std - 0.5 * math.log(2 * math.pi) - self._transform.log_slope(samples)
        return tf.reduce_sum(density, axis=-1)

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split(outputs)
        slope = self._transform.mean_log_slope(mean, tf.exp(log_std))
        return tf.reduce_sum(log_std + 0.5 * math.log(2 * math.pi * math.e) + slope, axis=-1)

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        # sum_i log(std / old_std) + (old_std^2 + (old_mean - mean)^2) / (2 std^2) - 1/2, whatever the transform
        (old_mean, old_log_std), (mean, log_std) = self._split(old_outputs), self._split(outputs)
        squares = tf.exp(2.0 * old_log_std) + tf.square(old_mean - mean)
        return tf.reduce_sum(log_std - old_log_std + 0.5 * squares * tf.exp(-2.0 * log_std) - 0.5, axis=-1)

    def _split(self, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return outputs[..., : self.num_free], outputs[..., self.num_free :]

    def _as_action(self, u: tf.Tensor) -> tf.Tensor:
        flat = self._transform.forward(u)
        actions = tf.reshape(flat, tf.concat([tf.shape(flat)[:-1], self._shape], axis=0))
        return tf.cast(tf.ensure_shape(actions, [*flat.shape[:-1], *self._shape]), self._dtype)


class Categorical:
    """Independent choices, one in each entry of the action; the outputs are their logits, one entry after another.

    Choice k is the action `start + k` of that entry.
    """

    num_free = 0

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete):
        self._shape = list(space.shape or ())
        counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n
        self.mask_groups: Sequence[int] = np.reshape(counts, -1).tolist()
        self._start = np.reshape(space.start, -1).astype(np.int64)
        self._dtype = space.dtype
        self.num_outputs = sum(self.mask_groups)
        self.mask_size: int | None = self.num_outputs

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        # Gumbel noise: the largest of logits + noise is a sample of their softmax.
        tiny = np.finfo(np.float32).tiny
        uniform = tf.random.stateless_uniform([*shape, self.num_outputs], seed, minval=tiny)
        return -tf.math.log(-tf.math.log(uniform))

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self.mode(outputs + noise)

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        choices = tf.stack([tf.argmax(logits, axis=-1) for logits in self._split(outputs)], axis=-1) + self._start
        actions = tf.reshape(choices, tf.concat([tf.shape(outputs)[:-1], self._shape], axis=0))
        return tf.cast(tf.ensure_shape(actions, [*outputs.shape[:-1], *self._shape]), self._dtype)

    def samples(self, outputs: tf.Tensor, noise: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
        return actions

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        batch = tf.shape(outputs)[:-1]
        choices = (
            tf.reshape(tf.cast(samples, tf.int64), tf.concat([batch, [len(self.mask_groups)]], axis=0)) - self._start
        )
        chosen = [
            tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(choices[..., i], self.mask_groups[i]), axis=-1)
            for i, logits in enumerate(self._split(outputs))
        ]
        return tf.add_n(chosen)

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        log_probs = [tf.nn.log_softmax(logits) for logits in self._split(outputs)]
        return -tf.add_n([tf.reduce_sum(tf.exp(log_prob) * log_prob, axis=-1) for log_prob in log_probs])

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        total = tf.zeros(tf.shape(outputs)[:-1])
        for old_logits, logits in zip(self._split(old_outputs), self._split(outputs), strict=True):
            old, new = tf.nn.log_softmax(old_logits), tf.nn.log_softmax(logits)
            total += tf.reduce_sum(tf.exp(old) * (old - new), axis=-1)
        return total

    def _split(self, outputs: tf.Tensor) -> list[tf.Tensor]:
        return [outputs] if len(self.mask_groups) == 1 else tf.split(outputs, self.mask_groups, axis=-1)


class Bernoulli:
    """Independent bits; the outputs are the logits of each being 1. A mask of 0 keeps a bit 0."""

    num_free = 0
    mask_groups: Sequence[int] = ()

    def __init__(self, space: spaces.MultiBinary):
        self._shape = list(space.shape)
        self._dtype = space.dtype
        self.num_outputs = int(np.prod(space.shape))
        self.mask_size: int | None = self.num_outputs

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        # Logistic noise: logit + noise is above 0 with probability sigmoid(logit).
        tiny = np.finfo(np.float32).tiny
        uniform = tf.random.stateless_uniform([*shape, self.num_outputs], seed, minval=tiny)
        return tf.math.log(uniform) - tf.math.log1p(-uniform)

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self.mode(outputs + noise)

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        bits = tf.reshape(outputs > 0.0, tf.concat([tf.shape(outputs)[:-1], self._shape], axis=0))
        return tf.cast(tf.ensure_shape(bits, [*outputs.shape[:-1], *self._shape]), self._dtype)

    def samples(self, outputs: tf.Tensor, noise: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
        return actions

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        sign = 2.0 * tf.reshape(tf.cast(samples, tf.float32), tf.shape(outputs)) - 1.0
        return tf.reduce_sum(tf.math.log_sigmoid(sign * outputs), axis=-1)

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        return -tf.reduce_sum(self._expected(outputs, outputs), axis=-1)

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self._expected(old_outputs, old_outputs) - self._expected(old_outputs, outputs), axis=-1)

    def _expected(self, weights: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the mean of `log_prob` of `outputs`, bit by bit, over bits drawn by `weights`."""
        ones, zeros = tf.sigmoid(weights), tf.sigmoid(-weights)
        return ones * tf.math.log_sigmoid(outputs) + zeros * tf.math.log_sigmoid(-outputs)


def for_space(space: gym.Space, *, transform: Literal["clip", "rescale", "tanh"] = "clip") -> Distribution:
    """Returns the distribution for an action space.

    Args:
        space: Of one action.
        transform: How a Gaussian's sample becomes an action of a Box, see `ppo.model.transforms`.

    Raises:
        vecenv.UnsupportedSpace: If there is none.
    """
    if space.shape is not None and 0 in space.shape:
        raise vecenv.UnsupportedSpace(f"the action space {space} has no entries: there is nothing to learn")
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return DiagonalGaussian(space, transform_for(transform, space))
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return Categorical(space)
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(space)
    raise vecenv.UnsupportedSpace(
        f"ppo has no policy for the action space {space}: it needs a Box of floats, a Discrete, a MultiDiscrete or a "
        "MultiBinary"
    )
