"""Tests of ppo/objective.py: numbers worked by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf

from ppo.objective import approximate_kl, clipped_surrogate, standardize, value_loss


def test_the_clipped_surrogate_by_hand():
    # ratios 2, 0.5, 1.1 with advantages 1, -1, 3 and clip 0.2:
    # min(2, 1.2) = 1.2;  min(-0.5, -0.8) = -0.8;  min(3.3, 3.3) = 3.3;  mean = 3.7 / 3
    log_probs = tf.math.log(tf.constant([2.0, 0.5, 1.1]))
    loss = clipped_surrogate(
        log_probs=log_probs, old_log_probs=tf.zeros(3), advantages=tf.constant([1.0, -1.0, 3.0]), clip_range=0.2
    )
    assert float(loss) == pytest.approx(-3.7 / 3)


def test_a_ratio_beyond_the_clip_has_no_gradient_in_the_direction_that_would_raise_it():
    log_ratio = tf.Variable([math.log(2.0), math.log(0.5), math.log(2.0), 0.0])
    with tf.GradientTape() as tape:
        loss = clipped_surrogate(
            log_probs=log_ratio,
            old_log_probs=tf.zeros(4),
            advantages=tf.constant([1.0, -1.0, -1.0, 1.0]),
            clip_range=0.2,
        )
    # d loss / d log ratio = -ratio * A / 4 where not clipped
    np.testing.assert_allclose(tape.gradient(loss, log_ratio), [0.0, 0.0, 2.0 / 4, -1.0 / 4])


def test_the_value_loss_is_half_the_mean_square():
    assert float(value_loss(values=tf.constant([1.0, 4.0]), targets=tf.constant([3.0, 3.0]))) == (4 + 1) / 4


def test_the_kl_estimate_is_zero_for_equal_policies_and_near_the_true_one_for_close_ones():
    assert float(approximate_kl(log_probs=tf.zeros(3), old_log_probs=tf.zeros(3))) == 0.0
    # Samples of N(0, 1) under N(0.1, 1): KL = 0.1^2 / 2 = 0.005
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    kl = approximate_kl(log_probs=tf.constant(-((x - 0.1) ** 2) / 2), old_log_probs=tf.constant(-(x**2) / 2))
    assert float(kl) == pytest.approx(0.005, rel=0.02)


def test_standardize_by_hand():
    np.testing.assert_allclose(standardize(tf.constant([1.0, 3.0])), [-1.0, 1.0], rtol=1e-6)
