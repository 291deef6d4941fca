"""Agent: everything a trained policy is: networks, normalisers, distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.algorithm.checks import check_mask
from ppo.algorithm.normalize import ValueNormalizer
from ppo.config import Config
from ppo.model import distributions
from ppo.model.custom import CustomNetwork
from ppo.model.networks import ActorCritic
from ppo.model.observations import MASK, Inputs, Observations
from ppo.seeds import network_seed
from vecenv.spaces import leaves, nest

LOG_STD_RANGE = (-10.0, 2.0)
"""Bounds on the logarithm of the deviation where the network gives it, so that no density overflows."""

HOST = "/CPU:0"
"""Device on which envs are stepped; an agent that acts in them step by step must be there too."""

FORBIDDEN = -1e9
"""Logit of an action that the mask forbids: its probability is 0, and all stays finite."""


class Agent(tf.Module):
    """Maps batches of observations to actions and values.

    Attributes:
        state_size: Length S of what it remembers of an episode; 0 without a recurrent core.

    Raises:
        vecenv.UnsupportedSpace: If there is no policy for the spaces.
        ConfigError: If the user's own network does not fit.
    """

    def __init__(self, config: Config, observation_space: gym.Space, action_space: gym.Space):
        super().__init__(name="agent")
        self.distribution = distributions.for_space(action_space, transform=config.action_transform)
        self.observations = Observations(
            observation_space,
            mask_size=self.distribution.mask_size,
            clip=config.observation_clip,
            normalize=config.normalize_observations,
        )
        self.values = ValueNormalizer(enabled=config.normalize_values)
        free = [config.initial_log_std] * self.distribution.num_free
        num_outputs = self.distribution.num_outputs - (0 if config.state_dependent_std else len(free))
        self.network: CustomNetwork | ActorCritic
        if config.network is not None:
            self.network = CustomNetwork(config.network, self.observations, num_outputs, seed=network_seed(config.seed))
        else:
            self.network = ActorCritic(config, self.observations.specs, num_outputs)
        self._initial_log_std = config.initial_log_std
        self.log_std = None
        if free and not config.state_dependent_std:
            self.log_std = tf.Variable(free, name="log_std")
        self.state_size = 0 if self.network.core is None else self.network.core.state_size
        spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape], s.dtype), _specs(observation_space))
        signature = [spec, tf.TensorSpec([None, self.state_size])]
        self._act = tf.function(self.mode, input_signature=signature, autograph=False)

    def policy(self, hidden: Any, inputs: Inputs) -> tf.Tensor:
        """Returns the parameters of the distribution over actions, `float32[B, num_outputs]`.

        Args:
            hidden: What the networks' features, and then the core if there is one, returned.
            inputs: Of the same batch; holds the mask if there is one.
        """
        outputs = self.network.policy(hidden)
        if self.log_std is not None:
            log_std = tf.broadcast_to(self.log_std, tf.shape(outputs))
            outputs = tf.concat([outputs, log_std], axis=-1)
        elif free := self.distribution.num_free:
            log_std = bounded(outputs[:, -free:] + self._initial_log_std, *LOG_STD_RANGE)
            outputs = tf.concat([outputs[:, :-free], log_std], axis=-1)
        return tf.where(inputs[MASK], outputs, FORBIDDEN) if self.observations.has_mask else outputs

    def value(self, hidden: Any) -> tf.Tensor:
        """Returns the values `float32[B]`, in units of normalised rewards."""
        return self.values.denormalize(self.network.value(hidden))

    def remember(self, features: Any, state: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Takes one step of the core: returns what the networks see, and the memory `float32[B, S]` after it."""
        core = self.network.core
        if core is None:
            return features, state
        state = core.step(core.project(features), state)
        return core.output(state), state

    def sample(self, observations: Any, state: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns sampled actions `[N, ...]`, and the memory, for observations `[N, ...]`."""
        outputs, state = self._outputs(observations, state)
        return self.distribution.sample(outputs, noise), state

    def mode(self, observations: Any, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the likeliest actions `[N, ...]`, and the memory, for observations `[N, ...]`."""
        outputs, state = self._outputs(observations, state)
        return self.distribution.mode(outputs), state

    def act(self, observations: Any, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the deterministic actions `[N, ...]`, and the memory, for observations `[N, ...]`, in numpy.

        Raises:
            NothingAllowed: If the mask of one forbids every action.
        """
        if self.observations.has_mask:
            check_mask(self.observations.mask(observations)[None], self.distribution.mask_groups, "this call")
        with tf.device(HOST):
            actions, after = self._act(observations, state)
        return actions.numpy(), after.numpy()

    def initial_state(self, num_envs: int) -> np.ndarray:
        """Returns the memory at the start of an episode, `float32[N, S]`."""
        return np.zeros([num_envs, self.state_size], np.float32)

    @property
    def on_host(self) -> bool:
        """Whether all variables are on the CPU, so that acting fetches no weights from an accelerator."""
        return all(tf.DeviceSpec.from_string(v.device).device_type == "CPU" for v in self.variables)

    @tf.function(autograph=False)
    def become(self, other: Agent) -> None:
        """Copies all variables of another agent of the same spaces and settings."""
        for mine, theirs in zip(self.variables, other.variables, strict=True):
            mine.assign(tf.raw_ops.DeepCopy(x=theirs.read_value()))

    @property
    def learned(self) -> list[tf.Variable]:
        """All variables that gradients change."""
        return [*self.network.trainable_variables, *([] if self.log_std is None else [self.log_std])]

    def _outputs(self, observations: Any, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inputs = self.observations.inputs(observations)
        hidden, state = self.remember(self.network.features(inputs), state)
        return self.policy(hidden, inputs), state


def bounded(x: tf.Tensor, low: float, high: float) -> tf.Tensor:
    """Returns `x` clipped to the bounds; outside them, gradients that point back inside still reach `x`.

    The gradients of `tf.clip_by_value` are zero there, so a value outside the bounds would never return.
    """

    @tf.custom_gradient
    def clipped(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:  # gradient descent moves x in the opposite direction
            outward = tf.logical_or((x > high) & (upstream < 0), (x < low) & (upstream > 0))
            return tf.where(outward, 0.0, upstream)

        return tf.clip_by_value(x, low, high), gradient

    return clipped(x)


def _specs(space: gym.Space) -> Any:
    """Returns shape and dtype of each leaf, nested as the space is."""
    found = dict(leaves(space))
    return nest(space, lambda path: tf.TensorSpec(found[path].shape, found[path].dtype))
