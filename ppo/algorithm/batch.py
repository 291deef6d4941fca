"""A rollout as the update sees it, and what a policy makes of all its states at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ppo.model.agent import Agent
from ppo.model.observations import Inputs
from ppo.model.recurrent import scan
from vecenv.ingraph import Rollout


class Batch(NamedTuple):
    """A rollout as the update needs it: time by env `[T, N, ...]`, or flat, `[T * N, ...]` and `[(T + 1) * N, ...]`."""

    raw: Inputs  # `[T * N, ...]`
    inputs: Inputs  # `[(T + 1) * N, ...]`
    actions: tf.Tensor  # `[T * N, ...]`
    rewards: tf.Tensor
    terminated: tf.Tensor
    truncated: tf.Tensor
    final_observations: Any
    state: tf.Tensor  # of the recurrent core before the first step, `[N, S]`
    first: tf.Tensor  # whether an episode begins, `[T + 1, N]`


def begins(rollout: Rollout) -> tf.Tensor:
    """Returns whether an episode begins in each of the T + 1 states, `bool[T + 1, N]`; of the first it is not asked."""
    done = tf.logical_or(rollout.terminated, rollout.truncated)
    return tf.concat([tf.zeros_like(done[:1]), done], axis=0)


def hidden_of(agent: Agent, inputs: Inputs, first: tf.Tensor, state: tf.Tensor) -> tuple[Any, tf.Tensor]:
    """Returns what an agent's networks see of all T + 1 states, flat, and its memory after the first T, `[T * N, S]`.

    Args:
        agent: Whose networks.
        inputs: Of all T + 1 states, `[(T + 1) * N, ...]`.
        first: Whether an episode begins, `bool[T + 1, N]`.
        state: The memory before the first step, `float32[N, S]`.
    """
    features, core = agent.network.features(inputs), agent.network.core
    if core is None:
        return features, tf.zeros([(first.shape[0] - 1) * first.shape[1], 0])
    states = scan(core, tf.reshape(features, [*first.shape, features.shape[-1]]), state, first)
    return flat(core.output(states)), flat(states[:-1])


def outputs_of(agent: Agent, inputs: Inputs, first: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
    """Returns an agent's distributions in the T states in which actions were taken, `float32[T * N, num_outputs]`.

    Args: As of `hidden_of`.
    """
    size = (first.shape[0] - 1) * first.shape[1]
    if agent.state_size:
        return agent.heads(hidden_of(agent, inputs, first, state)[0], inputs)[0][:size]
    inputs = without_last(inputs, size)
    return agent.heads(agent.network.features(inputs), inputs)[0]


def without_last(inputs: Inputs, size: int) -> Inputs:
    """Returns the first `size` rows: of T + 1 states, flat, the T in which actions were taken."""
    return {name: values[:size] for name, values in inputs.items()}


def flat(nested: Any) -> Any:
    """Returns `[T * N, ...]` for `[T, N, ...]`, leaf by leaf."""
    return tf.nest.map_structure(
        lambda column: tf.reshape(column, [column.shape[0] * column.shape[1], *column.shape[2:]]), nested
    )
