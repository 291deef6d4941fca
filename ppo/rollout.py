"""rollout.py: Collector: T steps of all envs in one graph call, written by the workers into the slab."""

from __future__ import annotations

import tensorflow as tf

from ppo.agent import Agent
from vecenv.ingraph import InGraphVectorEnv, Rollout


class Collector:
    """Runs the policy on the envs. Only the actions pass through here; all else stays where it is.

    Neither values nor log-probabilities are computed on the way: the update computes them for the
    whole batch at once, with the same weights and normaliser.
    """

    def __init__(self, agent: Agent, envs: InGraphVectorEnv):
        self._agent = agent
        self._envs = envs

    @tf.function
    def collect(self, seed: tf.Tensor) -> Rollout:
        """Takes T steps and returns the slabs that hold them.

        Args:
            seed: int32[2], of the sampling.
        """
        envs = self._envs
        noise = self._agent.distribution.noise([envs.num_steps, envs.num_envs], seed)
        observations = envs.observations()
        for t in tf.range(envs.num_steps):
            # Order: each step waits for the one before, as it takes its observations; one at a time.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            actions = self._agent.sample(observations, noise[t])
            observations = envs.step(actions).observations
        return envs.rollout()
