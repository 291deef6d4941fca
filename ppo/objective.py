"""objective.py: the losses of PPO on one minibatch."""

from __future__ import annotations

import tensorflow as tf


def clipped_surrogate(
    *, log_probs: tf.Tensor, old_log_probs: tf.Tensor, advantages: tf.Tensor, clip_range: float
) -> tf.Tensor:
    """Returns the policy loss, a scalar (Schulman et al., 2017, arXiv 1707.06347, formula 7, negated).

    ratio = exp(log_prob - old_log_prob)
    loss  = -mean(min(ratio * A, clip(ratio, 1 - clip_range, 1 + clip_range) * A))
    """
    ratio = tf.exp(log_probs - old_log_probs)
    clipped = tf.clip_by_value(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages))


def value_loss(*, values: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Returns half the mean squared error, a scalar."""
    return 0.5 * tf.reduce_mean(tf.square(values - targets))


def approximate_kl(*, log_probs: tf.Tensor, old_log_probs: tf.Tensor) -> tf.Tensor:
    """Returns an estimate of KL(old || new) in nats, a scalar: mean(ratio - 1 - log ratio), never negative."""
    log_ratio = log_probs - old_log_probs
    return tf.reduce_mean(tf.math.expm1(log_ratio) - log_ratio)


def standardize(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` shifted to mean 0 and scaled to deviation 1."""
    return (x - tf.reduce_mean(x)) / (tf.math.reduce_std(x) + 1e-8)
