"""The update: one graph function that improves the policy on a rollout.

If the policy and the value function share no layers, they learn in two chains of gradient steps. Within an epoch,
neither chain depends on the other, so TensorFlow runs both concurrently.

XLA compiles the whole update if there is one chain, and each chain if there are two. It compiles nothing for a policy
that sees images, because TensorFlow's convolutions are faster than XLA's on CPUs, or for a custom network that calls
graph functions; see `CustomNetwork.can_compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ppo.algorithm import losses
from ppo.algorithm.optimizer import Adam
from ppo.algorithm.rollout import Collected, ends_of, sequences_of
from ppo.algorithm.schedules import adapted_penalty, adapted_rate, guarded_rate, learning_rate_at
from ppo.config import Config
from ppo.graphs import graph_function
from ppo.model.agent import Agent
from ppo.model.normalize import RewardNormalizer, Statistics, statistics_of
from ppo.model.observations import MASK, Inputs
from ppo.model.recurrent import Sequences, flat
from ppo.seeds import shuffling_rng
from vecenv.ingraph import Rollout

compiles_updates = True
"""Whether XLA compiles updates where it can. Tests that are not about updates set this to False to save time."""

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Averages over the gradient steps of an update, NaN if there was none.

They are means and, for `grad_norm`, the root mean square of the norm of all gradients, which does not depend on the
number of chains.
"""

TOTALS = ("gradient_steps", *METRICS, "kl")
"""What a chain returns: sums over its gradient steps, and the KL of the update. What only the other computes is 0.

For `grad_norm`, it is the sum of the squared norms.
"""


class Batch(NamedTuple):
    """A rollout in the form that the update reads.

    Attributes:
        rollout: The rollout.
        inputs: Inputs of the networks in all states, `[(T + 1) * N, ...]`.
        sequences: The sequences that the T + 1 states form.
        rewards: Normalized rewards, `float32[T, N]`.
        seen: Statistics of the observations in which actions were taken, by leaf name.
        lives: 1 for steps of living agents and 0 for all others, `float32[T * N]`. None if all count.
        acts: 1 for steps in which the agent was alive and its mask allowed an action, and 0 for all others,
            `float32[T * N]`. None if all count.
    """

    rollout: Rollout
    inputs: Inputs
    sequences: Sequences
    rewards: tf.Tensor
    seen: dict[str, Statistics]
    lives: tf.Tensor | None
    acts: tf.Tensor | None


class Samples(NamedTuple):
    """The data of a gradient step: `[B, ...]` for a minibatch, `[T * N, ...]` for a whole rollout.

    Attributes:
        inputs: Inputs of the networks.
        actions: The actions, in the form that `Distribution.log_prob` takes.
        old_outputs: Distribution parameters of the policy that acted.
        old_log_probs: Log-probabilities of the actions under this policy.
        advantages: Advantages, not standardized.
        targets: Targets for the values.
        lives: See `Batch.lives`. The value function learns from these steps.
        acts: See `Batch.acts`. The policy learns from these steps.
    """

    inputs: Inputs
    actions: tf.Tensor
    old_outputs: tf.Tensor
    old_log_probs: tf.Tensor
    advantages: tf.Tensor
    targets: tf.Tensor
    lives: tf.Tensor | None
    acts: tf.Tensor | None


class Estimates(NamedTuple):
    """What the value function contributes to the samples of an epoch, `float32[T * N]` each. See `Samples`."""

    advantages: tf.Tensor
    targets: tf.Tensor


class Chain(NamedTuple):
    """A group of variables that learn together.

    Attributes:
        adam: Their optimizer.
        policy: Whether the group contains the policy.
        value: Whether the group contains the value function.
    """

    adam: Adam
    policy: bool
    value: bool


def shuffled(config: Config, update: int) -> np.ndarray:
    """Returns the samples of each minibatch of an update, `int32[epochs * minibatches, B]`, as indices into T * N.

    Every epoch uses every sample once. With a recurrent policy, a minibatch holds all T steps of some envs, ordered by
    time. NumPy shuffles the indices, because sorting random keys under XLA takes an eighth of the whole update.
    """
    recurrent = config.recurrent != "none"
    count = config.num_envs if recurrent else config.batch_size
    indices = np.tile(np.arange(count, dtype=np.int32), (config.epochs, 1))
    rng = shuffling_rng(config.seed, update)
    order = rng.permuted(indices, axis=1).reshape(config.epochs * config.num_minibatches, 1, -1)
    if recurrent:  # step t of env i is sample t * N + i
        order = order + np.arange(config.num_steps, dtype=np.int32)[:, None] * config.num_envs
    return order.reshape(len(order), config.minibatch_size)


class Learner(tf.Module):
    """Owns the optimizers and the reward normalizer, and updates the agent.

    The update reads the rollout's slab where the envs wrote it: the slab's tensors alias shared memory, and XLA
    reads arguments in place.

    Args:
        config: The settings of the run or, with several agents, of a team; see `Config.of_team`.
        agent: The agent to update.

    Attributes:
        optimizers: One for each group of `Agent.learned_groups`.
        penalty: Weight of the KL, for the objective "kl_penalty". It begins at 1, as in BatchPPO.
        rate: The learning rate of the schedule "kl_adaptive". With other schedules and `kl_limit`, the scheduled
            learning rate is multiplied by `rate / config.learning_rate`.
        compiled: Whether `learn` has compiled the update, which takes much longer than an update.
        observe: A graph function that only adds a rollout to the statistics of observations and rewards.
        update: The graph function of `learn`.
    """

    def __init__(self, config: Config, agent: Agent):
        super().__init__(name="learner")
        self._config, self._agent = config, agent
        self._sees_images = agent.observations.has_images
        # With images, predicting the values of all states again would take too long.
        self._recomputes = config.recompute_advantages and not self._sees_images
        compiles = compiles_updates and not self._sees_images and agent.network.can_compile
        self.rewards = RewardNormalizer(config.num_envs, gamma=config.gamma, enabled=config.normalize_rewards)
        self.optimizers = [
            Adam(variables, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm)
            for variables in agent.learned_groups
        ]
        first, last = self.optimizers[0], self.optimizers[-1]  # see `Agent.learned_groups`
        chains = [Chain(adam, policy=adam is first, value=adam is last) for adam in self.optimizers]

        self._rounds: list[Any] = [functools.partial(self._round, chain) for chain in chains]
        if compiles and len(chains) > 1:  # XLA would run them one after another if it compiled the whole update
            self._rounds = [graph_function(learn, jit_compile=True) for learn in self._rounds]
        self.observe = graph_function(self._observe)
        self.update = graph_function(self._update, jit_compile=compiles and len(chains) == 1)
        self.penalty = tf.Variable(1.0, trainable=False, name="kl_penalty")
        self.rate = tf.Variable(config.learning_rate, trainable=False, name="learning_rate")
        self.compiled = False

    @property
    def unseen(self) -> bool:
        """Whether a normalizer is enabled but has no statistics yet."""
        return self._agent.observations.unseen or self.rewards.unseen

    def _observe(self, collected: Collected) -> None:
        self._agent.observations.merge(self._prepare(collected).seen)

    def learn(self, collected: Collected, number: int) -> dict[str, float]:
        """Runs one update with the schedules and the order of update `number`, and returns its metrics."""
        rate = tf.constant(learning_rate_at(self._config, number), tf.float32)
        order = tf.constant(shuffled(self._config, number))
        metrics = self.update(collected, rate, order)
        self.compiled = True
        return {name: float(value) for name, value in metrics.items()}

    def _update(self, collected: Collected, learning_rate: tf.Tensor, order: tf.Tensor) -> dict[str, tf.Tensor]:
        """Runs all epochs and minibatches on one rollout and returns the metrics, float32 scalars.

        Args:
            collected: A rollout of the current policy.
            learning_rate: Scheduled learning rate, a float32 scalar; ignored by the schedule "kl_adaptive".
            order: Samples of each minibatch, `int32[epochs * minibatches, B]`; see `shuffled`.
        """
        config = self._config
        rate, penalty = self._effective_rate(learning_rate), self.penalty.read_value()
        batch = self._prepare(collected)
        samples = self._samples(batch, collected)
        taken, *totals, kl = tf.unstack(self._learn(batch, samples, order, rate))
        self._adapt(kl)
        # Order: statistics change last, so that all predictions of this update use the rollout's normalization.
        self._agent.observations.merge(batch.seen)
        metrics = {name: total / taken for name, total in zip(METRICS, totals, strict=True)}
        metrics["grad_norm"] = tf.sqrt(metrics["grad_norm"])
        metrics |= {"return_scale": self.rewards.moments.deviation, "learning_rate": rate, "kl": kl}
        errors = samples.targets - flat(collected.predictions.values[:-1])
        left, whole = (statistics_of(part, batch.lives).variance for part in (errors, samples.targets))
        unexplained = tf.cast(left, tf.float32) / (tf.cast(whole, tf.float32) + losses.EPSILON)
        metrics |= {"gradient_steps": taken, "explained_variance": 1.0 - unexplained}
        if self._agent.log_std is not None:
            metrics["action_std"] = tf.reduce_mean(tf.exp(tf.maximum(self._agent.log_std, config.min_log_std)))
        if config.objective == "kl_penalty":
            metrics["kl_penalty"] = penalty
        return metrics

    def _learn(self, batch: Batch, samples: Samples, order: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Takes all gradient steps, and returns the sum of what the chains return, `float32[len(TOTALS)]`.

        Args:
            batch: The rollout.
            samples: The samples of the rollout.
            order: Samples of each minibatch, `int32[epochs * minibatches, B]`.
            rate: Learning rate, a float32 scalar.
        """
        config = self._config
        count = config.epochs if self._recomputes else 1
        rounds = tf.reshape(order, [count, -1, config.minibatch_size])

        def step(number: tf.Tensor, estimates: Estimates, totals: tf.Tensor) -> tuple[tf.Tensor, Estimates, tf.Tensor]:
            current, following = samples._replace(**estimates._asdict()), estimates
            for learn in self._rounds:
                more, found = learn(batch, current, rounds[number], rate, number == count - 1)
                totals += more
                following = following if found is None else found
            return number + 1, following, totals

        # Order: each round needs the weights and the advantages of the previous one. Within a round, no chain writes a
        # variable that the other one uses, so they run concurrently.
        begin = (0, Estimates(samples.advantages, samples.targets), tf.zeros(len(TOTALS)))
        return tf.while_loop(lambda number, *_: number < count, step, begin, parallel_iterations=1)[2]

    def _effective_rate(self, scheduled: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of this update: the scheduled rate, adapted to the KL if so configured."""
        config, base = self._config, self.rate.read_value()
        if config.lr_schedule == "kl_adaptive":
            return base
        if config.kl_limit is None:
            return scheduled
        return tf.where(base < config.learning_rate, scheduled * (base / config.learning_rate), scheduled)

    def _adapt(self, kl: tf.Tensor) -> None:
        """Adapts the KL penalty and the learning rate of the next update to the KL of this update."""
        config, base = self._config, self.rate.read_value()
        if config.objective == "kl_penalty":
            self.penalty.assign(adapted_penalty(self.penalty.read_value(), kl, kl_target=config.kl_target))
        if config.lr_schedule == "kl_adaptive":
            self.rate.assign(adapted_rate(base, kl, kl_target=config.kl_target, initial=config.learning_rate))
        elif config.kl_limit is not None:
            self.rate.assign(guarded_rate(base, kl, kl_limit=config.kl_limit, initial=config.learning_rate))

    def _prepare(self, collected: Collected) -> Batch:
        """Adds the rewards to the statistics, and returns everything that does not change during the update."""
        rollout, observations = collected.rollout, self._agent.observations
        raw = observations.raw(flat(rollout.observations))
        lives, acts = self._counting(rollout, raw)
        return Batch(
            rollout=rollout,
            inputs=observations.normalized(raw),
            sequences=sequences_of(rollout, collected.state),
            rewards=self._normalized_rewards(rollout, lives),
            seen=observations.statistics(self._without_last(raw), lives),
            lives=lives,
            acts=acts,
        )

    def _normalized_rewards(self, rollout: Rollout, lives: tf.Tensor | None) -> tf.Tensor:
        """Adds the rewards to the statistics, and returns normalized rewards, `float32[T, N]`."""
        begins = tf.equal(rollout.episode_lengths[0], 1)
        return self.rewards(tf.cast(rollout.rewards, tf.float32), begins, ends_of(rollout), lives)

    def _counting(self, rollout: Rollout, raw: Inputs) -> tuple[tf.Tensor | None, tf.Tensor | None]:
        """Returns `Batch.lives` and `Batch.acts`."""
        if rollout.valid is None:
            return None, None
        lives = acts = flat(rollout.valid[:-1])
        if self._agent.observations.has_mask:
            acts = tf.logical_and(lives, tf.reduce_any(self._without_last(raw)[MASK], axis=-1))
        return tf.cast(lives, tf.float32), tf.cast(acts, tf.float32)

    def _without_last(self, inputs: Inputs) -> Inputs:
        """Drops the last of T + 1 states, in which no action was taken."""
        return {name: rows[: self._config.batch_size] for name, rows in inputs.items()}

    def _samples(self, batch: Batch, collected: Collected) -> Samples:
        """Returns all T * N samples of the rollout."""
        distribution, values = self._agent.distribution, collected.predictions.values
        outputs, memory = flat((collected.predictions.outputs, collected.predictions.memory))
        actions = distribution.samples(outputs, flat(collected.noise), flat(batch.rollout.actions))
        estimates = self._estimate(batch, values, memory)
        return Samples(
            inputs=self._without_last(batch.inputs),
            actions=actions,
            old_outputs=outputs,
            old_log_probs=distribution.log_prob(outputs, actions),
            advantages=estimates.advantages,
            targets=estimates.targets,
            lives=batch.lives,
            acts=batch.acts,
        )

    def _new_estimates(self, batch: Batch) -> Estimates:
        """Returns the estimates of the current value function."""
        encoded = self._agent.network.encode(batch.inputs)
        hidden, memory = self._agent.unroll(encoded, batch.sequences)
        values = tf.reshape(self._agent.values(hidden, encoded), batch.sequences.first.shape)
        return self._estimate(batch, values, memory[: self._config.batch_size])

    def _estimate(self, batch: Batch, values: tf.Tensor, memory: tf.Tensor) -> Estimates:
        """Returns advantages and value targets in the units of normalized rewards.

        Args:
            batch: The rollout.
            values: Values of its states, `float32[T + 1, N]`.
            memory: Memory of the recurrent core after each state in which an action was taken, `float32[T * N, S]`.
        """
        advantages, targets = losses.gae(
            rewards=batch.rewards,
            values=values[:-1],
            next_values=self._next_values(values, memory, batch.rollout),
            terminated=batch.rollout.terminated,
            truncated=batch.rollout.truncated,
            gamma=self._config.gamma,
            gae_lambda=self._config.gae_lambda,
        )
        return Estimates(flat(advantages), flat(targets))

    def _next_values(self, values: tf.Tensor, memory: tf.Tensor, rollout: Rollout) -> tf.Tensor:
        """Returns the values of the successor states, `float32[T, N]`: of final observations after truncation."""
        following = values[1:]
        cut = tf.logical_and(rollout.truncated, tf.logical_not(rollout.terminated))

        def values_of(observations: Any, memory: tf.Tensor) -> tf.Tensor:
            agent = self._agent
            encoded = agent.network.encode(agent.observations.inputs(observations))
            return agent.values(agent.advance(encoded, memory)[0], encoded)

        def with_final() -> tf.Tensor:
            states = (flat(rollout.final_observations), memory)
            if not self._sees_images:
                # Rows without a truncation hold data of an earlier rollout; `tf.where` discards their values.
                return tf.where(cut, tf.reshape(values_of(*states), cut.shape), following)
            places, size = tf.where(flat(cut)), self._config.minibatch_size

            def add(i: tf.Tensor, found: tf.Tensor) -> tf.Tensor:  # a CNN reads as many images as in a gradient step
                rows = places[i * size : (i + 1) * size]
                some = tf.nest.map_structure(lambda leaf: tf.gather_nd(leaf, rows), states)
                return tf.tensor_scatter_nd_update(found, rows, values_of(*some))

            return tf.reshape(_repeat(-(-tf.shape(places)[0] // size), add, flat(following)), cut.shape)

        return tf.cond(tf.reduce_any(cut), with_final, lambda: following)

    def _round(
        self,
        chain: Chain,
        batch: Batch,
        samples: Samples,
        order: tf.Tensor,
        rate: tf.Tensor,
        last: tf.Tensor,
    ) -> tuple[tf.Tensor, Estimates | None]:
        """Takes one chain's gradient steps of one round: an epoch, or all epochs if advantages are not recomputed.

        Args:
            chain: The chain.
            batch: The rollout.
            samples: The samples of the rollout.
            order: Samples of each minibatch, `int32[steps, B]`.
            rate: Learning rate, a float32 scalar.
            last: Whether this is the last round.

        Returns:
            The chain's part of `TOTALS`; and the estimates for the next round, or None if this chain computes none.
        """

        def step(k: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
            return totals + self._step(chain, *self._minibatch(batch, samples, order[k]), rate)

        totals = _repeat(tf.shape(order)[0], step, tf.zeros(len(TOTALS)))
        if chain.policy:
            kl = tf.cond(last, lambda: self._total_kl(batch, samples, order), lambda: tf.constant(0.0))
            totals += _totals({"kl": kl})
        if not chain.value or not self._recomputes:
            return totals, None
        return totals, tf.cond(
            last,
            lambda: Estimates(samples.advantages, samples.targets),
            lambda: self._new_estimates(batch),
        )

    def _minibatch(self, batch: Batch, samples: Samples, indices: tf.Tensor) -> tuple[Samples, Sequences | None]:
        """Returns the samples with the given indices `int32[B]`, and the sequences that they form."""

        def rows(column: tf.Tensor | None) -> tf.Tensor | None:
            return None if column is None else tf.gather(column, indices)

        return tf.nest.map_structure(rows, samples), self._sequences(batch, indices)

    def _sequences(self, batch: Batch, indices: tf.Tensor) -> Sequences | None:
        """Returns the sequences of a recurrent policy's minibatch, or None without a recurrent core."""
        if not self._agent.state_size:
            return None
        config, (first, state) = self._config, batch.sequences
        envs = indices[: config.minibatch_size // config.num_steps]  # samples of step 0 have the indices of their envs
        return Sequences(tf.gather(first[:-1], envs, axis=1), tf.gather(state, envs))

    def _step(self, chain: Chain, minibatch: Samples, sequences: Sequences | None, rate: tf.Tensor) -> tf.Tensor:
        """Takes one gradient step; returns its part of `TOTALS`.

        Without a step of a living agent in the minibatch, nothing changes, and the result is 0.
        """
        if minibatch.lives is None:
            return self._gradient_step(chain, minibatch, sequences, rate)
        return tf.cond(
            tf.reduce_any(minibatch.lives > 0),
            lambda: self._gradient_step(chain, minibatch, sequences, rate),
            lambda: tf.zeros(len(TOTALS)),
        )

    def _gradient_step(
        self, chain: Chain, minibatch: Samples, sequences: Sequences | None, rate: tf.Tensor
    ) -> tf.Tensor:
        config, loss = self._config, 0.0
        found: dict[str, Any] = {}
        with tf.GradientTape() as tape:
            encoded = self._agent.network.encode(minibatch.inputs)
            hidden, _ = self._agent.unroll(encoded, sequences)
            if chain.policy:
                found |= self._policy_metrics(minibatch, self._agent.outputs(hidden, encoded)) | {"gradient_steps": 1.0}
                loss += found["policy_loss"] - config.entropy_coef * found["entropy"]
            if chain.value:
                values = self._agent.values(hidden, encoded)
                found["value_loss"] = losses.value_loss(
                    values=values, targets=minibatch.targets, weights=minibatch.lives
                )
                loss += config.value_coef * found["value_loss"]
        gradients = tape.gradient(loss, chain.adam.learned)
        if chain.policy:
            gradients = self._agent.inward(gradients)
        found["grad_norm"] = tf.square(chain.adam.apply(gradients, rate))
        return _totals(found)

    def _policy_metrics(self, minibatch: Samples, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the metrics of the policy on a minibatch, by name, for the policy's outputs `[B, num_outputs]`."""
        config, distribution, acts = self._config, self._agent.distribution, minibatch.acts
        advantages = minibatch.advantages
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
        clipped = losses.mean(tf.cast(tf.abs(ratio - 1) > config.clip_range, tf.float32), acts)
        return {
            "policy_loss": policy_loss,
            "entropy": losses.mean(distribution.entropy(outputs), acts),
            "approx_kl": losses.approximate_kl(
                log_probs=log_probs, old_log_probs=minibatch.old_log_probs, weights=acts
            ),
            "clip_fraction": clipped,
        }

    def _total_kl(self, batch: Batch, samples: Samples, order: tf.Tensor) -> tf.Tensor:
        """Returns the KL from the policy at the start of the update to the current policy, a scalar.

        It is the mean over all samples or, if the policy sees images, over the first quarter of the last epoch.
        """
        distribution = self._agent.distribution

        def outputs(inputs: Inputs, sequences: Sequences | None) -> tf.Tensor:
            encoded = self._agent.network.encode(inputs)
            return self._agent.outputs(self._agent.unroll(encoded, sequences)[0], encoded)

        if not self._sees_images:
            now = outputs(batch.inputs, batch.sequences)[: self._config.batch_size]
            return losses.mean(distribution.kl(samples.old_outputs, now), samples.acts)

        last = order[-self._config.num_minibatches :]

        def add(k: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
            minibatch, sequences = self._minibatch(batch, samples, last[k])
            now = outputs(minibatch.inputs, sequences)
            return total + losses.mean(distribution.kl(minibatch.old_outputs, now), minibatch.acts)

        number = -(-self._config.num_minibatches // 4)
        return _repeat(number, add, tf.constant(0.0)) / number


def _totals(found: dict[str, Any]) -> tf.Tensor:
    """Returns these values, `float32[len(TOTALS)]`, with 0 for all others."""
    return tf.stack([found.get(name, 0.0) for name in TOTALS])


def _repeat(count: int | tf.Tensor, step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], carried: tf.Tensor) -> tf.Tensor:
    """Returns `carried` after `carried = step(i, carried)` for each i below `count`."""
    # Order: each step needs the weights that the previous step assigned.
    return tf.while_loop(
        lambda i, _: i < count, lambda i, carry: (i + 1, step(i, carry)), (0, carried), parallel_iterations=1
    )[1]
