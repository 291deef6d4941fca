"""Tests of ppo/algorithm/schedules.py."""

import dataclasses

import pytest
import tensorflow as tf

from ppo.algorithm.schedules import adapted_penalty, adapted_rate, guarded_rate, learning_rate_at
from ppo.config import Config


def test_the_learning_rate_falls_linearly_and_reaches_zero_after_the_last_update():
    config = Config(total_steps=4 * 2048, learning_rate=1.0)
    assert [learning_rate_at(config, update) for update in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    constant = dataclasses.replace(config, lr_schedule="constant")
    assert [learning_rate_at(constant, update) for update in range(5)] == [1.0] * 5


@pytest.mark.parametrize(
    ("targets", "penalty", "rate"),
    [(0.4, 2 / 1.5, 2.25e-3), (0.6, 2 / 1.5, 1.5e-3), (1.0, 2.0, 1.5e-3), (1.4, 3.0, 1.5e-3), (2.1, 3.0, 1e-3)],
)
def test_penalty_and_learning_rate_follow_the_kl(targets, penalty, rate):
    kl = tf.constant(targets * 0.01)
    assert float(adapted_penalty(tf.constant(2.0), kl, kl_target=0.01, initial=1.0)) == pytest.approx(penalty)
    assert float(adapted_rate(tf.constant(1.5e-3), kl, kl_target=0.01, initial=3e-4)) == pytest.approx(rate)


def test_the_adapted_learning_rate_stays_within_its_bounds():
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
def test_an_initial_value_beyond_the_usual_bounds_moves_in_the_right_direction(adapted, rises_with_kl, initial):
    value, bounds = tf.constant(initial), {"kl_target": 0.01, "initial": initial}
    small, large = (float(adapted(value, tf.constant(kl), **bounds)) for kl in (0.0, 1.0))
    if rises_with_kl:
        small, large = large, small
    assert small >= float(value) >= large
    # After it has moved, it can return to its initial value.
    away = value * 1.4 if initial == 1e-9 else value / 1.4
    kl = tf.constant(1.0 if (initial == 1e-9) != rises_with_kl else 0.0)
    assert float(adapted(away, kl, **bounds)) == pytest.approx(float(value))


def test_the_learning_rate_falls_while_the_kl_exceeds_its_limit_and_then_returns_to_its_initial_value():
    rate, found = tf.constant(3e-4), []
    for kl in (0.01, 0.06, 0.06, 0.03, 0.01, 0.02, 0.0):
        rate = guarded_rate(rate, tf.constant(kl), kl_limit=0.05, initial=3e-4)
        found.append(float(rate) / 3e-4)
    assert found == pytest.approx([1, 1 / 1.5, 1 / 2.25, 1 / 2.25, 1 / 1.5, 1, 1])
