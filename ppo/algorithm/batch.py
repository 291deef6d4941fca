"""The data of an update: a rollout with its advantages, cut into minibatches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ppo.algorithm import losses
from ppo.algorithm.collector import Collected
from ppo.algorithm.rewards import RewardNormalizer
from ppo.config import Config
from ppo.model.agent import Agent
from ppo.model.normalize import Statistics
from ppo.model.observations import MASK, Inputs
from ppo.model.recurrent import Sequences, flat
from ppo.runtime.graphs import repeat
from ppo.seeds import shuffling_rng
from vecenv.ingraph import Rollout


class Weights(NamedTuple):
    """Which samples count: 1 for those that do and 0 for all others, `float32[B]` each. None if all count.

    Attributes:
        lives: The steps of living agents, from which the value function learns.
        acts: The steps in which the agent was alive and its mask allowed an action, from which the policy learns.
    """

    lives: tf.Tensor | None = None
    acts: tf.Tensor | None = None


class Estimates(NamedTuple):
    """What the value function contributes to the samples, in the units of normalized rewards, `float32[B]` each.

    Attributes:
        advantages: Advantages, not standardized.
        targets: Targets for the values.
    """

    advantages: tf.Tensor
    targets: tf.Tensor


class Samples(NamedTuple):
    """The data of a gradient step: `[B, ...]` for a minibatch, `[T * N, ...]` for a whole rollout.

    Attributes:
        inputs: Inputs of the networks.
        actions: The actions, as samples that `Distribution.log_prob` takes.
        old_outputs: Distribution parameters of the policy that acted.
        old_log_probs: Log-probabilities of the actions under this policy.
        estimates: Advantages and targets.
        weights: Which samples count.
    """

    inputs: Inputs
    actions: Any
    old_outputs: tf.Tensor
    old_log_probs: tf.Tensor
    estimates: Estimates
    weights: Weights


class Batch(NamedTuple):
    """What does not change during an update.

    Attributes:
        rollout: The rollout.
        inputs: Inputs of the networks in all states, `[(T + 1) * N, ...]`.
        sequences: The sequences that the T + 1 states form.
        rewards: Normalized rewards, `float32[T, N]`.
        weights: Which of the T * N steps count.
        seen: Statistics of the observations in which actions were taken, by leaf name.
    """

    rollout: Rollout
    inputs: Inputs
    sequences: Sequences
    rewards: tf.Tensor
    weights: Weights
    seen: dict[str, Statistics]


def prepare(agent: Agent, rewards: RewardNormalizer, collected: Collected) -> Batch:
    """Adds the rewards to their statistics, and returns the batch. The statistics of observations stay unchanged."""
    rollout, observations = collected.rollout, agent.observations
    raw = observations.raw(flat(rollout.observations))
    acted = without_last(raw, rollout)
    weights = Weights()
    ended = tf.logical_or(rollout.terminated, rollout.truncated)
    if rollout.valid is not None:
        alive = rollout.valid[:-1]
        ended = tf.logical_or(ended, tf.logical_not(alive))  # nothing is carried across a dead agent's steps
        lives = acts = flat(alive)
        if observations.has_mask:
            acts = tf.logical_and(lives, tf.reduce_any(acted[MASK], axis=-1))
        weights = Weights(tf.cast(lives, tf.float32), tf.cast(acts, tf.float32))
    # No episode is marked as new in the first state. If one begins there, the memory is already 0.
    begins = tf.concat([tf.zeros_like(ended[:1]), ended], axis=0)
    fresh = tf.equal(rollout.episode_lengths[0], 1)
    return Batch(
        rollout=rollout,
        inputs=observations.normalized(raw),
        sequences=Sequences(begins, collected.state),
        rewards=rewards(tf.cast(rollout.rewards, tf.float32), fresh, ended, weights.lives),
        weights=weights,
        seen=observations.statistics(acted, weights.lives),
    )


def samples_of(config: Config, agent: Agent, batch: Batch, collected: Collected, gamma: tf.Tensor) -> Samples:
    """Returns all T * N samples of a rollout, with estimates of the value function that acted."""
    distribution, predicted = agent.distribution, collected.predictions
    outputs, memory = flat((predicted.outputs, predicted.memory))
    actions = distribution.samples(outputs, flat(collected.noise), flat(batch.rollout.actions))
    return Samples(
        inputs=without_last(batch.inputs, batch.rollout),
        actions=actions,
        old_outputs=outputs,
        old_log_probs=distribution.log_prob(outputs, actions),
        estimates=_estimates_for(config, agent, batch, predicted.values, memory, gamma),
        weights=batch.weights,
    )


def new_estimates(config: Config, agent: Agent, batch: Batch, gamma: tf.Tensor) -> Estimates:
    """Returns the estimates of the current value function."""
    encoded = agent.network.encode(batch.inputs)
    hidden, memory = agent.unroll(encoded, batch.sequences)
    values = tf.reshape(agent.values(hidden, encoded), batch.sequences.begins.shape)
    return _estimates_for(config, agent, batch, values, memory[: config.batch_size], gamma)


def _estimates_for(
    config: Config, agent: Agent, batch: Batch, values: tf.Tensor, memory: tf.Tensor, gamma: tf.Tensor
) -> Estimates:
    """Returns the estimates for the values of all states, `float32[T + 1, N]`.

    `memory` is the memory of the recurrent core after each state in which an action was taken, `float32[T * N, S]`.
    """
    advantages, targets = losses.gae(
        rewards=batch.rewards,
        values=values[:-1],
        next_values=next_values(config, agent, batch.rollout, values, memory),
        terminated=batch.rollout.terminated,
        truncated=batch.rollout.truncated,
        gamma=gamma,
        gae_lambda=config.gae_lambda,
    )
    return Estimates(flat(advantages), flat(targets))


def next_values(config: Config, agent: Agent, rollout: Rollout, values: tf.Tensor, memory: tf.Tensor) -> tf.Tensor:
    """Returns the values of the successor states, `float32[T, N]`: of final observations after truncation."""
    following = values[1:]
    cut = tf.logical_and(rollout.truncated, tf.logical_not(rollout.terminated))
    finals = (flat(rollout.final_observations), memory)

    def values_of(observations: Any, memory: tf.Tensor) -> tf.Tensor:
        encoded = agent.network.encode(agent.observations.inputs(observations))
        return agent.values(agent.advance(encoded, memory)[0], encoded)

    def of_all() -> tf.Tensor:
        # Rows without a truncation hold data of an earlier rollout; `tf.where` discards their values.
        return tf.where(cut, tf.reshape(values_of(*finals), cut.shape), following)

    def of_images() -> tf.Tensor:
        """Reads only final observations, because a CNN is slow, at most `minibatch_size` at a time."""
        places, size = tf.where(flat(cut)), config.minibatch_size

        def add(i: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
            rows = places[i * size : (i + 1) * size]
            some = tf.nest.map_structure(lambda leaf: tf.gather_nd(leaf, rows), finals)
            return tf.tensor_scatter_nd_update(found, rows, values_of(*some))

        return tf.reshape(repeat(-(-tf.shape(places)[0] // size), add, flat(following)), cut.shape)

    with_finals = of_images if agent.observations.has_images else of_all
    return tf.cond(tf.reduce_any(cut), with_finals, lambda: following)


def without_last(inputs: Inputs, rollout: Rollout) -> Inputs:
    """Drops the last of T + 1 states, in which no action was taken."""
    num_steps, num_envs = rollout.terminated.shape
    return {name: rows[: num_steps * num_envs] for name, rows in inputs.items()}


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


def minibatch_of(samples: Samples, sequences: Sequences, indices: tf.Tensor) -> tuple[Samples, Sequences | None]:
    """Returns the samples with the given indices `int32[B]`, a row of `shuffled`, and the sequences that they form.

    Without a recurrent core, they form none.
    """
    chosen = tf.nest.map_structure(lambda column: None if column is None else tf.gather(column, indices), samples)
    if not sequences.state.shape[1]:
        return chosen, None
    num_steps = sequences.begins.shape[0] - 1
    envs = indices[: indices.shape[0] // num_steps]  # samples of step 0 have the indices of their envs
    return chosen, Sequences(tf.gather(sequences.begins[:-1], envs, axis=1), tf.gather(sequences.state, envs))
