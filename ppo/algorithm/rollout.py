"""Rollouts: T steps of all envs in one graph call, with the predictions of the policies that acted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tensorflow as tf

import vecenv
from ppo.algorithm.collector import Collected, EnvState, Rollouts, Spaces
from ppo.algorithm.views import GroupView, View
from ppo.config import Config
from ppo.model.agent import HOST, Agent, Predictions
from ppo.runtime.graphs import graph_function, in_order, repeat
from ppo.seeds import env_seeds, sampling_seed
from vecenv.ingraph import InGraphVectorEnv

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import ParallelVectorEnv

    Envs = vecenv.AsyncVectorEnv | vecenv.SyncVectorEnv

_States = list[tf.Tensor]  # the memory of each policy, `float32[N, S]`
_Arrays = list[list[tf.TensorArray]]  # the predictions of each policy so far, in the order of `Predictions`


class LocalCollector:
    """Collects in this process.

    The envs write the rollout into the slab, so the graph carries only actions and predictions.

    See `Collector` for the methods.

    Args:
        config: The settings of the run.
        envs: The envs to step, as `ppo.envs.training_envs` makes them: all envs of the run, or a share of them.
        spaces: The spaces of each team.
        wrappers: The wrappers of each env.
        first_env: The number of the first of these envs in the run.

    Attributes:
        envs: The envs as graph operations.
        collect_in_graph: The graph function of `collect`.
    """

    def __init__(
        self,
        config: Config,
        envs: Envs | ParallelVectorEnv,
        spaces: Spaces,
        *,
        wrappers: Sequence[Any] = (),
        first_env: int = 0,
    ):
        self.wrappers = wrappers
        self.members: Mapping[str, tuple[str, ...]] = {name: () for name in spaces}
        joint = cast("Envs", envs)
        self._views = [View(envs.num_envs)]
        if config.is_multi_agent:
            parallel = cast("ParallelVectorEnv", envs)
            joint = parallel.joint
            self.members = {name: tuple(map(str, rows.group.agents)) for name, rows in parallel.groups.items()}
            self._views = [GroupView(joint.num_envs, rows) for rows in parallel.groups.values()]
        self.envs = InGraphVectorEnv(joint, num_steps=config.num_steps, timeout_s=config.step_timeout_s)
        self.spaces: Spaces = spaces
        slabs = sum(array.nbytes for array in joint.arrays.values())
        self.held_bytes = 0 if getattr(joint, "num_workers", 0) else slabs
        self._seed, self._total = config.seed, config.num_envs
        self._share = slice(first_env, first_env + joint.num_envs)
        self._actors: Sequence[Agent] = ()
        self._memories: list[tf.Variable] = []  # of each policy in the current episodes, `float32[N, S]`
        self.collect_in_graph = graph_function(self._collect)

    @property
    def steps(self) -> int:
        return self.envs.steps * self.envs.num_envs

    @property
    def restarts(self) -> int:
        return self.envs.envs.worker_restarts

    def use(self, actors: Sequence[Agent]) -> None:
        """Call this once."""
        self._actors = actors
        with tf.device(HOST):
            self._memories = [
                tf.Variable(actor.initial_state(view.num_envs), trainable=False, name="memory")
                for actor, view in zip(actors, self._views, strict=True)
            ]

    def begin(self, env_steps: int) -> None:
        with self.envs.raising():
            self.envs.reset(seed=env_seeds(self._seed, self._total, env_steps=env_steps)[self._share])
        for memory in self._memories:
            memory.assign(tf.zeros_like(memory))

    def collect(self, number: int, env_steps: int) -> Rollouts:
        """The tensors alias the slab wherever it has no padding."""
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

    def get_states(self) -> list[EnvState]:
        memories = [np.split(memory.numpy(), self.envs.num_envs) for memory in self._memories]
        return [
            {"env": state, "memories": list(of_env)}
            for state, *of_env in zip(self.envs.get_state(), *memories, strict=True)
        ]

    def set_states(self, states: Sequence[EnvState]) -> None:
        self.envs.set_state([state["env"] for state in states])
        for number, memory in enumerate(self._memories):
            memory.assign(np.concatenate([state["memories"][number] for state in states]))

    def _collect(self, seed: tf.Tensor) -> list[Collected]:
        """Takes T steps. `seed` is the seed of the action noise, int32[2]."""
        envs, actors = self.envs, self._actors
        with tf.device(HOST):  # otherwise TensorFlow places some operations of each step on an accelerator
            noises = self._noises(seed)
            initial = [tf.identity(memory) for memory in self._memories]

            def step(t: tf.Tensor, carried: tuple[Any, _States, _Arrays]) -> tuple[Any, _States, _Arrays]:
                joint, states, kept = carried
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
                return after.observations, states, kept

            last, states, kept = repeat(envs.num_steps, step, (envs.observations(), initial, self._arrays()))
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
            noises.append(noise if is_whole else noise[:, self._share.start * count : self._share.stop * count])
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
        return {name: view.joint_actions(of_team) for name, view, of_team in parts}

    def _arrays(self) -> _Arrays:
        """Returns empty arrays for the predictions in T steps."""
        return [
            [
                tf.TensorArray(tf.float32, self.envs.num_steps, element_shape=[view.num_envs, *shape])
                for shape in ([actor.distribution.num_outputs], [], [actor.state_size])
            ]
            for actor, view in zip(self._actors, self._views, strict=True)
        ]
