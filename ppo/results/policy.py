"""A trained policy as a function on numpy arrays."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.model.agent import HOST, Agent
from ppo.run.checkpoint import Checkpoints
from ppo.run.folder import Run
from vecenv.spaces import leaves, nest, pick


class Policy:
    """The deterministic policy of a run, with its normalizers. `load_policy` returns one.

    Attributes:
        observation_space: Space of one observation.
        action_space: Space of one action.
    """

    def __init__(self, agent: Agent, observation_space: gym.Space, action_space: gym.Space):
        self.observation_space = observation_space
        self.action_space = action_space
        self._agent = agent
        self._state: np.ndarray | None = None

    def __call__(self, observations: Any) -> np.ndarray:
        """Returns the most likely actions, in the shape, dtype and bounds of the action space.

        A recurrent policy remembers earlier calls: call `reset` when an episode ends.

        Args:
            observations: One observation or a batch `[N, ...]`, nested like the space.

        Returns:
            One action for one observation, or a batch of actions for a batch.

        Raises:
            ValueError: If the shape does not match the observation space, or N changed without a `reset`.
            NothingAllowed: If an action mask forbids every action.
        """
        single = self._is_single(observations)
        batch = nest(self.observation_space, lambda path: self._leaf(observations, path, single))
        (first, _), *_ = leaves(self.observation_space)
        num_envs = len(pick(batch, first))
        if self._state is None or not self._agent.state_size:
            self._state = self._agent.initial_state(num_envs)
        elif len(self._state) != num_envs:
            raise ValueError(
                f"a recurrent policy remembers {len(self._state)} envs, but this call has {num_envs} observations: "
                "call reset() first"
            )
        actions, self._state = self._agent.act(batch, self._state)
        if isinstance(self.action_space, gym.spaces.Box):  # as the engine does for envs
            actions = np.clip(actions, self.action_space.low, self.action_space.high)
        return actions[0] if single else actions

    def reset(self, ended: np.ndarray | None = None) -> None:
        """Clears the memory of a recurrent policy at the start of new episodes.

        Args:
            ended: The envs whose episode ended, `bool[N]`; None for all envs.
        """
        if ended is None:
            self._state = None
        elif self._state is not None:
            self._state[np.asarray(ended, np.bool_)] = 0.0

    def _is_single(self, observations: Any) -> bool:
        path, space = leaves(self.observation_space)[0]
        shape = np.shape(pick(observations, path))
        rank = len(shape) - len(space.shape or ())
        if rank not in (0, 1):
            raise ValueError(f"observations of shape {shape} are neither one element of the space {space} nor a batch")
        return rank == 0

    def _leaf(self, observations: Any, path: tuple, single: bool) -> np.ndarray:
        space = pick(self.observation_space, path)
        values = np.asarray(pick(observations, path), space.dtype)
        values = values[None] if single else values
        if values.shape[1:] != space.shape:
            raise ValueError(f"observations at {list(path)} have shape {values.shape}, but the space is {space}")
        return values


def load_policy(run: Run | Path | str, *, network: str | None = None, trust_modules: bool = False) -> Policy:
    """Returns the policy of a run's newest checkpoint.

    The env does not need to be installed. Nothing is unpickled.

    Args:
        run: The run folder.
        network: The run's `network`. Naming it allows the import of its module.
        trust_modules: Whether to allow this import without naming the network.

    Raises:
        RunError: If there is no run, no checkpoint that can be read, or no permission to import its network.

    Example:
        policy = ppo.load_policy("runs/20260101-120000-cheetah")
        action = policy(observation)
    """
    run = run if isinstance(run, Run) else Run.open(run)
    trust_modules = trust_modules or run.trust_modules
    run = dataclasses.replace(run, network=network or run.network, trust_modules=trust_modules)
    return Policy(load_agent(run, warnings.warn), *run.read_spaces())


def load_agent(run: Run, warn: Callable[[str], None], *, spaces: tuple[gym.Space, gym.Space] | None = None) -> Agent:
    """Returns the networks and normalizers of a run's newest checkpoint.

    Args:
        run: The run folder.
        warn: Called with a message for each damaged checkpoint.
        spaces: Spaces of one observation and of one action; None for the spaces that the run folder describes.

    Raises:
        RunError: If there is no checkpoint that can be read.
    """
    config = run.read_config(imports=("network",))
    run.check_begun()
    with tf.device(HOST):
        agent = Agent(config, *(spaces or run.read_spaces()))
    Checkpoints(run.checkpoints, agent=agent).restore_newest(warn=warn, partial=True)
    return agent
