"""The types of `vecenv.ingraph`: steps and rollouts, and the interface of algorithms for `simulate`.

Import these names from `vecenv.ingraph`. Arrays are TensorFlow tensors, but this module does not import TensorFlow.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Step(NamedTuple):
    """The results of a batch of actions: tensors that alias one slot.

    Attributes:
        observations: `[N, ...]`, nested like the observation space.
        rewards, terminated, truncated: `float64[N]`, `bool[N]`, `bool[N]`.
    """

    observations: Any
    rewards: Any
    terminated: Any
    truncated: Any


class Rollout(NamedTuple):
    """T steps of N envs. Observations and final observations are nested like the observation space.

    Attributes:
        observations: `[T + 1, N, ...]`: the states in which the actions were taken, and the state after the last one.
        actions: `[T, N, ...]`.
        rewards: `float64[T, N]`: the rewards of the actions.
        terminated, truncated: `bool[T, N]`: whether the step reached a terminal state, or cut the episode off.
        final_observations: `[T, N, ...]`: the last observation of an episode where one ended, and undefined
            elsewhere; None if the autoreset mode is not SAME_STEP.
        episode_returns, episode_lengths: `float64[T, N]` and `int64[T, N]`: the sum of the episode's rewards so far and
            the number of its steps; the totals where it ended.
        episode_infos: `float64[T, N]` for each of the vector env's `info_keys`: the episode's value where one ended,
            NaN if it has none, and undefined elsewhere.
        valid: `bool[T + 1, N]`: whether each row is in use in each state; None if all rows always are. A step counts
            only if its row was in use before it.
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


class Transition(NamedTuple):
    """One step of N envs, as an algorithm sees it. Observations and actions are nested like their spaces.

    Attributes:
        observations: `[N, ...]`: the states in which the actions were taken.
        actions: `[N, ...]`, as `Algorithm.perform` returned them.
        rewards, terminated, truncated: `float64[N]`, `bool[N]`, `bool[N]`: the results of the actions.
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
        rewards, terminated, truncated: `float64[N]`, `bool[N]`, `bool[N]`.
        episode_returns, episode_lengths: `float64[N]` and `int64[N]`: the sum of the episode's rewards so far and the
            number of its steps; the totals where it ended.
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
