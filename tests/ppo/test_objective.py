"""Tests of ppo/algorithm/objective.py: numbers worked by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf

from ppo.algorithm.objective import (
    adapted_penalty,
    adapted_rate,
    approximate_kl,
    clipped_surrogate,
    guarded_rate,
    kl_penalized_surrogate,
    standardize,
    value_loss,
)


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


def test_the_kl_penalty_and_its_cutoff_by_hand():
    # ratios 2 and 0.5 with advantages 1 and -1: surrogate -(2 - 0.5) / 2 = -0.75
    given = {
        "log_probs": tf.math.log(tf.constant([2.0, 0.5])),
        "old_log_probs": tf.zeros(2),
        "advantages": tf.constant([1.0, -1.0]),
        "penalty": tf.constant(3.0),
        "kl_target": 0.01,
        "cutoff_factor": 2.0,
        "cutoff_coef": 1000.0,
    }
    assert float(kl_penalized_surrogate(kl=tf.constant(0.02), **given)) == pytest.approx(-0.75 + 0.06)
    # 0.01 beyond twice the target: 1000 * 0.01^2 = 0.1
    assert float(kl_penalized_surrogate(kl=tf.constant(0.03), **given)) == pytest.approx(-0.75 + 0.09 + 0.1)


@pytest.mark.parametrize(
    ("targets", "penalty", "rate"),
    [(0.4, 2 / 1.5, 2.25e-3), (0.6, 2 / 1.5, 1.5e-3), (1.0, 2.0, 1.5e-3), (1.4, 3.0, 1.5e-3), (2.1, 3.0, 1e-3)],
)
def test_penalty_and_learning_rate_follow_the_kl(targets, penalty, rate):
    kl = tf.constant(targets * 0.01)
    assert float(adapted_penalty(tf.constant(2.0), kl, kl_target=0.01, initial=1.0)) == pytest.approx(penalty)
    assert float(adapted_rate(tf.constant(1.5e-3), kl, kl_target=0.01, initial=3e-4)) == pytest.approx(rate)


def test_the_adapted_learning_rate_keeps_within_its_bounds():
    bounds = {"kl_target": 0.01, "initial": 3e-4}
    assert float(adapted_rate(tf.constant(9e-3), tf.constant(0.0), **bounds)) == pytest.approx(1e-2)
    assert float(adapted_rate(tf.constant(1.2e-6), tf.constant(1.0), **bounds)) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("adapted", "rises_with_kl", "initial"),
    [
        (adapted_rate, False, 1e-9),
        (adapted_rate, False, 0.05),
        (adapted_penalty, True, 1e-9),
        (adapted_penalty, True, 1e9),
    ],
)
def test_an_initial_value_beyond_the_usual_bounds_moves_the_right_way(adapted, rises_with_kl, initial):
    value, bounds = tf.constant(initial), {"kl_target": 0.01, "initial": initial}
    small, large = (float(adapted(value, tf.constant(kl), **bounds)) for kl in (0.0, 1.0))
    if rises_with_kl:
        small, large = large, small
    assert small >= float(value) >= large
    # After it has moved, it can return to where it began.
    away = value * 1.4 if initial == 1e-9 else value / 1.4
    kl = tf.constant(1.0 if (initial == 1e-9) != rises_with_kl else 0.0)
    assert float(adapted(away, kl, **bounds)) == pytest.approx(float(value))


def test_the_learning_rate_falls_while_the_kl_is_above_its_limit_and_returns_to_the_initial_one():
    rate, found = tf.constant(3e-4), []
    for kl in (0.01, 0.06, 0.06, 0.03, 0.01, 0.02, 0.0):
        rate = guarded_rate(rate, tf.constant(kl), kl_limit=0.05, initial=3e-4)
        found.append(float(rate) / 3e-4)
    assert found == pytest.approx([1, 1 / 1.5, 1 / 2.25, 1 / 2.25, 1 / 1.5, 1, 1])


def test_a_clipped_value_error_is_the_larger_one():
    # value 5 may move to 2 from 1: errors 25 and 4 at target 0; at target 4: 1 and 4
    clip = {"values": tf.constant([5.0]), "old_values": tf.constant([1.0]), "clip_range": 1.0}
    assert float(value_loss(targets=tf.constant([0.0]), **clip)) == 12.5
    assert float(value_loss(targets=tf.constant([4.0]), **clip)) == 2.0
