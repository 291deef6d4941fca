"""The losses of PPO on one minibatch."""

from __future__ import annotations

import tensorflow as tf

EPSILON = 1e-8
"""Added to standard deviations by which advantages are divided."""


def clipped_surrogate(*, ratio: tf.Tensor, advantages: tf.Tensor, clip_range: tf.Tensor | float) -> tf.Tensor:
    """Returns the policy loss, a scalar (Schulman et al., 2017, arXiv 1707.06347, formula 7, negated).

    loss = -mean(min(ratio * A, clip(ratio, 1 - clip_range, 1 + clip_range) * A))

    Args:
        ratio: exp(log_prob - old_log_prob) of the actions, float32[B].
        advantages: A, float32[B].
        clip_range: How far the ratio may move from 1.
    """
    clipped = tf.clip_by_value(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages))


def kl_penalized_surrogate(
    *,
    ratio: tf.Tensor,
    advantages: tf.Tensor,
    kl: tf.Tensor,
    penalty: tf.Tensor,
    kl_target: float,
    cutoff_factor: float,
    cutoff_coef: float,
) -> tf.Tensor:
    """Returns the policy loss of BatchPPO, a scalar (Hafner et al., 2017, arXiv 1709.02878; formula 8 of PPO's paper).

    loss = -mean(ratio * A) + penalty * KL + cutoff_coef * max(0, KL - cutoff_factor * kl_target)^2

    Args:
        ratio: exp(log_prob - old_log_prob) of the actions, float32[B].
        advantages: A, float32[B].
        kl: KL(old || new) in nats, averaged over the minibatch, a scalar.
        penalty: Weight of the KL term, see `adapted_penalty`.
        kl_target: Target for the KL of a whole update, in nats.
        cutoff_factor: The squared cutoff applies if the KL exceeds this multiple of `kl_target`.
        cutoff_coef: Weight of the cutoff.
    """
    surrogate = -tf.reduce_mean(ratio * advantages)
    excess = tf.maximum(0.0, kl - cutoff_factor * kl_target)
    return surrogate + penalty * kl + cutoff_coef * tf.square(excess)


def value_loss(*, values: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Returns half the mean squared error, a scalar."""
    return 0.5 * tf.reduce_mean(tf.square(values - targets))


def approximate_kl(*, log_probs: tf.Tensor, old_log_probs: tf.Tensor) -> tf.Tensor:
    """Returns an estimate of KL(old || new) in nats, a scalar: mean(ratio - 1 - log ratio), never negative."""
    log_ratio = log_probs - old_log_probs
    return tf.reduce_mean(tf.math.expm1(log_ratio) - log_ratio)


def standardize(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` shifted to mean 0 and scaled to standard deviation 1."""
    return (x - tf.reduce_mean(x)) / (tf.math.reduce_std(x) + EPSILON)
