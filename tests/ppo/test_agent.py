"""Tests of ppo/model/agent.py."""

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from ppo.config import Config
from ppo.model.agent import LOG_STD_RANGE, Agent


@pytest.mark.parametrize(("offset", "bound"), [(50.0, LOG_STD_RANGE[1]), (-50.0, LOG_STD_RANGE[0])])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_standard_deviation_beyond_its_bounds_is_clipped_but_can_move_back_within_them(offset, bound, compiled):
    agent = Agent(Config(state_dependent_std=True), gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (1,)))
    bias = agent.network._policy.biases[-1]
    bias.assign([0.0, offset])
    encoded = agent.network.encode(agent.observations.inputs(tf.zeros([4, 3])))

    @tf.function(jit_compile=compiled, autograph=False)
    def log_std_and_gradient(sign):
        with tf.GradientTape() as tape:
            log_std = agent.heads(agent.network.features(encoded), encoded)[0][:, 1]
            loss = sign * tf.reduce_mean(log_std)
        return log_std, tape.gradient(loss, bias)[1]

    inward, outward = (log_std_and_gradient(tf.constant(s * np.sign(offset), tf.float32)) for s in (1, -1))
    np.testing.assert_array_equal(inward[0], [bound] * 4)
    assert float(inward[1]) == np.sign(offset) and float(outward[1]) == 0.0
