"""Tests of ppo/learner.py: the compiled update equals a slow one, step by step, and reads only its rollout."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import vecenv
from ppo.agent import Agent
from ppo.config import Config
from ppo.learner import Learner, shuffled
from ppo.rollout import Collector
from vecenv.ingraph import InGraphVectorEnv, slots_for

CONFIG = Config(
    env="Pendulum-v1",
    total_steps=1000,
    num_envs=4,
    num_steps=10,
    epochs=3,
    minibatch_size=8,
    policy_layers=(8,),
    value_layers=(8,),
)


def parts(config, max_episode_steps=7):
    """Returns envs whose episodes are cut within a rollout, and what learns on them."""
    vector = vecenv.SyncVectorEnv(
        [lambda: gym.make(config.env, max_episode_steps=max_episode_steps)] * config.num_envs,
        autoreset_mode="SameStep",
        num_slots=slots_for(config.num_steps),
        clip_actions=True,
        float32_observations=True,
    )
    envs = InGraphVectorEnv(vector, num_steps=config.num_steps)
    agent = Agent(config, vector.single_observation_space, vector.single_action_space)
    return vector, envs, agent, Learner(config, agent, envs), Collector(agent, envs)


def gaussian_kl(old_mean, old_log_std, mean, log_std):
    """KL(old || new), summed over dimensions, as TensorFlow tensors."""
    old_var, var = tf.exp(2 * old_log_std), tf.exp(2 * log_std)
    return tf.reduce_sum(log_std - old_log_std + (old_var + (old_mean - mean) ** 2) / (2 * var) - 0.5, axis=-1)


def slow_update(config, agent, learner, rollout, order, rate):
    """The update as one would write it at a blackboard: numpy, loops, eager TensorFlow for gradients."""
    network, distribution = agent.network, agent.distribution
    inputs = agent.inputs(tf.constant(rollout.observations))
    old_means, old_log_std = network.policy(inputs[:-1]), tf.constant(network.log_std.numpy())
    old = distribution.log_prob(old_means, network.log_std, tf.constant(rollout.actions)).numpy()
    old_means = old_means.numpy().reshape(config.batch_size, -1)
    if config.lr_schedule == "kl_adaptive":
        rate = tf.constant(learner.rate.numpy())
    done = rollout.terminated | rollout.truncated
    rewards = learner.rewards(tf.constant(rollout.rewards, tf.float32), tf.constant(done)).numpy()

    def advantages():
        values = network.value(inputs).numpy()
        result = np.zeros_like(rewards)
        for i in range(config.num_envs):
            later = 0.0
            for t in reversed(range(config.num_steps)):
                following = values[t + 1, i]
                if rollout.terminated[t, i]:
                    following = 0.0
                elif rollout.truncated[t, i]:
                    following = float(
                        network.value(agent.inputs(tf.constant(rollout.final_observations[t, i][None])))[0]
                    )
                if done[t, i]:
                    later = 0.0
                later = (
                    rewards[t, i] + config.gamma * following - values[t, i] + config.gamma * config.gae_lambda * later
                )
                result[t, i] = later
        return result, result + values[:-1]

    computed = advantages()
    old_values = (computed[1] - computed[0]).reshape(-1)
    flat_inputs = inputs[:-1].numpy().reshape(config.batch_size, -1)
    flat_actions = rollout.actions.reshape(config.batch_size, *rollout.actions.shape[2:])
    for k, samples in enumerate(order):
        if config.recompute_advantages and k % config.num_minibatches == 0:
            computed = advantages()
        advantage, target = (column.reshape(-1)[samples] for column in computed)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        variables = network.trainable_variables
        with tf.GradientTape() as tape:
            log_probs = distribution.log_prob(
                network.policy(flat_inputs[samples]), network.log_std, flat_actions[samples]
            )
            log_ratio = log_probs - old.reshape(-1)[samples]
            ratio = tf.exp(log_ratio)
            clipped = tf.clip_by_value(ratio, 1 - config.clip_range, 1 + config.clip_range)
            loss = -tf.reduce_mean(tf.minimum(ratio * advantage, clipped * advantage))
            if config.objective == "kl_penalty":
                means = network.policy(flat_inputs[samples])
                kl = tf.reduce_mean(gaussian_kl(old_means[samples], old_log_std, means, network.log_std))
                loss = -tf.reduce_mean(ratio * advantage) + learner.penalty.numpy() * kl
                if kl > config.kl_cutoff_factor * config.kl_target:
                    loss += config.kl_cutoff_coef * (kl - config.kl_cutoff_factor * config.kl_target) ** 2
            values = network.value(flat_inputs[samples])
            errors = (values - target) ** 2
            if config.value_clip_range is not None:
                near = old_values[samples]
                kept = tf.clip_by_value(values, near - config.value_clip_range, near + config.value_clip_range)
                errors = tf.maximum(errors, (kept - target) ** 2)
            loss += config.value_coef * tf.reduce_mean(errors) / 2
            entropy = tf.reduce_sum(network.log_std + 0.5 * np.log(2 * np.pi * np.e))
            loss -= config.entropy_coef * entropy
        if config.kl_stop is not None and tf.reduce_mean(ratio - 1 - log_ratio) >= config.kl_stop:
            break
        learner.optimizer.apply(tape.gradient(loss, variables), rate)
    means = network.policy(flat_inputs)
    kl = float(tf.reduce_mean(gaussian_kl(old_means, old_log_std, means, network.log_std)))
    for variable, above, below, factor in ((learner.penalty, 1.3, 0.7, 1.5), (learner.rate, 2.0, 0.5, 1 / 1.5)):
        if kl > above * config.kl_target:
            variable.assign(variable * factor)
        elif kl < below * config.kl_target:
            variable.assign(variable / factor)
    agent.normalizer.update(tf.constant(rollout.observations[:-1].reshape(config.batch_size, -1)))


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_advantages": False},
        {"recompute_advantages": True},
        {"objective": "kl_penalty", "kl_target": 1e-3},
        {"objective": "kl_penalty", "kl_target": 1.0, "entropy_coef": 0.1},
        {"kl_stop": 1e-3},
        {"value_clip_range": 0.02},
        {"lr_schedule": "kl_adaptive", "learning_rate": 1e-2, "kl_target": 1e-3},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_the_compiled_update_equals_a_slow_one_step_by_step(settings):
    config = dataclasses.replace(CONFIG, **settings)
    _, envs, agent, learner, collector = parts(config)
    _, _, slow_agent, slow_learner, _ = parts(config)
    envs.reset(seed=0)
    rate = tf.constant(1e-2)
    for update in range(3):
        rollout = collector.collect(tf.constant([0, update]))
        arrays = envs.last_rollout()
        assert arrays.truncated.any()
        order = shuffled(config, update)
        slow_update(config, slow_agent, slow_learner, arrays, order, rate)
        metrics = learner.update(rollout, rate, tf.constant(config.clip_range), tf.constant(order))
        if config.kl_stop is not None:
            assert metrics["gradient_steps"] < len(order)
        for name, fast, slow in (
            ("network", agent.network, slow_agent.network),
            ("rewards", learner.rewards, slow_learner.rewards),
            ("normalizer", agent.normalizer, slow_agent.normalizer),
            ("adapted", learner, slow_learner),
        ):
            for one, other in zip(fast.variables, slow.variables, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4, err_msg=f"{name} {one.name} {update}")
    assert learner.update.experimental_get_tracing_count() == 1
    assert collector.collect.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("num_envs", [4, 64])
def test_training_never_reads_a_released_slab_nor_a_row_that_nobody_wrote(num_envs):
    """With every released slab turned to NaN, training gives the same weights, bit for bit."""
    config = dataclasses.replace(CONFIG, num_envs=num_envs)
    results = []
    for poisoned in (False, True):
        vector, envs, agent, learner, collector = parts(config)
        envs.reset(seed=0)
        for update in range(5):
            rollout = collector.collect(tf.constant([0, update]))
            learner.update(rollout, tf.constant(1e-2), tf.constant(0.2), tf.constant(shuffled(config, update)))
            if poisoned:
                low = update % 2 * (config.num_steps + 1)
                for array in vector.arrays.values():
                    array[low : low + config.num_steps + 1] = np.nan if array.dtype.kind == "f" else 1
        results.append([variable.numpy() for variable in (*agent.variables, *learner.variables)])
        assert all(np.isfinite(value).all() for value in results[-1])
    for clean, after_poison in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, after_poison)


def test_every_epoch_takes_every_sample_once_in_another_order():
    order = shuffled(CONFIG, 0).reshape(CONFIG.epochs, -1)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(40), (3, 1)))
    assert (order[0] != order[1]).any()
    np.testing.assert_array_equal(shuffled(CONFIG, 5), shuffled(CONFIG, 5))
    assert (shuffled(CONFIG, 5) != shuffled(CONFIG, 6)).any()
