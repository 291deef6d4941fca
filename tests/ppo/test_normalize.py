"""Tests of ppo/algorithm/normalize.py."""

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo.algorithm.normalize import ObservationNormalizer, RewardNormalizer, RunningMoments, discounted_sums


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 2**16))
def test_merged_batches_have_the_moments_of_all_samples(sizes, seed):
    rng = np.random.default_rng(seed)
    batches = [rng.normal(1e3, 5.0, size=(size, 3)) for size in sizes]
    moments = RunningMoments((3,), name="moments")
    for batch in batches:
        moments.update(tf.constant(batch))
    everything = np.concatenate(batches)
    assert float(moments.count) == len(everything)
    np.testing.assert_allclose(moments.mean, everything.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, everything.var(axis=0), rtol=1e-6, atol=1e-9)


def test_observations_are_normalized_and_clipped_and_only_update_changes_the_statistics():
    normalizer = ObservationNormalizer(1, clip=2.0)
    np.testing.assert_allclose(normalizer(tf.constant([[0.5]])), [[0.5]])  # no statistics yet: unchanged
    normalizer.update(tf.constant([[1.0], [3.0]]))  # mean 2, deviation 1
    for _ in range(2):
        np.testing.assert_allclose(normalizer(tf.constant([[2.0], [3.0], [9.0]])), [[0.0], [1.0], [2.0]], rtol=1e-6)


def test_discounted_sums_worked_by_hand_restart_after_each_episode():
    # gamma 0.5, carried 4: 1 + 2 = 3 (ends);  1;  1 + 0.5 = 1.5
    sums, last = discounted_sums(
        tf.ones([3, 1]), tf.constant([[True], [False], [False]]), tf.constant([4.0]), gamma=0.5
    )
    np.testing.assert_allclose(sums[:, 0], [3.0, 1.0, 1.5])
    np.testing.assert_allclose(last, [1.5])


def test_rewards_are_divided_by_the_standard_deviation_of_the_discounted_return():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(40, 3)).astype(np.float32)
    done = rng.random((40, 3)) < 0.1
    normalizer = RewardNormalizer(3, gamma=0.9, clip=1.0, enabled=True)
    scaled = np.concatenate(
        [normalizer(tf.constant(rewards[a:b]), tf.constant(done[a:b])) for a, b in ((0, 25), (25, 40))]
    )
    returns, running = np.zeros((40, 3)), np.zeros(3)
    for t in range(40):  # the discounted sum continues from one batch to the next
        running = 0.9 * running + rewards[t]
        returns[t] = running
        running = np.where(done[t], 0.0, running)
    for a, b, seen in ((0, 25, 25), (25, 40, 40)):
        expected = np.clip(rewards[a:b] / np.sqrt(returns[:seen].var() + 1e-8), -1, 1)
        np.testing.assert_allclose(scaled[a:b], expected, rtol=1e-5)
