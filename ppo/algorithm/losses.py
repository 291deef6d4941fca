"""The mathematics of PPO: advantages of a rollout, and the losses on one minibatch."""

from __future__ import annotations

import tensorflow as tf

from ppo.runtime.graphs import straight_through

EPSILON = 1e-8
"""Added to divisors that may be 0: the deviation of advantages, and the variance of value targets."""

MAX_LOG_RATIO = 20.0
"""Maximum of the log-ratio. The squared norm of a gradient that a ratio of exp(20) scales is finite in float32."""

CUTOFF_FACTOR, CUTOFF_COEF = 2.0, 1000.0
"""The multiple of the target beyond which BatchPPO adds the square of a minibatch's KL, and the weight of this term."""


def gae(
    *,
    rewards: tf.Tensor,
    values: tf.Tensor,
    next_values: tf.Tensor,
    terminated: tf.Tensor,
    truncated: tf.Tensor,
    gamma: float | tf.Tensor,
    gae_lambda: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns advantages and value targets, each `float32[T, N]` (Schulman et al., 2015, arXiv 1506.02438).

        delta_t = r_t + gamma * next_value_t * (1 - terminated_t) - value_t
        A_t     = delta_t + gamma * lambda * (1 - terminated_t) * (1 - truncated_t) * A_{t+1}

    There is no reward after termination. A truncated episode would have continued, so its return is bootstrapped from
    the value of its final observation. The sum of deltas stops at the end of an episode in both cases.

    Args:
        rewards: `float32[T, N]`.
        values: Values of the states in which the actions were taken, `float32[T, N]`.
        next_values: Values of the successor states, `float32[T, N]`. At the last step of an episode, this is the value
            of its final observation, never of the next episode's first observation.
        terminated: `bool[T, N]`.
        truncated: `bool[T, N]`.
        gamma: Discount factor per step.
        gae_lambda: 0 for one-step advantages, 1 for whole returns.
    """
    alive = 1.0 - tf.cast(terminated, tf.float32)
    continues = alive * (1.0 - tf.cast(truncated, tf.float32))
    deltas = rewards + gamma * next_values * alive - values

    advantages = decayed_sums(deltas[::-1], gamma * gae_lambda * continues[::-1])[::-1]
    return advantages, advantages + values


def decayed_sums(terms: tf.Tensor, decays: tf.Tensor) -> tf.Tensor:
    """Returns `s_t = terms_t + decays_t * s_{t-1}`, `float32[T, N]`, where `s_{-1} = 0`.

    This takes log2(T) passes instead of a loop over T steps. Each pass doubles the number of steps that a sum spans
    (Hillis and Steele, 1986, "Data parallel algorithms").
    """

    def delayed(x: tf.Tensor, span: int) -> tf.Tensor:
        return tf.pad(x, [[span, 0], [0, 0]])[:-span]

    span = 1
    while span < terms.shape[0]:
        terms = terms + decays * delayed(terms, span)
        decays = decays * delayed(decays, span)
        span *= 2
    return terms


def mean(x: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the mean of `x: [B]`, a scalar. The mean of no values is 0.

    The weights are 0 for values that do not count and 1 for all others, float32[B]; None if all count.
    """
    if weights is None:
        return tf.reduce_mean(x)
    return tf.reduce_sum(x * weights) / tf.maximum(tf.reduce_sum(weights), 1.0)


def log_ratio(*, log_probs: tf.Tensor, old_log_probs: tf.Tensor) -> tf.Tensor:
    """Returns log_prob - old_log_prob, at most `MAX_LOG_RATIO`, float32[B].

    Without the limit, a single action whose probability grew by a factor of exp(88) would make the ratio infinite and
    the gradient NaN. The gradient passes through the limit, so a bad action beyond it still becomes less likely.
    """

    x = log_probs - old_log_probs
    return straight_through(tf.minimum(x, MAX_LOG_RATIO), x)


def clipped_surrogate(
    *, ratio: tf.Tensor, advantages: tf.Tensor, clip_range: float, weights: tf.Tensor | None = None
) -> tf.Tensor:
    """Returns the policy loss, a scalar (Schulman et al., 2017, arXiv 1707.06347, formula 7, negated).

    loss = -mean(min(ratio * A, clip(ratio, 1 - clip_range, 1 + clip_range) * A))

    The ratio is exp of the `log_ratio` of the actions, float32[B], and A the advantages, float32[B]. See `mean` for the
    weights.
    """
    clipped = tf.clip_by_value(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return -mean(tf.minimum(ratio * advantages, clipped * advantages), weights)


def kl_penalized_surrogate(
    *,
    ratio: tf.Tensor,
    advantages: tf.Tensor,
    kl: tf.Tensor,
    penalty: tf.Tensor,
    kl_target: float,
    weights: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns the policy loss of BatchPPO, a scalar (Hafner et al., 2017, arXiv 1709.02878; formula 8 of PPO's paper).

    loss = -mean(ratio * A) + penalty * KL + 1000 * max(0, KL - 2 * kl_target)^2

    Args:
        ratio: exp of the `log_ratio` of the actions, float32[B].
        advantages: A, float32[B].
        kl: KL(old || new) in nats, averaged over the minibatch, a scalar.
        penalty: Weight of the KL term; see `adapted_penalty`.
        kl_target: Target for the KL of a whole update, in nats.
        weights: See `mean`.
    """
    surrogate = -mean(ratio * advantages, weights)
    excess = tf.maximum(0.0, kl - CUTOFF_FACTOR * kl_target)
    return surrogate + penalty * kl + CUTOFF_COEF * tf.square(excess)


def value_loss(*, values: tf.Tensor, targets: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns half the mean squared error of `values: [B]`, a scalar. See `mean` for the weights."""
    return 0.5 * mean(tf.square(values - targets), weights)


def approximate_kl(*, log_probs: tf.Tensor, old_log_probs: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns an estimate of KL(old || new) in nats, a scalar: mean(ratio - 1 - log ratio), never negative.

    The log-probabilities are `[B]`. This is k3 of Schulman (2020, "Approximating KL Divergence").
    """
    log = log_ratio(log_probs=log_probs, old_log_probs=old_log_probs)
    return mean(tf.math.expm1(log) - log, weights)


def standardize(x: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Returns `x: [B]` shifted to mean 0 and scaled to standard deviation 1. See `mean` for the weights."""
    centered = x - mean(x, weights)
    return centered / (tf.sqrt(mean(tf.square(centered), weights)) + EPSILON)
