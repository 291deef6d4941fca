"""The update: one XLA-compiled function that improves the policy on a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from ppo.algorithm.advantage import gae
from ppo.algorithm.minibatches import BySample, BySequence, Minibatches, Samples
from ppo.algorithm.normalize import RewardNormalizer
from ppo.algorithm.objective import (
    approximate_kl,
    clipped_surrogate,
    kl_penalized_surrogate,
    standardize,
    value_loss,
)
from ppo.algorithm.optimizer import Adam
from ppo.algorithm.rollout import Collected, Predictions, Sequences, begins, flat, predict, unroll
from ppo.algorithm.schedules import adapted_penalty, adapted_rate, guarded_rate
from ppo.config import Config
from ppo.model.agent import Agent
from ppo.model.observations import Inputs
from vecenv.ingraph import InGraphVectorEnv

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Means over the gradient steps of an update, in the order that `_step` returns them; NaN if there were no steps."""


class Batch(NamedTuple):
    """A rollout in the form that the update reads.

    Attributes:
        raw: Observations in the T states in which actions were taken, before normalization, `[T * N, ...]`.
        inputs: Inputs of the networks in all states, `[(T + 1) * N, ...]`.
        sequences: The sequences that the T + 1 states form.
        actions: Actions as they were sampled, `[T * N, ...]`.
        rewards: Normalized rewards, `float32[T, N]`.
        terminated: `bool[T, N]`.
        truncated: `bool[T, N]`.
        final_observations: Final observations of truncated episodes, `[T, N, ...]`; other rows are undefined.
    """

    raw: Inputs
    inputs: Inputs
    sequences: Sequences
    actions: tf.Tensor
    rewards: tf.Tensor
    terminated: tf.Tensor
    truncated: tf.Tensor
    final_observations: Any


class Estimates(NamedTuple):
    """Values, advantages and targets of a rollout, `float32[T, N]` each, in the units of normalized rewards.

    Attributes:
        values: Values of the states.
        advantages: Advantages of the actions.
        targets: Targets for the values.
    """

    values: tf.Tensor
    advantages: tf.Tensor
    targets: tf.Tensor


class Learner(tf.Module):
    """Owns the optimizer and the reward normalizer, and updates the agent.

    The update reads the rollout's slab where the workers wrote it: the slab's tensors alias shared memory, and XLA
    reads arguments in place.

    Attributes:
        penalty: Weight of the KL, for the objective "kl_penalty".
        rate: The learning rate of the schedule "kl_adaptive". With other schedules and `kl_limit`, the scheduled
            learning rate is multiplied by `rate / config.learning_rate`.
    """

    def __init__(self, config: Config, agent: Agent, envs: InGraphVectorEnv):
        super().__init__(name="learner")
        self._config = config
        self._agent = agent
        self._envs = envs
        self._variables = agent.learned
        self.rewards = RewardNormalizer(
            config.num_envs, gamma=config.gamma, clip=config.reward_clip, enabled=config.normalize_rewards
        )
        self.optimizer = Adam(self._variables, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm)
        self.penalty = tf.Variable(config.kl_init_penalty, trainable=False, name="kl_penalty")
        self.rate = tf.Variable(config.learning_rate, trainable=False, name="learning_rate")

    @property
    def unseen(self) -> bool:
        """Whether a normalizer is enabled but has no statistics yet."""
        return self._agent.observations.unseen or self.rewards.unseen

    @tf.function(autograph=False)
    def observe(self, collected: Collected) -> None:
        """Adds a rollout to the statistics of observations and rewards. Changes nothing else."""
        self._agent.observations.update(self._prepare(collected).raw)

    @tf.function(jit_compile=True, autograph=False)  # AutoGraph would take seconds to convert the source
    def update(
        self, collected: Collected, learning_rate: tf.Tensor, clip_range: tf.Tensor, order: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Runs all epochs and minibatches on one rollout and returns the metrics, float32 scalars.

        Args:
            collected: A rollout. Probability ratios are relative to the policy that acted. Every KL is measured from
                the policy at the start of the update, which is a newer policy if `collected` has outputs.
            learning_rate: Scheduled learning rate, a float32 scalar; ignored by the schedule "kl_adaptive".
            clip_range: Clip range of the objective "clip", a float32 scalar.
            order: Indices of each minibatch, `int32[epochs * minibatches, ...]`, see `shuffled`.
        """
        config, agent = self._config, self._agent
        rate = self._effective_rate(learning_rate)
        batch = self._prepare(collected)
        start = self._predict(batch)
        estimates = self._estimate(batch, start)
        values, _, targets = estimates
        unexplained = tf.math.reduce_variance(targets - values) / (tf.math.reduce_variance(targets) + 1e-8)
        if config.normalize_values:
            agent.values.update(targets, agent.network.rescale_value)
        samples = self._samples(batch, collected, start.outputs, estimates)
        order = tf.reshape(order, [config.epochs, config.num_minibatches, order.shape[1]])
        totals, taken = self._learn(batch, samples, order, rate, clip_range)
        kl = tf.reduce_mean(agent.distribution.kl(start.outputs, self._predict(batch).outputs))
        self._adapt(kl)
        # Order: statistics change last, so that all predictions of this update use the rollout's normalization.
        agent.observations.update(batch.raw)
        metrics = dict(zip(METRICS, tf.unstack(totals / taken), strict=True))
        metrics |= {"return_scale": self.rewards.deviation, "gradient_steps": taken, "learning_rate": rate}
        metrics |= {"explained_variance": 1.0 - unexplained, "kl": kl}
        if config.objective == "kl_penalty":
            metrics["kl_penalty"] = self.penalty.read_value()
        return metrics

    def _effective_rate(self, scheduled: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of this update: the scheduled rate, adapted to the KL if so configured."""
        config, base = self._config, self.rate.read_value()
        if config.lr_schedule == "kl_adaptive":
            return base
        if config.kl_limit is None:
            return scheduled
        return tf.where(base < config.learning_rate, scheduled * (base / config.learning_rate), scheduled)

    def _adapt(self, kl: tf.Tensor) -> None:
        """Adapts the KL penalty and the learning rate of the next update to the KL of this one."""
        config, base = self._config, self.rate.read_value()
        if config.objective == "kl_penalty":
            target = {"kl_target": config.kl_target, "initial": config.kl_init_penalty}
            self.penalty.assign(adapted_penalty(self.penalty.read_value(), kl, **target))
        if config.lr_schedule == "kl_adaptive":
            target = {"kl_target": config.kl_target, "initial": config.learning_rate}
            self.rate.assign(adapted_rate(base, kl, **target))
        elif config.kl_limit is not None:
            self.rate.assign(guarded_rate(base, kl, kl_limit=config.kl_limit, initial=config.learning_rate))

    def _prepare(self, collected: Collected) -> Batch:
        """Returns everything that does not change during the update."""
        rollout, observations = self._envs.shaped(collected.rollout), self._agent.observations
        raw = observations.raw(flat(rollout.observations))
        done = tf.logical_or(rollout.terminated, rollout.truncated)
        return Batch(
            raw=self._without_last(raw),
            inputs=observations.normalized(raw),
            sequences=Sequences(begins(rollout), collected.state),
            actions=flat(rollout.actions),
            rewards=self.rewards(tf.cast(rollout.rewards, tf.float32), done),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            final_observations=rollout.final_observations,
        )

    def _without_last(self, inputs: Inputs) -> Inputs:
        """Drops the last of T + 1 states, in which no action was taken."""
        return {name: rows[: self._config.batch_size] for name, rows in inputs.items()}

    def _predict(self, batch: Batch) -> Predictions:
        """Returns the predictions of the current agent."""
        return predict(self._agent, batch.inputs, batch.sequences)

    def _estimate(self, batch: Batch, predictions: Predictions) -> Estimates:
        """Returns advantages and value targets by generalized advantage estimation."""
        values = self._agent.values.denormalize(predictions.values)
        advantages, targets = gae(
            rewards=batch.rewards,
            values=values[:-1],
            next_values=self._next_values(values[1:], predictions.memory, batch),
            terminated=batch.terminated,
            truncated=batch.truncated,
            gamma=self._config.gamma,
            gae_lambda=self._config.gae_lambda,
        )
        return Estimates(values[:-1], advantages, targets)

    def _next_values(self, following: tf.Tensor, memory: tf.Tensor, batch: Batch) -> tf.Tensor:
        """Replaces values of first states after truncation with values of the final observations."""
        cut = tf.logical_and(batch.truncated, tf.logical_not(batch.terminated))

        def with_final() -> tf.Tensor:
            # Rows without truncation hold data of an earlier rollout; `tf.where` discards their values.
            agent = self._agent
            inputs = agent.observations.inputs(flat(batch.final_observations))
            hidden, _ = agent.remember(agent.network.features(inputs), memory)
            values = agent.values.denormalize(agent.heads(hidden, inputs)[1])
            return tf.where(cut, tf.reshape(values, cut.shape), following)

        return tf.cond(tf.reduce_any(cut), with_final, lambda: following)

    def _samples(self, batch: Batch, collected: Collected, start_outputs: tf.Tensor, estimates: Estimates) -> Samples:
        """Returns all T * N samples of the rollout. XLA removes the columns that no gradient step reads."""
        distribution, normalize = self._agent.distribution, self._agent.values.normalize
        old_outputs = start_outputs if collected.outputs is None else collected.outputs
        actions = distribution.samples(old_outputs, flat(collected.noise), batch.actions)
        return Samples(
            inputs=self._without_last(batch.inputs),
            actions=actions,
            old_log_probs=distribution.log_prob(old_outputs, actions),
            start_log_probs=distribution.log_prob(start_outputs, actions),
            start_outputs=start_outputs,
            old_values=flat(normalize(estimates.values)),
            advantages=flat(estimates.advantages),
            targets=flat(normalize(estimates.targets)),
        )

    def _learn(
        self, batch: Batch, samples: Samples, order: tf.Tensor, rate: tf.Tensor, clip_range: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes all gradient steps; returns the sums of their metrics, `float32[len(METRICS)]`, and their number.

        Args:
            batch: The rollout.
            samples: Its samples.
            order: Indices of each minibatch, `int32[epochs, minibatches, ...]`.
            rate: Learning rate, a float32 scalar.
            clip_range: A float32 scalar.
        """
        config = self._config
        first, state = batch.sequences
        minibatches: Minibatches = BySequence(Sequences(first[:-1], state)) if self._agent.state_size else BySample()

        def epoch(number: tf.Tensor, *carried: tf.Tensor) -> tuple[tf.Tensor, ...]:
            current = samples
            if config.recompute_advantages:  # redundant in the first epoch, but cheaper than another branch
                _, advantages, targets = self._estimate(batch, self._predict(batch))
                targets = self._agent.values.normalize(targets)
                current = samples._replace(advantages=flat(advantages), targets=flat(targets))
            arranged = minibatches.arrange(current)

            def step(k: tf.Tensor, totals: tf.Tensor, taken: tf.Tensor, going: tf.Tensor) -> tuple[tf.Tensor, ...]:
                minibatch, sequences = minibatches.take(arranged, order[number, k])
                metrics, going = self._step_unless_stopped(minibatch, sequences, rate, clip_range, going)
                return totals + metrics, taken + tf.cast(going, tf.float32), going

            return _repeat(config.num_minibatches, step, carried)

        nothing = (tf.zeros([len(METRICS)]), tf.constant(0.0), tf.constant(True))
        totals, taken, _ = _repeat(config.epochs, epoch, nothing)
        return totals, taken

    def _step_unless_stopped(
        self,
        minibatch: Samples,
        sequences: Sequences | None,
        rate: tf.Tensor,
        clip_range: tf.Tensor,
        going: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes a gradient step unless a minibatch of this update has reached `kl_stop`.

        Returns:
            The metrics of the step, or zeros if it was skipped; and whether it was taken.
        """
        if self._config.kl_stop is None:
            return self._step(minibatch, sequences, rate, clip_range), going

        def step() -> tuple[tf.Tensor, tf.Tensor]:
            outputs, _ = self._heads(minibatch, sequences)
            log_probs = self._agent.distribution.log_prob(outputs, minibatch.actions)
            kl = approximate_kl(log_probs=log_probs, old_log_probs=minibatch.start_log_probs)
            near = kl < self._config.kl_stop
            return tf.cond(near, lambda: self._step(minibatch, sequences, rate, clip_range), no_metrics), near

        def no_metrics() -> tf.Tensor:
            return tf.zeros([len(METRICS)])

        return tf.cond(going, step, lambda: (no_metrics(), going))

    def _heads(self, minibatch: Samples, sequences: Sequences | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns distribution parameters and values for a minibatch."""
        return self._agent.heads(unroll(self._agent, minibatch.inputs, sequences)[0], minibatch.inputs)

    def _step(
        self, minibatch: Samples, sequences: Sequences | None, rate: tf.Tensor, clip_range: tf.Tensor
    ) -> tf.Tensor:
        """Takes one gradient step; returns its metrics, `float32[len(METRICS)]`."""
        config, distribution = self._config, self._agent.distribution
        advantages = minibatch.advantages
        if config.normalize_advantages:
            advantages = standardize(advantages)
        with tf.GradientTape() as tape:
            outputs, values = self._heads(minibatch, sequences)
            log_probs = distribution.log_prob(outputs, minibatch.actions)
            ratios = {"log_probs": log_probs, "old_log_probs": minibatch.old_log_probs, "advantages": advantages}
            if config.objective == "clip":
                policy_loss = clipped_surrogate(**ratios, clip_range=clip_range)
            else:
                policy_loss = kl_penalized_surrogate(
                    **ratios,
                    kl=tf.reduce_mean(distribution.kl(minibatch.start_outputs, outputs)),
                    penalty=self.penalty.read_value(),
                    kl_target=config.kl_target,
                    cutoff_factor=config.kl_cutoff_factor,
                    cutoff_coef=config.kl_cutoff_coef,
                )
            error = value_loss(
                values=values,
                targets=minibatch.targets,
                old_values=minibatch.old_values,
                clip_range=config.value_clip_range,
            )
            entropy = tf.reduce_mean(distribution.entropy(outputs))
            loss = policy_loss + config.value_coef * error - config.entropy_coef * entropy
        norm = self.optimizer.apply(tape.gradient(loss, self._variables), rate)
        kl = approximate_kl(log_probs=log_probs, old_log_probs=minibatch.start_log_probs)
        ratio = tf.exp(log_probs - minibatch.old_log_probs)
        clipped = tf.reduce_mean(tf.cast(tf.abs(ratio - 1) > clip_range, tf.float32))
        return tf.stack([policy_loss, error, entropy, kl, clipped, norm])


def _repeat(
    count: int, step: Callable[..., tuple[tf.Tensor, ...]], carried: tuple[tf.Tensor, ...]
) -> tuple[tf.Tensor, ...]:
    """Returns `carried` after `carried = step(i, *carried)` for each i below `count`."""
    return tf.while_loop(lambda i, *_: i < count, lambda i, *carry: (i + 1, *step(i, *carry)), (0, *carried))[1:]
