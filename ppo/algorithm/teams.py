"""Teams: each policy of a run with its learner. An env with one agent has one team, whose name is ""."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import gymnasium as gym
import tensorflow as tf

from ppo.algorithm.collector import Collected, Spaces
from ppo.algorithm.update import Learner
from ppo.config import Config
from ppo.model.agent import Agent
from ppo.model.checks import check_losses
from ppo.runtime.graphs import graph_function


@dataclass(frozen=True)
class Team:
    """Agents that share a policy.

    Attributes:
        name: Name of the group of agents; "" if the env has one agent.
        members: Names of the agents; empty if the env has one agent.
        agent: The policy that learns.
        actor: The policy that acts: `agent` itself, or a copy of it on the host. `Teams` keeps it up to date.
        learner: Updates `agent`.
    """

    name: str
    members: tuple[str, ...]
    agent: Agent
    actor: Agent
    learner: Learner


class Teams:
    """All teams of a run, which learn together: an update changes every team, or none if it fails.

    `spaces` and `members` are those of a `Collector`.
    """

    def __init__(self, config: Config, spaces: Spaces, members: Mapping[str, tuple[str, ...]]):
        self._teams = [team_of(config, name, members[name], spaces[name]) for name in members]
        modules: list[tf.Module] = [module for team in self._teams for module in (team.agent, team.learner)]
        self._variables = list({variable.ref(): variable for one in modules for variable in one.variables}.values())
        self._snapshot = graph_function(lambda: [variable.read_value() for variable in self._variables])

    def __iter__(self) -> Iterator[Team]:
        return iter(self._teams)

    @property
    def actors(self) -> dict[str, Agent]:
        """The policy that acts for each team, by the name of the team."""
        return {team.name: team.actor for team in self._teams}

    @property
    def lacks_statistics(self) -> bool:
        """Whether a normalizer is enabled but has no statistics yet."""
        return any(team.learner.lacks_statistics for team in self._teams)

    @property
    def compiled(self) -> bool:
        """Whether the updates have been compiled, which takes much longer than an update."""
        return all(team.learner.compiled for team in self._teams)

    def observe(self, collected: Sequence[Collected]) -> None:
        """Adds a rollout of each team to the statistics of its normalizers, without an update."""
        for team, rollout in zip(self._teams, collected, strict=True):
            team.learner.observe(rollout)
        self.copy_to_actors()

    def update(self, collected: Sequence[Collected], number: int, env_steps: int) -> dict[str, dict[str, float]]:
        """Updates each team with its rollout, and returns the metrics of each, by the name of the team.

        Any exception leaves all policies and learners as they were, so that the previous update can be saved.

        Args:
            collected: The rollout of each team.
            number: Number of the update, which determines the learning rate and the order of the samples.
            env_steps: Env-steps of the run before the rollout, for messages.

        Raises:
            TrainingDiverged: If a loss is not finite.
        """
        metrics: dict[str, dict[str, float]] = {}
        before = self._snapshot()  # shares the variables' memory until they are written
        try:
            for team, rollout in zip(self._teams, collected, strict=True):
                metrics[team.name] = team.learner.update(rollout, number)
                check_losses(metrics[team.name], env_steps)
        except BaseException:
            for variable, value in zip(self._variables, before, strict=True):
                variable.assign(value)
            raise
        self.copy_to_actors()
        return metrics

    def copy_to_actors(self) -> None:
        """Copies the policies that learn to those that act, where the two differ.

        `observe` and `update` do so. Call this after any other change of the policies, such as a restored checkpoint.
        """
        for team in self._teams:
            if team.actor is not team.agent:
                team.actor.become(team.agent)


def config_of(config: Config, members: Sequence[str]) -> Config:
    """Returns the run's settings or, if the team has members, the settings of a learner with a row for each of them."""
    return config.of_team(len(members)) if members else config


def team_of(config: Config, name: str, members: Sequence[str], spaces: tuple[gym.Space, gym.Space]) -> Team:
    """Returns a new team of a run with these settings; see `Team` for the name and the members."""
    config = config_of(config, members)
    agent = Agent(config, *spaces)
    actor = agent if agent.on_host else agent.untrained_copy()
    return Team(name, tuple(members), agent, actor, Learner(config, agent))
