"""Stacks of the last observations ("frames"), gathered from a rollout that holds every observation once.

As in Gymnasium's `FrameStackObservation`, the oldest frame is first, and at the start of an episode, the first
observation fills the empty places. Observations and stacks are nested like the observation space.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import tensorflow as tf
from gymnasium.vector.utils import batch_space


def stacked_space(space: gym.Space, size: int) -> gym.Space:
    """Returns the space of stacks of `size` observations, or `space` itself for a size of 1."""
    return space if size == 1 else batch_space(space, size)


def first_stacks(observations: Any, size: int) -> Any:
    """Returns the stacks `[N, size, ...]` at the first observations `[N, ...]` of an episode.

    A stack of size 1 is the observation itself, here and in `next_stacks`.
    """
    if size == 1:
        return observations
    return tf.nest.map_structure(lambda leaf: tf.repeat(leaf[:, None], size, axis=1), observations)


def next_stacks(stacks: Any, observations: Any, began: tf.Tensor, size: int) -> Any:
    """Returns the stacks `[N, size, ...]` that follow `stacks`.

    Args:
        stacks: The stacks one step before, `[N, size, ...]`.
        observations: The observations after the step, `[N, ...]`.
        began: Whether these observations begin an episode, `bool[N]`.
        size: Number of frames of a stack.
    """
    if size == 1:
        return observations

    def leaf(stack: tf.Tensor, observation: tf.Tensor) -> tf.Tensor:
        longer = tf.concat([stack[:, 1:], observation[:, None]], axis=1)
        first = tf.repeat(observation[:, None], size, axis=1)
        return tf.raw_ops.Select(condition=began, x=first, y=longer)  # takes whole rows, unlike `tf.where`

    return tf.nest.map_structure(leaf, stacks, observations)


def frames_of(stacks: Any, observations: Any) -> Any:
    """Returns all frames of a rollout, `[(T + size) * N, ...]`.

    Args:
        stacks: The stacks in the first state of the rollout, `[N, size, ...]`.
        observations: The observations of the rollout, `[T + 1, N, ...]`.
    """

    def leaf(stack: tf.Tensor, later: tf.Tensor) -> tf.Tensor:
        before = tf.transpose(stack[:, :-1], [1, 0, *range(2, stack.shape.rank)])
        frames = tf.concat([before, later], axis=0)
        return tf.reshape(frames, [-1, *later.shape[2:]])

    return tf.nest.map_structure(leaf, stacks, observations)


def rows_of_stacks(ended: tf.Tensor, size: int) -> tf.Tensor:
    """Returns the rows of `frames_of` that form the stack in each state of a rollout, `int32[(T + 1) * N, size]`.

    Args:
        ended: Whether each step ended an episode, `bool[T, N]`.
        size: Number of frames of a stack.
    """
    num_steps, num_envs = ended.shape
    # The stacks in the first state already repeat the first observation, so nothing begins before the second state.
    began = tf.reshape(tf.concat([tf.zeros([size, num_envs], tf.bool), ended], axis=0), [-1])
    rows = [tf.range((num_steps + 1) * num_envs, dtype=tf.int32) + (size - 1) * num_envs]
    for _ in range(size - 1):
        rows.append(tf.where(tf.gather(began, rows[-1]), rows[-1], rows[-1] - num_envs))
    return tf.stack(rows[::-1], axis=1)


def gathered(frames: Any, rows: tf.Tensor) -> Any:
    """Returns the stacks `[B, size, ...]` of the frames in `rows: int32[B, size]`."""
    return tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), frames)
