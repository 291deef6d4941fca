"""Running means and variances, and the normalization of observations."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

EPSILON = 1e-8  # added to variances to avoid division by zero for constant features
GRAY_LEVEL = 1.0 / 255.0
LEAST_DEVIATION = 8 * GRAY_LEVEL  # keeps inputs within +-32 when a previously static screen changes
PIXELS_PER_UPDATE = 2**22  # 16 MiB of float32


class Statistics(NamedTuple):
    """Number, mean and variance of the samples of a batch, float64 tensors; the number is a scalar."""

    number: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor


def statistics_of(batch: tf.Tensor, weights: tf.Tensor | None = None) -> Statistics:
    """Returns the statistics over the first axis of `batch: [B, ...]`.

    The weights are 0 for samples that do not count and 1 for all others, `float32[B]`; None if all count.
    """
    batch = tf.cast(batch, tf.float64)
    if weights is not None:
        weights = tf.cast(tf.reshape(weights, [-1, *[1] * (batch.shape.rank - 1)]), tf.float64)
        number = tf.reduce_sum(weights)
        least = tf.maximum(number, 1.0)
        mean = tf.reduce_sum(batch * weights, axis=0) / least
        return Statistics(number, mean, tf.reduce_sum(tf.square(batch - mean) * weights, axis=0) / least)
    mean = tf.reduce_mean(batch, axis=0)
    number = tf.cast(tf.shape(batch)[0], tf.float64)
    return Statistics(number, mean, tf.reduce_mean(tf.square(batch - mean), axis=0))


class RunningMoments(tf.Module):
    """Count, mean and variance of all samples so far, in float64, merged batch by batch."""

    def __init__(self, shape: tuple[int, ...], name: str):
        super().__init__(name=name)
        self.count = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="count")
        self.mean = tf.Variable(tf.zeros(shape, tf.float64), trainable=False, name="mean")
        self.variance = tf.Variable(tf.ones(shape, tf.float64), trainable=False, name="variance")

    def merge(self, batch: Statistics) -> None:
        """Adds the samples with these statistics (Chan, Golub, LeVeque, 1979, formula 2.1)."""
        batch_count, batch_mean, batch_variance = batch
        count = tf.maximum(self.count + batch_count, 1.0)  # both may be 0 if no sample counts
        delta = batch_mean - self.mean
        squares = (
            self.variance * self.count
            + batch_variance * batch_count
            + tf.square(delta) * self.count * batch_count / count
        )
        self.mean.assign_add(delta * batch_count / count)
        self.variance.assign(squares / count)
        self.count.assign_add(batch_count)

    @property
    def is_empty(self) -> bool:
        """Whether there are no samples yet."""
        return float(self.count) == 0.0

    @property
    def deviation(self) -> tf.Tensor:
        """Standard deviation, `float32[*shape]`."""
        return tf.cast(tf.sqrt(self.variance + EPSILON), tf.float32)

    @property
    def scale(self) -> tf.Tensor:
        """Reciprocal of the standard deviation, `float32[*shape]`."""
        return tf.cast(tf.math.rsqrt(self.variance + EPSILON), tf.float32)


class ObservationNormalizer(tf.Module):
    """Shifts and scales each feature to mean 0 and standard deviation 1, and clips it.

    Features are shifted in their own dtype. In float64, small differences between large numbers survive.

    Only merging into `moments` changes the statistics, so a rollout and the update that trains on it normalize in the
    same way.
    """

    def __init__(self, num_features: int, *, clip: float):
        super().__init__(name="observation_normalizer")
        self._clip = clip
        self.moments = RunningMoments((num_features,), name="moments")

    def __call__(self, features: tf.Tensor) -> tf.Tensor:
        """Returns normalized features `float32[..., F]` for float32 or float64 features `[..., F]`."""
        centered = tf.cast(features - tf.cast(self.moments.mean, features.dtype), tf.float32)
        return tf.clip_by_value(centered * self.moments.scale, -self._clip, self._clip)

    def statistics(self, features: tf.Tensor, weights: tf.Tensor | None = None) -> Statistics:
        """Returns the statistics of features `[B, ..., F]`, which `moments` can merge. See `statistics_of`."""
        if weights is not None:
            weights = tf.repeat(weights, math.prod(features.shape[1:-1]))
        return statistics_of(tf.reshape(features, [-1, features.shape[-1]]), weights)


class ImageNormalizer(tf.Module):
    """Subtracts each pixel's mean and divides all pixels by one standard deviation.

    Subtracting the mean removes a static background. The deviation is the root mean square of the pixels' deviations
    over time. Separate deviations would amplify pixels that rarely change.
    """

    def __init__(self, shape: tuple[int, ...]):  # height, width, channels
        super().__init__(name="image_normalizer")
        self._number = max(1, PIXELS_PER_UPDATE // math.prod(shape))
        self.moments = RunningMoments(shape, name="moments")  # of pixels divided by 255

    def parameters(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `mean: float32[H, W, C]` and the scalar `scale`: an image becomes `(image - mean) * scale`."""
        deviation = tf.maximum(tf.sqrt(tf.reduce_mean(self.moments.variance)), LEAST_DEVIATION)
        return tf.cast(self.moments.mean / GRAY_LEVEL, tf.float32), tf.cast(GRAY_LEVEL / deviation, tf.float32)

    def chosen(self, count: tf.Tensor) -> tf.Tensor:
        """Returns the indices `int32[K]` of images sampled with replacement from `count` images.

        K is at most `count`, and `PIXELS_PER_UPDATE` limits it further.
        """
        # The count is part of every checkpoint, so a resumed run draws the same images.
        seed = tf.stack([tf.cast(self.moments.count, tf.int64), 0])
        return tf.random.stateless_uniform([tf.minimum(count, self._number)], seed, 0, count, tf.int32)

    def statistics(self, images: tf.Tensor, weights: tf.Tensor | None = None) -> Statistics:
        """Returns the statistics of images `uint8[B, H, W, C]`, which `moments` can merge. See `statistics_of`."""
        pixels = tf.cast(images, tf.float32) * GRAY_LEVEL
        if weights is not None:
            return statistics_of(pixels, weights)
        mean = tf.reduce_mean(pixels, axis=0)
        variance = tf.reduce_mean(tf.square(pixels - mean), axis=0)
        number = tf.cast(tf.shape(images)[0], tf.float64)
        return Statistics(number, tf.cast(mean, tf.float64), tf.cast(variance, tf.float64))
