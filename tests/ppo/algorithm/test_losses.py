"""Tests of ppo/algorithm/losses.py, mostly against numbers worked by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo.algorithm.losses import (
    approximate_kl,
    clipped_surrogate,
    decayed_sums,
    gae,
    kl_penalized_surrogate,
    log_ratio,
    mean,
    standardize,
    value_loss,
)


def compute(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    advantages, targets = gae(
        rewards=tf.constant(rewards, tf.float32),
        values=tf.constant(values, tf.float32),
        next_values=tf.constant(next_values, tf.float32),
        terminated=tf.constant(terminated),
        truncated=tf.constant(truncated),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    return advantages.numpy(), targets.numpy()


def test_three_steps_worked_by_hand():
    # gamma = 0.5, lambda = 0.5, one env, rewards 1 2 4, values 1 1 1, value after the last step 2.
    # deltas: 1 + 0.5*1 - 1 = 0.5;  2 + 0.5*1 - 1 = 1.5;  4 + 0.5*2 - 1 = 4
    # A3 = 4;  A2 = 1.5 + 0.25*4 = 2.5;  A1 = 0.5 + 0.25*2.5 = 1.125;  targets = A + value
    advantages, targets = compute([[1], [2], [4]], [[1]] * 3, [[1], [1], [2]], [[False]] * 3, [[False]] * 3, 0.5, 0.5)
    np.testing.assert_allclose(advantages[:, 0], [1.125, 2.5, 4.0])
    np.testing.assert_allclose(targets[:, 0], [2.125, 3.5, 5.0])


def test_a_termination_bootstraps_from_zero_and_a_truncation_from_the_final_states_value():
    # The same steps, but the episode ends at the second step, in a state of value 3.
    # terminated: delta2 = 2 - 1 = 1,               A2 = 1,    A1 = 0.5 + 0.25*1    = 0.75
    # truncated:  delta2 = 2 + 0.5*3 - 1 = 2.5,     A2 = 2.5,  A1 = 0.5 + 0.25*2.5  = 1.125
    ends = [[False], [True], [False]]
    never = [[False]] * 3
    next_values = [[1], [3], [2]]
    terminated, _ = compute([[1], [2], [4]], [[1]] * 3, next_values, ends, never, 0.5, 0.5)
    truncated, _ = compute([[1], [2], [4]], [[1]] * 3, next_values, never, ends, 0.5, 0.5)
    np.testing.assert_allclose(terminated[:, 0], [0.75, 1.0, 4.0])
    np.testing.assert_allclose(truncated[:, 0], [1.125, 2.5, 4.0])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(0, 2**16))
def test_decayed_sums_equal_a_slow_loop(steps, seed):
    rng = np.random.default_rng(seed)
    terms = rng.normal(size=(steps, 3)).astype(np.float32)
    decays = (rng.random((steps, 3)) * (rng.random((steps, 3)) < 0.8)).astype(np.float32)
    expected, total = [], np.zeros(3)
    for term, decay in zip(terms, decays, strict=True):
        total = term + decay * total
        expected.append(total)
    np.testing.assert_allclose(decayed_sums(tf.constant(terms), tf.constant(decays)), expected, rtol=1e-4, atol=1e-5)


def test_a_constant_reward_of_one_has_value_one_over_one_minus_gamma():
    gamma = 0.9
    true_value = 1 / (1 - gamma)
    advantages, targets = compute(
        np.ones((20, 2)), np.full((20, 2), true_value), np.full((20, 2), true_value),
        np.zeros((20, 2), bool), np.zeros((20, 2), bool), gamma, 0.95,
    )  # fmt: skip
    np.testing.assert_allclose(advantages, 0, atol=1e-5)
    np.testing.assert_allclose(targets, true_value, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 2**16), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_a_slow_loop(num_steps, num_envs, seed, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, num_steps, num_envs)).astype(np.float32)
    terminated, truncated = rng.random((2, num_steps, num_envs)) < 0.2
    expected = np.zeros_like(rewards)
    for i in range(num_envs):
        later = 0.0
        for t in reversed(range(num_steps)):
            bootstrap = 0.0 if terminated[t, i] else gamma * next_values[t, i]
            if terminated[t, i] or truncated[t, i]:
                later = 0.0
            later = rewards[t, i] + bootstrap - values[t, i] + gamma * gae_lambda * later
            expected[t, i] = later
    advantages, targets = compute(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)
    assert advantages == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert targets == pytest.approx(expected + values, rel=1e-4, abs=1e-4)


def test_the_clipped_surrogate_worked_by_hand():
    # ratios 2, 0.5, 1.1 with advantages 1, -1, 3 and clip 0.2:
    # min(2, 1.2) = 1.2;  min(-0.5, -0.8) = -0.8;  min(3.3, 3.3) = 3.3;  mean = 3.7 / 3
    ratio, advantages = tf.constant([2.0, 0.5, 1.1]), tf.constant([1.0, -1.0, 3.0])
    loss = clipped_surrogate(ratio=ratio, advantages=advantages, clip_range=0.2)
    assert float(loss) == pytest.approx(-3.7 / 3)


def test_a_ratio_beyond_the_clip_has_no_gradient_that_would_move_it_further():
    log_ratios = tf.Variable([math.log(2.0), math.log(0.5), math.log(2.0), 0.0])
    with tf.GradientTape() as tape:
        loss = clipped_surrogate(
            ratio=tf.exp(log_ratios),
            advantages=tf.constant([1.0, -1.0, -1.0, 1.0]),
            clip_range=0.2,
        )
    # d loss / d log ratio = -ratio * A / 4 where not clipped
    np.testing.assert_allclose(tape.gradient(loss, log_ratios), [0.0, 0.0, 2.0 / 4, -1.0 / 4])


@pytest.mark.parametrize("far", [30.0, 100.0, 1e6])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_losses_and_gradients_are_finite_however_far_a_probability_has_moved(far, advantage):
    advantages, old = tf.constant([advantage, 1.0]), tf.constant([-far, 0.0])
    log_probs = tf.Variable([0.0, 0.0])
    penalized = {"kl": tf.constant(0.0), "penalty": tf.constant(1.0), "kl_target": 0.01}
    with tf.GradientTape(persistent=True) as tape:
        ratio = tf.exp(log_ratio(log_probs=log_probs, old_log_probs=old))
        assert ratio.numpy() == pytest.approx([math.exp(20), 1.0], rel=1e-5)
        clipped = clipped_surrogate(ratio=ratio, advantages=advantages, clip_range=0.2)
        losses = [clipped, kl_penalized_surrogate(ratio=ratio, advantages=advantages, **penalized)]
        losses.append(approximate_kl(log_probs=log_probs, old_log_probs=old))
    gradients = [tape.gradient(loss, log_probs) for loss in losses]
    assert np.isfinite(losses).all() and np.isfinite(gradients).all()
    assert np.isfinite([tf.linalg.global_norm([gradient]) for gradient in gradients]).all()
    # Gradient descent makes a bad action less likely, and leaves a good one as it is.
    assert (gradients[0][0] > 1e6) if advantage < 0 else (gradients[0][0] == 0)


def test_the_value_loss_is_half_the_mean_square():
    assert float(value_loss(values=tf.constant([1.0, 4.0]), targets=tf.constant([3.0, 3.0]))) == (4 + 1) / 4


def test_the_kl_estimate_is_zero_for_equal_policies_and_close_to_the_kl_for_similar_policies():
    assert float(approximate_kl(log_probs=tf.zeros(3), old_log_probs=tf.zeros(3))) == 0.0
    # Samples of N(0, 1) under N(0.1, 1): KL = 0.1^2 / 2 = 0.005
    x = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    kl = approximate_kl(log_probs=tf.constant(-((x - 0.1) ** 2) / 2), old_log_probs=tf.constant(-(x**2) / 2))
    assert float(kl) == pytest.approx(0.005, rel=0.02)


def test_standardize_worked_by_hand():
    np.testing.assert_allclose(standardize(tf.constant([1.0, 5.0])), [-1.0, 1.0], rtol=1e-6)


def test_the_kl_penalty_and_its_cutoff_worked_by_hand():
    # ratios 2 and 0.5 with advantages 1 and -1: surrogate -(2 - 0.5) / 2 = -0.75
    settled = {
        "ratio": tf.constant([2.0, 0.5]),
        "advantages": tf.constant([1.0, -1.0]),
        "penalty": tf.constant(3.0),
        "kl_target": 0.01,
    }
    assert float(kl_penalized_surrogate(kl=tf.constant(0.02), **settled)) == pytest.approx(-0.75 + 0.06)
    # 0.01 beyond twice the target: 1000 * 0.01^2 = 0.1
    assert float(kl_penalized_surrogate(kl=tf.constant(0.03), **settled)) == pytest.approx(-0.75 + 0.09 + 0.1)


def test_values_with_weight_0_count_neither_in_losses_nor_in_standardized_advantages():
    weights = tf.constant([1.0, 0.0, 1.0])
    x = tf.constant([1.0, 1e6, 3.0])
    assert float(mean(x, weights)) == 2.0
    assert float(mean(x, tf.constant([0.0, 0.0, 1.0]))) == 3.0
    assert float(mean(x, tf.zeros(3))) == 0.0
    np.testing.assert_allclose(tf.gather(standardize(2 * x, weights), [0, 2]), [-1.0, 1.0], rtol=1e-6)
    assert float(value_loss(values=x, targets=tf.constant([3.0, 0.0, 3.0]), weights=weights)) == (4 + 0) / 4
    ratio, advantages = tf.constant([2.0, 7.0, 1.1]), tf.constant([1.0, 7.0, 3.0])
    loss = clipped_surrogate(ratio=ratio, advantages=advantages, clip_range=0.2, weights=weights)
    assert float(loss) == pytest.approx(-(1.2 + 3.3) / 2)
    log_probs, old = tf.constant([0.5, 9.0, 0.0]), tf.zeros(3)
    kl = approximate_kl(log_probs=log_probs, old_log_probs=old, weights=weights)
    assert float(kl) == pytest.approx((math.exp(0.5) - 1 - 0.5) / 2)
    settled = {"kl": tf.constant(0.0), "penalty": tf.constant(0.0), "kl_target": 1.0}
    settled |= {"weights": weights}
    loss = kl_penalized_surrogate(ratio=ratio, advantages=advantages, **settled)
    assert float(loss) == pytest.approx(-(2.0 + 3.3) / 2)
