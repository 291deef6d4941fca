"""The update: one graph function that improves the policy on a rollout.

XLA compiles it, with two exceptions: a policy that sees images, because TensorFlow's convolutions are faster than XLA's
on CPUs; and a custom network that calls graph functions, see `CustomNetwork.can_compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from ppo.algorithm import objective
from ppo.algorithm.advantage import gae
from ppo.algorithm.chunks import in_chunks
from ppo.algorithm.normalize import RewardNormalizer, Statistics, statistics_of
from ppo.algorithm.optimizer import Adam
from ppo.algorithm.ranks import Ranks
from ppo.algorithm.rollout import Collected, ends_of, sequences_of
from ppo.algorithm.schedules import adapted_penalty, adapted_rate, clip_range_at, guarded_rate, learning_rate_at
from ppo.config import Config
from ppo.graphs import graph_function, graph_method
from ppo.model.agent import Agent, Predictions
from ppo.model.frames import frames_of, gathered, rows_of_stacks
from ppo.model.observations import Inputs
from ppo.model.recurrent import Sequences, flat
from ppo.seeds import shuffling_rng
from vecenv.ingraph import Rollout

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Means over the gradient steps of an update, in the order that `_step` returns them; NaN if there were no steps."""


ROWS = "rows"
"""Key under which a batch holds row indices into `Batch.frames` instead of network inputs."""


class Rows(Protocol):
    """The envs of a rollout, or a group of their agents."""

    def shaped(self, rollout: Rollout) -> Rollout:
        """Returns the rollout of these rows, in the shapes that `Rollout` documents."""


class Batch(NamedTuple):
    """A rollout in the form that the update reads.

    Attributes:
        rollout: The rollout, in the shapes that `Rollout` documents.
        raw: Observations in all states before normalization, `[(T + 1) * N, ...]`, see `Observations.raw`. With stacks
            of frames: the rows of `frames` that form each stack, `int32[(T + 1) * N, F]`, under the name `ROWS`.
        inputs: Inputs of the networks: `raw` after normalization. With stacks of frames, the same rows as `raw`.
        frames: With stacks of frames: all frames `[(T + F) * N, ...]`, nested like the observation space. Else None.
        sequences: The sequences that the T + 1 states form.
        rewards: Normalized rewards, `float32[T, N]`.
        seen: Statistics of the observations in which actions were taken, by leaf name.
        weights: 1 for steps to learn from; 0 where the agent was not alive, `float32[T * N]`. None to learn from all
            steps.
    """

    rollout: Rollout
    raw: Inputs
    inputs: Inputs
    frames: Any
    sequences: Sequences
    rewards: tf.Tensor
    seen: dict[str, Statistics]
    weights: tf.Tensor | None


class Samples(NamedTuple):
    """The data of a gradient step: `[B, ...]` for a minibatch, `[T * N, ...]` for a whole rollout.

    Attributes:
        inputs: Inputs of the networks, or rows as in `Batch.inputs`.
        actions: The actions, in the form that `Distribution.log_prob` takes.
        old_log_probs: Log-probabilities under the policy that acted.
        start_log_probs: Log-probabilities under the policy at the start of the update.
        start_outputs: Distribution parameters of the policy at the start of the update.
        advantages: Advantages, not standardized.
        targets: Targets for the values.
        weights: See `Batch.weights`.
    """

    inputs: Inputs
    actions: tf.Tensor
    old_log_probs: tf.Tensor
    start_log_probs: tf.Tensor
    start_outputs: tf.Tensor
    advantages: tf.Tensor
    targets: tf.Tensor
    weights: tf.Tensor | None


def shuffled(config: Config, update: int, rank: int | None = None) -> np.ndarray:
    """Returns the samples of each minibatch of an update, `int32[epochs * minibatches, B]`, as indices into T * N.

    Every epoch uses every sample once. With a recurrent policy, a minibatch holds all T steps of some envs, ordered by
    time. NumPy shuffles the indices, because sorting random keys under XLA takes an eighth of the whole update.

    Each of several ranks shuffles its own samples, so a minibatch has the same number of samples from each rank.

    Args:
        config: The settings of this rank's share.
        update: The number of the update.
        rank: The number of this rank; None if it is the only one.
    """
    recurrent = config.recurrent != "none"
    count = config.num_envs if recurrent else config.batch_size
    indices = np.tile(np.arange(count, dtype=np.int32), (config.epochs, 1))
    rng = shuffling_rng(config.seed, update, rank)
    order = rng.permuted(indices, axis=1).reshape(config.epochs * config.num_minibatches, 1, -1)
    if recurrent:  # step t of env i is sample t * N + i
        order = order + np.arange(config.num_steps, dtype=np.int32)[:, None] * config.num_envs
    return order.reshape(len(order), config.minibatch_size)


class Learner(tf.Module):
    """Owns the optimizer and the reward normalizer, and updates the agent.

    The update reads the rollout's slab where the envs wrote it: the slab's tensors alias shared memory, and XLA
    reads arguments in place.

    With several ranks, XLA compiles the parts between the collective operations, which it cannot contain. Each rank
    computes gradients and statistics from its own samples. The ranks average them before they are used.

    Args:
        config: The settings of the run.
        agent: The agent to update.
        envs: The envs of this rank, or a group of their agents.
        ranks: The ranks of the run.

    Attributes:
        penalty: Weight of the KL, for the objective "kl_penalty".
        rate: The learning rate of the schedule "kl_adaptive". With other schedules and `kl_limit`, the scheduled
            learning rate is multiplied by `rate / config.learning_rate`.
        compiled: Whether `learn` has compiled the update, which takes much longer than an update.
    """

    def __init__(
        self,
        config: Config,
        agent: Agent,
        envs: Rows,
        ranks: Ranks = Ranks(),  # noqa: B008
    ):
        super().__init__(name="learner")
        self._ranks = ranks
        self._whole = config
        self._config = config = ranks.share(config)
        self._agent = agent
        self._envs = envs
        self._variables = agent.learned
        self._sees_images = agent.observations.has_images
        recompute = config.recompute_advantages
        self._recomputes = not self._sees_images if recompute is None else recompute
        compiles = not self._sees_images and agent.network.can_compile
        self._in_parts = ranks.count > 1 and compiles
        self._parts = _Parts()
        self.update = graph_function(self._update, jit_compile=compiles and not self._in_parts)
        self.rewards = RewardNormalizer(
            self._whole.num_envs,
            gamma=config.gamma,
            clip=config.reward_clip,
            enabled=config.normalize_rewards,
            rows=ranks.rows(self._whole),
        )
        self.optimizer = Adam(self._variables, epsilon=config.adam_epsilon, max_grad_norm=config.max_grad_norm)
        self.penalty = tf.Variable(config.kl_init_penalty, trainable=False, name="kl_penalty")
        self.rate = tf.Variable(config.learning_rate, trainable=False, name="learning_rate")
        self.compiled = False

    @property
    def unseen(self) -> bool:
        """Whether a normalizer is enabled but has no statistics yet."""
        return self._agent.observations.unseen or self.rewards.unseen

    @graph_method()
    def observe(self, collected: Collected) -> None:
        """Adds a rollout to the statistics of observations and rewards. Changes nothing else."""
        self._agent.observations.merge(self._prepare(collected).seen)

    def learn(self, collected: Collected, number: int) -> dict[str, float]:
        """Runs one update with the schedules and the order of update `number`, and returns its metrics."""
        config, rank = self._whole, self._ranks.number if self._ranks.count > 1 else None
        rate = tf.constant(learning_rate_at(config, number), tf.float32)
        clip_range = tf.constant(clip_range_at(config, number), tf.float32)
        with self._ranks.raising():
            order = tf.constant(shuffled(self._config, number, rank))
            metrics = self.update(collected, rate, clip_range, order)
        self.compiled = True
        return {name: float(value) for name, value in metrics.items()}

    def _update(
        self, collected: Collected, learning_rate: tf.Tensor, clip_range: tf.Tensor, order: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Runs all epochs and minibatches on one rollout and returns the metrics, float32 scalars.

        Args:
            collected: A rollout. Probability ratios are relative to the policy that acted. Every KL is measured from
                the policy at the start of the update, which is a newer policy if `collected` has outputs.
            learning_rate: Scheduled learning rate, a float32 scalar; ignored by the schedule "kl_adaptive".
            clip_range: Clip range of the objective "clip", a float32 scalar.
            order: Samples of each minibatch, `int32[epochs * minibatches, B]`, see `shuffled`.
        """
        config = self._config
        rate = self._effective_rate(learning_rate)
        batch = self._prepare(collected)
        samples, values = self._part(self._start)(batch, collected)
        order = tf.reshape(order, [config.epochs, config.num_minibatches, config.minibatch_size])
        totals, taken = self._learn(batch, samples, order, rate, clip_range)
        kl = self._ranks.mean(self._part(self._total_kl)(batch, samples, order))
        self._adapt(kl)
        # Order: statistics change last, so that all predictions of this update use the rollout's normalization.
        self._agent.observations.merge(batch.seen)
        weights = samples.weights
        parts = [statistics_of(samples.targets - values, weights), statistics_of(samples.targets, weights)]
        left, total = (tf.cast(part.variance, tf.float32) for part in self._ranks.merged(parts))
        unexplained = left / (total + 1e-8)
        metrics = dict(zip(METRICS, tf.unstack(totals / taken), strict=True))
        metrics |= {"return_scale": self.rewards.moments.deviation, "gradient_steps": taken, "learning_rate": rate}
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
        """Adapts the KL penalty and the learning rate of the next update to the KL of this update."""
        config, base = self._config, self.rate.read_value()
        if config.objective == "kl_penalty":
            target = {"kl_target": config.kl_target, "initial": config.kl_init_penalty}
            self.penalty.assign(adapted_penalty(self.penalty.read_value(), kl, **target))
        if config.lr_schedule == "kl_adaptive":
            target = {"kl_target": config.kl_target, "initial": config.learning_rate}
            self.rate.assign(adapted_rate(base, kl, **target))
        elif config.kl_limit is not None:
            self.rate.assign(guarded_rate(base, kl, kl_limit=config.kl_limit, initial=config.learning_rate))

    def _part(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, compiled by XLA if the update is compiled in parts."""
        return self._parts(function) if self._in_parts else function

    def _prepare(self, collected: Collected) -> Batch:
        """Adds the rewards to the statistics, and returns everything that does not change during the update."""
        batch, returns = self._part(self._read_rollout)(collected)
        merged = self._ranks.merged([*([] if returns is None else [returns]), *batch.seen.values()])
        if returns is not None:
            self.rewards.moments.merge(merged.pop(0))
        seen = dict(zip(batch.seen, merged, strict=True))
        return batch._replace(rewards=self.rewards(batch.rewards), seen=seen)

    def _read_rollout(self, collected: Collected) -> tuple[Batch, Statistics | None]:
        """Returns the batch, with this rank's statistics and rewards that are not normalized.

        Also returns the statistics of the running returns, or None if rewards are not normalized.
        """
        rollout, observations = self._envs.shaped(collected.rollout), self._agent.observations
        ended, weights = ends_of(rollout), _weights_of(rollout)
        if collected.stacks is None:
            raw, frames = observations.raw(flat(rollout.observations)), None
            inputs = observations.normalized(raw)
        else:
            raw = inputs = {ROWS: rows_of_stacks(ended, self._config.frame_stack)}
            frames = frames_of(collected.stacks, rollout.observations)

        def read(rows: Inputs) -> Inputs:
            return rows if frames is None else observations.raw(gathered(frames, rows[ROWS]))

        rewards = tf.cast(rollout.rewards, tf.float32)
        batch = Batch(
            rollout=rollout,
            raw=raw,
            inputs=inputs,
            frames=frames,
            sequences=sequences_of(rollout, collected.state),
            rewards=rewards,
            seen=observations.statistics(self._without_last(raw), read, weights),
            weights=weights,
        )
        return batch, self.rewards.statistics(rewards, ended, weights)

    def _start(self, batch: Batch, collected: Collected) -> tuple[Samples, tf.Tensor]:
        """Returns the samples at the start of the update, and their predicted values, `float32[T * N]`."""
        start = self._predict(batch) if collected.start is None else collected.start
        advantages, targets = self._estimate(batch, start)
        return self._samples(batch, collected, start.outputs, advantages, targets), flat(start.values[:-1])

    def _without_last(self, inputs: Inputs) -> Inputs:
        """Drops the last of T + 1 states, in which no action was taken."""
        return {name: rows[: self._config.batch_size] for name, rows in inputs.items()}

    def _predict(self, batch: Batch) -> Predictions:
        """Returns the current agent's predictions for the rollout.

        Outputs and memory are of the T states in which actions were taken; values are `float32[T + 1, N]`.
        """
        outputs, values, memory = self._agent.unroll(self._encoded(batch), batch.sequences)
        size = self._config.batch_size
        return Predictions(outputs[:size], tf.reshape(values, batch.sequences.first.shape), memory[:size])

    def _estimate(self, batch: Batch, predictions: Predictions) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns advantages and value targets, `float32[T, N]` each, in the units of normalized rewards."""
        return gae(
            rewards=batch.rewards,
            values=predictions.values[:-1],
            next_values=self._next_values(predictions.values[1:], predictions.memory, batch),
            terminated=batch.rollout.terminated,
            truncated=batch.rollout.truncated,
            gamma=self._config.gamma,
            gae_lambda=self._config.gae_lambda,
        )

    def _next_values(self, following: tf.Tensor, memory: tf.Tensor, batch: Batch) -> tf.Tensor:
        """Replaces values of first states after truncation with values of the final observations."""
        rollout = batch.rollout
        cut = tf.logical_and(rollout.truncated, tf.logical_not(rollout.terminated))

        def with_final() -> tf.Tensor:
            states = (flat(rollout.final_observations), memory, self._without_last(batch.inputs))
            if not self._sees_images:
                # Rows without truncation hold data of an earlier rollout; `tf.where` discards their values.
                values = self._values_of_final(batch, *states)
                return tf.where(cut, tf.reshape(values, cut.shape), following)
            states = tf.nest.map_structure(lambda rows: tf.boolean_mask(rows, flat(cut)), states)
            return tf.tensor_scatter_nd_update(following, tf.where(cut), self._values_of_final(batch, *states))

        return tf.cond(tf.reduce_any(cut), with_final, lambda: following)

    def _values_of_final(self, batch: Batch, final: Any, memory: tf.Tensor, before: Inputs) -> tf.Tensor:
        """Returns the values of final observations, `float32[B]`.

        Args:
            batch: The rollout.
            final: The final observations, `[B, ...]`.
            memory: The policy's memory before them, `float32[B, S]`.
            before: The rows of `batch.inputs` in the states before them.
        """

        def encode(part: tuple[Any, Inputs]) -> Inputs:
            last, before = part
            if batch.frames is not None:
                stacks = gathered(batch.frames, before[ROWS][:, 1:])
                last = tf.nest.map_structure(lambda old, new: tf.concat([old, new[:, None]], axis=1), stacks, last)
            return self._agent.network.encode(self._agent.observations.inputs(last))

        return self._agent.advance(self._in_chunks(encode, (final, before)), memory).values

    def _encoded(self, batch: Batch) -> Inputs:
        """Returns the encoded inputs of all states of a rollout, `[(T + 1) * N, ...]`."""
        return self._in_chunks(lambda inputs: self._agent.network.encode(self._read(batch, inputs)), batch.inputs)

    def _in_chunks(self, encode: Callable[[Any], Inputs], rows: Any) -> Inputs:
        """Returns `encode(rows)`, computed for one minibatch at a time if the policy sees images."""
        return in_chunks(encode, rows, self._config.minibatch_size) if self._sees_images else encode(rows)

    def _read(self, batch: Batch, inputs: Inputs) -> Inputs:
        """Returns the inputs of the networks for some of `batch.inputs`, which may be rows of frames."""
        if batch.frames is None:
            return inputs
        return self._agent.observations.inputs(gathered(batch.frames, inputs[ROWS]))

    def _samples(
        self,
        batch: Batch,
        collected: Collected,
        start_outputs: tf.Tensor,
        advantages: tf.Tensor,
        targets: tf.Tensor,
    ) -> Samples:
        """Returns all T * N samples of the rollout. XLA removes the columns that no gradient step reads."""
        distribution = self._agent.distribution
        old_outputs = start_outputs if collected.outputs is None else collected.outputs
        actions = distribution.samples(old_outputs, flat(collected.noise), flat(batch.rollout.actions))
        return Samples(
            inputs=self._without_last(batch.inputs),
            actions=actions,
            old_log_probs=distribution.log_prob(old_outputs, actions),
            start_log_probs=distribution.log_prob(start_outputs, actions),
            start_outputs=start_outputs,
            advantages=flat(advantages),
            targets=flat(targets),
            weights=batch.weights,
        )

    def _learn(
        self, batch: Batch, samples: Samples, order: tf.Tensor, rate: tf.Tensor, clip_range: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes all gradient steps; returns the sums of their metrics, `float32[len(METRICS)]`, and their number.

        Args:
            batch: The rollout.
            samples: The samples of the rollout.
            order: Samples of each minibatch, `int32[epochs, minibatches, B]`.
            rate: Learning rate, a float32 scalar.
            clip_range: A float32 scalar.
        """
        config = self._config
        kl_of, reestimate = self._part(self._kl), self._part(self._reestimate)

        def epoch(number: tf.Tensor, *carried: tf.Tensor) -> tuple[tf.Tensor, ...]:
            current = samples
            if self._recomputes:  # redundant in the first epoch, but cheaper than another branch
                advantages, targets = flat(reestimate(batch))
                current = samples._replace(advantages=advantages, targets=targets)
            scales = self._scales(current.advantages, order[number])

            def step(k: tf.Tensor, totals: tf.Tensor, taken: tf.Tensor, going: tf.Tensor) -> tuple[tf.Tensor, ...]:
                indices, scale = order[number, k], None if scales is None else scales[k]

                def gradient_step() -> tf.Tensor:
                    return self._step(batch, current, indices, rate, clip_range, scale)

                def continues() -> tf.Tensor:
                    return self._ranks.mean(kl_of(batch, current, indices)) < config.kl_stop

                if config.kl_stop is None:
                    metrics = gradient_step()
                else:
                    going = tf.cond(going, continues, lambda: going)
                    metrics = tf.cond(going, gradient_step, lambda: tf.zeros([len(METRICS)]))
                return totals + metrics, taken + tf.cast(going, tf.float32), going

            return _repeat(config.num_minibatches, step, carried)

        nothing = (tf.zeros([len(METRICS)]), tf.constant(0.0), tf.constant(True))
        totals, taken, _ = _repeat(config.epochs, epoch, nothing)
        return totals, taken

    def _minibatch(self, batch: Batch, samples: Samples, indices: tf.Tensor) -> tuple[Samples, Sequences | None]:
        """Returns the samples with the given indices `int32[B]`, and the sequences that they form."""

        def rows(column: tf.Tensor | None) -> tf.Tensor | None:
            return None if column is None else tf.gather(column, indices)

        chosen = tf.nest.map_structure(rows, samples)
        return chosen._replace(inputs=self._read(batch, chosen.inputs)), self._sequences(batch, indices)

    def _sequences(self, batch: Batch, indices: tf.Tensor) -> Sequences | None:
        """Returns the sequences of a recurrent policy's minibatch, or None without a recurrent core."""
        if not self._agent.state_size:
            return None
        config, (first, state) = self._config, batch.sequences
        envs = indices[: config.minibatch_size // config.num_steps]  # samples of step 0 have the indices of their envs
        return Sequences(tf.gather(first[:-1], envs, axis=1), tf.gather(state, envs))

    def _reestimate(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns advantages and value targets with the current value function, `float32[T, N]` each."""
        return self._estimate(batch, self._predict(batch))

    def _scales(self, advantages: tf.Tensor, order: tf.Tensor) -> tf.Tensor | None:
        """Returns mean and standard deviation of the advantages in each minibatch of all ranks, `float32[M, 2]`.

        None if there is only one rank, which computes them in each gradient step, or if advantages are not scaled.

        Args:
            advantages: `float32[T * N]`.
            order: Samples of each minibatch of an epoch, `int32[M, B]`.
        """
        if self._ranks.count == 1 or not self._config.normalize_advantages:
            return None
        (merged,) = self._ranks.merged([statistics_of(tf.gather(advantages, tf.transpose(order)))])
        return tf.cast(tf.stack([merged.mean, tf.sqrt(merged.variance)], axis=1), tf.float32)

    def _kl(self, batch: Batch, samples: Samples, indices: tf.Tensor) -> tf.Tensor:
        """Returns the estimated KL of a minibatch since the start of the update, a scalar."""
        minibatch, sequences = self._minibatch(batch, samples, indices)
        log_probs = self._agent.distribution.log_prob(self._outputs(minibatch, sequences), minibatch.actions)
        return objective.approximate_kl(
            log_probs=log_probs, old_log_probs=minibatch.start_log_probs, weights=minibatch.weights
        )

    def _total_kl(self, batch: Batch, samples: Samples, order: tf.Tensor) -> tf.Tensor:
        """Returns the KL from the policy at the start of the update to the current policy, a scalar.

        It is the mean over all samples or, if the policy sees images, over the first quarter of the last epoch.
        """
        if not self._sees_images:
            outputs = self._predict(batch).outputs
            return objective.mean(self._agent.distribution.kl(samples.start_outputs, outputs), samples.weights)

        def add(k: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor]:
            minibatch, sequences = self._minibatch(batch, samples, order[-1, k])
            outputs = self._outputs(minibatch, sequences)
            kl = self._agent.distribution.kl(minibatch.start_outputs, outputs)
            return (total + objective.mean(kl, minibatch.weights),)

        number = -(-self._config.num_minibatches // 4)
        (total,) = _repeat(number, add, (tf.constant(0.0),))
        return total / number

    def _outputs(self, minibatch: Samples, sequences: Sequences | None) -> tf.Tensor:
        """Returns the current policy's distribution parameters for a minibatch, `float32[B, num_outputs]`."""
        return self._agent.unroll(self._agent.network.encode(minibatch.inputs), sequences).outputs

    def _step(
        self,
        batch: Batch,
        samples: Samples,
        indices: tf.Tensor,
        rate: tf.Tensor,
        clip_range: tf.Tensor,
        scale: tf.Tensor | None,
    ) -> tf.Tensor:
        """Takes one gradient step; returns its metrics, `float32[len(METRICS)]`.

        Args:
            batch: The rollout.
            samples: The samples of the rollout.
            indices: Samples of the minibatch, `int32[B]`.
            rate: Learning rate, a float32 scalar.
            clip_range: A float32 scalar.
            scale: Mean and standard deviation of the minibatch's advantages, `float32[2]`. None to compute them.
        """
        several, others = self._ranks.count > 1, tf.constant(0.0)
        if several and self._config.objective == "kl_penalty":
            own = self._part(self._start_kl)(batch, samples, indices)
            others = self._ranks.mean(own) - own
        gradients, metrics = self._part(self._gradients)(batch, samples, indices, clip_range, scale, others)
        if several:
            sizes = [*(variable.shape.num_elements() for variable in self._variables), len(METRICS) - 1]
            flattened = tf.concat([tf.reshape(part, [-1]) for part in (*gradients, metrics)], axis=0)
            *parts, metrics = tf.split(self._ranks.mean(flattened), sizes)
            gradients = [tf.reshape(part, own.shape) for part, own in zip(parts, self._variables, strict=True)]
        return tf.concat([metrics, [self._part(self._apply)(gradients, rate)]], axis=0)

    def _apply(self, gradients: list[tf.Tensor], rate: tf.Tensor) -> tf.Tensor:
        """Changes the weights; returns the norm of the gradient, a scalar."""
        return self.optimizer.apply(self._agent.inward(gradients), rate)

    def _start_kl(self, batch: Batch, samples: Samples, indices: tf.Tensor) -> tf.Tensor:
        """Returns the KL of a minibatch since the start of the update, a scalar, from the distributions."""
        minibatch, sequences = self._minibatch(batch, samples, indices)
        outputs = self._outputs(minibatch, sequences)
        return tf.reduce_mean(self._agent.distribution.kl(minibatch.start_outputs, outputs))

    def _gradients(
        self,
        batch: Batch,
        samples: Samples,
        indices: tf.Tensor,
        clip_range: tf.Tensor,
        scale: tf.Tensor | None,
        others: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the gradient of the loss on a minibatch, and all metrics but the gradient norm.

        Args:
            batch: See `_step`.
            samples: See `_step`.
            indices: See `_step`.
            clip_range: See `_step`.
            scale: See `_step`.
            others: With the objective "kl_penalty": the KL of all ranks' minibatches, minus the KL of this one.
        """
        config, distribution = self._config, self._agent.distribution
        minibatch, sequences = self._minibatch(batch, samples, indices)
        advantages, weights = minibatch.advantages, minibatch.weights
        if scale is not None:
            advantages = (advantages - scale[0]) / (scale[1] + objective.EPSILON)
        elif config.normalize_advantages:
            advantages = objective.standardize(advantages, weights)
        with tf.GradientTape() as tape:
            outputs, values, _ = self._agent.unroll(self._agent.network.encode(minibatch.inputs), sequences)
            log_probs = distribution.log_prob(outputs, minibatch.actions)
            ratio = tf.exp(log_probs - minibatch.old_log_probs)
            if config.objective == "clip":
                policy_loss = objective.clipped_surrogate(
                    ratio=ratio, advantages=advantages, clip_range=clip_range, weights=weights
                )
            else:
                policy_loss = objective.kl_penalized_surrogate(
                    ratio=ratio,
                    advantages=advantages,
                    kl=objective.mean(distribution.kl(minibatch.start_outputs, outputs), weights) + others,
                    penalty=self.penalty.read_value(),
                    kl_target=config.kl_target,
                    cutoff_factor=config.kl_cutoff_factor,
                    cutoff_coef=config.kl_cutoff_coef,
                    weights=weights,
                )
            value_loss = objective.value_loss(values=values, targets=minibatch.targets, weights=weights)
            entropy = objective.mean(distribution.entropy(outputs), weights)
            loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        kl = objective.approximate_kl(log_probs=log_probs, old_log_probs=minibatch.start_log_probs, weights=weights)
        clipped = objective.mean(tf.cast(tf.abs(ratio - 1) > clip_range, tf.float32), weights)
        return tape.gradient(loss, self._variables), tf.stack([policy_loss, value_loss, entropy, kl, clipped])


def _weights_of(rollout: Rollout) -> tf.Tensor | None:
    """Returns `Batch.weights`."""
    return None if rollout.valid is None else tf.cast(flat(rollout.valid[:-1]), tf.float32)


class _Parts:
    """Functions that XLA compiles separately. Keeps them, because the graph that calls them does not."""

    def __init__(self) -> None:
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the compiled function."""
        name = function.__qualname__
        if name not in self._compiled:
            self._compiled[name] = graph_function(function, jit_compile=True)
        return self._compiled[name]


def _repeat(
    count: int, step: Callable[..., tuple[tf.Tensor, ...]], carried: tuple[tf.Tensor, ...]
) -> tuple[tf.Tensor, ...]:
    """Returns `carried` after `carried = step(i, *carried)` for each i below `count`."""
    # Order: each step needs the weights that the previous step assigned.
    return tf.while_loop(
        lambda i, *_: i < count, lambda i, *carry: (i + 1, *step(i, *carry)), (0, *carried), parallel_iterations=1
    )[1:]
