"""Overlap: the next rollout is collected while the update runs, with the policy from before that update."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import tensorflow as tf

from ppo.algorithm.rollout import Collected, Collector
from ppo.model.agent import Agent
from vecenv.ingraph import InGraphVectorEnv


class Overlap:
    """Collects in a thread of its own, with a copy of the agent that no update changes.

    Args:
        agent: Which learns.
        behaviour: Another of the same spaces and settings, which becomes a copy of it for each rollout.
        envs: To step.

    Attributes:
        collector: Steps the envs with `behaviour`.
        dropped: Whether the envs have gone on beyond what was learnt from.
    """

    def __init__(self, agent: Agent, behaviour: Agent, envs: InGraphVectorEnv):
        self.collector = Collector(behaviour, envs)
        self._agent, self._behaviour = agent, behaviour
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._next: Future[Collected] | None = None
        self.dropped = False

    @property
    def under_way(self) -> bool:
        """Whether a rollout was begun that was not taken yet."""
        return self._next is not None

    def begin(self, seed: tf.Tensor) -> None:
        """Begins a rollout with the policy as it is.

        Args:
            seed: int32[2], of the sampling.
        """
        # Order: no rollout is under way, so nobody reads the copy; and the update that will change the agent
        # begins after this.
        self._behaviour.become(self._agent)
        # Owner: the slab that the thread writes is the one after that which the update reads.
        self._next = self._thread.submit(self._collect, seed)

    def take(self) -> Collected:
        """Waits for the rollout that was begun, and returns it, or raises what its envs raised."""
        assert self._next is not None
        collected, self._next = self._next, None
        return collected.result()

    def drop(self) -> None:
        """Waits for the rollout under way, if there is one, and forgets it."""
        if self._next is not None:
            wait([self._next])
            self._next, self.dropped = None, True

    def close(self) -> None:
        """Waits for the rollout under way, if there is one, and ends the thread."""
        self._thread.shutdown()

    def _collect(self, seed: tf.Tensor) -> Collected:
        collected = self.collector.collect(seed)
        # Order: computed before the copy becomes another policy.
        return collected._replace(outputs=self.collector.outputs(collected.rollout, collected.state))
