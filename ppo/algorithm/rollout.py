"""Rollouts of T steps of all envs in one graph call, and an optional thread that collects them in advance."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import tensorflow as tf

from ppo.graphs import graph_method
from ppo.model.agent import HOST, Agent, Predictions
from ppo.model.frames import first_stacks, frames_of, gathered, next_stacks, rows_of_stacks
from ppo.model.recurrent import Sequences, flat
from ppo.seeds import sampling_seed
from vecenv.ingraph import InGraphVectorEnv, Rollout
from vecenv.spaces import leaves, nest, pick


class Collected(NamedTuple):
    """A rollout, with everything needed to recompute how its actions were sampled.

    Attributes:
        rollout: The slab, which aliases the memory of the envs.
        state: The policy's memory before the first step, `float32[N, S]`.
        stacks: With stacks of frames: the stacks in the first state, `[N, F, ...]`, nested like the observation space.
            Else None.
        noise: The noise passed to `Distribution.sample`, `float32[T, N, ...]`.
        outputs: Distribution parameters of the policy that acted, `float32[T * N, num_outputs]`; None if the policy
            has not changed since.
        start: Predictions of the policy that acted, if it has not changed since and the collector kept them: outputs
            `float32[T * N, num_outputs]`, values `float32[T + 1, N]` and memory `float32[T * N, S]`. None if the update
            must compute the predictions of the policy at its start.
    """

    rollout: Rollout
    state: tf.Tensor
    stacks: Any
    noise: tf.Tensor
    outputs: tf.Tensor | None = None
    start: Predictions | None = None


class Collector(tf.Module):
    """Runs the policy on the envs. Only actions pass through it; the envs write everything else into the slab.

    The update needs the predictions of the policy that acted. If the policy sees images, whose encoding is costly, the
    collector keeps the predictions. Otherwise the update recomputes them for the whole batch, with the same weights and
    normalization, which is faster than storing them.

    Args:
        agent: The policy.
        envs: The envs to step.
        rows: Their numbers among the envs of all ranks. None if there is only one rank.
        total: Number of envs of all ranks. None if there is only one rank.

    Attributes:
        state: The policy's memory of the current episode of each env of all ranks, `float32[total, S]`. Only the rows
            of this rank are up to date.
        stacks: With stacks of frames: the last `frame_stack` observations of each env, one variable `[total, F, ...]`
            per leaf of the observation space. Else empty. Only the rows of this rank are up to date.
    """

    def __init__(self, agent: Agent, envs: InGraphVectorEnv, rows: slice | None = None, total: int | None = None):
        super().__init__(name="collector")
        self._agent = agent
        self._envs = envs
        self._rows = slice(0, envs.num_envs) if rows is None else rows
        self._total = envs.num_envs if total is None else total
        stacked: list[Any] = [leaf for _, leaf in leaves(agent.observations.space)] if agent.frame_stack > 1 else []
        with tf.device(HOST):
            self.state = tf.Variable(agent.initial_state(self._total), trainable=False, name="state")
            self.stacks = [
                tf.Variable(tf.zeros([self._total, *leaf.shape], leaf.dtype), trainable=False, name="stacks")
                for leaf in stacked
            ]

    def begin(self) -> None:
        """Clears the policy's memory and fills the stacks with the current observations, after a reset of all envs."""
        self.state.assign(tf.zeros_like(self.state))
        if self.stacks:
            self._keep(first_stacks(self._envs.observations(), self._agent.frame_stack))

    def _kept(self) -> Any:
        """Returns the stacks, nested like the observation space; None without stacks."""
        if not self.stacks:
            return None
        space = self._agent.observations.space
        by_path = {path: kept[self._rows] for (path, _), kept in zip(leaves(space), self.stacks, strict=True)}
        return nest(space, by_path.__getitem__)

    def _keep(self, stacks: Any) -> None:
        for (path, _), kept in zip(leaves(self._agent.observations.space), self.stacks, strict=True):
            kept[self._rows].assign(pick(stacks, path))

    @graph_method()
    def collect(self, seed: tf.Tensor) -> Collected:
        """Takes T steps of all envs and returns the slab that holds them, without `outputs`.

        Args:
            seed: Seed of the action noise, int32[2].
        """
        envs = self._envs
        with tf.device(HOST):  # otherwise TensorFlow places some operations of each step on an accelerator
            # The noise of an env does not depend on the rank that steps it.
            noise = self._agent.distribution.noise([envs.num_steps, self._total], seed)[:, self._rows]
            initial, stacks = self.state[self._rows], self._kept()
            state, last, start = self._steps(noise, initial, stacks)
            self.state[self._rows].assign(state)
            if self.stacks:
                self._keep(last)
            if start is not None:
                start = start._replace(outputs=flat(start.outputs), memory=flat(start.memory))
            return Collected(envs.rollout(), initial, stacks, noise, start=start)

    def _steps(self, noise: tf.Tensor, state: tf.Tensor, stacks: Any) -> tuple[tf.Tensor, Any, Predictions | None]:
        """Takes T steps of all envs in a graph loop.

        Args:
            noise: Noise for `Distribution.sample`, `float32[T, N, ...]`.
            state: Memory before the first step, `float32[N, S]`.
            stacks: Stacks of frames in the first state, `[N, F, ...]`, or None.

        Returns:
            The final memory; what the policy sees in the last state; and, if it sees images, the predictions
            `[T, N, ...]`, with values `float32[T + 1, N]`.
        """
        envs, agent = self._envs, self._agent
        kept: list[tf.TensorArray] = []
        if agent.observations.has_images:
            shapes = [[envs.num_envs, *shape] for shape in ([agent.distribution.num_outputs], [], [agent.state_size])]
            kept = [tf.TensorArray(tf.float32, envs.num_steps, element_shape=shape) for shape in shapes]

        def step(t: tf.Tensor, observations: Any, state: tf.Tensor, kept: list[tf.TensorArray]) -> tuple[Any, ...]:
            predictions = agent.step(observations, state)
            actions, state = agent.distribution.sample(predictions.outputs, noise[t]), predictions.memory
            after = envs.step(actions)
            ended = tf.logical_or(after.terminated, after.truncated)
            if agent.state_size:
                state = tf.where(ended[:, None], 0.0, state)
            seen = next_stacks(observations, after.observations, ended, agent.frame_stack)
            if kept:
                kept = [array.write(t, of_all) for array, of_all in zip(kept, predictions, strict=True)]
            return t + 1, seen, state, kept

        # Order: each step needs the observations of the previous step, so the steps run one at a time.
        begin = (0, envs.observations() if stacks is None else stacks, state, kept)
        _, last, state, kept = tf.while_loop(lambda t, *_: t < envs.num_steps, step, begin, parallel_iterations=1)
        if not kept:
            return state, last, None
        outputs, values, memory = (array.stack() for array in kept)
        values = tf.concat([values, agent.step(last, state).values[None]], axis=0)
        return state, last, Predictions(outputs, values, memory)

    @graph_method(jit_compile=True)
    def outputs(self, rollout: Rollout, initial: tf.Tensor, stacks: Any) -> tf.Tensor:
        """Returns the parameters of the distributions from which actions were sampled, `float32[T * N, num_outputs]`.

        Args:
            rollout: The rollout that `collect` returned. The agent must not have changed since.
            initial: Memory before its first step, `float32[N, S]`.
            stacks: Stacks of frames in the first state, `[N, F, ...]`, or None.
        """
        envs, agent = self._envs, self._agent
        with tf.device(HOST):
            shaped = envs.shaped(rollout)
            seen = flat(shaped.observations)
            if stacks is not None:
                ended = ends_of(shaped)
                rows = rows_of_stacks(ended, agent.frame_stack)
                seen = gathered(frames_of(stacks, shaped.observations), rows)
            encoded = agent.network.encode(agent.observations.inputs(seen))
            outputs = agent.unroll(encoded, sequences_of(shaped, initial)).outputs
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
        rows: See `Collector`.
        total: See `Collector`.

    Attributes:
        collector: Steps the envs with `actor`.
        dropped: Whether a rollout was dropped. The envs are then ahead of the learner.
    """

    def __init__(
        self,
        agent: Agent,
        actor: Agent,
        envs: InGraphVectorEnv,
        *,
        overlap: bool,
        seed: int,
        rows: slice | None = None,
        total: int | None = None,
    ):
        self.collector = Collector(actor, envs, rows, total)
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

    def take(self, number: int) -> list[Collected]:
        """Returns rollout `number` of the only team, which begins now unless it is pending.

        Raises any exception of its envs.
        """
        if self._thread is None:
            self.policy()
            return [self._collect(number)]
        if self._next is None:
            self.begin(number)
        assert self._next is not None
        pending, self._next = self._next, None
        return [pending.result()]

    def policies(self) -> dict[str, Agent]:
        """Returns the current policy of the only team, "", on the host. No rollout may be pending."""
        return {"": self.policy()}

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
        if self._actor is self._agent:
            return collected
        if self._thread is None:  # on an accelerator, the agent's predictions differ by rounding
            return collected._replace(start=None)
        # Order: the outputs are computed before the actor is overwritten with a newer policy.
        outputs = (
            self.collector.outputs(collected.rollout, collected.state, collected.stacks)
            if collected.start is None
            else collected.start.outputs
        )
        return collected._replace(outputs=outputs, start=None)


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
