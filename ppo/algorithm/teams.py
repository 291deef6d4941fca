"""Teams: each policy of a run with its learner and its view of the envs.

An env with one agent has one team, which sees the envs themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.algorithm.rollout import EnvView, View
from ppo.algorithm.update import Learner
from ppo.config import Config
from ppo.model.agent import Agent
from ppo.model.recurrent import flat
from vecenv.ingraph import InGraphVectorEnv, Rollout
from vecenv.spaces import Path, nest, pick

Group = Any  # a AgentRows; its module needs PettingZoo


@dataclass(frozen=True)
class Team:
    """Agents that share a policy.

    Attributes:
        name: Name of the group of agents; "" if the env has one agent.
        members: Names of the agents; empty if the env has one agent.
        agent: The policy that learns.
        actor: The policy that acts: `agent` itself, or a copy of it on the host.
        learner: Updates `agent`.
        view: The rows in which it acts.
    """

    name: str
    members: tuple[str, ...]
    agent: Agent
    actor: Agent
    learner: Learner
    view: View

    def policy(self) -> Agent:
        """Returns the current policy on the host."""
        if self.actor is not self.agent:
            self.actor.become(self.agent)
        return self.actor


def team_of_envs(
    config: Config, envs: InGraphVectorEnv, spaces: tuple[gym.Space, gym.Space], total: int, own: slice
) -> Team:
    """Returns the team of envs with one agent.

    Args:
        config: The settings of this rank.
        envs: The envs of this rank.
        spaces: The observation space and the action space of one env.
        total: Number of envs of all ranks.
        own: The envs of this rank among them.
    """
    agent, view = Agent(config, *spaces), EnvView(envs)
    return Team("", (), agent, _actor_of(agent), Learner(config, agent, view, total=total, own=own), view)


def team_of_group(config: Config, envs: InGraphVectorEnv, group: Group, spaces: tuple[gym.Space, gym.Space]) -> Team:
    """Returns the team of a group of agents.

    Args:
        config: The settings of the run.
        envs: The envs that all teams share.
        group: A `vecenv.adapters.pettingzoo.AgentRows`.
        spaces: The observation space and the action space of one agent.
    """
    members = tuple(map(str, group.group.agents))
    config, view = config.of_team(len(members)), GroupView(envs, group)
    agent = Agent(config, *spaces)
    return Team(group.group.name, members, agent, _actor_of(agent), Learner(config, agent, view), view)


def _actor_of(agent: Agent) -> Agent:
    return agent if agent.on_host else agent.untrained_copy()


class GroupView:
    """The N = M * K rows of a group of K agents in M envs, whose observations hold the results of each agent.

    The rows of an env's agents are contiguous in memory, so reshaping `[M, K, ...]` to `[N, ...]` copies nothing. See
    `View` for the methods.

    Args:
        envs: The envs, which all groups share: an `InGraphVectorEnv` over `ParallelVectorEnv.joint`.
        group: A `vecenv.adapters.pettingzoo.AgentRows`.
    """

    def __init__(self, envs: InGraphVectorEnv, group: Group):
        self.num_envs = group.num_envs
        self._envs, self._name, self._count = envs, group.group.name, len(group.group.agents)
        self._observed, self._acted = group.single_observation_space, group.single_action_space

    def observations(self, joint: Any) -> Any:
        own = joint[self._name]["observation"]
        return nest(self._observed, lambda path: self._rows(pick(own, path), 0))

    def joint_actions(self, actions: Any) -> Any:
        def leaf(path: Path) -> tf.Tensor:
            values = pick(actions, path)
            return tf.reshape(values, [self._envs.num_envs, self._count, *values.shape[1:]])

        return nest(self._acted, leaf)

    def goes_on(self, before: Any, after: Any, over: tf.Tensor) -> tf.Tensor:
        over = tf.repeat(over, self._count)  # each agent's episode ends with that of its env
        return self._valid(before) & self._valid(after) & tf.logical_not(over)

    def shaped(self, rollout: Rollout) -> Rollout:
        return self._part(self._envs.shaped(rollout))

    def last_rollout(self) -> Rollout:
        return self._part(self._envs.last_rollout())

    def _valid(self, joint: Any) -> tf.Tensor:
        """Returns whether the agent of each row is alive, `bool[N]`, from the observations of all envs."""
        return self._rows(joint[self._name]["valid"], 0) != 0

    def _part(self, joint: Rollout) -> Rollout:
        own, last = joint.observations[self._name], joint.final_observations[self._name]
        over = joint.terminated | joint.truncated

        def result(key: str) -> Any:  # step t writes row t + 1
            return self._rows(own[key][1:])

        def observed(path: Path) -> Any:
            return self._rows(pick(own["observation"], path))

        def final(path: Path) -> Any:
            # If other agents continue, an agent's last observation is not overwritten.
            values = [pick(part["observation"], path) for part in (last, own)]
            return self._rows(_chosen(over, values[0], values[1][1:]))

        return Rollout(
            observations=nest(self._observed, observed),
            actions=nest(self._acted, lambda path: self._rows(pick(joint.actions[self._name], path))),
            rewards=result("reward"),
            terminated=result("terminated") != 0,
            truncated=result("truncated") != 0,
            final_observations=nest(self._observed, final),
            episode_returns=result("episode_return"),
            episode_lengths=result("episode_length"),
            episode_infos={},
            valid=self._rows(own["valid"]) != 0,
        )

    def _rows(self, values: Any, axis: int = 1) -> Any:
        """Returns `[..., M, K, *shape]` as `[..., N, *shape]`, where M has the given axis."""
        shape = [*values.shape[:axis], self.num_envs, *values.shape[axis + 2 :]]
        return tf.reshape(values, shape) if tf.is_tensor(values) else values.reshape(shape)


def _chosen(condition: Any, one: Any, other: Any) -> Any:
    """Returns the rows `[T, M, ...]` of `one` where `condition: bool[T, M]` holds, and those of `other` elsewhere."""
    if not tf.is_tensor(one):
        return np.where(condition.reshape(*condition.shape, *[1] * (one.ndim - 2)), one, other)
    # Select takes whole rows. `tf.where` would broadcast the condition, which is ten times slower for images.
    rows = tf.raw_ops.Select(condition=flat(condition), x=flat(one), y=flat(other))
    return tf.reshape(rows, one.shape)
