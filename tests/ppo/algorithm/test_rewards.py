"""Tests of ppo/algorithm/rewards.py."""

import numpy as np
import tensorflow as tf

from ppo.algorithm.rewards import RewardNormalizer, discounted_sums


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
    rewards[30, 1], done[30, 1] = 1e3, True  # 11 standard deviations, so it is clipped
    normalizer = RewardNormalizer(3, gamma=0.9, enabled=True)
    scaled = np.zeros_like(rewards)
    begins = tf.constant([False] * 3)
    for a, b in ((0, 25), (25, 40)):
        scaled[a:b] = normalizer(tf.constant(rewards[a:b]), begins, tf.constant(done[a:b]))
    returns, running = np.zeros((40, 3)), np.zeros(3)
    for t in range(40):  # the discounted sum continues from one batch to the next
        running = 0.9 * running + rewards[t]
        returns[t] = running
        running = np.where(done[t], 0.0, running)
    for a, b, seen in ((0, 25, 25), (25, 40, 40)):
        expected = np.clip(rewards[a:b] / np.sqrt(returns[:seen].var() + 1e-8), -10, 10)
        np.testing.assert_allclose(scaled[a:b], expected, rtol=1e-5)
