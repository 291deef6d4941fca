"""Tests of ppo/algorithm/advantage.py."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo.algorithm.advantage import gae


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
