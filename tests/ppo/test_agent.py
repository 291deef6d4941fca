"""Tests of ppo/model/agent.py."""

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from ppo.config import Config
from ppo.model.agent import MAX_LOG_STD, Agent


@pytest.mark.parametrize(("offset", "bound"), [(50.0, MAX_LOG_STD), (-50.0, -1.5)])
@pytest.mark.parametrize("of_state", [False, True])
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
        return log_std, tape.gradient(loss, variable)[-1]

    inward, outward = (log_std_and_gradient(tf.constant(s * np.sign(offset), tf.float32)) for s in (1, -1))
    np.testing.assert_array_equal(inward[0], [bound] * 4)
    assert float(inward[1]) == np.sign(offset) and float(outward[1]) == 0.0
