"""Tests of ppo/model/agent.py."""

import logging

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from ppo import Config
from ppo.model.agent import Agent


@pytest.mark.parametrize("compiled", [False, True])
def test_a_standard_deviation_below_its_minimum_is_raised_but_can_move_back_above_it(compiled):
    agent = Agent(Config(min_log_std=-1.5), gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (1,)))
    agent.log_std.assign([-50.0])
    encoded = agent.network.encode(agent.observations.inputs(tf.zeros([4, 3])))

    @tf.function(jit_compile=compiled, autograph=False)
    def log_std_and_gradient(sign):
        with tf.GradientTape() as tape:
            log_std = agent.outputs(agent.network.features(encoded), encoded)[:, 1]
            loss = sign * tf.reduce_mean(log_std)
        return log_std, agent.inward([tape.gradient(loss, agent.log_std)], [agent.log_std])[0][-1]

    upward, downward = (log_std_and_gradient(tf.constant(sign)) for sign in (-1.0, 1.0))
    np.testing.assert_array_equal(upward[0], [-1.5] * 4)
    assert float(upward[1]) == -1.0 and float(downward[1]) == 0.0


def test_a_standard_deviation_has_no_maximum():
    agent = Agent(Config(), gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,)))
    agent.log_std.assign([3.0, 0.0])
    encoded = agent.network.encode(agent.observations.inputs(tf.zeros([1, 3])))
    with tf.GradientTape() as tape:
        log_std = agent.outputs(agent.network.features(encoded), encoded)[:, 2:]
    np.testing.assert_array_equal(log_std[0], [3.0, 0.0])
    np.testing.assert_array_equal(tape.gradient(log_std, agent.log_std), [1.0, 1.0])
    gradients = [tf.zeros(variable.shape) for variable in agent.learned[:-1]]
    for sign in (1.0, -1.0):
        gradient = tf.constant([sign, -sign])
        np.testing.assert_array_equal(agent.inward([*gradients, gradient], agent.learned)[-1], gradient)


def test_an_agent_describes_its_networks_in_one_line():
    boxes = {"eye": gym.spaces.Box(0, 255, (4, 40, 40), np.uint8), "grid": gym.spaces.Box(0, 1, (5, 2))}
    space = gym.spaces.Dict({**boxes, "speed": gym.spaces.Box(-1, 1, (3,)), "gear": gym.spaces.Discrete(4)})
    config = Config(recurrent="gru", recurrent_units=8, policy_layers=(16, 8), num_steps=8)
    agent = Agent(config, space, gym.spaces.Box(-1, 1, (2,)))
    count = sum(np.prod(variable.shape) for variable in agent.trainable_variables)
    assert agent.description == (
        "eye 40x40x4, gear one-hot 4, grid 5x2 flattened to 10, speed 3 -> nature CNN, gru 8, policy 16 8, value 64 64 "
        f"(tanh); {count:,} parameters"
    )


def test_the_first_actions_of_many_agents_do_not_warn_of_retracing(caplog):
    space = gym.spaces.Box(-1, 1, (2,))
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        for _ in range(6):
            agent = Agent(Config(policy_layers=(4,), value_layers=(4,)), space, space)
            agent.act(np.zeros((1, 2), np.float32), agent.initial_state(1))
    assert not caplog.records
