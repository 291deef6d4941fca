"""Rollouts: T steps of all envs in one graph call, with the predictions of the policies that acted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from ppo.graphs import graph_function, in_order
from ppo.model.agent import HOST, Agent, Predictions
from ppo.model.recurrent import Sequences, flat
from vecenv.ingraph import InGraphVectorEnv, Rollout


class View(Protocol):
    """What one policy sees of the envs, as N rows: the envs themselves, or the agents of a group in all envs.

    Attributes:
        num_envs: N.
    """

    num_envs: int

    def observations(self, joint: Any) -> Any:
        """Returns what the policy sees, `[N, ...]`, from the observations of all envs."""

    def joint_actions(self, actions: Any) -> Any:
        """Returns the policy's actions `[N, ...]` in the form in which they are part of the actions of all envs."""

    def goes_on(self, before: Any, after: Any, over: tf.Tensor) -> tf.Tensor:
        """Returns whether the episode of each row continues after a step, `bool[N]`.

        Args:
            before: The observations of all envs before the step.
            after: The observations of all envs after the step.
            over: Whether the step ended the episode of each env, `bool[M]`.
        """

    def shaped(self, rollout: Rollout) -> Rollout:
        """Returns the rows of a result of `InGraphVectorEnv.rollout`, in the shapes that `Rollout` documents."""

    def last_rollout(self) -> Rollout:
        """Returns the rows of the previous rollout as NumPy arrays."""


class Collected(NamedTuple):
    """The rollout of one policy, with everything that the update needs to know about how it acted.

    Attributes:
        rollout: The slab, which aliases the memory of the envs.
        state: The policy's memory before the first step, `float32[N, S]`.
        noise: The noise passed to `Distribution.sample`, `float32[T, N, ...]`.
        predictions: What the policy predicted: outputs `float32[T * N, num_outputs]`, values `float32[T + 1, N]` and
            memory `float32[T * N, S]`.
    """

    rollout: Rollout
    state: tf.Tensor
    noise: tf.Tensor
    predictions: Predictions


class Collector(tf.Module):
    """Runs the policies on the envs, which write the rollout into the slab. Only actions and predictions pass through.

    Args:
        envs: The envs to step.
        policies: For each policy: its name among the actions of all envs, the agent that acts, and its view. The name
            is "" if the policy is the only one and its actions are the actions of the envs.
        total: Number of envs of all ranks.
        own: The envs of this rank.

    Attributes:
        state: The memory of each policy in the current episodes of all ranks, `float32[total, S]`. Only the rows of
            this rank are up to date.
        collect_in_graph: The graph function of `collect`.
    """

    def __init__(self, envs: InGraphVectorEnv, policies: Sequence[tuple[str, Agent, View]], *, total: int, own: slice):
        super().__init__(name="collector")
        self._envs = envs
        self._names = [name for name, _, _ in policies]
        self._actors = [actor for _, actor, _ in policies]
        self._views = [view for _, _, view in policies]
        agents = [view.num_envs // envs.num_envs for view in self._views]  # rows per env
        self._own = [slice(own.start * count, own.stop * count) for count in agents]
        with tf.device(HOST):
            self.state = [
                tf.Variable(actor.initial_state(total * count), trainable=False, name="state")
                for actor, count in zip(self._actors, agents, strict=True)
            ]
        self.collect_in_graph = graph_function(self._collect)

    def begin(self) -> None:
        """Clears the policies' memories, after a reset of all envs."""
        for state in self.state:
            state.assign(tf.zeros_like(state))

    def collect(self, seed: tf.Tensor) -> list[Collected]:
        """Takes T steps of all envs and returns the rollout of each policy. All of them hold the same slab.

        Args:
            seed: Seed of the action noise, int32[2].
        """
        with in_order(all(actor.runs_in_order for actor in self._actors)):
            return self.collect_in_graph(seed)

    def _collect(self, seed: tf.Tensor) -> list[Collected]:
        envs, actors = self._envs, self._actors
        with tf.device(HOST):  # otherwise TensorFlow places some operations of each step on an accelerator
            noises = [
                actor.distribution.noise([envs.num_steps, view.num_envs], seed + tf.constant([0, number]))
                for number, (actor, view) in enumerate(zip(actors, self._views, strict=True))
            ]
            initial = [tf.identity(state[own]) for state, own in zip(self.state, self._own, strict=True)]

            def step(t: tf.Tensor, joint: Any, states: list[tf.Tensor], kept: list[Any]) -> tuple[Any, ...]:
                predicted = self._predictions(joint, states)
                sampled = [
                    actor.distribution.sample(one.outputs, noise[t])
                    for actor, one, noise in zip(actors, predicted, noises, strict=True)
                ]
                after = envs.step(self._joint(sampled))
                over = tf.logical_or(after.terminated, after.truncated)
                states = [
                    tf.where(view.goes_on(joint, after.observations, over)[:, None], one.memory, 0.0)
                    if actor.state_size
                    else one.memory
                    for actor, view, one in zip(actors, self._views, predicted, strict=True)
                ]
                kept = [
                    [array.write(t, column) for array, column in zip(arrays, one, strict=True)]
                    for arrays, one in zip(kept, predicted, strict=True)
                ]
                return t + 1, after.observations, states, kept

            # Order: each step needs the observations of the previous step, so the steps run one at a time.
            begin = (0, envs.observations(), initial, self._arrays())
            _, last, states, kept = tf.while_loop(lambda t, *_: t < envs.num_steps, step, begin, parallel_iterations=1)
            for variable, own, state in zip(self.state, self._own, states, strict=True):
                variable[own].assign(state)
            slab, final = envs.rollout(), self._predictions(last, states)
            found = []
            for arrays, state, noise, after in zip(kept, initial, noises, final, strict=True):
                outputs, values, memory = (array.stack() for array in arrays)
                values = tf.concat([values, after.values[None]], axis=0)
                found.append(Collected(slab, state, noise, Predictions(flat(outputs), values, flat(memory))))
            return found

    def _predictions(self, joint: Any, states: Sequence[tf.Tensor]) -> list[Predictions]:
        """Returns the predictions of each policy for the current observations of all envs."""
        return [
            actor.step(view.observations(joint), state)
            for actor, view, state in zip(self._actors, self._views, states, strict=True)
        ]

    def _joint(self, actions: Sequence[Any]) -> Any:
        """Returns the actions of all envs for the actions of each policy."""
        if self._names == [""]:
            return actions[0]
        parts = zip(self._names, self._views, actions, strict=True)
        return {name: view.joint_actions(own) for name, view, own in parts}

    def _arrays(self) -> list[list[tf.TensorArray]]:
        """Returns arrays for the predictions of each policy in T steps, in the order of `Predictions`."""
        return [
            [
                tf.TensorArray(tf.float32, self._envs.num_steps, element_shape=[view.num_envs, *shape])
                for shape in ([actor.distribution.num_outputs], [], [actor.state_size])
            ]
            for actor, view in zip(self._actors, self._views, strict=True)
        ]


class EnvView:
    """The view of the only policy of envs with one agent: all envs. See `View`."""

    def __init__(self, envs: InGraphVectorEnv):
        self.num_envs, self.shaped, self.last_rollout = envs.num_envs, envs.shaped, envs.last_rollout

    def observations(self, joint: Any) -> Any:
        return joint

    def joint_actions(self, actions: Any) -> Any:
        return actions

    def goes_on(self, before: Any, after: Any, over: tf.Tensor) -> tf.Tensor:
        return tf.logical_not(over)


def sequences_of(rollout: Rollout, initial: tf.Tensor) -> Sequences:
    """Returns the sequences that the T + 1 states of a rollout form.

    No episode is marked as new in the first state. If one begins there, `initial`, the memory before the first step, is
    already 0.
    """
    ended = ends_of(rollout)
    return Sequences(tf.concat([tf.zeros_like(ended[:1]), ended], axis=0), initial)


def ends_of(rollout: Rollout) -> tf.Tensor:
    """Returns whether each step ends an episode or belongs to no living agent, `bool[T, N]`.

    Nothing is carried across such a step.
    """
    ended = tf.logical_or(rollout.terminated, rollout.truncated)
    return ended if rollout.valid is None else tf.logical_or(ended, tf.logical_not(rollout.valid[:-1]))
