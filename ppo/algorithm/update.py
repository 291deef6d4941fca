"""Learner: one XLA-compiled function that turns a rollout into a better policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.algorithm.advantage import gae
from ppo.algorithm.batch import Batch, begins, flat, hidden_of, outputs_of, without_last
from ppo.algorithm.normalize import RewardNormalizer
from ppo.algorithm.objective import (
    adapted_penalty,
    adapted_rate,
    approximate_kl,
    clipped_surrogate,
    guarded_rate,
    kl_penalized_surrogate,
    standardize,
    value_loss,
)
from ppo.algorithm.optimizer import Adam
from ppo.algorithm.rollout import Collected
from ppo.config import Config
from ppo.model.agent import Agent
from ppo.model.recurrent import scan
from ppo.seeds import shuffling
from vecenv.ingraph import InGraphVectorEnv, Rollout

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Means over the gradient steps of an update, in the order that `_minibatch` returns; NaN if there were no steps."""

Columns = dict[str, Any]
"""What a gradient step reads, by name: one row for each sample, or one column for each env of a recurrent policy."""


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
        self._recurrent = agent.state_size > 0
        self._variables = agent.learned
        self.optimizer = Adam(self._variables, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm)
        self.penalty = tf.Variable(config.kl_init_penalty, trainable=False, name="kl_penalty")
        self.rate = tf.Variable(config.learning_rate, trainable=False, name="learning_rate")

    @property
    def unseen(self) -> bool:
        """Whether a normalizer is in use that has no statistics yet."""
        return self._agent.observations.unseen or self.rewards.unseen

    @tf.function(autograph=False)
    def observe(self, rollout: Rollout) -> None:
        """Adds a rollout to the statistics of observations and rewards, and changes nothing else."""
        shaped = self._envs.shaped(rollout)
        raw = self._agent.observations.raw(flat(shaped.observations))
        self._agent.observations.update(without_last(raw, self._config.batch_size))
        self.rewards(tf.cast(shaped.rewards, tf.float32), tf.logical_or(shaped.terminated, shaped.truncated))

    @tf.function(jit_compile=True, autograph=False)  # AutoGraph's conversion of sources would take seconds
    def update(
        self,
        collected: Collected,
        learning_rate: tf.Tensor,
        clip_range: tf.Tensor,
        order: tf.Tensor,
    ) -> dict[str, tf.Tensor]:
        """Runs all epochs and minibatches on one rollout and returns the metrics, scalars.

        Args:
            collected: What `Collector.collect` returned. Ratios are against the policy that acted; every KL is measured
                from the policy at the start of the update, which differs if `collected` has outputs.
            learning_rate: float32 scalar; with the schedule "kl_adaptive" the learner has its own.
            clip_range: float32 scalar.
            order: What each minibatch takes, `int32[epochs * minibatches, ...]`, see `shuffled`.
        """
        config = self._config
        adapted, rate = self.rate.read_value(), learning_rate
        if config.lr_schedule == "kl_adaptive":
            rate = adapted
        elif config.kl_limit is not None:
            slowed = learning_rate * (adapted / config.learning_rate)
            rate = tf.where(adapted < config.learning_rate, slowed, learning_rate)
        batch = self._prepare(self._envs.shaped(collected.rollout), collected.state)
        start_outputs = self._outputs_now(batch)
        fixed = self._fixed_columns(batch, collected, start_outputs)
        values, advantages, targets = self._advantages(batch)
        unexplained = tf.math.reduce_variance(targets - values) / (tf.math.reduce_variance(targets) + 1e-8)
        if config.normalize_values:
            self._agent.values.update(targets, self._agent.network.rescale_value)
        if config.value_clip_range is not None:
            fixed |= self._as_columns({"old_values": self._agent.values.normalize(values)})
        order = tf.reshape(order, [config.epochs, config.num_minibatches, order.shape[1]])
        totals, taken = self._learn(batch, fixed, (advantages, targets), order, rate, clip_range)
        kl = tf.reduce_mean(self._agent.distribution.kl(start_outputs, self._outputs_now(batch)))
        if config.objective == "kl_penalty":
            target = {"kl_target": config.kl_target, "initial": config.kl_init_penalty}
            self.penalty.assign(adapted_penalty(self.penalty.read_value(), kl, **target))
        if config.lr_schedule == "kl_adaptive":
            target = {"kl_target": config.kl_target, "initial": config.learning_rate}
            self.rate.assign(adapted_rate(adapted, kl, **target))
        elif config.kl_limit is not None:
            self.rate.assign(guarded_rate(adapted, kl, kl_limit=config.kl_limit, initial=config.learning_rate))
        # Order: statistics change last, so the rollout's own log-probabilities were of the same function.
        self._agent.observations.update(batch.raw)
        metrics = dict(zip(METRICS, tf.unstack(totals / taken), strict=True))
        metrics |= {"return_scale": self.rewards.deviation, "gradient_steps": taken, "learning_rate": rate}
        metrics |= {"explained_variance": 1.0 - unexplained, "kl": kl}
        if config.objective == "kl_penalty":
            metrics["kl_penalty"] = self.penalty.read_value()
        return metrics

    def _learn(
        self,
        batch: Batch,
        fixed: Columns,
        estimates: tuple[tf.Tensor, tf.Tensor],
        order: tf.Tensor,
        rate: tf.Tensor,
        clip_range: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes all gradient steps; returns the sums of their metrics, and how many were taken.

        Args:
            batch: The rollout.
            fixed: Columns that stay as they are.
            estimates: Advantages and value targets, `float32[T, N]` each.
            order: What each minibatch takes, `int32[epochs, minibatches, ...]`.
            rate: Learning rate, float32 scalar.
            clip_range: float32 scalar.
        """
        config = self._config

        def epoch(number: tf.Tensor, *carried: tf.Tensor) -> tuple[tf.Tensor, ...]:
            # Recomputed the first time for nothing, which costs less than another branch.
            advantages, targets = self._advantages(batch)[1:] if config.recompute_advantages else estimates
            estimated = {"advantages": advantages, "targets": self._agent.values.normalize(targets)}
            columns = {**fixed, **self._as_columns(estimated)}

            def step(k: tf.Tensor, totals: tf.Tensor, taken: tf.Tensor, going: tf.Tensor) -> tuple[tf.Tensor, ...]:
                minibatch = self._take(columns, batch.state, order[number, k])
                metrics, going = self._minibatch_unless_stopped(minibatch, rate, clip_range, going)
                return totals + metrics, taken + tf.cast(going, tf.float32), going

            return _repeat(config.num_minibatches, step, carried)

        totals, taken, _ = _repeat(
            config.epochs, epoch, (tf.zeros([len(METRICS)]), tf.constant(0.0), tf.constant(True))
        )
        return totals, taken

    def _prepare(self, rollout: Rollout, state: tf.Tensor) -> Batch:
        """Computes all that does not change while the update runs."""
        observations = self._agent.observations
        raw = observations.raw(flat(rollout.observations))
        done = tf.logical_or(rollout.terminated, rollout.truncated)
        return Batch(
            raw=without_last(raw, self._config.batch_size),
            inputs=observations.normalized(raw),
            actions=flat(rollout.actions),
            rewards=self.rewards(tf.cast(rollout.rewards, tf.float32), done),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            final_observations=rollout.final_observations,
            state=state,
            first=begins(rollout),
        )

    def _fixed_columns(self, batch: Batch, collected: Collected, start_outputs: tf.Tensor) -> Columns:
        """Returns the columns that stay as they are while the update runs."""
        distribution = self._agent.distribution
        old_outputs = start_outputs if collected.outputs is None else collected.outputs
        samples = distribution.samples(old_outputs, flat(collected.noise), batch.actions)
        columns = {
            "inputs": without_last(batch.inputs, self._config.batch_size),
            "samples": samples,
            "log_probs": distribution.log_prob(old_outputs, samples),
        }
        if collected.outputs is not None:
            columns["start_log_probs"] = distribution.log_prob(start_outputs, samples)
        if self._config.objective == "kl_penalty":
            columns["outputs"] = start_outputs
        if not self._recurrent:
            return columns
        shape = batch.terminated.shape
        by_time = tf.nest.map_structure(lambda column: tf.reshape(column, [*shape, *column.shape[1:]]), columns)
        return {**by_time, "first": batch.first[:-1]}

    def _advantages(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns values, advantages and value targets `float32[T, N]` of the network as it is now."""
        hidden, states = hidden_of(self._agent, batch.inputs, batch.first, batch.state)
        values = self._agent.values.denormalize(self._agent.heads(hidden, batch.inputs)[1])
        values = tf.reshape(values, batch.first.shape)
        advantages, targets = gae(
            rewards=batch.rewards,
            values=values[:-1],
            next_values=self._next_values(values[1:], states, batch),
            terminated=batch.terminated,
            truncated=batch.truncated,
            gamma=self._config.gamma,
            gae_lambda=self._config.gae_lambda,
        )
        return values[:-1], advantages, targets

    def _next_values(self, following: tf.Tensor, states: tf.Tensor, batch: Batch) -> tf.Tensor:
        """Replaces the value of the next episode's first state by that of the cut episode's last."""
        cut = tf.logical_and(batch.truncated, tf.logical_not(batch.terminated))

        def with_final() -> tf.Tensor:
            # Rows that did not end hold whatever an earlier rollout left there; their values are not taken.
            inputs = self._agent.observations.inputs(flat(batch.final_observations))
            hidden, _ = self._agent.remember(self._agent.network.features(inputs), states)
            values = self._agent.values.denormalize(self._agent.heads(hidden, inputs)[1])
            return tf.where(cut, tf.reshape(values, cut.shape), following)

        return tf.cond(tf.reduce_any(cut), with_final, lambda: following)

    def _outputs_now(self, batch: Batch) -> tf.Tensor:
        """Returns the policy's distributions in the T states, as the policy is now."""
        return outputs_of(self._agent, batch.inputs, batch.first, batch.state)

    def _as_columns(self, columns: Columns) -> Columns:
        """Returns `[T, N, ...]` as minibatches are taken from it: by sample, or by env where order in time matters."""
        return columns if self._recurrent else tf.nest.map_structure(flat, columns)

    def _take(self, columns: Columns, state: tf.Tensor, samples: tf.Tensor) -> Columns:
        """Returns a minibatch: the samples asked for, `[B, ...]`, or all steps of the envs asked for, flat."""
        if not self._recurrent:
            return tf.nest.map_structure(lambda column: tf.gather(column, samples), columns)
        columns = tf.nest.map_structure(lambda column: tf.gather(column, samples, axis=1), columns)
        first = columns.pop("first")
        return {**tf.nest.map_structure(flat, columns), "first": first, "state": tf.gather(state, samples)}

    def _minibatch_unless_stopped(
        self, minibatch: Columns, learning_rate: tf.Tensor, clip_range: tf.Tensor, going: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes a gradient step, unless a minibatch of this update has reached `kl_stop`; says whether it did."""
        if self._config.kl_stop is None:
            return self._minibatch(minibatch, learning_rate, clip_range), going

        def step() -> tuple[tf.Tensor, tf.Tensor]:
            outputs, _ = self._agent.heads(self._hidden_of(minibatch), minibatch["inputs"])
            log_probs = self._agent.distribution.log_prob(outputs, minibatch["samples"])
            near = _kl_from_start(minibatch, log_probs) < self._config.kl_stop
            return tf.cond(near, lambda: self._minibatch(minibatch, learning_rate, clip_range), nothing), near

        def nothing() -> tf.Tensor:
            return tf.zeros([len(METRICS)])

        return tf.cond(going, step, lambda: (nothing(), going))

    def _hidden_of(self, minibatch: Columns) -> Any:
        """Returns what the networks see of a minibatch, flat."""
        features = self._agent.network.features(minibatch["inputs"])
        core = self._agent.network.core
        if core is None:
            return features
        first = minibatch["first"]
        by_time = tf.reshape(features, [*first.shape, features.shape[-1]])
        return flat(core.output(scan(core, by_time, minibatch["state"], first)))

    def _minibatch(self, minibatch: Columns, learning_rate: tf.Tensor, clip_range: tf.Tensor) -> tf.Tensor:
        """Takes one gradient step; returns the metrics `float32[len(METRICS)]`."""
        config, agent, distribution = self._config, self._agent, self._agent.distribution
        advantages, old_log_probs = minibatch["advantages"], minibatch["log_probs"]
        if config.normalize_advantages:
            advantages = standardize(advantages)
        with tf.GradientTape() as tape:
            outputs, values = agent.heads(self._hidden_of(minibatch), minibatch["inputs"])
            log_probs = distribution.log_prob(outputs, minibatch["samples"])
            ratios = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
            if config.objective == "clip":
                policy_loss = clipped_surrogate(**ratios, clip_range=clip_range)
            else:
                policy_loss = kl_penalized_surrogate(
                    **ratios,
                    kl=tf.reduce_mean(distribution.kl(minibatch["outputs"], outputs)),
                    penalty=self.penalty.read_value(),
                    kl_target=config.kl_target,
                    cutoff_factor=config.kl_cutoff_factor,
                    cutoff_coef=config.kl_cutoff_coef,
                )
            error = value_loss(
                values=values,
                targets=minibatch["targets"],
                old_values=minibatch.get("old_values"),
                clip_range=config.value_clip_range,
            )
            entropy = tf.reduce_mean(distribution.entropy(outputs))
            loss = policy_loss + config.value_coef * error - config.entropy_coef * entropy
        norm = self.optimizer.apply(tape.gradient(loss, self._variables), learning_rate)
        kl = _kl_from_start(minibatch, log_probs)
        clipped = tf.reduce_mean(tf.cast(tf.abs(tf.exp(log_probs - old_log_probs) - 1) > clip_range, tf.float32))
        return tf.stack([policy_loss, error, entropy, kl, clipped, norm])


def _kl_from_start(minibatch: Columns, log_probs: tf.Tensor) -> tf.Tensor:
    """Returns an estimate of the KL of a minibatch from the policy at the start of the update, a scalar."""
    old_log_probs = minibatch.get("start_log_probs", minibatch["log_probs"])
    return approximate_kl(log_probs=log_probs, old_log_probs=old_log_probs)


def _repeat(
    count: int, step: Callable[..., tuple[tf.Tensor, ...]], carried: tuple[tf.Tensor, ...]
) -> tuple[tf.Tensor, ...]:
    """Returns what is carried after `carried = step(i, *carried)` for each i below `count`."""
    return tf.while_loop(lambda i, *_: i < count, lambda i, *carry: (i + 1, *step(i, *carry)), (0, *carried))[1:]


def shuffled(config: Config, update: int) -> np.ndarray:
    """Returns what each minibatch of an update takes, `int32[epochs * minibatches, B]`: which samples.

    For a recurrent policy, which envs, `int32[epochs * minibatches, B / T]`. Every epoch takes everything once.
    Drawn in numpy, because sorting random keys under XLA takes an eighth of the whole update.
    """
    rng = shuffling(config.seed, update)
    count = config.batch_size if config.recurrent == "none" else config.num_envs
    items = np.tile(np.arange(count, dtype=np.int32), (config.epochs, 1))
    return rng.permuted(items, axis=1).reshape(config.epochs * config.num_minibatches, -1)
