"""The losses of PPO on one minibatch, and what they adapt to between updates."""

from __future__ import annotations

import tensorflow as tf


def clipped_surrogate(
    *, log_probs: tf.Tensor, old_log_probs: tf.Tensor, advantages: tf.Tensor, clip_range: tf.Tensor | float
) -> tf.Tensor:
    """Returns the policy loss, a scalar (Schulman et al., 2017, arXiv 1707.06347, formula 7, negated).

    ratio = exp(log_prob - old_log_prob)
    loss  = -mean(min(ratio * A, clip(ratio, 1 - clip_range, 1 + clip_range) * A))
    """
    ratio = tf.exp(log_probs - old_log_probs)
    clipped = tf.clip_by_value(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return -tf.reduce_mean(tf.minimum(ratio * advantages, clipped * advantages))


def kl_penalized_surrogate(
    *,
    log_probs: tf.Tensor,
    old_log_probs: tf.Tensor,
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
        log_probs: Of the actions now, float32[B].
        old_log_probs: When they were taken.
        advantages: A, float32[B].
        kl: KL(old || new) in nats, the mean over the minibatch: a scalar.
        penalty: Weight of the KL, see `adapted_penalty`.
        kl_target: What the KL of a whole update should come to, in nats.
        cutoff_factor: Beyond that many targets the squared cutoff holds the policy back.
        cutoff_coef: Weight of the cutoff.
    """
    surrogate = -tf.reduce_mean(tf.exp(log_probs - old_log_probs) * advantages)
    excess = tf.maximum(0.0, kl - cutoff_factor * kl_target)
    return surrogate + penalty * kl + cutoff_coef * tf.square(excess)


def adapted_penalty(penalty: tf.Tensor, kl: tf.Tensor, *, kl_target: float, initial: float) -> tf.Tensor:
    """Returns the next update's penalty: multiplied by 1.5 after a KL above 1.3 targets, divided by 1.5 below 0.7.

    It stays between 1e-6 and 1e6, or between wider bounds that include `initial`, so that it can always recover.
    """
    stronger = tf.where(kl > 1.3 * kl_target, tf.minimum(penalty * 1.5, max(1e6, initial)), penalty)
    return tf.where(kl < 0.7 * kl_target, tf.maximum(penalty / 1.5, min(1e-6, initial)), stronger)


def adapted_rate(rate: tf.Tensor, kl: tf.Tensor, *, kl_target: float, initial: float) -> tf.Tensor:
    """Returns the next update's learning rate: divided by 1.5 after a KL above 2 targets, times 1.5 below 0.5.

    It stays between 1e-6 and 1e-2 (as in rl_games' adaptive schedule), or wider bounds that include `initial`.
    """
    slower = tf.where(kl > 2.0 * kl_target, tf.maximum(rate / 1.5, min(1e-6, initial)), rate)
    return tf.where(kl < 0.5 * kl_target, tf.minimum(rate * 1.5, max(1e-2, initial)), slower)


def guarded_rate(rate: tf.Tensor, kl: tf.Tensor, *, kl_limit: float, initial: float) -> tf.Tensor:
    """Returns the next update's base learning rate: divided by 1.5 after a KL above the limit.

    After a KL below half the limit it is multiplied by 1.5, until it is the initial one again.
    """
    slower = tf.where(kl > kl_limit, rate / 1.5, rate)
    return tf.where(kl < 0.5 * kl_limit, tf.minimum(rate * 1.5, initial), slower)


def value_loss(
    *, values: tf.Tensor, targets: tf.Tensor, old_values: tf.Tensor | None = None, clip_range: float | None = None
) -> tf.Tensor:
    """Returns half the mean squared error, a scalar.

    With `clip_range`, the larger of the errors of the values and of the values kept within that of `old_values`, as
    OpenAI's baselines have it.
    """
    errors = tf.square(values - targets)
    if clip_range is not None:
        kept = old_values + tf.clip_by_value(values - old_values, -clip_range, clip_range)
        errors = tf.maximum(errors, tf.square(kept - targets))
    return 0.5 * tf.reduce_mean(errors)


def approximate_kl(*, log_probs: tf.Tensor, old_log_probs: tf.Tensor) -> tf.Tensor:
    """Returns an estimate of KL(old || new) in nats, a scalar: mean(ratio - 1 - log ratio), never negative."""
    log_ratio = log_probs - old_log_probs
    return tf.reduce_mean(tf.math.expm1(log_ratio) - log_ratio)


def standardize(x: tf.Tensor) -> tf.Tensor:
    """Returns `x` shifted to mean 0 and scaled to deviation 1."""
    return (x - tf.reduce_mean(x)) / (tf.math.reduce_std(x) + 1e-8)
