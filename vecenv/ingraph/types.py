"""The types of `vecenv.ingraph`: steps and rollouts, and the interfaces of envs and algorithms for `simulate`.

Import these names from `vecenv.ingraph`. Arrays are TensorFlow tensors, but this module does not import TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from gymnasium import Space

from vecenv import spaces as tree
from vecenv.memory import layout
from vecenv.spaces import Path


class Step(NamedTuple):
    """The results of a batch of actions: tensors that alias one slot.

    Attributes:
        observations: `[N, ...]`, nested like the observation space.
        rewards: `float64[N]`.
        terminated: `bool[N]`.
        truncated: `bool[N]`.
    """

    observations: Any
    rewards: Any
    terminated: Any
    truncated: Any


class Rollout(NamedTuple):
    """T steps of N envs. Observations and final observations are nested like the observation space.

    `InGraphVectorEnv.rollout` returns whole slabs, `[T + 1, padded slot length]`; `InGraphVectorEnv.shaped` gives the
    leaves the shapes below.

    Attributes:
        observations: `[T + 1, N, ...]`: the states in which the actions were taken, and the state after the last one.
        actions: `[T, N, ...]`.
        rewards: `float64[T, N]`: the rewards of the actions.
        terminated: `bool[T, N]`: whether the step reached a terminal state.
        truncated: `bool[T, N]`: whether the step cut the episode off, for example at its time limit.
        final_observations: `[T, N, ...]`: the last observation of an episode where one ended, and undefined
            elsewhere; None if the autoreset mode is not SAME_STEP.
        episode_returns: `float64[T, N]`: the sum of the episode's rewards so far, and the total where it ended.
        episode_lengths: `int64[T, N]`: the number of the episode's steps so far, and the total where it ended.
        episode_infos: `float64[T, N]` for each of the vector env's `info_keys`: the info's value at the last step of an
            episode where one ended (NaN if the info lacks the key), and undefined elsewhere.
        valid: Whether each row is in use in each state, `bool[T + 1, N]`, for code that builds rollouts from parts of
            other rollouts. A step counts only if the row was in use before it. None if all rows are always in use.
    """

    observations: Any
    actions: Any
    rewards: Any
    terminated: Any
    truncated: Any
    final_observations: Any
    episode_returns: Any
    episode_lengths: Any
    episode_infos: dict[str, Any]
    valid: Any = None


MEMBERS = {
    layout.OBSERVATION: "observations",
    layout.ACTION: "actions",
    layout.FINAL_OBSERVATION: "final_observations",
    layout.REWARD[0]: "rewards",
    layout.TERMINATED[0]: "terminated",
    layout.TRUNCATED[0]: "truncated",
    layout.EPISODE_RETURN[0]: "episode_returns",
    layout.EPISODE_LENGTH[0]: "episode_lengths",
    layout.EPISODE_INFO: "episode_infos",
}
"""Maps each field of the memory to the member of `Rollout` that it becomes."""


def rollout_of(
    leaf: Callable[[Path], Any], observed: Space, acted: Space, *, finals: bool, info_keys: Sequence[str]
) -> Rollout:
    """Returns a rollout with `leaf(path)` for each field of the memory.

    Args:
        leaf: Called with paths, see `vecenv.memory.layout`.
        observed: The observation space of one env.
        acted: The action space of one env.
        finals: Whether there are final observations.
        info_keys: Keys of `episode_infos`.
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
        episode_infos={key: leaf((layout.EPISODE_INFO, key)) for key in info_keys},
    )


class Transition(NamedTuple):
    """One step of N envs, as an algorithm sees it. Observations and actions are nested like their spaces.

    Attributes:
        observations: `[N, ...]`: the states in which the actions were taken.
        actions: `[N, ...]`, as `Algorithm.perform` returned them.
        rewards: `float64[N]`: the rewards of the actions.
        terminated: `bool[N]`: whether the step reached a terminal state.
        truncated: `bool[N]`: whether the step cut the episode off, for example at its time limit.
        next_observations: `[N, ...]`: the states that the actions led to. Where an episode ended, this is its final
            observation, never the first observation of the next episode.
    """

    observations: Any
    actions: Any
    rewards: Any
    terminated: Any
    truncated: Any
    next_observations: Any


class SimulatedStep(NamedTuple):
    """The results of one step of `simulate`.

    Attributes:
        observations: `[N, ...]`: the current observations. Where an episode ended, this is the first observation of
            the next episode.
        rewards: `float64[N]`.
        terminated: `bool[N]`.
        truncated: `bool[N]`.
        episode_returns: `float64[N]`: the sum of the episode's rewards so far, and the total where it ended.
        episode_lengths: `int64[N]`: the number of the episode's steps so far, and the total where it ended.
    """

    observations: Any
    rewards: Any
    terminated: Any
    truncated: Any
    episode_returns: Any
    episode_lengths: Any


class Algorithm(Protocol):
    """The methods that `simulate` calls, each once per step and in this order."""

    def begin_episode(self, began: Any) -> None:
        """Receives `bool[N]`: which envs are at the first step of an episode. After a reset, all envs are."""

    def perform(self, observations: Any) -> Any:
        """Returns the actions `[N, ...]` for the observations `[N, ...]`, in the dtypes of the action space."""

    def experience(self, transition: Transition) -> None:
        """Receives the results of the actions."""

    def end_episode(self, ended: Any) -> None:
        """Receives `bool[N]`: which envs finished an episode in this step."""


class CopyingEnvs(Protocol):
    """The part of `InGraphVectorEnv` that `simulate` uses.

    Attributes:
        envs: The vector env.
    """

    envs: Any

    def observations_copied(self) -> tuple[Any, Any]:
        """Returns copies of the current observations, and whether each is the first of an episode."""

    def step_copied(self, actions: Any) -> tuple[SimulatedStep, Any]:
        """Steps every env; returns copies of the results, and of the observations that the actions led to."""
