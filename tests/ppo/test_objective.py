"""Tests of ppo/algorithm/objective.py, mostly against numbers worked by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf

from ppo.algorithm.objective import approximate_kl, clipped_surrogate, kl_penalized_surrogate, standardize, value_loss


def test_the_clipped_surrogate_worked_by_hand():
    # ratios 2, 0.5, 1.1 with advantages 1, -1, 3 and clip 0.2:
    # min(2, 1.2) = 1.2;  min(-0.5, -0.8) = -0.8;  min(3.3, 3.3) = 3.3;  mean = 3.7 / 3
    ratio, advantages = tf.constant([2.0, 0.5, 1.1]), tf.constant([1.0, -1.0, 3.0])
    loss = clipped_surrogate(ratio=ratio, advantages=advantages, clip_range=0.2)
    assert float(loss) == pytest.approx(-3.7 / 3)


def test_a_ratio_beyond_the_clip_has_no_gradient_that_would_move_it_further():
    log_ratio = tf.Variable([math.log(2.0), math.log(0.5), math.log(2.0), 0.0])
    with tf.GradientTape() as tape:
        loss = clipped_surrogate(
            ratio=tf.exp(log_ratio),
            advantages=tf.constant([1.0, -1.0, -1.0, 1.0]),
            clip_range=0.2,
        )
    # d loss / d log ratio = -ratio * A / 4 where not clipped
    np.testing.assert_allclose(tape.gradient(loss, log_ratio), [0.0, 0.0, 2.0 / 4, -1.0 / 4])


def test_the_value_loss_is_half_the_mean_square():
    assert float(value_loss(values=tf.constant([1.0, 4.0]), targets=tf.constant([3.0, 3.0]))) == (4 + 1) / 4


def test_the_kl_estimate_is_zero_for_equal_policies_and_close_to_the_kl_for_similar_policies():
    assert float(approximate_kl(log_probs=tf.zeros(3), old_log_probs=tf.zeros(3))) == 0.0
    # Samples of N(0, 1) under N(0.1, 1): KL = 0.1^2 / 2 = 0.005
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    kl = approximate_kl(log_probs=tf.constant(-((x - 0.1) ** 2) / 2), old_log_probs=tf.constant(-(x**2) / 2))
    assert float(kl) == pytest.approx(0.005, rel=0.02)


def test_standardize_worked_by_hand():
    np.testing.assert_allclose(standardize(tf.constant([1.0, 3.0])), [-1.0, 1.0], rtol=1e-6)


def test_the_kl_penalty_and_its_cutoff_worked_by_hand():
    # ratios 2 and 0.5 with advantages 1 and -1: surrogate -(2 - 0.5) / 2 = -0.75
    given = {
        "ratio": tf.constant([2.0, 0.5]),
        "advantages": tf.constant([1.0, -1.0]),
        "penalty": tf.constant(3.0),
        "kl_target": 0.01,
    }
    assert float(kl_penalized_surrogate(kl=tf.constant(0.02), **given)) == pytest.approx(-0.75 + 0.06)
    # 0.01 beyond twice the target: 1000 * 0.01^2 = 0.1
    assert float(kl_penalized_surrogate(kl=tf.constant(0.03), **given)) == pytest.approx(-0.75 + 0.09 + 0.1)
