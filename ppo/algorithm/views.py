"""Views: what each policy observes of the envs, and how its actions enter the joint actions of the envs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ppo.model.recurrent import flat
from vecenv.ingraph import Rollout
from vecenv.tree import Path, nest, pick

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import AgentRows  # needs PettingZoo


class View:
    """What one policy sees of M envs, as `num_envs` = N rows. Here, N is M: the envs have one agent and one policy."""

    def __init__(self, num_envs: int):
        self.num_envs = num_envs

    def observations(self, joint: Any) -> Any:
        """Returns what the policy sees, `[N, ...]`, from the observations of all envs."""
        return joint

    def joint_actions(self, actions: Any) -> Any:
        """Returns the policy's actions `[N, ...]` in the layout that the joint actions of all envs need."""
        return actions

    def goes_on(self, before: Any, after: Any, over: tf.Tensor) -> tf.Tensor:
        """Returns whether the episode of each row continues after a step, `bool[N]`.

        Args:
            before: The observations of all envs before the step.
            after: The observations of all envs after the step.
            over: Whether the step ended the episode of each env, `bool[M]`.
        """
        return tf.logical_not(over)

    def rows(self, rollout: Rollout) -> Rollout:
        """Returns the policy's rows of a rollout of all envs, of tensors or of NumPy arrays."""
        return rollout


class GroupView(View):
    """The N = M * K rows of a group of K agents in M envs, whose observations hold the results of each agent.

    The rows of an env's agents are contiguous in memory, so reshaping `[M, K, ...]` to `[N, ...]` copies nothing.
    `num_joint` is M.
    """

    def __init__(self, num_joint: int, rows: AgentRows):
        super().__init__(rows.num_envs)
        self._num_joint, self._name, self._count = num_joint, rows.group.name, len(rows.group.agents)
        self._observed, self._acted = rows.single_observation_space, rows.single_action_space

    def observations(self, joint: Any) -> Any:
        of_group = joint[self._name]["observation"]
        return nest(self._observed, lambda path: self._rows(pick(of_group, path), 0))

    def joint_actions(self, actions: Any) -> Any:
        def leaf(path: Path) -> tf.Tensor:
            values = pick(actions, path)
            return tf.reshape(values, [self._num_joint, self._count, *values.shape[1:]])

        return nest(self._acted, leaf)

    def goes_on(self, before: Any, after: Any, over: tf.Tensor) -> tf.Tensor:
        over = tf.repeat(over, self._count)  # each agent's episode ends with that of its env
        return self._valid(before) & self._valid(after) & tf.logical_not(over)

    def rows(self, rollout: Rollout) -> Rollout:
        of_group, last = rollout.observations[self._name], rollout.final_observations[self._name]
        over = rollout.terminated | rollout.truncated

        def result(key: str) -> Any:  # step t writes row t + 1
            return self._rows(of_group[key][1:])

        def observed(path: Path) -> Any:
            return self._rows(pick(of_group["observation"], path))

        def final(path: Path) -> Any:
            # If other agents continue, an agent's last observation is not overwritten.
            values = [pick(part["observation"], path) for part in (last, of_group)]
            return self._rows(_chosen(over, values[0], values[1][1:]))

        return Rollout(
            observations=nest(self._observed, observed),
            actions=nest(self._acted, lambda path: self._rows(pick(rollout.actions[self._name], path))),
            rewards=result("reward"),
            terminated=result("terminated") != 0,
            truncated=result("truncated") != 0,
            final_observations=nest(self._observed, final),
            episode_returns=result("episode_return"),
            episode_lengths=result("episode_length"),
            episode_infos={},
            valid=self._rows(of_group["valid"]) != 0,
        )

    def _valid(self, joint: Any) -> tf.Tensor:
        """Returns whether the agent of each row is alive, `bool[N]`, from the observations of all envs."""
        return self._rows(joint[self._name]["valid"], 0) != 0

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
