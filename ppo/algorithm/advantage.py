"""Generalized advantage estimation that treats a time limit differently from a terminal state."""

from __future__ import annotations

import tensorflow as tf


def gae(
    *,
    rewards: tf.Tensor,
    values: tf.Tensor,
    next_values: tf.Tensor,
    terminated: tf.Tensor,
    truncated: tf.Tensor,
    gamma: float,
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

    def step(later: tf.Tensor, now: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        delta, decay = now
        return delta + decay * later

    advantages = tf.scan(
        step, (deltas, gamma * gae_lambda * continues), initializer=tf.zeros_like(deltas[0]), reverse=True
    )
    return advantages, advantages + values
