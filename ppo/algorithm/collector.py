"""The contract between the trainer and a collector, which steps the envs of a run in this process or on Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.model.agent import Agent, Predictions
from vecenv.ingraph import Rollout

Spaces = Mapping[str, tuple[gym.Space, gym.Space]]
"""The observation space and the action space of an agent of each team, by the name of the team."""


class Collected(NamedTuple):
    """The rollout of one policy, with everything that the update needs to know about how it acted.

    Attributes:
        rollout: The steps of the policy's rows.
        state: The policy's memory before the first step, `float32[N, S]`.
        noise: The noise passed to `Distribution.sample`, `float32[T, N, ...]`.
        predictions: What the policy predicted: outputs `float32[T, N, num_outputs]`, values `float32[T + 1, N]` and
            memory `float32[T, N, S]`.
    """

    rollout: Rollout
    state: tf.Tensor
    noise: tf.Tensor
    predictions: Predictions


class Rollouts(NamedTuple):
    """What `Collector.collect` returns. All members may alias memory that the collector overwrites; see `collect`.

    Attributes:
        collected: The rollout of each team, as tensors that its learner reads.
        arrays: The steps of each team's rows, as NumPy arrays.
        envs: The steps of the envs themselves, as NumPy arrays: rewards, flags and the results of episodes. The
            observations and actions may be None.
    """

    collected: Sequence[Collected]
    arrays: Sequence[Rollout]
    envs: Rollout


class EnvState(TypedDict):
    """The state of an env between two rollouts.

    Attributes:
        env: An element of `vecenv.AsyncVectorEnv.get_state`.
        memories: The memory of each policy for its K rows of this env, `float32[K, S]`.
    """

    env: Any
    memories: list[np.ndarray]


class Collector(Protocol):
    """Steps the envs of a run with the policies of its teams. The trainer need not know where these envs are.

    Attributes:
        spaces: The spaces of each team, in the order of the teams; see `Spaces`.
        members: The names of each team's agents; empty if the env has one agent.
        wrappers: The wrappers of each env, as JSON values; see `ppo.run.wrappers.describe_each`.
        held_bytes: Memory for rollouts that this process allocates, apart from memory that it shares with workers.
        steps: Env-steps of the current rollout so far, over all envs.
        restarts: How many times a dead worker or collector was replaced.
    """

    spaces: Spaces
    members: Mapping[str, tuple[str, ...]]
    wrappers: Sequence[Any]
    held_bytes: int

    @property
    def steps(self) -> int: ...

    @property
    def restarts(self) -> int: ...

    def use(self, actors: Sequence[Agent]) -> None:
        """Sets the policies that act, one for each team. They must be on the host. `collect` uses current weights."""

    def begin(self, env_steps: int) -> None:
        """Resets all envs to begin fresh episodes. The seeds depend on the env-steps of the run so far."""

    def collect(self, number: int, env_steps: int) -> Rollouts:
        """Takes T steps of all envs.

        The result is valid until the next call returns, apart from its first observations, which the next call
        overwrites.

        Args:
            number: The number of the rollout, which determines the action noise.
            env_steps: Env-steps of the run before the rollout.
        """

    def get_states(self) -> list[EnvState]:
        """Returns the state of each env, with the memories of the policies, between two rollouts.

        Raises:
            vecenv.NotRestorable: If an env has no state that can be saved.
        """

    def set_states(self, states: Sequence[EnvState]) -> None:
        """Restores a result of `get_states`."""
