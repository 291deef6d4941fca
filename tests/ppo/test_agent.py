"""Tests of ppo/model/agent.py."""

import logging

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from ppo.config import Config
from ppo.model.agent import MAX_LOG_STD, Agent


@pytest.mark.parametrize(
    ("of_state", "offset", "bound"), [(True, 50.0, MAX_LOG_STD), (True, -50.0, -1.5), (False, -50.0, -1.5)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_standard_deviation_beyond_its_bounds_is_clipped_but_can_move_back_within_them(
    offset, bound, of_state, compiled
):
    config = Config(state_dependent_std=of_state, min_log_std=-1.5)
    agent = Agent(config, gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (1,)))
    variable = agent.network._policy.biases[-1] if of_state else agent.log_std
    variable.assign([0.0, offset] if of_state else [offset])
    encoded = agent.network.encode(agent.observations.inputs(tf.zeros([4, 3])))

    @tf.function(jit_compile=compiled, autograph=False)
    def log_std_and_gradient(sign):
        with tf.GradientTape() as tape:
            log_std = agent.heads(agent.network.features(encoded), encoded)[0][:, 1]
            loss = sign * tf.reduce_mean(log_std)
        gradient = tape.gradient(loss, variable)
        return log_std, (gradient if of_state else agent.inward([gradient])[0])[-1]

    inward, outward = (log_std_and_gradient(tf.constant(s * np.sign(offset), tf.float32)) for s in (1, -1))
    np.testing.assert_array_equal(inward[0], [bound] * 4)
    assert float(inward[1]) == np.sign(offset) and float(outward[1]) == 0.0


def test_a_standard_deviation_that_does_not_depend_on_the_state_has_no_maximum():
    agent = Agent(Config(), gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,)))
    agent.log_std.assign([MAX_LOG_STD + 1, 0.0])
    encoded = agent.network.encode(agent.observations.inputs(tf.zeros([1, 3])))
    with tf.GradientTape() as tape:
        log_std = agent.heads(agent.network.features(encoded), encoded)[0][:, 2:]
    np.testing.assert_array_equal(log_std[0], [MAX_LOG_STD + 1, 0.0])
    np.testing.assert_array_equal(tape.gradient(log_std, agent.log_std), [1.0, 1.0])
    gradients = [tf.zeros(variable.shape) for variable in agent.learned[:-1]]
    for sign in (1.0, -1.0):
        gradient = tf.constant([sign, -sign])
        np.testing.assert_array_equal(agent.inward([*gradients, gradient])[-1], gradient)


def test_the_first_actions_of_many_agents_do_not_warn_of_retracing(caplog):
    space = gym.spaces.Box(-1, 1, (2,))
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        for _ in range(6):
            agent = Agent(Config(policy_layers=(4,), value_layers=(4,)), space, space)
            agent.act(np.zeros((1, 2), np.float32), agent.initial_state(1))
    assert not caplog.records
