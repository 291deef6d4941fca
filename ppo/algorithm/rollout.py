"""Collector: T steps of all envs in one graph call, written by the workers into the slab."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from ppo.algorithm.batch import begins, flat, outputs_of
from ppo.model.agent import HOST, Agent
from vecenv.ingraph import InGraphVectorEnv, Rollout


class Collected(NamedTuple):
    """A rollout, and what the update must know of how its actions were drawn.

    Attributes:
        rollout: The slab.
        state: Memory of the policy before the first step, `float32[N, S]`.
        noise: The noise that `Distribution.sample` was given, `float32[T, N, ...]`.
        outputs: The distributions of the policy that acted, `float32[T * N, num_outputs]`; None if the policy has not
            changed since.
    """

    rollout: Rollout
    state: tf.Tensor
    noise: tf.Tensor
    outputs: tf.Tensor | None = None


class Collector(tf.Module):
    """Runs the policy on the envs. Only the actions pass through here; all else stays where it is.

    Neither values nor log-probabilities are computed on the way: the update computes them for the
    whole batch at once, with the same weights and normaliser.

    Attributes:
        state: What the policy remembers of the episodes under way, `float32[N, S]`.
    """

    def __init__(self, agent: Agent, envs: InGraphVectorEnv):
        super().__init__(name="collector")
        self._agent = agent
        self._envs = envs
        with tf.device(HOST):
            self.state = tf.Variable(agent.initial_state(envs.num_envs), trainable=False, name="state")

    def begin(self) -> None:
        """Forgets everything, as all envs begin a new episode."""
        self.state.assign(tf.zeros_like(self.state))

    @tf.function(autograph=False)
    def collect(self, seed: tf.Tensor) -> Collected:
        """Takes T steps of all envs and returns the slabs that hold them, without the policy's outputs.

        Args:
            seed: int32[2], of the sampling.
        """
        with tf.device(HOST):  # TensorFlow would place some operations of each step on an accelerator
            return self._collected(seed)

    def _collected(self, seed: tf.Tensor) -> Collected:
        envs = self._envs
        noise = self._agent.distribution.noise([envs.num_steps, envs.num_envs], seed)
        initial = self.state.read_value()
        if len(envs.groups) == 1:
            self.state.assign(self._steps(noise, initial))
        else:
            # Order: the loops group no variable that is written, so TensorFlow runs them at the same time; the rollout
            # is handed out after both.
            runs = [slice(rows.start, rows.stop) for rows in envs.groups]
            states = [self._steps(noise[:, rows], initial[rows], group) for group, rows in enumerate(runs)]
            self.state.assign(tf.concat(states, axis=0))
        return Collected(envs.rollout(), initial, noise)

    def _steps(self, noise: tf.Tensor, state: tf.Tensor, group: int | None = None) -> tf.Tensor:
        """Takes T steps of all envs, or of one group, as a graph loop; returns the memory after them.

        Args:
            noise: What `Distribution.sample` takes, `[T, N, ...]`.
            state: Memory before the first step, `float32[N, S]`.
            group: Index of one of `InGraphVectorEnv.groups`.
        """
        envs, agent = self._envs, self._agent

        def step(t: tf.Tensor, observations: Any, state: tf.Tensor) -> tuple[tf.Tensor, Any, tf.Tensor]:
            actions, state = agent.sample(observations, state, noise[t])
            after = envs.step(actions, group)
            if agent.state_size:
                ended = tf.logical_or(after.terminated, after.truncated)
                state = tf.where(ended[:, None], 0.0, state)
            return t + 1, after.observations, state

        # Order: each step waits for the one before, as it takes its observations; one at a time.
        start = (0, envs.observations(group), state)
        return tf.while_loop(lambda t, *_: t < envs.num_steps, step, start, parallel_iterations=1)[-1]

    @tf.function(jit_compile=True, autograph=False)
    def outputs(self, rollout: Rollout, initial: tf.Tensor) -> tf.Tensor:
        """Returns the distributions from which a rollout's actions were drawn, `float32[T * N, num_outputs]`.

        Args:
            rollout: What `collect` returned; the agent must not have changed since.
            initial: The memory before its first step.
        """
        with tf.device(HOST):
            shaped = self._envs.shaped(rollout)
            inputs = self._agent.observations.inputs(flat(shaped.observations))
            return outputs_of(self._agent, inputs, begins(shaped), initial)
