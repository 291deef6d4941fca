"""The normalization of rewards."""

from __future__ import annotations

import tensorflow as tf

from ppo.algorithm.losses import decayed_sums
from ppo.model.normalize import RunningMoments, statistics_of

REWARD_CLIP = 10.0  # greatest magnitude of a normalized reward


class RewardNormalizer(tf.Module):
    """Divides rewards by the standard deviation of the discounted return, and clips them at 10, without shifting them.

    As in Gymnasium's NormalizeReward, the return accumulates forward in time, `g_t = gamma * g_{t-1} + r_t`. It starts
    at 0 in each episode. Its discount factor stays at the initial one, so that the scale of rewards does not drift.

    Attributes:
        moments: Statistics of the discounted return.
        running_return: The discounted return g of each env, `float32[num_envs]`.
    """

    def __init__(self, num_envs: int, *, gamma: float, enabled: bool):
        super().__init__(name="reward_normalizer")
        self._gamma, self._enabled = gamma, enabled
        self.moments = RunningMoments((), name="moments")
        self.running_return = tf.Variable(tf.zeros([num_envs], tf.float32), trainable=False, name="running_return")

    def __call__(
        self, rewards: tf.Tensor, fresh: tf.Tensor, ended: tf.Tensor, weights: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Continues the running returns, adds the returns to the statistics, and returns normalized rewards `[T, N]`.

        Args:
            rewards: Rewards of all steps, `float32[T, N]`.
            fresh: Whether the first of these steps is the first step of an episode, `bool[N]`.
            ended: Whether each step ended an episode or belongs to no living agent, `bool[T, N]`. The running return
                restarts at 0 after it.
            weights: 0 for steps that do not count and 1 for all others, `float32[T * N]`; None if all count.
        """
        if not self._enabled:
            return rewards
        initial = tf.where(fresh, 0.0, self.running_return.read_value())
        returns, last = discounted_sums(rewards, ended, initial, self._gamma)
        self.running_return.assign(last)
        self.moments.merge(statistics_of(tf.reshape(returns, [-1]), weights))
        return tf.clip_by_value(rewards * self.moments.scale, -REWARD_CLIP, REWARD_CLIP)

    @property
    def lacks_statistics(self) -> bool:
        """Whether the normalizer is enabled but has no statistics yet."""
        return self._enabled and self.moments.is_empty


def discounted_sums(
    rewards: tf.Tensor, ended: tf.Tensor, initial: tf.Tensor, gamma: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns `g_t = gamma * g_{t-1} + r_t`, `float32[T, N]`, and the initial g of the next rollout, `float32[N]`.

    The sum restarts at 0 after each step at which an episode ends.
    """
    goes_on = 1.0 - tf.cast(ended, tf.float32)
    before = tf.concat([gamma * initial[None], tf.zeros_like(rewards[1:])], axis=0)
    sums = decayed_sums(rewards + before, gamma * tf.concat([tf.zeros_like(goes_on[:1]), goes_on[:-1]], axis=0))
    return sums, sums[-1] * goes_on[-1]
