"""Tests of ppo/model/normalize.py."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo.model.normalize import (
    PIXELS_PER_UPDATE,
    ImageNormalizer,
    ObservationNormalizer,
    RunningMoments,
    statistics_of,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 2**16))
def test_merged_batches_have_the_moments_of_all_samples(sizes, seed):
    rng = np.random.default_rng(seed)
    batches = [rng.normal(1e3, 5.0, size=(size, 3)) for size in sizes]
    moments = RunningMoments((3,), name="moments")
    for batch in batches:
        moments.merge(statistics_of(tf.constant(batch)))
    everything = np.concatenate(batches)
    assert float(moments.count) == len(everything)
    np.testing.assert_allclose(moments.mean, everything.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, everything.var(axis=0), rtol=1e-6, atol=1e-9)


def test_samples_of_weight_0_do_not_count():
    samples = tf.constant([[1.0, 10.0], [1e9, -1e9], [3.0, 10.0]])
    number, mean, variance = statistics_of(samples, tf.constant([1.0, 0.0, 1.0]))
    assert float(number) == 2
    np.testing.assert_allclose(mean, [2.0, 10.0])
    np.testing.assert_allclose(variance, [1.0, 0.0])
    number, mean, variance = statistics_of(samples, tf.constant([0.0, 0.0, 1.0]))
    assert float(number) == 1
    np.testing.assert_allclose([mean, variance], [[3.0, 10.0], [0.0, 0.0]])
    moments = RunningMoments((2,), name="moments")
    for _ in range(2):
        moments.merge(statistics_of(samples, tf.zeros(3)))
        assert moments.is_empty and np.isfinite(moments.variance).all()


def test_the_deviation_and_its_reciprocal_worked_by_hand():
    moments = RunningMoments((2,), name="moments")
    moments.merge(statistics_of(tf.constant([[1.0, 7.0], [5.0, 7.0]])))
    np.testing.assert_allclose(moments.deviation, [2.0, 1e-4], rtol=1e-5)
    np.testing.assert_allclose(moments.scale, [0.5, 1e4], rtol=1e-5)


@pytest.mark.parametrize("kind", ["images", "small images"])
def test_statistics_with_weights_are_those_of_the_samples_that_count(kind):
    samples = np.random.default_rng(0).integers(0, 256, (10, 3, 2, 4)).astype(np.uint8)
    normalizer = ImageNormalizer((3, 2, 4)) if kind == "images" else ObservationNormalizer(4, clip=10.0)
    weights = np.array([1, 0, 0, 1, 1, 0, 1, 0, 0, 1], np.float32)
    found = normalizer.statistics(tf.constant(samples), tf.constant(weights))
    expected = normalizer.statistics(tf.constant(samples[weights > 0]))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == tf.float64 and one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_observations_are_normalized_and_clipped_and_only_update_changes_the_statistics():
    normalizer = ObservationNormalizer(1, clip=2.0)
    np.testing.assert_allclose(normalizer(tf.constant([[0.5]])), [[0.5]])  # no statistics yet: unchanged
    normalizer.moments.merge(normalizer.statistics(tf.constant([[1.0], [3.0]])))  # mean 2, deviation 1
    for _ in range(2):
        np.testing.assert_allclose(normalizer(tf.constant([[2.0], [3.0], [9.0]])), [[0.0], [1.0], [2.0]], rtol=1e-6)


def test_sampled_images_cover_all_envs_and_the_whole_rollout():
    normalizer, num_steps, num_envs = ImageNormalizer((64, 64, 2)), 127, 8
    counted = np.zeros([num_steps, num_envs])
    step, env = np.divmod(np.arange(num_steps * num_envs), num_envs)
    images = np.tile(np.stack([step, env], axis=-1).astype(np.uint8)[:, None, None], [1, 64, 64, 1])
    for _ in range(20):
        chosen = normalizer.chosen(len(images)).numpy()
        np.add.at(counted.reshape(-1), chosen, 1)
        normalizer.moments.merge(normalizer.statistics(tf.constant(images[chosen])))
    total = 20 * PIXELS_PER_UPDATE // (64 * 64 * 2)
    assert counted.sum() == normalizer.moments.count == total
    for axis in (0, 1):  # a chi-squared statistic is near its degrees of freedom if all are equally likely
        expected = total / counted.shape[1 - axis]
        assert (np.square(counted.sum(axis=axis) - expected) / expected).sum() < 3 * counted.shape[1 - axis]


def test_image_statistics_merge_updates_and_bound_the_scale():
    normalizer, rng = ImageNormalizer((3, 2, 1)), np.random.default_rng(0)
    images = rng.integers(0, 254, (1, 3, 2, 1), np.uint8)
    normalizer.moments.merge(normalizer.statistics(tf.constant(images)))
    normalizer.moments.merge(normalizer.statistics(tf.constant(images + np.uint8(2))))
    mean, scale = normalizer.parameters()
    np.testing.assert_allclose(mean, images[0] + 1.0, rtol=1e-5)
    np.testing.assert_allclose(normalizer.moments.mean, (images[0] + 1.0) / 255, rtol=1e-5)
    assert float(normalizer.moments.count) == 2
    assert float(scale) == pytest.approx(1 / 8)  # although the deviation is a single gray level


def test_all_pixels_are_divided_by_the_root_mean_square_of_their_deviations():
    normalizer = ImageNormalizer((1, 2, 1))
    images = np.array([[[[0], [100]]], [[[80], [160]]]], np.uint8)  # deviations 40 and 30
    normalizer.moments.merge(normalizer.statistics(tf.constant(images)))
    mean, scale = normalizer.parameters()
    np.testing.assert_allclose(mean, [[[40.0], [130.0]]], rtol=1e-5)
    assert float(scale) == pytest.approx(1 / np.sqrt((40**2 + 30**2) / 2))


@pytest.mark.parametrize(("pixels", "count"), [(2, 1), (6, 1), (18, 3), (600, 7)])
def test_at_least_one_image_and_at_most_all_are_sampled(monkeypatch, pixels, count):
    monkeypatch.setattr("ppo.model.normalize.PIXELS_PER_UPDATE", pixels)
    chosen = ImageNormalizer((3, 2, 1)).chosen(7).numpy()
    assert chosen.shape == (count,) and set(chosen) <= set(range(7))


def test_later_updates_sample_other_images_and_any_image_may_be_sampled():
    normalizer, found = ImageNormalizer((3, 2, 1)), []
    for count in range(0, 60, 2):
        normalizer.moments.count.assign(count)
        found.append(tuple(normalizer.chosen(2).numpy()))
    assert set(found) == {(0, 0), (0, 1), (1, 0), (1, 1)}
