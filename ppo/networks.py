"""networks.py: the policy and the value function: two multilayer perceptrons, and their initial weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

ACTIVATIONS = {"tanh": tf.tanh, "relu": tf.nn.relu, "elu": tf.nn.elu}


class MLP(tf.Module):
    """Dense layers with an activation between them.

    Args:
        num_inputs: Features of an input.
        layers: Units of the hidden layers.
        num_outputs: Features of an output.
        activation: Its name.
        output_gain: Scale of the last layer's initial weights.
        rng: Draws the initial weights.
    """

    def __init__(
        self,
        num_inputs: int,
        layers: Sequence[int],
        num_outputs: int,
        *,
        activation: str,
        output_gain: float,
        rng: np.random.Generator,
        name: str,
    ):
        super().__init__(name=name)
        sizes = [num_inputs, *layers, num_outputs]
        gains = [np.sqrt(2.0)] * len(layers) + [output_gain]
        self._activation = ACTIVATIONS[activation]
        self._weights = [
            tf.Variable(orthogonal(rows, columns, gain, rng), name=f"weight_{i}")
            for i, (rows, columns, gain) in enumerate(zip(sizes[:-1], sizes[1:], gains, strict=True))
        ]
        self._biases = [tf.Variable(tf.zeros([units]), name=f"bias_{i}") for i, units in enumerate(sizes[1:])]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns `float32[..., num_outputs]` for `float32[..., num_inputs]`."""
        hidden = inputs
        for i, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            hidden = tf.matmul(hidden, weight) + bias
            if i < len(self._weights) - 1:
                hidden = self._activation(hidden)
        return hidden


class ActorCritic(tf.Module):
    """A policy network, a value network, and a free log deviation where the policy is Gaussian.

    Initial weights after Andrychowicz et al., "What Matters in On-Policy Reinforcement Learning?"
    (2021): orthogonal, and a small last policy layer, so that first actions hardly depend on the state.
    """

    def __init__(
        self,
        *,
        num_inputs: int,
        num_outputs: int,
        log_std: float | None,
        policy_layers: Sequence[int],
        value_layers: Sequence[int],
        activation: str,
        seed: int,
    ):
        super().__init__(name="actor_critic")
        rng = np.random.default_rng(seed)
        self.policy = MLP(
            num_inputs, policy_layers, num_outputs, activation=activation, output_gain=0.01, rng=rng, name="policy"
        )
        self._value = MLP(num_inputs, value_layers, 1, activation=activation, output_gain=1.0, rng=rng, name="value")
        self.log_std = None if log_std is None else tf.Variable(tf.fill([num_outputs], log_std), name="log_std")

    def value(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the value `float32[...]` of states `float32[..., num_inputs]`."""
        return tf.squeeze(self._value(inputs), axis=-1)


def orthogonal(rows: int, columns: int, gain: float, rng: np.random.Generator) -> np.ndarray:
    """Returns a random `float32[rows, columns]` whose shorter side is orthonormal, times `gain` (Saxe et al., 2013)."""
    gaussian = rng.normal(size=(max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(gaussian)
    q *= np.sign(np.diag(r))
    return (gain * (q if rows >= columns else q.T)).astype(np.float32)
