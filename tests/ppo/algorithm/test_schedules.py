"""Tests of ppo/algorithm/schedules.py."""

import dataclasses

import pytest
import tensorflow as tf

from ppo import Config
from ppo.algorithm.schedules import (
    adapted_base_rate,
    adapted_penalty,
    effective_rate,
    gamma_at,
    learning_rate_at,
)


def adapted_rate(rate, kl, *, kl_target, initial):
    config = Config(lr_schedule="kl_adaptive", kl_target=kl_target, learning_rate=initial)
    return adapted_base_rate(config, rate, kl)


def guarded_rate(rate, kl, *, kl_limit, initial):
    return adapted_base_rate(Config(kl_limit=kl_limit, learning_rate=initial), rate, kl)


def test_the_learning_rate_falls_linearly_and_reaches_zero_after_the_last_update():
    config = Config(total_steps=4 * 2048, learning_rate=1.0)
    assert [learning_rate_at(config, update) for update in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = dataclasses.replace(config, lr_schedule="constant")
    assert [learning_rate_at(constant, update) for update in range(5)] == [1.0] * 5


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.99, 0.99125, 0.9925, 0.99375, 0.995, 0.995]),
        ({"gamma": 0.9}, [0.9] * 6),  # a factor that was chosen stays as it is
        ({"gamma": 0.0, "final_gamma": 1.0}, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"final_gamma": 0.99}, [0.99] * 6),
    ],
)
def test_the_discount_factor_changes_linearly_from_the_first_update_to_the_end(settings, expected):
    config = Config(total_steps=4 * 2048, **settings)
    assert [gamma_at(config, update) for update in range(6)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("targets", "penalty", "rate"),
    [(0.4, 2 / 1.5, 2.25e-3), (0.6, 2 / 1.5, 1.5e-3), (1.0, 2.0, 1.5e-3), (1.4, 3.0, 1.5e-3), (2.1, 3.0, 1e-3)],
)
def test_penalty_and_learning_rate_follow_the_kl(targets, penalty, rate):
    kl = tf.constant(targets * 0.01)
    assert float(adapted_penalty(tf.constant(2.0), kl, kl_target=0.01)) == pytest.approx(penalty)
    assert float(adapted_rate(tf.constant(1.5e-3), kl, kl_target=0.01, initial=3e-4)) == pytest.approx(rate)


def test_the_adapted_penalty_and_learning_rate_stay_within_their_bounds():
    for penalty, kl, bound in ((9e5, 1.0, 1e6), (1.2e-6, 0.0, 1e-6)):
        assert float(adapted_penalty(tf.constant(penalty), tf.constant(kl), kl_target=0.01)) == pytest.approx(bound)
    for initial, bound in ((3e-4, 1e-6), (1e-9, 1e-9)):
        rate = guarded_rate(tf.constant(bound * 1.2), tf.constant(1.0), kl_limit=0.05, initial=initial)
        assert float(rate) == pytest.approx(bound)
    bounds = {"kl_target": 0.01, "initial": 3e-4}
    assert float(adapted_rate(tf.constant(9e-3), tf.constant(0.0), **bounds)) == pytest.approx(1e-2)
    assert float(adapted_rate(tf.constant(1.2e-6), tf.constant(1.0), **bounds)) == pytest.approx(1e-6)


@pytest.mark.parametrize("initial", [1e-9, 0.05])
def test_an_initial_learning_rate_beyond_the_usual_bounds_moves_in_the_right_direction(initial):
    rate, bounds = tf.constant(initial), {"kl_target": 0.01, "initial": initial}
    small, large = (float(adapted_rate(rate, tf.constant(kl), **bounds)) for kl in (0.0, 1.0))
    assert small >= float(rate) >= large
    # After it has moved, it can return to its initial value.
    away, kl = (rate * 1.4, tf.constant(1.0)) if initial == 1e-9 else (rate / 1.4, tf.constant(0.0))
    assert float(adapted_rate(away, kl, **bounds)) == pytest.approx(float(rate))


def test_the_learning_rate_falls_while_the_kl_exceeds_its_limit_and_then_returns_to_its_initial_value():
    rate, found = tf.constant(3e-4), []
    for kl in (0.01, 0.06, 0.06, 0.03, 0.01, 0.02, 0.0):
        rate = guarded_rate(rate, tf.constant(kl), kl_limit=0.05, initial=3e-4)
        found.append(float(rate) / 3e-4)
    assert found == pytest.approx([1, 1 / 1.5, 1 / 2.25, 1 / 2.25, 1 / 1.5, 1, 1])


@pytest.mark.parametrize(
    ("settings", "rate", "following"),
    [
        ({"kl_limit": None}, 1e-4, 2e-4),
        ({"kl_limit": 0.05}, 1e-4 / 1.5, 2e-4 / 1.5),
        ({"lr_schedule": "kl_adaptive", "kl_target": 0.05}, 2e-4, 2e-4 / 1.5),
    ],
)
def test_the_kl_adapts_a_base_rate_that_the_schedule_scales_if_there_is_one(settings, rate, following):
    config, base = Config(learning_rate=3e-4, **settings), tf.constant(2e-4)
    assert float(effective_rate(config, scheduled=tf.constant(1e-4), base=base)) == pytest.approx(rate)
    assert float(adapted_base_rate(config, base, tf.constant(1.0))) == pytest.approx(following)
