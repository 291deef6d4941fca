"""learner.py: Learner: one XLA-compiled function that turns a rollout into a better policy."""

from __future__ import annotations

from typing import NamedTuple

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


class _Batch(NamedTuple):
    """A rollout as the update needs it: time by env `[T, N, ...]` (inputs `[T + 1, N, F]`), columns `[T * N, ...]`."""

    inputs: tf.Tensor
    rewards: tf.Tensor
    terminated: tf.Tensor
    truncated: tf.Tensor
    final_observations: tf.Tensor
    columns: tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # inputs, actions, log-probabilities
    features: tf.Tensor


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
        config = self._config
        batch = self._prepare(self._envs.shaped(rollout))
        order = tf.reshape(order, [config.epochs, config.num_minibatches, config.minibatch_size])
        values, advantages, targets = self._advantages(batch)
        unexplained = tf.math.reduce_variance(targets - values) / (tf.math.reduce_variance(targets) + 1e-8)
        totals = tf.zeros([len(METRICS)])
        for epoch in tf.range(config.epochs):
            if config.recompute_advantages:  # the first time for nothing, which costs less than another branch
                _, advantages, targets = self._advantages(batch)
            columns = (*batch.columns, _flat(advantages), _flat(targets))
            for k in tf.range(config.num_minibatches):
                totals += self._minibatch(*(tf.gather(column, order[epoch, k]) for column in columns), learning_rate)
        # Order: statistics change last, so the rollout's own log-probabilities were of the same function.
        self._agent.normalizer.update(batch.features)
        metrics = dict(zip(METRICS, tf.unstack(totals / (config.epochs * config.num_minibatches)), strict=True))
        metrics["explained_variance"] = 1.0 - unexplained
        return metrics

    def _prepare(self, rollout: Rollout) -> _Batch:
        """Computes all that does not change while the update runs."""
        agent = self._agent
        features = agent.features(rollout.observations)
        inputs = agent.normalizer(features)
        done = tf.logical_or(rollout.terminated, rollout.truncated)
        log_probs = agent.distribution.log_prob(
            agent.network.policy(inputs[:-1]), agent.network.log_std, rollout.actions
        )
        return _Batch(
            inputs=inputs,
            rewards=self.rewards(tf.cast(rollout.rewards, tf.float32), done),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            final_observations=rollout.final_observations,
            columns=(_flat(inputs[:-1]), _flat(rollout.actions), _flat(log_probs)),
            features=_flat(features[:-1]),
        )

    def _advantages(self, batch: _Batch) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns values, advantages and value targets `float32[T, N]` of the network as it is now."""
        values = self._agent.network.value(batch.inputs)
        advantages, targets = gae(
            rewards=batch.rewards,
            values=values[:-1],
            next_values=self._next_values(values[1:], batch.final_observations, batch.terminated, batch.truncated),
            terminated=batch.terminated,
            truncated=batch.truncated,
            gamma=self._config.gamma,
            gae_lambda=self._config.gae_lambda,
        )
        return values[:-1], advantages, targets

    def _next_values(
        self, following: tf.Tensor, final_observations: tf.Tensor, terminated: tf.Tensor, truncated: tf.Tensor
    ) -> tf.Tensor:
        """Replaces the value of the next episode's first state by that of the cut episode's last."""
        cut = tf.logical_and(truncated, tf.logical_not(terminated))

        def with_final() -> tf.Tensor:
            # Rows that did not end hold whatever an earlier rollout left there; their values are not taken.
            return tf.where(cut, self._agent.network.value(self._agent.inputs(final_observations)), following)

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


def _flat(column: tf.Tensor) -> tf.Tensor:
    """Returns `[T * N, ...]` for `[T, N, ...]`."""
    return tf.reshape(column, [column.shape[0] * column.shape[1], *column.shape[2:]])


def shuffled(config: Config, update: int) -> np.ndarray:
    """Returns which samples each minibatch of an update takes, `int32[epochs * minibatches, B]`.

    Every epoch takes every sample once. Drawn in numpy, because sorting random keys under XLA takes
    an eighth of the whole update.
    """
    rng = np.random.default_rng((config.seed, update))
    samples = np.tile(np.arange(config.batch_size, dtype=np.int32), (config.epochs, 1))
    return rng.permuted(samples, axis=1).reshape(-1, config.minibatch_size)
