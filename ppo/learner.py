"""learner.py: Learner: one XLA-compiled function that turns a rollout into a better policy."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ppo.advantage import gae
from ppo.agent import Agent
from ppo.config import Config
from ppo.normalize import RewardNormalizer
from ppo.objective import approximate_kl, clipped_surrogate, standardize, value_loss
from ppo.optimizer import Adam
from vecenv.ingraph import InGraphVectorEnv, Rollout

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Means over all minibatches of an update, in the order in which `_minibatch` returns them."""


class Learner(tf.Module):
    """Owns the optimizer and the reward normaliser; changes the agent.

    The update reads the rollout's slab where the workers wrote it: its arguments alias shared memory,
    and XLA reads arguments in place.
    """

    def __init__(self, config: Config, agent: Agent, envs: InGraphVectorEnv):
        super().__init__(name="learner")
        self._config = config
        self._agent = agent
        self._envs = envs
        self.rewards = RewardNormalizer(
            config.num_envs, gamma=config.gamma, clip=config.reward_clip, enabled=config.normalize_rewards
        )
        self._variables = agent.network.trainable_variables
        self.optimizer = Adam(self._variables, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm)

    @tf.function(jit_compile=True)
    def update(self, rollout: Rollout, learning_rate: tf.Tensor, order: tf.Tensor) -> dict[str, tf.Tensor]:
        """Runs all epochs and minibatches on one rollout and returns the metrics, scalars.

        Args:
            rollout: What `InGraphVectorEnv.rollout` handed out.
            learning_rate: float32 scalar.
            order: The samples of each minibatch, `int32[epochs * minibatches, B]`, see `shuffled`.
        """
        data, values, targets, features = self._prepare(self._envs.shaped(rollout))
        config = self._config
        totals = tf.zeros([len(METRICS)])
        for k in tf.range(config.epochs * config.num_minibatches):
            totals += self._minibatch(*(tf.gather(column, order[k]) for column in data), learning_rate)
        # Order: statistics change last, so the rollout's own log-probabilities were of the same function.
        self._agent.normalizer.update(features)
        metrics = dict(zip(METRICS, tf.unstack(totals / (config.epochs * config.num_minibatches)), strict=True))
        residual = tf.math.reduce_variance(targets - values)
        metrics["explained_variance"] = 1.0 - residual / (tf.math.reduce_variance(targets) + 1e-8)
        return metrics

    def _prepare(self, rollout: Rollout) -> tuple[tuple[tf.Tensor, ...], tf.Tensor, tf.Tensor, tf.Tensor]:
        """Computes advantages; returns the columns to train on `[B, ...]`, values, targets and raw features."""
        agent, config = self._agent, self._config
        terminated, truncated = rollout.terminated, rollout.truncated
        features = agent.features(rollout.observations)
        inputs = agent.normalizer(features)
        values = agent.network.value(inputs)
        next_values = self._next_values(values[1:], rollout.final_observations, terminated, truncated)
        rewards = self.rewards(tf.cast(rollout.rewards, tf.float32), tf.logical_or(terminated, truncated))
        advantages, targets = gae(
            rewards=rewards,
            values=values[:-1],
            next_values=next_values,
            terminated=terminated,
            truncated=truncated,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        log_probs = agent.distribution.log_prob(
            agent.network.policy(inputs[:-1]), agent.network.log_std, rollout.actions
        )
        columns = (inputs[:-1], rollout.actions, log_probs, advantages, targets)
        flat = tuple(tf.reshape(column, [config.batch_size, *column.shape[2:]]) for column in columns)
        return flat, values[:-1], targets, tf.reshape(features[:-1], [config.batch_size, -1])

    def _next_values(
        self, following: tf.Tensor, final_observations: tf.Tensor, terminated: tf.Tensor, truncated: tf.Tensor
    ) -> tf.Tensor:
        """Replaces the value of the next episode's first state by that of the cut episode's last."""
        cut = tf.logical_and(truncated, tf.logical_not(terminated))

        def with_final() -> tf.Tensor:
            # Rows that did not end hold whatever an earlier rollout left there.
            mask = tf.reshape(cut, [*cut.shape, *[1] * (len(final_observations.shape) - 2)])
            final = tf.where(mask, final_observations, tf.zeros_like(final_observations))
            return tf.where(cut, self._agent.network.value(self._agent.inputs(final)), following)

        return tf.cond(tf.reduce_any(cut), with_final, lambda: following)

    def _minibatch(
        self,
        inputs: tf.Tensor,
        actions: tf.Tensor,
        old_log_probs: tf.Tensor,
        advantages: tf.Tensor,
        targets: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tf.Tensor:
        """Takes one gradient step; returns the metrics `float32[len(METRICS)]`."""
        config, network, distribution = self._config, self._agent.network, self._agent.distribution
        if config.normalize_advantages:
            advantages = standardize(advantages)
        with tf.GradientTape() as tape:
            outputs = network.policy(inputs)
            log_probs = distribution.log_prob(outputs, network.log_std, actions)
            policy_loss = clipped_surrogate(
                log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, clip_range=config.clip_range
            )
            error = value_loss(values=network.value(inputs), targets=targets)
            entropy = tf.reduce_mean(distribution.entropy(outputs, network.log_std))
            loss = policy_loss + config.value_coef * error - config.entropy_coef * entropy
        norm = self.optimizer.apply(tape.gradient(loss, self._variables), learning_rate)
        kl = approximate_kl(log_probs=log_probs, old_log_probs=old_log_probs)
        clipped = tf.reduce_mean(tf.cast(tf.abs(tf.exp(log_probs - old_log_probs) - 1) > config.clip_range, tf.float32))
        return tf.stack([policy_loss, error, entropy, kl, clipped, norm])


def shuffled(config: Config, update: int) -> np.ndarray:
    """Returns which samples each minibatch of an update takes, `int32[epochs * minibatches, B]`.

    Every epoch takes every sample once. Drawn in numpy, because sorting random keys under XLA takes
    an eighth of the whole update.
    """
    rng = np.random.default_rng((config.seed, update))
    samples = np.tile(np.arange(config.batch_size, dtype=np.int32), (config.epochs, 1))
    return rng.permuted(samples, axis=1).reshape(-1, config.minibatch_size)
