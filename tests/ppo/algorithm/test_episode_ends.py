"""Tests that learned values match known values, which requires distinguishing termination from truncation."""

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import vecenv
from ppo import Config
from ppo.algorithm import batch, losses
from ppo.algorithm.batch import shuffled
from ppo.algorithm.rollout import LocalCollector
from ppo.algorithm.update import Learner
from ppo.model.agent import Agent
from vecenv.ingraph import slots_for

GAMMA, PLACES = 0.8, 8
CONFIG = Config(
    num_envs=16,
    num_steps=32,
    epochs=4,
    minibatch_size=64,
    learning_rate=1e-2,
    gamma=GAMMA,
    normalize_rewards=False,
    value_layers=(32,),
    policy_layers=(4,),
)


class Ring(gym.Env):
    """Walks around a ring, whatever the action; moving from the last place to the first gives a reward of 1.

    Either this move terminates the episode, or the walk never terminates and is truncated after three steps.
    Episodes begin at a random place.
    """

    observation_space = gym.spaces.Discrete(PLACES)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, ends):
        self._ends = ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._steps = int(self.np_random.integers(PLACES)), 0
        return self._place, {}

    def step(self, action):
        passed = self._place == PLACES - 1
        self._place, self._steps = (self._place + 1) % PLACES, self._steps + 1
        return self._place, float(passed), passed and self._ends, self._steps == 3 and not self._ends, {}


def true_values(ends):
    to_go = GAMMA ** np.arange(PLACES - 1, -1, -1.0)  # V(k) = gamma^(steps before the reward)
    return to_go if ends else to_go / (1 - GAMMA**PLACES)  # the reward comes once, or once per round forever


def learned_values(ends):
    config = CONFIG
    vector = vecenv.SyncVectorEnv(
        [lambda: Ring(ends)] * config.num_envs, autoreset_mode="SameStep", num_slots=slots_for(config.num_steps)
    )
    spaces = (vector.single_observation_space, vector.single_action_space)
    agent, collector = Agent(config, *spaces), LocalCollector(config, vector, {"": spaces})
    collector.use([agent])
    learner = Learner(config, agent)
    collector.begin(0)
    for update in range(60):
        (collected,) = collector.collect(update, 0).collected
        rate = tf.constant(config.learning_rate * (1 - update / 60), tf.float32)
        learner.update_in_graph(collected, rate, tf.constant(GAMMA), tf.constant(shuffled(config, update)))
    return agent.step(tf.range(PLACES), tf.zeros([PLACES, agent.state_size])).values.numpy()


@pytest.mark.parametrize("ends", [True, False], ids=["terminated", "truncated"])
def test_learned_values_are_the_true_values(ends):
    np.testing.assert_allclose(learned_values(ends), true_values(ends), rtol=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False], ids=["terminated", "truncated"])
def test_values_are_wrong_if_termination_and_truncation_are_swapped(ends, monkeypatch):
    """Shows that `test_learned_values_are_the_true_values` can fail: swapped flags cause errors above 30%."""
    right = losses.gae

    def wrong(*, terminated, truncated, **others):
        return right(terminated=truncated, truncated=terminated, **others)

    monkeypatch.setattr(losses, "gae", wrong)
    assert (np.abs(learned_values(ends) / true_values(ends) - 1) > 0.3).any()


@pytest.mark.slow
def test_values_are_wrong_if_the_next_episode_replaces_the_final_observation(monkeypatch):
    def wrong(config, agent, rollout, values, memory):
        return values[1:]

    monkeypatch.setattr(batch, "next_values", wrong)
    assert (np.abs(learned_values(ends=False) / true_values(ends=False) - 1) > 0.3).any()
