"""Teams: groups of agents that act in the same envs, each with its own policy and learner.

An env with one agent has one team, whose rows are the envs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.algorithm.ranks import Ranks
from ppo.algorithm.rollout import Collected
from ppo.algorithm.self_play import Snapshots, opponent_rows
from ppo.algorithm.update import Learner
from ppo.config import Config
from ppo.graphs import graph_method
from ppo.model.agent import HOST, Agent
from ppo.model.recurrent import flat
from ppo.seeds import sampling_seed
from vecenv.ingraph import InGraphVectorEnv, Rollout
from vecenv.spaces import Path, nest, pick

Spaces = tuple[gym.Space, gym.Space]
Group = Any  # an AgentRows; its module needs PettingZoo


class GroupRows:
    """The N = M * K rows of a group of K agents in M envs, whose observations hold the results of each agent.

    The rows of an env's agents are contiguous in memory, so reshaping `[M, K, ...]` to `[N, ...]` copies nothing.

    Args:
        envs: The envs, which all groups share: an `InGraphVectorEnv` over `ParallelVectorEnv.joint`.
        group: A `vecenv.adapters.pettingzoo.AgentRows`.

    Attributes:
        num_envs: N.
    """

    def __init__(self, envs: InGraphVectorEnv, group: Group):
        self.num_envs = group.num_envs
        self._envs, self._name, self._count = envs, group.group.name, len(group.group.agents)
        self._observed, self._acted = group.single_observation_space, group.single_action_space

    def observations(self, joint: Any) -> Any:
        """Returns what the agents of this group see, `[N, ...]`, from the observations of all envs."""
        own = joint[self._name]["observation"]
        return nest(self._observed, lambda path: self._rows(pick(own, path), 0))

    def valid(self, joint: Any) -> tf.Tensor:
        """Returns whether the agent of each row is alive, `bool[N]`, from the observations of all envs."""
        return self._rows(joint[self._name]["valid"], 0) != 0

    def joint_actions(self, actions: Any) -> Any:
        """Returns actions `[N, ...]` as this group's entry `[M, K, ...]` in the actions of all envs."""

        def leaf(path: Path) -> tf.Tensor:
            values = pick(actions, path)
            return tf.reshape(values, [self._envs.num_envs, self._count, *values.shape[1:]])

        return nest(self._acted, leaf)

    def of_agents(self, per_env: tf.Tensor) -> tf.Tensor:
        """Returns `[N]` for one value per env, `[M]`: each agent has the value of its env."""
        return tf.repeat(per_env, self._count)

    def shaped(self, rollout: Rollout) -> Rollout:
        """Returns this group's part of the result of `InGraphVectorEnv.rollout`, in the shapes of `Rollout`."""
        return self._part(self._envs.shaped(rollout))

    def last_rollout(self) -> Rollout:
        """Returns this group's part of the previous rollout as NumPy arrays, mostly views of the same memory."""
        return self._part(self._envs.last_rollout())

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


@dataclass(frozen=True)
class Team:
    """Agents that share a policy.

    Attributes:
        name: Name of the group of agents; "" if the env has one agent.
        members: Names of the agents; empty if the env has one agent.
        agent: The policy that learns.
        actor: The policy that acts: `agent` itself, or a copy of it on the host.
        learner: Updates `agent`.
        rows: The rollouts of these agents.
    """

    name: str
    members: tuple[str, ...]
    agent: Agent
    actor: Agent
    learner: Learner
    rows: InGraphVectorEnv | GroupRows


def team_of_one(config: Config, envs: InGraphVectorEnv, spaces: Spaces, ranks: Ranks) -> Team:
    """Returns the team of envs with one agent.

    Args:
        config: The settings of the run.
        envs: The envs of this rank.
        spaces: What the networks see, and the action space of the env with its bounds.
        ranks: The ranks of the run.
    """
    agent = Agent(config, *spaces)
    actor = agent.untrained_copy() if config.overlap or not agent.on_host else agent
    return Team("", (), agent, actor, Learner(config, agent, envs, ranks), envs)


def team_of_group(config: Config, envs: InGraphVectorEnv, group: Group) -> Team:
    """Returns the team of a group of agents.

    Args:
        config: The settings of the run.
        envs: The envs that all teams share.
        group: A `vecenv.adapters.pettingzoo.AgentRows`.
    """
    members = tuple(map(str, group.group.agents))
    config = config.of_team(len(members))
    agent = Agent(config, group.single_observation_space, group.env_action_space)
    actor = agent if agent.on_host else agent.untrained_copy()
    rows = GroupRows(envs, group)
    return Team(group.group.name, members, agent, actor, Learner(config, agent, rows), rows)


class TeamCollector(tf.Module):
    """Runs the policies of all teams on envs with several agents: the counterpart of `Collector`.

    Args:
        teams: The teams.
        envs: The envs that all teams share.
        opponent: With self-play: the agent that plays the rows `opponent_rows` of the only team.
        opponent_rows: `bool[N]`; None without self-play.

    Attributes:
        state: The memory of each team's policy, `float32[N, S]`.
        stacks: Empty, because stacks of frames are not supported.
    """

    def __init__(
        self,
        teams: Sequence[Team],
        envs: InGraphVectorEnv,
        *,
        opponent: Agent | None = None,
        opponent_rows: np.ndarray | None = None,
    ):
        super().__init__(name="collector")
        self.opponent, self._opponent_rows = opponent, opponent_rows
        self._names, self._actors = [team.name for team in teams], [team.actor for team in teams]
        self._groups: list[Any] = [team.rows for team in teams]
        self._envs = envs
        self.stacks: list[tf.Variable] = []
        with tf.device(HOST):
            self.state = [
                tf.Variable(team.actor.initial_state(team.rows.num_envs), trainable=False, name="state")
                for team in teams
            ]

    def begin(self) -> None:
        """Clears the policies' memories, after a reset of all envs."""
        for state in self.state:
            state.assign(tf.zeros_like(state))

    @graph_method()
    def collect(self, seed: tf.Tensor) -> list[Collected]:
        """Takes T steps of all envs and returns the rollout of each team. All of them hold the same slab.

        Args:
            seed: Seed of the action noise, int32[2].
        """
        envs = self._envs
        with tf.device(HOST):
            noises = [
                actor.distribution.noise([envs.num_steps, group.num_envs], seed + tf.constant([0, number]))
                for number, (actor, group) in enumerate(zip(self._actors, self._groups, strict=True))
            ]
            initial = [tf.identity(state) for state in self.state]

            def step(t: tf.Tensor, joint: Any, states: list[tf.Tensor]) -> tuple[Any, ...]:
                actions, memories, alive = {}, [], []
                teams = zip(self._names, self._actors, self._groups, noises, states, strict=True)
                for name, actor, group, noise, state in teams:
                    seen = group.observations(joint)
                    predictions = actor.step(seen, state)
                    chosen, memory = actor.distribution.sample(predictions.outputs, noise[t]), predictions.memory
                    if self.opponent is not None:
                        others = self.opponent.step(seen, state)
                        theirs = self.opponent.distribution.sample(others.outputs, noise[t])
                        chosen, memory = self._with_opponents((chosen, memory), (theirs, others.memory))
                    actions[name] = group.joint_actions(chosen)
                    memories.append(memory)
                    alive.append(group.valid(joint))
                after = envs.step(actions)
                over = tf.logical_or(after.terminated, after.truncated)
                kept = [
                    self._continued(actor, group, memory, before, after.observations, over)
                    for actor, group, memory, before in zip(self._actors, self._groups, memories, alive, strict=True)
                ]
                return t + 1, after.observations, kept

            # Order: each step needs the observations of the previous step, so the steps run one at a time.
            begin = (0, envs.observations(), initial)
            *_, states = tf.while_loop(lambda t, *_: t < envs.num_steps, step, begin, parallel_iterations=1)
            for own, state in zip(self.state, states, strict=True):
                own.assign(state)
            slab = envs.rollout()
            learns = None if self._opponent_rows is None else tf.constant(~self._opponent_rows)
            return [
                Collected(slab, state, None, noise, learns=learns) for state, noise in zip(initial, noises, strict=True)
            ]

    def _with_opponents(self, own: Any, theirs: Any) -> Any:
        """Returns the values `[N, ...]` of the opponent in the rows that it plays, and the policy's own elsewhere."""

        def leaf(mine: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.Select(condition=tf.constant(self._opponent_rows), x=other, y=mine)

        return tf.nest.map_structure(leaf, own, theirs)

    @staticmethod
    def _continued(
        actor: Agent, group: GroupRows, memory: tf.Tensor, before: tf.Tensor, joint: Any, over: tf.Tensor
    ) -> tf.Tensor:
        """Returns the memory after a step: 0 where the agent's episode did not continue."""
        if not actor.state_size:
            return memory
        goes_on = before & group.valid(joint) & tf.logical_not(group.of_agents(over))
        return tf.where(goes_on[:, None], memory, 0.0)


class TeamRollouts:
    """Collects rollout after rollout for all teams: the counterpart of `Rollouts`, without overlap.

    Args:
        teams: The teams.
        collector: Steps the envs.
        seed: Seed of the run.
        snapshots: With self-play: the pool from which opponents are drawn.

    Attributes:
        collector: See above.
        snapshots: See above.
        pending: False, because no rollout begins early.
        dropped: False, for the same reason.
    """

    pending = dropped = False

    def __init__(
        self, teams: Sequence[Team], collector: TeamCollector, *, seed: int, snapshots: Snapshots | None = None
    ):
        self.collector, self.snapshots = collector, snapshots
        self._teams, self._seed = teams, seed

    def begin(self, number: int) -> None:
        """Does nothing."""

    def take(self, number: int) -> list[Collected]:
        """Returns rollout `number` of each team. Raises any exception of the envs."""
        self.policies()
        opponent = self.collector.opponent
        if self.snapshots is not None and opponent is not None:
            if len(self.snapshots):
                self.snapshots.load(self.snapshots.drawn(number), opponent)
            else:  # rollout 0, which only initializes the normalizers
                opponent.become(self._teams[0].agent)
        return self.collector.collect(tf.constant(sampling_seed(self._seed, number)))

    def policies(self) -> dict[str, Agent]:
        """Returns the current policy of each team on the host."""
        for team in self._teams:
            if team.actor is not team.agent:
                team.actor.become(team.agent)
        return {team.name: team.actor for team in self._teams}

    def drop(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def rollouts_of_groups(config: Config, teams: Sequence[Team], envs: InGraphVectorEnv) -> TeamRollouts:
    """Returns the rollouts of teams, with opponents if `config.self_play` is set.

    Raises:
        ConfigError: If self-play is impossible, because the envs do not have two agents.
    """
    if config.self_play is None:
        return TeamRollouts(teams, TeamCollector(teams, envs), seed=config.seed)
    (team,) = teams  # the policy is shared
    rows, opponent = opponent_rows(config, len(team.members)), team.actor.untrained_copy()
    collector = TeamCollector(teams, envs, opponent=opponent, opponent_rows=rows)
    return TeamRollouts(teams, collector, seed=config.seed, snapshots=Snapshots(config, opponent))
