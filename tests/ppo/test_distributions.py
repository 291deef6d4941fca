"""Tests of ppo/distributions.py."""

import math

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import vecenv
from ppo import distributions

GAUSSIAN = distributions.for_space(gym.spaces.Box(-1, 1, (2,), np.float32))
CATEGORICAL = distributions.for_space(gym.spaces.Discrete(3, start=-1))


def test_gaussian_log_prob_and_entropy_by_hand():
    # mean (0, 1), std (1, 2), action (1, 3): z = (1, 1)
    # log p = -0.5 - 0.5 - log 1 - log 2 - log(2 pi);  entropy = log 2 + 2 * 0.5 * log(2 pi e)
    log_std = tf.constant([0.0, math.log(2.0)])
    log_prob = GAUSSIAN.log_prob(tf.constant([[0.0, 1.0]]), log_std, tf.constant([[1.0, 3.0]]))
    assert float(log_prob[0]) == pytest.approx(-1 - math.log(2) - math.log(2 * math.pi), rel=1e-6)
    entropy = GAUSSIAN.entropy(tf.zeros([1, 2]), log_std)
    assert float(entropy[0]) == pytest.approx(math.log(2) + math.log(2 * math.pi * math.e), rel=1e-6)


def test_gaussian_samples_have_the_mean_and_deviation_asked_for():
    noise = GAUSSIAN.noise([50_000], tf.constant([1, 2]))
    actions = GAUSSIAN.sample(tf.constant([1.0, -2.0]) + tf.zeros([50_000, 2]), tf.constant([0.0, 1.0]), noise).numpy()
    np.testing.assert_allclose(actions.mean(axis=0), [1.0, -2.0], atol=0.05)
    np.testing.assert_allclose(actions.std(axis=0), [1.0, math.e], rtol=0.02)


def test_categorical_log_prob_and_entropy_by_hand():
    # probabilities 1/2, 1/4, 1/4 for the actions -1, 0, 1
    logits = tf.math.log(tf.constant([[0.5, 0.25, 0.25]] * 2))
    log_prob = CATEGORICAL.log_prob(logits, None, tf.constant([-1, 1], tf.int64))
    np.testing.assert_allclose(log_prob, np.log([0.5, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(CATEGORICAL.entropy(logits, None), [1.5 * math.log(2)] * 2, rtol=1e-6)
    np.testing.assert_array_equal(CATEGORICAL.mode(logits), [-1, -1])


def test_categorical_samples_have_the_probabilities_asked_for():
    logits = tf.math.log(tf.constant([0.7, 0.2, 0.1])) + tf.zeros([50_000, 3])
    actions = CATEGORICAL.sample(logits, None, CATEGORICAL.noise([50_000], tf.constant([3, 4]))).numpy()
    assert actions.dtype == np.int64
    np.testing.assert_allclose([(actions == k).mean() for k in (-1, 0, 1)], [0.7, 0.2, 0.1], atol=0.01)


@pytest.mark.parametrize("distribution", [GAUSSIAN, CATEGORICAL])
def test_the_same_seed_gives_the_same_noise(distribution):
    one, same, other = (distribution.noise([4, 5], tf.constant([7, k])).numpy() for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert one.shape == (4, 5, distribution.num_outputs) and (one != other).any()


def test_actions_have_shape_and_dtype_of_the_space():
    space = gym.spaces.Box(-1, 1, (2, 3), np.float64)
    distribution = distributions.for_space(space)
    action = distribution.sample(tf.zeros([4, 6]), tf.zeros([6]), distribution.noise([4], tf.constant([0, 0])))
    assert action.shape == (4, 2, 3) and action.dtype == tf.float64


def test_a_space_without_a_policy_says_what_is_needed():
    with pytest.raises(vecenv.UnsupportedSpace, match="needs a Box of floats or a Discrete"):
        distributions.for_space(gym.spaces.MultiBinary(3))


def test_gaussian_kl_by_hand_and_by_sampling():
    # mean 0 -> 1, std 1 -> 2: log 2 + (1 + 1) / 8 - 1/2, in each of two dimensions
    old, new, log_std = tf.zeros([1, 2]), tf.ones([1, 2]), tf.constant([math.log(2.0)] * 2)
    kl = float(GAUSSIAN.kl(old, tf.zeros([2]), new, log_std)[0])
    assert kl == pytest.approx(2 * (math.log(2) + 0.25 - 0.5))
    actions = GAUSSIAN.sample(old, tf.zeros([2]), GAUSSIAN.noise([200_000], tf.constant([1, 2])))
    ratio = GAUSSIAN.log_prob(old + 0 * actions, tf.zeros([2]), actions) - GAUSSIAN.log_prob(
        new + 0 * actions, log_std, actions
    )
    assert float(tf.reduce_mean(ratio)) == pytest.approx(kl, rel=0.02)


def test_categorical_kl_by_hand():
    # from (1/2, 1/4, 1/4) to (1/4, 1/2, 1/4): log 2 / 2 - log 2 / 4
    old, new = tf.math.log(tf.constant([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]))[:, None]
    np.testing.assert_allclose(CATEGORICAL.kl(old, None, new, None), [math.log(2) / 4], rtol=1e-5)
