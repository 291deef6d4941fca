"""ActorCritic: multilayer perceptrons, behind a CNN for images and a recurrent core if there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.config import Config
from ppo.model.initializers import orthogonal
from ppo.model.recurrent import GRU, LSTM, Core
from ppo.seeds import network_seed

ACTIVATIONS = {"tanh": tf.tanh, "relu": tf.nn.relu, "elu": tf.nn.elu}
CORES: dict[str, Callable[..., Core]] = {"gru": GRU, "lstm": LSTM}


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
            tf.Variable(orthogonal(rows, columns, gain, rng), name=f"{name}/weight_{i}")
            for i, (rows, columns, gain) in enumerate(zip(sizes[:-1], sizes[1:], gains, strict=True))
        ]
        self.biases = [tf.Variable(tf.zeros([units]), name=f"{name}/bias_{i}") for i, units in enumerate(sizes[1:])]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns `float32[..., num_outputs]` for `float32[..., num_inputs]`."""
        hidden = inputs
        for i, (weight, bias) in enumerate(zip(self._weights, self.biases, strict=True)):
            hidden = tf.matmul(hidden, weight) + bias
            if i < len(self._weights) - 1:
                hidden = self._activation(hidden)
        return hidden

    def rescale(self, scale: tf.Tensor, shift: tf.Tensor) -> None:
        """Changes the last layer so that the outputs become `scale * outputs + shift`."""
        self._weights[-1].assign(self._weights[-1] * scale)
        self.biases[-1].assign(self.biases[-1] * scale + shift)


class NatureCNN(tf.Module):
    """Three convolutions and a dense layer, all with ReLU (Mnih et al., Nature, 2015): bytes to 512 features.

    Args:
        shape: Height, width and channels, at least 36 x 36.
        rng: Draws the initial weights.
    """

    LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # filters, kernel, stride
    NUM_OUTPUTS = 512

    def __init__(self, shape: Sequence[int], *, rng: np.random.Generator):
        super().__init__(name="cnn")
        height, width, channels = shape
        self._kernels = []
        for i, (filters, kernel, stride) in enumerate(self.LAYERS):
            weight = orthogonal(kernel * kernel * channels, filters, np.sqrt(2.0), rng)
            self._kernels.append(tf.Variable(weight, name=f"cnn/kernel_{i}"))
            height, width, channels = (height - kernel) // stride + 1, (width - kernel) // stride + 1, filters
        self._biases = [tf.Variable(tf.zeros([filters]), name="cnn/bias") for filters, _, _ in self.LAYERS]
        self._dense = MLP(
            height * width * channels, (), self.NUM_OUTPUTS, activation="relu", output_gain=np.sqrt(2.0), rng=rng,
            name="dense",
        )  # fmt: skip

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Returns `float32[B, 512]` for `uint8[B, H, W, C]`."""
        hidden = tf.cast(images, tf.float32) / 255.0
        for (_, kernel, stride), weight, bias in zip(self.LAYERS, self._kernels, self._biases, strict=True):
            patches = _patches(hidden, kernel, stride)
            flat = tf.reshape(patches, [tf.reduce_prod(tf.shape(patches)[:3]), weight.shape[0]])
            hidden = tf.nn.relu(tf.matmul(flat, weight) + bias)
            hidden = tf.reshape(hidden, [tf.shape(patches)[0], *patches.shape[1:3], weight.shape[1]])
        return tf.nn.relu(self._dense(tf.reshape(hidden, [tf.shape(hidden)[0], int(np.prod(hidden.shape[1:]))])))


class ActorCritic(tf.Module):
    """A policy and a value function. What they share is in `features` and `core`; the rest they have for themselves.

    Initial weights after Andrychowicz et al., "What Matters in On-Policy Reinforcement Learning?"
    (2021): orthogonal, and a small last policy layer, so that first actions hardly depend on the state.

    Args:
        config: Sizes and kinds of all layers.
        specs: What the networks see, by the name of the leaf: shape `[None, ...]`; uint8 for images.
        num_outputs: Of the policy.
    """

    def __init__(self, config: Config, specs: Mapping[str, tf.TensorSpec], num_outputs: int):
        super().__init__(name="actor_critic")
        rng = np.random.default_rng(network_seed(config.seed))
        self._cnns = {
            name: NatureCNN(spec.shape[1:], rng=rng) for name, spec in specs.items() if spec.dtype == tf.uint8
        }
        width = sum(NatureCNN.NUM_OUTPUTS if name in self._cnns else spec.shape[1] for name, spec in specs.items())
        self._names = list(specs)
        self.core: Core | None = None
        if config.recurrent != "none":
            self.core = CORES[config.recurrent](width, config.recurrent_units, rng=rng)
            width = config.recurrent_units
        self._trunk, policy_layers, value_layers = None, config.policy_layers, config.value_layers
        if config.share_layers:
            *hidden, last = config.policy_layers
            self._trunk = MLP(width, hidden, last, activation=config.activation, output_gain=np.sqrt(2.0), rng=rng,
                              name="trunk")  # fmt: skip
            self._activation = ACTIVATIONS[config.activation]
            width, policy_layers, value_layers = last, (), ()
        kind: dict[str, Any] = {"activation": config.activation, "rng": rng}
        self._policy = MLP(
            width, policy_layers, num_outputs, output_gain=config.policy_output_gain, name="policy", **kind
        )
        self._value = MLP(width, value_layers, 1, output_gain=1.0, name="value", **kind)

    def features(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Returns all leaves of `inputs: [B, ...]` as one vector each, `float32[B, F]`."""
        parts = [self._cnns[name](inputs[name]) if name in self._cnns else inputs[name] for name in self._names]
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis=-1)

    def policy(self, hidden: tf.Tensor) -> tf.Tensor:
        """Returns the policy's outputs `float32[B, num_outputs]` for what `features`, then the core, returned."""
        return self._policy(self._shared(hidden))

    def value(self, hidden: tf.Tensor) -> tf.Tensor:
        """Returns the values `float32[B]`."""
        return tf.squeeze(self._value(self._shared(hidden)), axis=-1)

    def rescale_value(self, scale: tf.Tensor, shift: tf.Tensor) -> None:
        """Changes the value function so that it gives `scale * value + shift` where it gave `value`."""
        self._value.rescale(scale, shift)

    def _shared(self, hidden: tf.Tensor) -> tf.Tensor:
        return hidden if self._trunk is None else self._activation(self._trunk(hidden))


def _patches(images: tf.Tensor, kernel: int, stride: int) -> tf.Tensor:
    """Returns the squares under a kernel, `float32[B, H', W', kernel * kernel * C]`, without padding.

    A convolution is then a product of matrices, forwards and backwards: XLA's own gradient of one takes twenty times as
    long on a CPU when it stands within a loop, as it does in the update. The kernel must be a multiple of the stride.
    """
    blocks = kernel // stride
    rows, columns, channels = images.shape[1] // stride, images.shape[2] // stride, images.shape[3]
    images = images[:, : rows * stride, : columns * stride]
    if stride > 1:
        images = tf.reshape(images, [tf.shape(images)[0], rows, stride, columns, stride, channels])
        images = tf.transpose(images, [0, 1, 3, 2, 4, 5])
        images = tf.reshape(images, [tf.shape(images)[0], rows, columns, stride * stride * channels])
    high, wide = rows - blocks + 1, columns - blocks + 1
    shifted = [images[:, y : y + high, x : x + wide] for y in range(blocks) for x in range(blocks)]
    return tf.concat(shifted, axis=-1)
