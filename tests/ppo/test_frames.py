"""Tests of ppo/model/frames.py: training with `frame_stack` equals training with Gymnasium's wrapper."""

import dataclasses
import functools
import json

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import ppo
import vecenv
from ppo.algorithm.rollout import Collector
from ppo.algorithm.update import Learner, shuffled
from ppo.model.agent import Agent
from ppo.model.frames import frames_of, gathered, rows_of_stacks, stacked_space
from ppo.results.evaluation import evaluate_run
from ppo.run.folder import Run
from ppo.run.metrics import TIMES
from tests.ppo.test_learner import CONFIG, IMAGES, NoiseImages, SmallImages
from vecenv.ingraph import InGraphVectorEnv, slots_for

GAME = functools.partial(gym.make, "Pendulum-v1", max_episode_steps=7)


def wrapped(make, size):
    return gym.wrappers.FrameStackObservation(make(), size)


def parts(config, make, *, by_wrapper):
    """Returns the graph envs, the agent, its learner and its collector."""
    size = config.frame_stack
    vector = vecenv.SyncVectorEnv(
        [functools.partial(wrapped, make, size) if by_wrapper else make] * config.num_envs,
        autoreset_mode="SameStep",
        num_slots=slots_for(config.num_steps, 3),
        clip_actions=True,
        float32_observations=True,
    )
    envs = InGraphVectorEnv(vector, num_steps=config.num_steps)
    config = dataclasses.replace(config, frame_stack=1 if by_wrapper else size)
    agent = Agent(config, stacked_space(vector.single_observation_space, config.frame_stack), vector.env_action_space)
    return envs, agent, Learner(config, agent, envs), Collector(agent, envs)


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"frame_stack": 3}, GAME),
        # Longer than an episode and than a rollout.
        pytest.param({"frame_stack": 12}, GAME, marks=pytest.mark.slow),
        ({"frame_stack": 2, "recurrent": "gru", "recurrent_units": 5, "minibatch_size": 20}, GAME),
        (IMAGES | {"frame_stack": 4}, NoiseImages),
        (IMAGES | {"frame_stack": 2, "recompute_advantages": True, "cnn": "small"}, SmallImages),
    ],
    ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()) if isinstance(case, dict) else None,
)
def test_an_update_equals_that_of_the_wrapper(settings, make):
    config = dataclasses.replace(CONFIG, **settings)
    both = [parts(config, make, by_wrapper=by_wrapper) for by_wrapper in (False, True)]
    for envs, _, _, collector in both:
        envs.reset(seed=3)
        collector.begin()
    for update in range(3):
        order, rollouts = tf.constant(shuffled(config, update)), []
        for envs, _, learner, collector in both:
            collected = collector.collect(tf.constant([0, update]))
            rollouts.append((envs.shaped(collected.rollout), collected, envs.last_rollout()))
            learner.update(collected, tf.constant(1e-3), tf.constant(0.2), order)
        (ours, collected, _), (_, _, theirs) = rollouts
        assert theirs.truncated.any()
        ended = tf.logical_or(ours.terminated, ours.truncated)
        rows = rows_of_stacks(ended, config.frame_stack)
        stacks = gathered(frames_of(collected.stacks, ours.observations), rows)
        for one, other in zip(tf.nest.flatten(stacks), tf.nest.flatten(theirs.observations), strict=True):
            # Later weights, and thus actions, may differ by rounding.
            np.testing.assert_allclose(one, other.reshape(one.shape), rtol=1e-5 if update else 0, atol=1e-6 * update)
        for one, other in zip(both[0][1].variables, both[1][1].variables, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=one.name)
    assert both[0][3].collect.experimental_get_tracing_count() == 1
    assert both[0][2].update.experimental_get_tracing_count() == 1


RUN = ppo.Config(
    env="CartPole-v1",
    num_workers=0,
    total_steps=512,
    num_envs=4,
    num_steps=32,
    minibatch_size=32,
    epochs=2,
    report_interval=128,
    eval_episodes=3,
)


def reports(result):
    lines = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


@pytest.mark.parametrize("settings", [{}, {"overlap": True}], ids=["in turn", "overlap"])
def test_a_run_equals_that_with_the_wrapper(tmp_path, settings):
    config = dataclasses.replace(RUN, **settings)
    stacked = ppo.train(dataclasses.replace(config, frame_stack=3), logdir=tmp_path / "a")
    wrapper = dataclasses.replace(config, wrappers=('FrameStackObservation:{"stack_size": 3}',))
    by_wrapper = ppo.train(wrapper, logdir=tmp_path / "b")
    for one, other in zip(reports(stacked), reports(by_wrapper), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5, nan_ok=True)
    np.testing.assert_array_equal(stacked.evaluation.returns, by_wrapper.evaluation.returns)
    assert (stacked.path / "spaces.json").read_text() == (by_wrapper.path / "spaces.json").read_text()
    again = evaluate_run(Run(stacked.path), 3)
    np.testing.assert_array_equal(again.returns, stacked.evaluation.returns)
    policy = ppo.load_policy(stacked.path)
    env = gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 3)
    assert env.action_space.contains(policy(env.reset(seed=0)[0]))


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("examples.crawler:Crawler-v0", {}),  # registered only as a vector env
        pytest.param("HalfCheetah-v5", {"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param("Local-v0", {"num_workers": 2}, marks=pytest.mark.slow),  # registered only in this process
    ],
)
def test_envs_of_every_kind_are_trained_and_evaluated(tmp_path, env, settings):
    gym.register("Local-v0", entry_point=SmallImages, max_episode_steps=6)
    config = dataclasses.replace(RUN, env=env, frame_stack=2, total_steps=256, eval_interval=128, **settings)
    try:
        assert ppo.train(config, logdir=tmp_path).evaluation.returns.size == 3
    finally:
        del gym.registry["Local-v0"]


def test_given_functions_and_a_given_vector_env_are_evaluated_alike(tmp_path):
    config = dataclasses.replace(RUN, frame_stack=2)
    fns = [lambda: gym.make("CartPole-v1")] * 4
    of_functions = ppo.train(config, envs=fns, logdir=tmp_path)
    with vecenv.SyncVectorEnv(fns, **ppo.vector_options(config)) as envs:
        of_vector = ppo.train(config, envs=envs, logdir=tmp_path)
        assert evaluate_run(Run(of_functions.path), 3, envs=envs).returns.size == 3
    assert reports(of_functions)[-1]["return_mean"] == reports(of_vector)[-1]["return_mean"]


def test_action_masks_are_not_stacked():
    config = dataclasses.replace(RUN, frame_stack=2)
    space = gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (2,)), action_mask=gym.spaces.MultiBinary(3))
    with pytest.raises(ppo.ConfigError, match=r'frame_stack=2 would also stack "action_mask"'):
        Agent(config, stacked_space(space, 2), gym.spaces.Discrete(3))
