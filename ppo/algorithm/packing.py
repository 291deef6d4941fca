"""Packing the rollouts of each share of the envs for transport, and joining them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ppo.algorithm.collector import Collected, Rollouts
from ppo.model.agent import HOST
from vecenv.ingraph import Rollout


class Packed(NamedTuple):
    """Rollouts of a share of the envs, as NumPy arrays that Ray can send.

    Attributes:
        teams: What the policy of each team has collected. Final observations are present only for ended rows,
            `[E, ...]`, ordered by step.
        envs: As of `Rollouts`, without observations and actions.
        restarted: Whether the envs began fresh episodes, because the process of the collector was replaced.
        restarts: How many times dead workers of the collector were replaced since its last rollout.
    """

    teams: list[Collected]
    envs: Rollout
    restarted: bool
    restarts: int


def packed(rollouts: Rollouts, *, restarted: bool, restarts: int) -> Packed:
    """Returns the rollouts of a local collector, ready to be sent."""
    teams = []
    for collected, arrays in zip(rollouts.collected, rollouts.arrays, strict=True):
        ended = arrays.terminated | arrays.truncated
        finals = tf.nest.map_structure(lambda leaf, ended=ended: leaf[ended], arrays.final_observations)
        acted = (collected.state, collected.noise, collected.predictions)
        rest = tf.nest.map_structure(lambda tensor: tensor.numpy(), acted)
        teams.append(Collected(arrays._replace(final_observations=finals), *rest))
    envs = rollouts.envs._replace(observations=None, actions=None, final_observations=None)
    return Packed(teams, envs, restarted, restarts)


def joined(parts: Sequence[Packed]) -> Rollouts:
    """Joins the rollouts of all shares, in the order of the envs."""
    collected, arrays = [], []
    for of_team in zip(*(part.teams for part in parts), strict=True):
        rollouts, states, noises, predictions = zip(*of_team, strict=True)
        whole = _joined_rollouts(rollouts)
        acted = (_concatenated(states, axis=0), _concatenated(noises), _concatenated(predictions))
        with tf.device(HOST):
            collected.append(Collected(*_tensors((whole, *acted))))
        arrays.append(whole)
    return Rollouts(collected, arrays, _concatenated([part.envs for part in parts]))


def _joined_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """Joins the rows of all shares. Final observations are zero in steps that end no episode."""
    whole = _concatenated([rollout._replace(final_observations=None) for rollout in rollouts])

    def final(observed: np.ndarray, *rows: np.ndarray) -> np.ndarray:
        found, first = np.zeros_like(observed[1:]), 0
        for rollout, of_share in zip(rollouts, rows, strict=True):
            ended = rollout.terminated | rollout.truncated
            found[:, first : first + ended.shape[1]][ended] = of_share
            first += ended.shape[1]
        return found

    finals = [rollout.final_observations for rollout in rollouts]
    return whole._replace(final_observations=tf.nest.map_structure(final, whole.observations, *finals))


def _concatenated(parts: Sequence[Any], axis: int = 1) -> Any:
    """Concatenates nested arrays along the axis of the rows. None stays None."""

    def leaf(*leaves: Any) -> Any:
        return leaves[0] if leaves[0] is None or len(leaves) == 1 else np.concatenate(leaves, axis)

    return tf.nest.map_structure(leaf, *parts)


def _tensors(nested: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), nested)
