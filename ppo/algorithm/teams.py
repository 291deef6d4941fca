"""Teams: groups of agents that act in the same envs, each with its own policy and learner.

An env with one agent has one team, whose rows are the envs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.algorithm.rollout import Collected
from ppo.algorithm.self_play import Snapshots
from ppo.algorithm.update import Learner
from ppo.model.agent import HOST, Agent
from ppo.seeds import sampling_seed
from vecenv.ingraph import InGraphGroup, InGraphVectorEnv


@dataclass(frozen=True)
class Team:
    """Agents that share a policy.

    Attributes:
        name: Name of the group of agents; "" if the env has one agent.
        agent: The policy that learns.
        learner: Updates the policy.
        rows: The rollouts of these agents.
    """

    name: str
    agent: Agent
    learner: Learner
    rows: InGraphVectorEnv | InGraphGroup


class TeamCollector(tf.Module):
    """Runs the policies of all teams on envs with several agents. Does what `Collector` does for one agent.

    Args:
        actors: The policy of each team.
        groups: The rows of each team, in the same order.
        names: The name of each group.
        envs: The envs that all teams share.
        opponent: With self-play: the agent that plays the rows `opponent_rows` of the only team.
        opponent_rows: `bool[N]`; None without self-play.

    Attributes:
        state: The memory of each team's policy, `float32[N, S]`.
        stacks: Empty, because stacks of frames are not supported.
    """

    def __init__(
        self,
        actors: Sequence[Agent],
        groups: Sequence[InGraphGroup],
        names: Sequence[str],
        envs: InGraphVectorEnv,
        *,
        opponent: Agent | None = None,
        opponent_rows: np.ndarray | None = None,
    ):
        super().__init__(name="collector")
        self.opponent, self._opponent_rows = opponent, opponent_rows
        self._actors, self._groups, self._names, self._envs = list(actors), list(groups), list(names), envs
        self.stacks: list[tf.Variable] = []
        with tf.device(HOST):
            self.state = [
                tf.Variable(actor.initial_state(group.num_envs), trainable=False, name="state")
                for actor, group in zip(actors, groups, strict=True)
            ]

    def begin(self) -> None:
        """Clears the policies' memories, after a reset of all envs."""
        for state in self.state:
            state.assign(tf.zeros_like(state))

    @tf.function(autograph=False)
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
                    seen = group.states(joint)
                    predictions = actor.step(seen.observations, state)
                    chosen, memory = actor.distribution.sample(predictions.outputs, noise[t]), predictions.memory
                    if self.opponent is not None:
                        others = self.opponent.step(seen.observations, state)
                        theirs = self.opponent.distribution.sample(others.outputs, noise[t])
                        chosen, memory = self._with_opponents((chosen, memory), (theirs, others.memory))
                    actions[name] = group.joint_actions(chosen)
                    memories.append(memory)
                    alive.append(seen.valid)
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
        actor: Agent, group: InGraphGroup, memory: tf.Tensor, before: tf.Tensor, joint: Any, over: tf.Tensor
    ) -> tf.Tensor:
        """Returns the memory after a step: 0 where the agent's episode did not go on."""
        if not actor.state_size:
            return memory
        goes_on = before & group.states(joint).valid & tf.logical_not(group.of_agents(over))
        return tf.where(goes_on[:, None], memory, 0.0)


class TeamRollouts:
    """Collects rollout after rollout for all teams. Does what `Rollouts` does for one agent, without overlap.

    Args:
        agents: The agent of each team.
        actors: The agents that act: the same agents, or copies of them on the host.
        collector: Steps the envs with `actors`.
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
        self,
        agents: Sequence[Agent],
        actors: Sequence[Agent],
        collector: TeamCollector,
        *,
        seed: int,
        snapshots: Snapshots | None = None,
    ):
        self.collector, self.snapshots = collector, snapshots
        self._agents, self._actors, self._seed = agents, actors, seed

    def begin(self, number: int) -> None:
        """Does nothing."""

    def take(self, number: int) -> list[Collected]:
        """Returns rollout `number` of each team. Raises any exception of the envs."""
        self.policies()
        if self.snapshots is not None:
            assert self.collector.opponent is not None
            if not len(self.snapshots):
                self.snapshots.add(self._agents[0], 0)
            self.snapshots.load(self.snapshots.drawn(number), self.collector.opponent)
        return self.collector.collect(tf.constant(sampling_seed(self._seed, number)))

    def policies(self) -> list[Agent]:
        """Returns the current policies on the host."""
        for actor, agent in zip(self._actors, self._agents, strict=True):
            if actor is not agent:
                actor.become(agent)
        return list(self._actors)

    def drop(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
