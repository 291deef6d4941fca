"""Steps and rollouts as `vecenv.ingraph` hands them out, and what its `simulate` asks of an algorithm.

Import these names from `vecenv.ingraph`. Arrays are tensors of TensorFlow, which only that module knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gymnasium import Space

from vecenv import spaces as tree
from vecenv.memory import layout
from vecenv.spaces import Path


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


MEMBERS = {
    layout.OBSERVATION: "observations",
    layout.ACTION: "actions",
    layout.FINAL_OBSERVATION: "final_observations",
    layout.REWARD[0]: "rewards",
    layout.TERMINATED[0]: "terminated",
    layout.TRUNCATED[0]: "truncated",
    layout.EPISODE_RETURN[0]: "episode_returns",
    layout.EPISODE_LENGTH[0]: "episode_lengths",
}
"""Fields of the memory, each with the name of the member of `Rollout` that is made of it."""


def rollout_of(leaf: Callable[[Path], Any], observed: Space, acted: Space, *, finals: bool) -> Rollout:
    """Returns a rollout of what `leaf` gives for each leaf of the memory.

    Args:
        leaf: Called with paths, see `vecenv.memory.layout`.
        observed: Space of one observation.
        acted: Space of one action.
        finals: Whether there are final observations.
    """

    def nested(field: str, space: Space) -> Any:
        return tree.nest(space, lambda path: leaf((field, *path)))

    return Rollout(
        observations=nested(layout.OBSERVATION, observed),
        actions=nested(layout.ACTION, acted),
        rewards=leaf(layout.REWARD),
        terminated=leaf(layout.TERMINATED),
        truncated=leaf(layout.TRUNCATED),
        final_observations=nested(layout.FINAL_OBSERVATION, observed) if finals else None,
        episode_returns=leaf(layout.EPISODE_RETURN),
        episode_lengths=leaf(layout.EPISODE_LENGTH),
    )


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
