"""agent.py: Agent: everything a trained policy is: network, normaliser, distribution."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import tensorflow as tf

import vecenv
from ppo import distributions
from ppo.config import Config
from ppo.networks import ActorCritic
from ppo.normalize import ObservationNormalizer, num_features


class Agent(tf.Module):
    """Maps batches of observations to actions and values.

    Raises:
        vecenv.UnsupportedSpace: If there is no policy for the spaces.
    """

    def __init__(self, config: Config, observation_space: gym.Space, action_space: gym.Space):
        super().__init__(name="agent")
        if not isinstance(observation_space, gym.spaces.Box):
            raise vecenv.UnsupportedSpace(
                f"ppo has no network for the observation space {observation_space}: it needs a Box. "
                "For a nested or discrete space, wrap the env in gymnasium.wrappers.FlattenObservation."
            )
        features = num_features(observation_space.shape)
        self.distribution = distributions.for_space(action_space)
        self._observation_rank = len(observation_space.shape)
        self.normalizer = ObservationNormalizer(
            features, clip=config.observation_clip, enabled=config.normalize_observations
        )
        self.network = ActorCritic(
            num_inputs=features,
            num_outputs=self.distribution.num_outputs,
            log_std=config.initial_log_std if self.distribution.has_log_std else None,
            policy_layers=config.policy_layers,
            value_layers=config.value_layers,
            activation=config.activation,
            seed=config.seed,
        )
        self._mode = tf.function(
            lambda observations: self.distribution.mode(self.network.policy(self.inputs(observations))),
            input_signature=[tf.TensorSpec([None, *observation_space.shape], observation_space.dtype)],
        )

    def features(self, observations: tf.Tensor) -> tf.Tensor:
        """Returns observations flattened to `float32[..., F]`, not yet normalised."""
        batch = tf.shape(observations)[: len(observations.shape) - self._observation_rank]
        flat = tf.reshape(observations, tf.concat([batch, [self.normalizer.moments.mean.shape[0]]], axis=0))
        flat.set_shape([*observations.shape[: len(observations.shape) - self._observation_rank], flat.shape[-1]])
        return tf.cast(flat, tf.float32)

    def inputs(self, observations: tf.Tensor) -> tf.Tensor:
        """Returns what the networks take: features, normalised."""
        return self.normalizer(self.features(observations))

    def sample(self, observations: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        """Returns sampled actions `[N, ...]` for observations `[N, ...]`."""
        return self.distribution.sample(self.network.policy(self.inputs(observations)), self.network.log_std, noise)

    def act(self, observations: np.ndarray) -> np.ndarray:
        """Returns the deterministic actions `[N, ...]` for observations `[N, ...]`, in numpy."""
        return self._mode(observations).numpy()
