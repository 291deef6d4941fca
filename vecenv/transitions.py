"""transitions.py: steps and rollouts as `vecenv.ingraph` hands them out, and what its `simulate` asks of an algorithm.

Import these names from `vecenv.ingraph`. Arrays are tensors of TensorFlow, which only that module knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Step(NamedTuple):
    """What follows from a batch of actions: tensors that alias one slot."""

    observations: Any
    rewards: Any
    terminated: Any
    truncated: Any


class Rollout(NamedTuple):
    """T steps of N envs. Observations and final observations are nested as the observation space is.

    As `InGraphVectorEnv.rollout` hands it out, each leaf is a whole slab, `[T + 1, padded row length]`;
    `InGraphVectorEnv.shaped` gives the leaves the shapes that stand here.

    Attributes:
        observations: `[T + 1, N, ...]`: the states that actions were taken in, and the one after the last.
        actions: `[T, N, ...]`.
        rewards: `float64[T, N]`, of those actions.
        terminated: `bool[T, N]`: whether the step reached an end of the task.
        truncated: `bool[T, N]`: whether the step was the last one allowed.
        final_observations: `[T, N, ...]`: where an episode ended, its last observation, and anything
            elsewhere; None if autoreset is not SAME_STEP.
        episode_returns: `float64[T, N]`: reward of the episode so far, the total where it ended.
        episode_lengths: `int64[T, N]`: steps of the episode so far.
    """

    observations: Any
    actions: Any
    rewards: Any
    terminated: Any
    truncated: Any
    final_observations: Any
    episode_returns: Any
    episode_lengths: Any


class Transition(NamedTuple):
    """One step of N envs, as an algorithm sees it; observations and actions are nested as their spaces are.

    Attributes:
        observations: `[N, ...]`: the states that the actions were taken in.
        actions: `[N, ...]`, as `Algorithm.perform` returned them.
        rewards: `float64[N]`, of those actions.
        terminated: `bool[N]`: whether the step reached an end of the task.
        truncated: `bool[N]`: whether the step was the last one allowed.
        next_observations: `[N, ...]`: what the actions led to; where an episode ended its final observation, never
            the first one of the next.
    """

    observations: Any
    actions: Any
    rewards: Any
    terminated: Any
    truncated: Any
    next_observations: Any


class SimulatedStep(NamedTuple):
    """What a step of `simulate` came to.

    Attributes:
        observations: `[N, ...]`: what the next actions answer; where an episode ended, the first of the next.
        rewards: `float64[N]`.
        terminated: `bool[N]`.
        truncated: `bool[N]`.
        episode_returns: `float64[N]`: reward of the episode so far, the total where it ended in this step.
        episode_lengths: `int64[N]`: steps of the episode so far, counted likewise.
    """

    observations: Any
    rewards: Any
    terminated: Any
    truncated: Any
    episode_returns: Any
    episode_lengths: Any


class Algorithm(Protocol):
    """What `simulate` calls, once each in a step and in this order."""

    def begin_episode(self, began: Any) -> None:
        """Takes `bool[N]`: which envs are at the first step of an episode; all of them after a reset."""

    def perform(self, observations: Any) -> Any:
        """Returns the actions `[N, ...]` for the observations `[N, ...]`, in the dtypes of the action space."""

    def experience(self, transition: Transition) -> None:
        """Takes what followed from the actions."""

    def end_episode(self, ended: Any) -> None:
        """Takes `bool[N]`: which envs have finished an episode with this step."""
