"""Rollouts of T steps of all envs in one graph call, and an agent's predictions for their T + 1 states."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import tensorflow as tf

from ppo.model.agent import HOST, Agent
from ppo.model.observations import Inputs
from ppo.model.recurrent import scan
from ppo.seeds import sampling_seed
from vecenv.ingraph import InGraphVectorEnv, Rollout


class Collected(NamedTuple):
    """A rollout, with everything needed to recompute how its actions were sampled.

    Attributes:
        rollout: The slab, which aliases the memory of the envs.
        state: Recurrent state of the policy before the first step, `float32[N, S]`.
        noise: The noise passed to `Distribution.sample`, `float32[T, N, ...]`.
        outputs: Distribution parameters of the policy that acted, `float32[T * N, num_outputs]`; None if the policy
            has not changed since.
    """

    rollout: Rollout
    state: tf.Tensor
    noise: tf.Tensor
    outputs: tf.Tensor | None = None


class Sequences(NamedTuple):
    """How states form sequences, for a recurrent core.

    Attributes:
        first: Whether an episode begins in each state, `bool[T, N]`.
        state: Recurrent state before the first step, `float32[N, S]`.
    """

    first: tf.Tensor
    state: tf.Tensor


class Predictions(NamedTuple):
    """The predictions of an agent for the T + 1 states of a rollout.

    Attributes:
        outputs: Distribution parameters in the T states in which actions were taken, `float32[T * N, num_outputs]`.
        values: Values of all states, as the network returns them, `float32[T + 1, N]`.
        memory: Recurrent state after each of the T states, `float32[T * N, S]`.
    """

    outputs: tf.Tensor
    values: tf.Tensor
    memory: tf.Tensor


class Collector(tf.Module):
    """Runs the policy on the envs. Only actions pass through it; the workers write everything else into the slab.

    The collector computes neither values nor log-probabilities. The update computes them for the whole batch at once,
    with the same weights and normalization.

    Attributes:
        state: Recurrent state of the policy in each env's current episode, `float32[N, S]`.
    """

    def __init__(self, agent: Agent, envs: InGraphVectorEnv):
        super().__init__(name="collector")
        self._agent = agent
        self._envs = envs
        with tf.device(HOST):
            self.state = tf.Variable(agent.initial_state(envs.num_envs), trainable=False, name="state")

    def begin(self) -> None:
        """Resets the recurrent state, because all envs begin a new episode."""
        self.state.assign(tf.zeros_like(self.state))

    @tf.function(autograph=False)
    def collect(self, seed: tf.Tensor) -> Collected:
        """Takes T steps of all envs and returns the slab that holds them, without the policy's outputs.

        Args:
            seed: Seed of the action noise, int32[2].
        """
        with tf.device(HOST):  # otherwise TensorFlow places some operations of each step on an accelerator
            return self._collect(seed)

    def _collect(self, seed: tf.Tensor) -> Collected:
        envs = self._envs
        noise = self._agent.distribution.noise([envs.num_steps, envs.num_envs], seed)
        initial = self.state.read_value()
        if len(envs.groups) == 1:
            self.state.assign(self._steps(noise, initial))
        else:
            # Order: the groups' loops write no common variable, so TensorFlow runs them concurrently; `envs.rollout()`
            # runs after both.
            runs = [slice(rows.start, rows.stop) for rows in envs.groups]
            states = [self._steps(noise[:, rows], initial[rows], group) for group, rows in enumerate(runs)]
            self.state.assign(tf.concat(states, axis=0))
        return Collected(envs.rollout(), initial, noise)

    def _steps(self, noise: tf.Tensor, state: tf.Tensor, group: int | None = None) -> tf.Tensor:
        """Takes T steps of all envs, or of one group, in a graph loop, and returns the final recurrent state.

        Args:
            noise: Noise for `Distribution.sample`, `float32[T, N, ...]`.
            state: Recurrent state before the first step, `float32[N, S]`.
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

    @tf.function(jit_compile=True, autograph=False)
    def outputs(self, rollout: Rollout, initial: tf.Tensor) -> tf.Tensor:
        """Returns the parameters of the distributions from which actions were sampled, `float32[T * N, num_outputs]`.

        Args:
            rollout: The rollout that `collect` returned. The agent must not have changed since.
            initial: Recurrent state before its first step, `float32[N, S]`.
        """
        with tf.device(HOST):
            shaped = self._envs.shaped(rollout)
            inputs = self._agent.observations.inputs(flat(shaped.observations))
            return predict(self._agent, inputs, Sequences(begins(shaped), initial)).outputs


class Rollouts:
    """Collects rollout after rollout; with `overlap`, a thread collects the next one while the update runs.

    Args:
        agent: The agent that learns.
        actor: The agent that acts: `agent` itself, or another agent with the same spaces and settings, which becomes a
            copy of `agent` before each rollout. With `overlap`, it must be another agent: no update may change it.
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
        # Order: no rollout is pending, so no thread reads the copy; and the next update begins after this call.
        self.policy()
        # Owner: the thread writes the slab that follows the one the update reads.
        self._next = self._thread.submit(self._collect_with_outputs, self._noise_seed(number))

    def take(self, number: int) -> Collected:
        """Returns rollout `number`, which begins now unless it is pending. Raises any exception of its envs."""
        if self._thread is None:
            self.policy()
            return self.collector.collect(self._noise_seed(number))
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
        """Waits for the pending rollout, if there is one, and discards it."""
        if self._next is not None:
            wait([self._next])
            self._next, self.dropped = None, True

    def close(self) -> None:
        """Waits for the pending rollout, if there is one, and ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _noise_seed(self, number: int) -> tf.Tensor:
        return tf.constant(sampling_seed(self._seed, number))

    def _collect_with_outputs(self, seed: tf.Tensor) -> Collected:
        collected = self.collector.collect(seed)
        # Order: the outputs are computed before the actor copies a newer policy.
        return collected._replace(outputs=self.collector.outputs(collected.rollout, collected.state))


def predict(agent: Agent, inputs: Inputs, sequences: Sequences) -> Predictions:
    """Returns an agent's predictions for all T + 1 states of a rollout, given their inputs `[(T + 1) * N, ...]`."""
    hidden, memory = unroll(agent, inputs, sequences)
    outputs, values = agent.heads(hidden, inputs)
    num_states, num_envs = sequences.first.shape
    size = (num_states - 1) * num_envs
    return Predictions(outputs[:size], tf.reshape(values, [num_states, num_envs]), memory[:size])


def unroll(agent: Agent, inputs: Inputs, sequences: Sequences | None) -> tuple[Any, tf.Tensor]:
    """Runs an agent's features, and its recurrent core if it has one, over T steps of N envs.

    Args:
        agent: The agent.
        inputs: Inputs in all T states, `[T * N, ...]`.
        sequences: The sequences that the states form; may be None without a recurrent core.

    Returns:
        The input of the heads, `[T * N, ...]`, and the recurrent state after each step, `float32[T * N, S]`.
    """
    features, core = agent.network.features(inputs), agent.network.core
    if core is None:
        return features, tf.zeros([tf.nest.flatten(inputs)[0].shape[0], 0])
    assert sequences is not None
    first, state = sequences
    memory = scan(core, tf.reshape(features, [*first.shape, features.shape[-1]]), state, first)
    return flat(core.output(memory)), flat(memory)


def begins(rollout: Rollout) -> tf.Tensor:
    """Returns whether an episode begins in each of the T + 1 states, `bool[T + 1, N]`.

    The first row is False: the recurrent state before the first step is already reset where an episode begins.
    """
    done = tf.logical_or(rollout.terminated, rollout.truncated)
    return tf.concat([tf.zeros_like(done[:1]), done], axis=0)


def flat(nested: Any) -> Any:
    """Reshapes every `[T, N, ...]` of a nested structure to `[T * N, ...]`."""
    return tf.nest.map_structure(
        lambda column: tf.reshape(column, [column.shape[0] * column.shape[1], *column.shape[2:]]), nested
    )
