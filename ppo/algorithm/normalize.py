"""Running mean and variance, and what is normalised with them: observations, rewards, values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

EPSILON = 1e-8  # added to variances, so that a constant feature does not divide by zero


class RunningMoments(tf.Module):
    """Count, mean and variance of all samples seen, in float64; merged batch by batch."""

    def __init__(self, shape: tuple[int, ...], name: str):
        super().__init__(name=name)
        self.count = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="count")
        self.mean = tf.Variable(tf.zeros(shape, tf.float64), trainable=False, name="mean")
        self.variance = tf.Variable(tf.ones(shape, tf.float64), trainable=False, name="variance")

    def update(self, batch: tf.Tensor) -> None:
        """Merges `batch: [B, *shape]` into the statistics (Chan, Golub, LeVeque, 1979, formula 2.1)."""
        batch = tf.cast(batch, tf.float64)
        batch_count = tf.cast(tf.shape(batch)[0], tf.float64)
        batch_mean = tf.reduce_mean(batch, axis=0)
        batch_variance = tf.reduce_mean(tf.square(batch - batch_mean), axis=0)
        count = self.count + batch_count
        delta = batch_mean - self.mean
        squares = (
            self.variance * self.count
            + batch_variance * batch_count
            + tf.square(delta) * self.count * batch_count / count
        )
        self.mean.assign_add(delta * batch_count / count)
        self.variance.assign(squares / count)
        self.count.assign(count)


class ObservationNormalizer(tf.Module):
    """Maps observations to mean 0 and deviation 1, feature by feature, clipped.

    Its statistics change only in `update`, so all of a rollout and its update see the same function.
    """

    def __init__(self, num_features: int, *, clip: float, enabled: bool):
        super().__init__(name="observation_normalizer")
        self._enabled = enabled
        self._clip = clip
        self.moments = RunningMoments((num_features,), name="moments")

    def __call__(self, features: tf.Tensor) -> tf.Tensor:
        """Returns `float32[..., F]` for `float32[..., F]`."""
        if not self._enabled:
            return features
        mean = tf.cast(self.moments.mean, tf.float32)
        scale = tf.cast(tf.math.rsqrt(self.moments.variance + EPSILON), tf.float32)
        return tf.clip_by_value((features - mean) * scale, -self._clip, self._clip)

    @property
    def unseen(self) -> bool:
        """Whether it is in use, but has no statistics yet."""
        return self._enabled and float(self.moments.count) == 0.0

    def update(self, features: tf.Tensor) -> None:
        """Takes `float32[B, F]` into the statistics."""
        if self._enabled:
            self.moments.update(features)


class ValueNormalizer(tf.Module):
    """Lets the value function learn targets of mean 0 and deviation 1.

    When the statistics change, the last layer is changed against them, so that no value does (PopArt: van Hasselt et
    al., 2016, arXiv 1602.07714, formula 5).
    """

    def __init__(self, *, enabled: bool):
        super().__init__(name="value_normalizer")
        self._enabled = enabled
        self.moments = RunningMoments((), name="moments")

    def update(self, targets: tf.Tensor, rescale: Callable[[tf.Tensor, tf.Tensor], None]) -> None:
        """Takes targets of any shape into the statistics.

        Args:
            targets: Value targets.
            rescale: Makes the value function give `scale * value + shift` where it gave `value`.
        """
        mean, deviation = self._mean, self._deviation
        self.moments.update(tf.reshape(targets, [-1]))
        rescale(deviation / self._deviation, (mean - self._mean) / self._deviation)

    def normalize(self, targets: tf.Tensor) -> tf.Tensor:
        """Returns what the value function is to learn."""
        return (targets - self._mean) / self._deviation if self._enabled else targets

    def denormalize(self, values: tf.Tensor) -> tf.Tensor:
        """Returns what the value function has learnt, in the units of the targets."""
        return values * self._deviation + self._mean if self._enabled else values

    @property
    def _mean(self) -> tf.Tensor:
        return tf.cast(self.moments.mean, tf.float32)

    @property
    def _deviation(self) -> tf.Tensor:
        return tf.cast(tf.sqrt(self.moments.variance + EPSILON), tf.float32)


class RewardNormalizer(tf.Module):
    """Divides rewards by the deviation of the discounted return, clipped; it does not shift them.

    The return runs forward, `g_t = gamma * g_{t-1} + r_t`, as in Gymnasium's NormalizeReward, and
    begins anew with each episode.
    """

    def __init__(self, num_envs: int, *, gamma: float, clip: float, enabled: bool):
        super().__init__(name="reward_normalizer")
        self._enabled = enabled
        self._gamma = gamma
        self._clip = clip
        self.moments = RunningMoments((), name="moments")
        self.running_return = tf.Variable(tf.zeros([num_envs], tf.float32), trainable=False, name="running_return")

    @property
    def unseen(self) -> bool:
        """Whether it is in use, but has no statistics yet."""
        return self._enabled and float(self.moments.count) == 0.0

    def begin(self) -> None:
        """Forgets the running returns, as all envs begin a new episode."""
        self.running_return.assign(tf.zeros_like(self.running_return))

    def __call__(self, rewards: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        """Takes `float32[T, N]` rewards into the statistics and returns them normalised.

        Args:
            rewards: Of each step.
            done: Whether that step ended an episode, terminated or truncated: bool[T, N].
        """
        if not self._enabled:
            return rewards
        returns, last = discounted_sums(rewards, done, self.running_return, self._gamma)
        self.running_return.assign(last)
        self.moments.update(tf.reshape(returns, [-1]))
        scale = tf.cast(tf.math.rsqrt(self.moments.variance + EPSILON), tf.float32)
        return tf.clip_by_value(rewards * scale, -self._clip, self._clip)

    @property
    def deviation(self) -> tf.Tensor:
        """What rewards are divided by, float32; 1 without normalisation."""
        return tf.cast(tf.sqrt(self.moments.variance + EPSILON), tf.float32)


def discounted_sums(
    rewards: tf.Tensor, done: tf.Tensor, initial: tf.Tensor, gamma: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns `g_t = gamma * g_{t-1} + r_t: float32[T, N]`, reset after each done, and the g to go on with."""

    def step(carry: tuple[tf.Tensor, tf.Tensor], now: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        reward, ends = now
        total = gamma * carry[0] + reward
        return tf.where(ends, 0.0, total), total

    carried, totals = tf.scan(
        step, (rewards, done), initializer=(tf.convert_to_tensor(initial), tf.zeros_like(initial))
    )
    return totals, carried[-1]


def num_features(shape: Sequence[int]) -> int:
    """Returns how many features a flattened observation has."""
    return int(np.prod(shape, dtype=np.int64))
