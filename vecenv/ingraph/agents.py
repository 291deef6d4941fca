"""InGraphGroup: the rows of one group of agents in the rollouts and steps of envs with several agents."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from gymnasium import Space

from vecenv import spaces as tree
from vecenv.ingraph.types import Rollout
from vecenv.ingraph.vector_env import InGraphVectorEnv
from vecenv.rows import agents as fields
from vecenv.spaces import Path


class AgentStates(NamedTuple):
    """What the agents of a group see.

    Attributes:
        observations: `[N, ...]`, nested like the observation space.
        valid: Whether the agent of each row is alive, `bool[N]`.
    """

    observations: Any
    valid: Any


class InGraphGroup:
    """The N = M * K rows of a group of K agents in M envs.

    The memory of a row of agents is contiguous, so reshaping `[M, K, ...]` to `[N, ...]` copies nothing.

    Args:
        envs: The envs, which all groups share: an `InGraphVectorEnv` over `ParallelVectorEnv.joint`.
        name: Name of the group.
        num_agents: K.
        observation_space: The observation space of one agent.
        action_space: The action space of one agent.

    Attributes:
        num_envs: N.
        num_steps: T, the steps of one rollout.
    """

    def __init__(
        self, envs: InGraphVectorEnv, name: str, num_agents: int, observation_space: Space, action_space: Space
    ):
        self.num_envs, self.num_steps = envs.num_envs * num_agents, envs.num_steps
        self._envs, self._name, self._count = envs, name, num_agents
        self._observed, self._acted = observation_space, action_space

    def states(self, joint: Any) -> AgentStates:
        """Returns the part of this group in the observations of all envs."""
        own = joint[self._name]
        observations = tree.nest(self._observed, lambda path: self._rows(tree.pick(own[fields.OBSERVED], path), 0))
        return AgentStates(observations, tf.cast(self._rows(own[fields.VALID], 0), tf.bool))

    def joint_actions(self, actions: Any) -> Any:
        """Returns actions `[N, ...]` as this group's entry `[M, K, ...]` in the actions of all envs."""

        def leaf(path: Path) -> tf.Tensor:
            values = tree.pick(actions, path)
            return tf.reshape(values, [self._envs.num_envs, self._count, *values.shape[1:]])

        return tree.nest(self._acted, leaf)

    def of_agents(self, per_env: tf.Tensor) -> tf.Tensor:
        """Returns `[N]` for `[M]`: the value of each agent's env."""
        return tf.repeat(per_env, self._count)

    def shaped(self, rollout: Rollout) -> Rollout:
        """Returns this group's part of the result of `InGraphVectorEnv.rollout`, in the shapes of `Rollout`."""
        return self._part(self._envs.shaped(rollout))

    def last_rollout(self) -> Rollout:
        """Returns this group's part of the previous rollout as NumPy arrays, which are views of the same memory."""
        return self._part(self._envs.last_rollout())

    def _part(self, joint: Rollout) -> Rollout:
        results = {name: self._rows(values) for name, values in joint.agents[self._name].items()}

        def observed(of_envs: Any) -> Any:
            own = of_envs[self._name][fields.OBSERVED]
            return tree.nest(self._observed, lambda path: self._rows(tree.pick(own, path)))

        valid: Any = self._rows(joint.observations[self._name][fields.VALID])
        return Rollout(
            observations=observed(joint.observations),
            actions=tree.nest(self._acted, lambda path: self._rows(tree.pick(joint.actions[self._name], path))),
            rewards=results[fields.REWARD],
            terminated=results[fields.TERMINATED],
            truncated=results[fields.TRUNCATED],
            final_observations=None if joint.final_observations is None else observed(joint.final_observations),
            episode_returns=results[fields.EPISODE_RETURN],
            episode_lengths=results[fields.EPISODE_LENGTH],
            episode_infos={},
            valid=valid != 0,
        )

    def _rows(self, values: Any, axis: int = 1) -> Any:
        """Returns `[..., M, K, *shape]` as `[..., N, *shape]`, where M has the given axis."""
        shape = [*values.shape[:axis], self.num_envs, *values.shape[axis + 2 :]]
        return tf.reshape(values, shape) if tf.is_tensor(values) else values.reshape(shape)
