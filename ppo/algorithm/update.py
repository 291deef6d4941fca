"""The update: one graph function that improves the policy on a rollout. `Learner._update` is the algorithm.

If the policy and the value function share no layers, they learn in two chains of gradient steps. Within an epoch,
neither chain depends on the other, so TensorFlow runs both concurrently. Otherwise, one chain descends on the sum of
both losses.

XLA compiles the whole update if there is one chain, and each chain if there are two. It compiles nothing for a policy
that sees images, because TensorFlow's convolutions are faster than XLA's on CPUs, or for a custom network that calls
graph functions; see `CustomNetwork.can_compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ppo.algorithm import losses
from ppo.algorithm.batch import Batch, Estimates, Samples, minibatch_of, new_estimates, prepare, samples_of, shuffled
from ppo.algorithm.collector import Collected
from ppo.algorithm.optimizer import Adam
from ppo.algorithm.rewards import RewardNormalizer
from ppo.algorithm.schedules import adapted_base_rate, adapted_penalty, effective_rate, gamma_at, learning_rate_at
from ppo.config import Config
from ppo.model.agent import Agent, Hidden
from ppo.model.normalize import statistics_of
from ppo.model.observations import Inputs
from ppo.model.recurrent import Sequences, flat
from ppo.runtime.graphs import graph_function, repeat

compiles_updates = True
"""Whether XLA compiles updates where it can. Tests that are not about updates set this to False to save time."""

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Averages over the gradient steps of an update, NaN if there was none.

They are means and, for `grad_norm`, the root mean square of the norm of all gradients, which does not depend on the
number of chains.
"""

TOTALS = ("gradient_steps", *METRICS)
"""What each chain sums over its gradient steps; for `grad_norm`, the squared norm.

The totals of two chains add up, because each chain leaves at 0 the totals that it does not compute.
"""

LossTerm = Callable[[Samples, Hidden, Inputs, tf.Tensor], tuple[tf.Tensor, dict[str, tf.Tensor]]]
"""A term of the loss, as a function of a minibatch, its hidden activations, its encoded inputs and the weight of the
entropy. It returns a scalar, and the totals in `TOTALS` that the term computes, by name."""


class Learner(tf.Module):
    """Owns the optimizers and the reward normalizer, and updates the agent.

    The update reads the rollout's slab where the envs wrote it: the slab's tensors alias shared memory, and XLA
    reads arguments in place.

    Args:
        config: The settings of the run or, with several agents, of a team; see `Config.of_team`.
        agent: The agent to update.

    Attributes:
        optimizers: One for each group of `Agent.learned_groups`.
        rewards: Normalizes the rewards.
        penalty: Weight of the KL, for the objective "kl_penalty". It begins at 1, as in BatchPPO.
        base_rate: The learning rate before the schedule is applied. It adapts to the KL if `lr_schedule` is
            "kl_adaptive" or `kl_limit` is set, and is constant otherwise.
        compiled: Whether `update` has compiled the update, which takes much longer than an update.
        observe: A graph function that only adds a rollout to the statistics of observations and rewards.
        update_in_graph: The graph function of `update`.
    """

    def __init__(self, config: Config, agent: Agent):
        super().__init__(name="learner")
        self._config, self._agent = config, agent
        self._sees_images = agent.observations.has_images
        # With images, predicting the values of all states again would take too long.
        self._recomputes = config.recompute_advantages and not self._sees_images
        self.rewards = RewardNormalizer(config.num_envs, gamma=config.gamma, enabled=config.normalize_rewards)
        self.optimizers = [
            Adam(variables, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm)
            for variables in agent.learned_groups
        ]
        self.penalty = tf.Variable(1.0, trainable=False, name="kl_penalty")
        self.base_rate = tf.Variable(config.learning_rate, trainable=False, name="learning_rate")
        self.compiled = False

        compiles = compiles_updates and not self._sees_images and agent.network.can_compile
        has_two_chains = len(self.optimizers) == 2
        terms: list[list[LossTerm]] = [[self._policy_loss, self._value_loss]]
        if has_two_chains:
            terms = [[self._policy_loss], [self._value_loss]]

        def compiled_part(function: Callable[..., Any]) -> Callable[..., Any]:
            # If XLA compiled the whole update, it would run two chains one after the other.
            return graph_function(function, jit_compile=True) if compiles and has_two_chains else function

        self._chains: list[Callable[..., tf.Tensor]] = [
            compiled_part(functools.partial(self._descend, adam, of_chain))
            for adam, of_chain in zip(self.optimizers, terms, strict=True)
        ]
        self._new_estimates: Callable[[Batch, tf.Tensor], Estimates] = compiled_part(
            functools.partial(new_estimates, config, agent)
        )
        self._kl: Callable[..., tf.Tensor] = compiled_part(self._kl_of_update)
        self.observe = graph_function(self._observe)
        self.update_in_graph = graph_function(self._update, jit_compile=compiles and not has_two_chains)

    @property
    def lacks_statistics(self) -> bool:
        """Whether a normalizer is enabled but has no statistics yet."""
        return self._agent.observations.lacks_statistics or self.rewards.lacks_statistics

    def _observe(self, collected: Collected) -> None:
        self._agent.observations.merge(prepare(self._agent, self.rewards, collected).seen)

    def update(self, collected: Collected, number: int) -> dict[str, float]:
        """Runs one update with the schedules and the order of update `number`, and returns its metrics."""
        rate = tf.constant(learning_rate_at(self._config, number), tf.float32)
        gamma = tf.constant(gamma_at(self._config, number), tf.float32)
        order = tf.constant(shuffled(self._config, number))
        metrics = self.update_in_graph(collected, rate, gamma, order)
        self.compiled = True
        return {name: float(value) for name, value in metrics.items()}

    def _update(
        self, collected: Collected, learning_rate: tf.Tensor, gamma: tf.Tensor, order: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Runs all epochs and minibatches on one rollout and returns the metrics, float32 scalars.

        Args:
            collected: A rollout of the current policy.
            learning_rate: Scheduled learning rate, a float32 scalar, which the weight of the entropy follows. The
                schedule "kl_adaptive" uses its own rate instead.
            gamma: Scheduled discount factor, a float32 scalar.
            order: Samples of each minibatch, `int32[epochs * minibatches, B]`; see `shuffled`.
        """
        config, agent = self._config, self._agent
        batch = prepare(agent, self.rewards, collected)
        samples = samples_of(config, agent, batch, collected, gamma)
        rate = effective_rate(config, scheduled=learning_rate, base=self.base_rate.read_value())
        entropy_coef = config.entropy_coef * (learning_rate / config.learning_rate)
        # A round is an epoch or, if advantages are not recomputed, all epochs.
        num_rounds = config.epochs if self._recomputes else 1
        rounds = tf.reshape(order, [num_rounds, -1, config.minibatch_size])

        def run_round(k: tf.Tensor, carried: tuple[Estimates, tf.Tensor]) -> tuple[Estimates, tf.Tensor]:
            estimates, totals = carried
            # Order: no chain writes a variable that the other one uses, so both run concurrently.
            for chain in self._chains:
                totals += chain(batch, samples._replace(estimates=estimates), rounds[k], rate, entropy_coef)
            if self._recomputes:
                is_last = tf.equal(k, num_rounds - 1)
                estimates = tf.cond(is_last, lambda: estimates, lambda: self._new_estimates(batch, gamma))
            return estimates, totals

        _, totals = repeat(num_rounds, run_round, (samples.estimates, tf.zeros(len(TOTALS))))
        kl = self._kl(batch, samples, rounds[-1])
        metrics = self._metrics(samples, collected.predictions.values, totals, rate, kl)
        self._adapt(kl)
        # Order: statistics change last, so that all predictions of this update use the rollout's normalization.
        agent.observations.merge(batch.seen)
        return metrics

    def _descend(
        self,
        adam: Adam,
        terms: Sequence[LossTerm],
        batch: Batch,
        samples: Samples,
        order: tf.Tensor,
        rate: tf.Tensor,
        entropy_coef: tf.Tensor,
    ) -> tf.Tensor:
        """Takes a gradient step for each minibatch of a round, and returns the chain's part of `TOTALS`.

        The loss is the sum of the terms. `order` holds the samples of each minibatch, `int32[steps, B]`.
        """
        agent = self._agent

        def gradient_step(minibatch: Samples, sequences: Sequences | None) -> tf.Tensor:
            with tf.GradientTape() as tape:
                encoded = agent.network.encode(minibatch.inputs)
                hidden, _ = agent.unroll(encoded, sequences)
                computed = [term(minibatch, hidden, encoded, entropy_coef) for term in terms]
                loss = sum(value for value, _ in computed)
            gradients = agent.inward(tape.gradient(loss, adam.learned), adam.learned)
            found = {"grad_norm": tf.square(adam.apply(gradients, rate))}
            for _, metrics in computed:
                found |= metrics
            return tf.stack([found.get(name, 0.0) for name in TOTALS])

        def step(k: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
            minibatch, sequences = minibatch_of(samples, batch.sequences, order[k])
            lives = minibatch.weights.lives
            if lives is None:
                return totals + gradient_step(minibatch, sequences)
            return totals + tf.cond(
                tf.reduce_any(lives > 0),
                lambda: gradient_step(minibatch, sequences),
                lambda: tf.zeros(len(TOTALS)),  # without a living agent, not even Adam's moments change
            )

        return repeat(tf.shape(order)[0], step, tf.zeros(len(TOTALS)))

    def _policy_loss(
        self, minibatch: Samples, hidden: Hidden, encoded: Inputs, entropy_coef: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """See `LossTerm`."""
        config, distribution, acts = self._config, self._agent.distribution, minibatch.weights.acts
        outputs = self._agent.outputs(hidden, encoded)
        advantages = minibatch.estimates.advantages
        if config.normalize_advantages:
            advantages = losses.standardize(advantages, acts)
        log_probs = distribution.log_prob(outputs, minibatch.actions)
        ratio = tf.exp(losses.log_ratio(log_probs=log_probs, old_log_probs=minibatch.old_log_probs))
        if config.objective == "clip":
            policy_loss = losses.clipped_surrogate(
                ratio=ratio, advantages=advantages, clip_range=config.clip_range, weights=acts
            )
        else:
            policy_loss = losses.kl_penalized_surrogate(
                ratio=ratio,
                advantages=advantages,
                kl=losses.mean(distribution.kl(minibatch.old_outputs, outputs), acts),
                penalty=self.penalty.read_value(),
                kl_target=config.kl_target,
                weights=acts,
            )
        rewarded_entropy = losses.mean(distribution.rewarded_entropy(outputs), acts)
        return policy_loss - entropy_coef * rewarded_entropy, {
            "gradient_steps": 1.0,
            "policy_loss": policy_loss,
            "entropy": losses.mean(distribution.entropy(outputs), acts),
            "approx_kl": losses.approximate_kl(
                log_probs=log_probs, old_log_probs=minibatch.old_log_probs, weights=acts
            ),
            "clip_fraction": losses.mean(tf.cast(tf.abs(ratio - 1) > config.clip_range, tf.float32), acts),
        }

    def _value_loss(
        self, minibatch: Samples, hidden: Hidden, encoded: Inputs, _: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """See `LossTerm`."""
        value_loss = losses.value_loss(
            values=self._agent.values(hidden, encoded),
            targets=minibatch.estimates.targets,
            weights=minibatch.weights.lives,
        )
        return self._config.value_coef * value_loss, {"value_loss": value_loss}

    def _kl_of_update(self, batch: Batch, samples: Samples, order: tf.Tensor) -> tf.Tensor:
        """Returns the KL from the policy at the start of the update to the current policy, a scalar.

        It is the mean over all samples or, if the policy sees images, over the first quarter of the last epoch, whose
        minibatches are the last of `order: int32[steps, B]`.
        """
        agent, count = self._agent, self._config.num_minibatches

        def outputs(inputs: Inputs, sequences: Sequences | None) -> tf.Tensor:
            encoded = agent.network.encode(inputs)
            return agent.outputs(agent.unroll(encoded, sequences)[0], encoded)

        if not self._sees_images:
            now = outputs(batch.inputs, batch.sequences)[: self._config.batch_size]
            return losses.mean(agent.distribution.kl(samples.old_outputs, now), samples.weights.acts)

        def add(k: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
            minibatch, sequences = minibatch_of(samples, batch.sequences, order[-count:][k])
            now = outputs(minibatch.inputs, sequences)
            return total + losses.mean(agent.distribution.kl(minibatch.old_outputs, now), minibatch.weights.acts)

        quarter = -(-count // 4)
        return repeat(quarter, add, tf.constant(0.0)) / quarter

    def _metrics(
        self, samples: Samples, values: tf.Tensor, totals: tf.Tensor, rate: tf.Tensor, kl: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Returns the metrics of an update, by name.

        `values` are those of all states at the start of the update, `float32[T + 1, N]`, `totals` the `TOTALS` of all
        chains, and `kl` the result of `_kl_of_update`.
        """
        steps, *sums = tf.unstack(totals)
        metrics = {name: total / steps for name, total in zip(METRICS, sums, strict=True)}
        metrics["grad_norm"] = tf.sqrt(metrics["grad_norm"])
        metrics |= {"return_scale": self.rewards.moments.deviation, "learning_rate": rate, "kl": kl}
        targets = samples.estimates.targets
        errors = targets - flat(values[:-1])
        left, whole = (statistics_of(part, samples.weights.lives).variance for part in (errors, targets))
        unexplained = tf.cast(left, tf.float32) / (tf.cast(whole, tf.float32) + losses.EPSILON)
        metrics |= {"gradient_steps": steps, "explained_variance": 1.0 - unexplained}
        if self._agent.log_std is not None:
            metrics["action_std"] = tf.reduce_mean(tf.exp(tf.maximum(self._agent.log_std, self._config.min_log_std)))
        if self._config.objective == "kl_penalty":
            metrics["kl_penalty"] = self.penalty.read_value()
        return metrics

    def _adapt(self, kl: tf.Tensor) -> None:
        """Adapts the KL penalty and the base learning rate of the next update to the KL of this update."""
        config = self._config
        if config.objective == "kl_penalty":
            self.penalty.assign(adapted_penalty(self.penalty.read_value(), kl, kl_target=config.kl_target))
        self.base_rate.assign(adapted_base_rate(config, self.base_rate.read_value(), kl))
