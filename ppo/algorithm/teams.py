"""Teams: each policy of a run with its learner. An env with one agent has one team, whose name is ""."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gymnasium as gym

from ppo.algorithm.update import Learner
from ppo.config import Config
from ppo.model.agent import Agent


@dataclass(frozen=True)
class Team:
    """Agents that share a policy.

    Attributes:
        name: Name of the group of agents; "" if the env has one agent.
        members: Names of the agents; empty if the env has one agent.
        agent: The policy that learns.
        actor: The policy that acts: `agent` itself, or a copy of it on the host.
        learner: Updates `agent`.
    """

    name: str
    members: tuple[str, ...]
    agent: Agent
    actor: Agent
    learner: Learner

    def policy(self) -> Agent:
        """Returns the current policy on the host."""
        if self.actor is not self.agent:
            self.actor.become(self.agent)
        return self.actor


def config_of(config: Config, members: Sequence[str]) -> Config:
    """Returns the settings of a team: those of the run, or those for a learner with a row for each of its agents."""
    return config.of_team(len(members)) if members else config


def team_of(config: Config, name: str, members: Sequence[str], spaces: tuple[gym.Space, gym.Space]) -> Team:
    """Returns a new team.

    Args:
        config: The settings of the run.
        name: The name of the team.
        members: The names of its agents; empty if the env has one agent.
        spaces: The observation space and the action space of each agent.
    """
    config = config_of(config, members)
    agent = Agent(config, *spaces)
    actor = agent if agent.on_host else agent.untrained_copy()
    return Team(name, tuple(members), agent, actor, Learner(config, agent))
