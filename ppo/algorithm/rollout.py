"""Rollouts of T steps of all envs in one graph call, and an optional thread that collects them in advance."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import tensorflow as tf

from ppo.algorithm.chunks import encoded
from ppo.model.agent import HOST, Agent
from ppo.model.recurrent import Sequences, flat
from ppo.seeds import sampling_seed
from vecenv.ingraph import InGraphVectorEnv, Rollout


class Collected(NamedTuple):
    """A rollout, with everything needed to recompute how its actions were sampled.

    Attributes:
        rollout: The slab, which aliases the memory of the envs.
        state: The policy's memory before the first step, `float32[N, S]`.
        noise: The noise passed to `Distribution.sample`, `float32[T, N, ...]`.
        outputs: Distribution parameters of the policy that acted, `float32[T * N, num_outputs]`; None if the policy
            has not changed since.
    """

    rollout: Rollout
    state: tf.Tensor
    noise: tf.Tensor
    outputs: tf.Tensor | None = None


class Collector(tf.Module):
    """Runs the policy on the envs. Only actions pass through it; the envs write everything else into the slab.

    The collector computes neither values nor log-probabilities. The update computes them for the whole batch at once,
    with the same weights and normalization.

    Attributes:
        state: The policy's memory of each env's current episode, `float32[N, S]`.
    """

    def __init__(self, agent: Agent, envs: InGraphVectorEnv):
        super().__init__(name="collector")
        self._agent = agent
        self._envs = envs
        with tf.device(HOST):
            self.state = tf.Variable(agent.initial_state(envs.num_envs), trainable=False, name="state")
        self.outputs = tf.function(self._outputs, jit_compile=not agent.observations.has_images, autograph=False)

    def begin(self) -> None:
        """Clears the policy's memory, because all envs begin a new episode."""
        self.state.assign(tf.zeros_like(self.state))

    @tf.function(autograph=False)
    def collect(self, seed: tf.Tensor) -> Collected:
        """Takes T steps of all envs and returns the slab that holds them, without the policy's outputs.

        Args:
            seed: Seed of the action noise, int32[2].
        """
        envs = self._envs
        with tf.device(HOST):  # otherwise TensorFlow places some operations of each step on an accelerator
            noise = self._agent.distribution.noise([envs.num_steps, envs.num_envs], seed)
            initial = self.state.read_value()
            if len(envs.groups) == 1:
                self.state.assign(self._steps(noise, initial))
            else:
                # Order: the groups' loops write no common variable, so TensorFlow runs them concurrently.
                # `envs.rollout()` runs after all of them.
                runs = [slice(rows.start, rows.stop) for rows in envs.groups]
                states = [self._steps(noise[:, rows], initial[rows], group) for group, rows in enumerate(runs)]
                self.state.assign(tf.concat(states, axis=0))
            return Collected(envs.rollout(), initial, noise)

    def _steps(self, noise: tf.Tensor, state: tf.Tensor, group: int | None = None) -> tf.Tensor:
        """Takes T steps of all envs, or of one group, in a graph loop, and returns the final memory.

        Args:
            noise: Noise for `Distribution.sample`, `float32[T, N, ...]`.
            state: Memory before the first step, `float32[N, S]`.
            group: Index into `InGraphVectorEnv.groups`.
        """
        envs, agent = self._envs, self._agent

        def step(t: tf.Tensor, observations: Any, state: tf.Tensor) -> tuple[tf.Tensor, Any, tf.Tensor]:
            actions, state = agent.sample(observations, state, noise[t])
            after = envs.step(actions, group)
            if agent.state_size:
                ended = tf.logical_or(after.terminated, after.truncated)
                state = tf.where(ended[:, None], 0.0, state)
            return t + 1, after.observations, state

        # Order: each step needs the observations of the previous step, so the steps run one at a time.
        start = (0, envs.observations(group), state)
        return tf.while_loop(lambda t, *_: t < envs.num_steps, step, start, parallel_iterations=1)[-1]

    def _outputs(self, rollout: Rollout, initial: tf.Tensor) -> tf.Tensor:
        """Returns the parameters of the distributions from which actions were sampled, `float32[T * N, num_outputs]`.

        Args:
            rollout: The rollout that `collect` returned. The agent must not have changed since.
            initial: Memory before its first step, `float32[N, S]`.
        """
        envs, agent = self._envs, self._agent
        with tf.device(HOST):
            shaped = envs.shaped(rollout)
            inputs = agent.observations.inputs(flat(shaped.observations))
            sequences = sequences_of(shaped, initial)
            outputs = agent.unroll(encoded(agent, inputs, envs.num_envs), sequences).outputs
            return outputs[: envs.num_steps * envs.num_envs]


class Rollouts:
    """Collects rollout after rollout. With `overlap`, a thread collects the next rollout while the update runs.

    Args:
        agent: The agent that learns.
        actor: The agent that acts: `agent` itself, or another agent with the same spaces and settings, which becomes a
            copy of `agent` before each rollout. With `overlap`, it must be another agent, which no update changes.
        envs: The envs to step.
        overlap: Whether to collect in a thread.
        seed: Seed of the run.

    Attributes:
        collector: Steps the envs with `actor`.
        dropped: Whether a rollout was dropped. The envs are then ahead of the learner.
    """

    def __init__(self, agent: Agent, actor: Agent, envs: InGraphVectorEnv, *, overlap: bool, seed: int):
        self.collector = Collector(actor, envs)
        self.dropped = False
        self._agent, self._actor, self._seed = agent, actor, seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collect") if overlap else None
        self._next: Future[Collected] | None = None

    @property
    def pending(self) -> bool:
        """Whether a rollout has begun that `take` has not yet returned."""
        return self._next is not None

    def begin(self, number: int) -> None:
        """Starts collecting rollout `number` with the current policy; does nothing without `overlap`."""
        if self._thread is None:
            return
        # Order: no rollout is pending, so no thread reads the actor; and the next update begins after this call.
        self.policy()
        # Owner: the thread writes the slab that follows the one the update reads.
        self._next = self._thread.submit(self._collect, number)

    def take(self, number: int) -> Collected:
        """Returns rollout `number`, which begins now unless it is pending. Raises any exception of its envs."""
        if self._thread is None:
            self.policy()
            return self._collect(number)
        if self._next is None:
            self.begin(number)
        assert self._next is not None
        pending, self._next = self._next, None
        return pending.result()

    def policy(self) -> Agent:
        """Returns the current policy on the host. No rollout may be pending."""
        if self._actor is not self._agent:
            self._actor.become(self._agent)
        return self._actor

    def drop(self) -> None:
        """Waits for the pending rollout, if any, and discards it."""
        if self._next is not None:
            wait([self._next])
            self._next, self.dropped = None, True

    def close(self) -> None:
        """Waits for the pending rollout, if any, and ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _collect(self, number: int) -> Collected:
        collected = self.collector.collect(tf.constant(sampling_seed(self._seed, number)))
        if self._thread is None:
            return collected
        # Order: the outputs are computed before the actor copies a newer policy.
        return collected._replace(outputs=self.collector.outputs(collected.rollout, collected.state))


def sequences_of(rollout: Rollout, initial: tf.Tensor) -> Sequences:
    """Returns the sequences that the T + 1 states of a rollout form.

    The first row marks no episode as new: where one begins, `initial`, the memory before the first step, is already 0.
    """
    ended = tf.logical_or(rollout.terminated, rollout.truncated)
    return Sequences(tf.concat([tf.zeros_like(ended[:1]), ended], axis=0), initial)
