"""learner.py: Learner: one XLA-compiled function that turns a rollout into a better policy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ppo.advantage import gae
from ppo.agent import Agent
from ppo.config import Config
from ppo.normalize import RewardNormalizer
from ppo.objective import (
    adapted_penalty,
    adapted_rate,
    approximate_kl,
    clipped_surrogate,
    kl_penalized_surrogate,
    standardize,
    value_loss,
)
from ppo.optimizer import Adam
from vecenv.ingraph import InGraphVectorEnv, Rollout

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Means over all minibatches of an update, in the order in which `_minibatch` returns them."""

Columns = dict[str, tf.Tensor]
"""What a gradient step reads, by name, one row for each sample."""


class _Batch(NamedTuple):
    """A rollout as the update needs it: time by env `[T, N, ...]` (inputs `[T + 1, N, F]`), columns `[T * N, ...]`."""

    inputs: tf.Tensor
    rewards: tf.Tensor
    terminated: tf.Tensor
    truncated: tf.Tensor
    final_observations: tf.Tensor
    outputs: tf.Tensor  # of the policy when the actions were taken, `[T * N, num_outputs]`
    columns: Columns
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
        self.penalty = tf.Variable(config.kl_init_penalty, trainable=False, name="kl_penalty")
        self.rate = tf.Variable(config.learning_rate, trainable=False, name="learning_rate")

    @tf.function(jit_compile=True)
    def update(
        self, rollout: Rollout, learning_rate: tf.Tensor, clip_range: tf.Tensor, order: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Runs all epochs and minibatches on one rollout and returns the metrics, scalars.

        Args:
            rollout: What `InGraphVectorEnv.rollout` handed out.
            learning_rate: float32 scalar; with the schedule "kl_adaptive" the learner has its own.
            clip_range: float32 scalar.
            order: The samples of each minibatch, `int32[epochs * minibatches, B]`, see `shuffled`.
        """
        config = self._config
        rate = self.rate.read_value() if config.lr_schedule == "kl_adaptive" else learning_rate
        old_log_std = None if self._agent.network.log_std is None else self._agent.network.log_std.read_value()
        batch = self._prepare(self._envs.shaped(rollout))
        order = tf.reshape(order, [config.epochs, config.num_minibatches, config.minibatch_size])
        values, advantages, targets = self._advantages(batch)
        unexplained = tf.math.reduce_variance(targets - values) / (tf.math.reduce_variance(targets) + 1e-8)
        old_values = _flat(values)
        totals, taken, going = tf.zeros([len(METRICS)]), tf.constant(0.0), tf.constant(True)
        for epoch in tf.range(config.epochs):
            if config.recompute_advantages:  # the first time for nothing, which costs less than another branch
                _, advantages, targets = self._advantages(batch)
            columns = {**batch.columns, "advantages": _flat(advantages), "targets": _flat(targets)}
            if config.value_clip_range is not None:
                columns["old_values"] = old_values
            for k in tf.range(config.num_minibatches):
                minibatch = {name: tf.gather(column, order[epoch, k]) for name, column in columns.items()}
                metrics, going = self._minibatch_unless_stopped(minibatch, old_log_std, rate, clip_range, going)
                totals += metrics
                taken += tf.cast(going, tf.float32)
        kl = self._mean_kl(batch, old_log_std)
        self.penalty.assign(adapted_penalty(self.penalty.read_value(), kl, config.kl_target))
        self.rate.assign(adapted_rate(self.rate.read_value(), kl, config.kl_target))
        # Order: statistics change last, so the rollout's own log-probabilities were of the same function.
        self._agent.normalizer.update(batch.features)
        metrics = dict(zip(METRICS, tf.unstack(totals / tf.maximum(taken, 1.0)), strict=True))
        metrics |= {"explained_variance": 1.0 - unexplained, "kl": kl, "gradient_steps": taken, "learning_rate": rate}
        if config.objective == "kl_penalty":
            metrics["kl_penalty"] = self.penalty.read_value()
        return metrics

    def _prepare(self, rollout: Rollout) -> _Batch:
        """Computes all that does not change while the update runs."""
        agent = self._agent
        features = agent.features(rollout.observations)
        inputs = agent.normalizer(features)
        done = tf.logical_or(rollout.terminated, rollout.truncated)
        outputs = agent.network.policy(inputs[:-1])
        log_probs = agent.distribution.log_prob(outputs, agent.network.log_std, rollout.actions)
        columns = {"inputs": inputs[:-1], "actions": rollout.actions, "log_probs": log_probs}
        if self._config.objective == "kl_penalty":
            columns["outputs"] = outputs
        return _Batch(
            inputs=inputs,
            rewards=self.rewards(tf.cast(rollout.rewards, tf.float32), done),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            final_observations=rollout.final_observations,
            outputs=_flat(outputs),
            columns={name: _flat(column) for name, column in columns.items()},
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

    def _mean_kl(self, batch: _Batch, old_log_std: tf.Tensor | None) -> tf.Tensor:
        """Returns KL(old || new) of the whole batch in nats, a scalar."""
        network = self._agent.network
        outputs = network.policy(_flat(batch.inputs[:-1]))
        return tf.reduce_mean(self._agent.distribution.kl(batch.outputs, old_log_std, outputs, network.log_std))

    def _minibatch_unless_stopped(
        self,
        minibatch: Columns,
        old_log_std: tf.Tensor | None,
        learning_rate: tf.Tensor,
        clip_range: tf.Tensor,
        going: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes a gradient step, unless a minibatch of this update has reached `kl_stop`; says whether it did."""
        if self._config.kl_stop is None:
            return self._minibatch(minibatch, old_log_std, learning_rate, clip_range), going

        def step() -> tuple[tf.Tensor, tf.Tensor]:
            log_probs = self._log_probs(minibatch)[1]
            near = approximate_kl(log_probs=log_probs, old_log_probs=minibatch["log_probs"]) < self._config.kl_stop
            return tf.cond(
                near, lambda: self._minibatch(minibatch, old_log_std, learning_rate, clip_range), nothing
            ), near

        def nothing() -> tf.Tensor:
            return tf.zeros([len(METRICS)])

        return tf.cond(going, step, lambda: (nothing(), going))

    def _log_probs(self, minibatch: Columns) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the policy's outputs, and the log-probabilities of the actions, as they are now."""
        network = self._agent.network
        outputs = network.policy(minibatch["inputs"])
        return outputs, self._agent.distribution.log_prob(outputs, network.log_std, minibatch["actions"])

    def _minibatch(
        self, minibatch: Columns, old_log_std: tf.Tensor | None, learning_rate: tf.Tensor, clip_range: tf.Tensor
    ) -> tf.Tensor:
        """Takes one gradient step; returns the metrics `float32[len(METRICS)]`."""
        config, network, distribution = self._config, self._agent.network, self._agent.distribution
        advantages, old_log_probs = minibatch["advantages"], minibatch["log_probs"]
        if config.normalize_advantages:
            advantages = standardize(advantages)
        with tf.GradientTape() as tape:
            outputs, log_probs = self._log_probs(minibatch)
            ratios = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
            if config.objective == "clip":
                policy_loss = clipped_surrogate(**ratios, clip_range=clip_range)
            else:
                policy_loss = kl_penalized_surrogate(
                    **ratios,
                    kl=tf.reduce_mean(distribution.kl(minibatch["outputs"], old_log_std, outputs, network.log_std)),
                    penalty=self.penalty.read_value(),
                    kl_target=config.kl_target,
                    cutoff_factor=config.kl_cutoff_factor,
                    cutoff_coef=config.kl_cutoff_coef,
                )
            error = value_loss(
                values=network.value(minibatch["inputs"]),
                targets=minibatch["targets"],
                old_values=minibatch.get("old_values"),
                clip_range=config.value_clip_range,
            )
            entropy = tf.reduce_mean(distribution.entropy(outputs, network.log_std))
            loss = policy_loss + config.value_coef * error - config.entropy_coef * entropy
        norm = self.optimizer.apply(tape.gradient(loss, self._variables), learning_rate)
        kl = approximate_kl(log_probs=log_probs, old_log_probs=old_log_probs)
        clipped = tf.reduce_mean(tf.cast(tf.abs(tf.exp(log_probs - old_log_probs) - 1) > clip_range, tf.float32))
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
