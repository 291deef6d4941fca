"""Rollouts: T steps of all envs in one graph call, with the predictions of the policies that acted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.algorithm.views import views_of
from ppo.config import Config
from ppo.graphs import graph_function, in_order
from ppo.model.agent import HOST, Agent, Predictions
from ppo.model.recurrent import Sequences
from ppo.seeds import env_seeds, sampling_seed
from vecenv.ingraph import InGraphVectorEnv, Rollout

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


class Collector(Protocol):
    """Steps the envs of a run with the policies of its teams. The trainer need not know where these envs are.

    Attributes:
        spaces: The spaces of each team, in the order of the teams; see `Spaces`.
        members: The names of each team's agents; empty if the env has one agent.
        wrappers: The wrappers of each env, as JSON values; see `ppo.run.wrappers.describe_each`.
        held_bytes: Memory for rollouts that this process allocates, apart from memory that it shares with workers.
        steps: Env-steps of the current rollout so far, over all envs.
    """

    spaces: Spaces
    members: Mapping[str, tuple[str, ...]]
    wrappers: Sequence[Any]
    held_bytes: int

    @property
    def steps(self) -> int: ...

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

    def get_states(self) -> list[Any]:
        """Returns the state of each env, with the memories of the policies, between two rollouts.

        Raises:
            vecenv.NotRestorable: If an env has no state that can be saved.
        """

    def set_states(self, states: Sequence[Any]) -> None:
        """Restores a result of `get_states`."""


class LocalCollector:
    """Collects in this process. The envs write the rollout into the slab; only actions and predictions pass through.

    Args:
        config: The settings of the run.
        envs: The envs to step, as `ppo.envs.training_envs` makes them: all envs of the run, or a share of them.
        spaces: The spaces of each team.
        wrappers: The wrappers of each env.
        first: The number of the first of these envs in the run.

    Attributes:
        envs: The envs as graph operations.
        collect_in_graph: The graph function of `collect`.
    """

    def __init__(
        self,
        config: Config,
        envs: Any,
        spaces: Spaces,
        *,
        wrappers: Sequence[Any] = (),
        first: int = 0,
    ):
        self.wrappers = wrappers
        joint = envs.joint if config.is_multi_agent else envs
        self.envs = InGraphVectorEnv(joint, num_steps=config.num_steps, timeout_s=config.step_timeout_s)
        self.spaces: Spaces = spaces
        self.members: Mapping[str, tuple[str, ...]] = {name: () for name in spaces}
        if config.is_multi_agent:
            self.members = {name: tuple(map(str, rows.group.agents)) for name, rows in envs.groups.items()}
        slabs = sum(array.nbytes for array in joint.arrays.values())
        self.held_bytes = 0 if getattr(joint, "num_workers", 0) else slabs
        self._seed, self._total, self._own = config.seed, config.num_envs, slice(first, first + joint.num_envs)
        self._views = list(views_of(envs, is_multi_agent=config.is_multi_agent).values())
        self._actors: Sequence[Agent] = ()
        self._memories: list[tf.Variable] = []  # of each policy in the current episodes, `float32[N, S]`
        self.collect_in_graph = graph_function(self._collect)

    @property
    def steps(self) -> int:
        """Env-steps of the current rollout so far, over all envs."""
        return self.envs.steps * self.envs.num_envs

    def use(self, actors: Sequence[Agent]) -> None:
        """See `Collector.use`. Call it once."""
        self._actors = actors
        with tf.device(HOST):
            self._memories = [
                tf.Variable(actor.initial_state(view.num_envs), trainable=False, name="memory")
                for actor, view in zip(actors, self._views, strict=True)
            ]

    def begin(self, env_steps: int) -> None:
        """See `Collector.begin`."""
        with self.envs.raising():
            self.envs.reset(seed=env_seeds(self._seed, self._total, env_steps=env_steps)[self._own])
        for memory in self._memories:
            memory.assign(tf.zeros_like(memory))

    def collect(self, number: int, env_steps: int) -> Rollouts:
        """See `Collector.collect`. The tensors alias the slab wherever it has no padding."""
        seed = tf.constant(sampling_seed(self._seed, number))
        try:
            with self.envs.raising(), in_order(all(actor.runs_in_order for actor in self._actors)):
                collected = self.collect_in_graph(seed)
        except Exception as error:  # envs in this process raise exceptions of any type
            error.add_note(f"This was step {self.envs.steps} of the rollout that began after {env_steps} env-steps.")
            raise
        # Owner: the caller, until the envs reach this slab again, in the next rollout but one.
        whole = self.envs.last_rollout()
        return Rollouts(collected, [view.rows(whole) for view in self._views], whole)

    def get_states(self) -> list[Any]:
        """See `Collector.get_states`."""
        memories = [np.split(memory.numpy(), self.envs.num_envs) for memory in self._memories]
        return [
            {"env": state, "memories": list(of_env)}
            for state, *of_env in zip(self.envs.get_state(), *memories, strict=True)
        ]

    def set_states(self, states: Sequence[Any]) -> None:
        """See `Collector.set_states`."""
        self.envs.set_state([state["env"] for state in states])
        for number, memory in enumerate(self._memories):
            memory.assign(np.concatenate([state["memories"][number] for state in states]))

    def _collect(self, seed: tf.Tensor) -> list[Collected]:
        """Takes T steps. `seed` is the seed of the action noise, int32[2]."""
        envs, actors = self.envs, self._actors
        with tf.device(HOST):  # otherwise TensorFlow places some operations of each step on an accelerator
            noises = self._noises(seed)
            initial = [tf.identity(memory) for memory in self._memories]

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
            for memory, state in zip(self._memories, states, strict=True):
                memory.assign(state)
            whole, final = envs.rollout(), self._predictions(last, states)
            found = []
            for view, arrays, state, noise, after in zip(self._views, kept, initial, noises, final, strict=True):
                outputs, values, memories = (array.stack() for array in arrays)
                values = tf.concat([values, after.values[None]], axis=0)
                found.append(Collected(view.rows(whole), state, noise, Predictions(outputs, values, memories)))
            return found

    def _noises(self, seed: tf.Tensor) -> list[tf.Tensor]:
        """Returns the noise of each policy, `float32[T, N, ...]`.

        It is drawn for all envs of the run, so that the actions in an env do not depend on where it is stepped.
        """
        noises = []
        for number, (actor, view) in enumerate(zip(self._actors, self._views, strict=True)):
            count = view.num_envs // self.envs.num_envs  # rows per env
            shape = [self.envs.num_steps, self._total * count]
            noise = actor.distribution.noise(shape, seed + tf.constant([0, number]))
            is_whole = self.envs.num_envs == self._total
            noises.append(noise if is_whole else noise[:, self._own.start * count : self._own.stop * count])
        return noises

    def _predictions(self, joint: Any, states: Sequence[tf.Tensor]) -> list[Predictions]:
        """Returns the predictions of each policy for the current observations of all envs."""
        return [
            actor.step(view.observations(joint), state)
            for actor, view, state in zip(self._actors, self._views, states, strict=True)
        ]

    def _joint(self, actions: Sequence[Any]) -> Any:
        """Returns the actions of all envs for the actions of each policy."""
        if list(self.spaces) == [""]:
            return actions[0]
        parts = zip(self.spaces, self._views, actions, strict=True)
        return {name: view.joint_actions(own) for name, view, own in parts}

    def _arrays(self) -> list[list[tf.TensorArray]]:
        """Returns arrays for the predictions of each policy in T steps, in the order of `Predictions`."""
        return [
            [
                tf.TensorArray(tf.float32, self.envs.num_steps, element_shape=[view.num_envs, *shape])
                for shape in ([actor.distribution.num_outputs], [], [actor.state_size])
            ]
            for actor, view in zip(self._actors, self._views, strict=True)
        ]


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
