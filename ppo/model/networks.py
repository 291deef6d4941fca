"""Feed-forward networks: a multilayer perceptron, the CNNs for images, and their initial weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import tensorflow as tf

from ppo.model.normalize import ImageNormalizer

ACTIVATIONS = {"tanh": tf.tanh, "relu": tf.nn.relu, "elu": tf.nn.elu}

Layer = Callable[[tf.Tensor], tf.Tensor]


def orthogonal(rows: int, columns: int, gain: float, rng: np.random.Generator) -> np.ndarray:
    """Returns a random `float32[rows, columns]` with orthogonal rows or columns of norm `gain` (Saxe et al., 2013).

    The rows are orthogonal if there are fewer rows than columns, and the columns otherwise.
    """
    gaussian = rng.normal(size=(max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(gaussian)
    q *= np.sign(np.diag(r))
    return (gain * (q if rows >= columns else q.T)).astype(np.float32)


class MLP(tf.Module):
    """Dense layers with an activation between them.

    The initial weights of hidden layers have a gain of sqrt(2), whatever the activation. Stable-Baselines3's
    `ActorCriticPolicy` does the same.

    Args:
        sizes: Number of inputs, units of each hidden layer, number of outputs.
        activation: A key of `ACTIVATIONS`.
        output_gain: Scale of the last layer's initial weights. None if that layer is hidden, too: the activation then
            follows it.
        rng: Draws the initial weights.
        name: Prefix of the variables' names.
    """

    def __init__(
        self, sizes: Sequence[int], *, activation: str, output_gain: float | None, rng: np.random.Generator, name: str
    ):
        super().__init__(name=name)
        self._activation = ACTIVATIONS[activation]
        self._num_hidden = len(sizes) - (1 if output_gain is None else 2)
        gains = [np.sqrt(2.0)] * self._num_hidden + ([] if output_gain is None else [output_gain])
        self._weights = [
            tf.Variable(orthogonal(rows, columns, gain, rng), name=f"{name}/weight_{i}")
            for i, (rows, columns, gain) in enumerate(zip(sizes[:-1], sizes[1:], gains, strict=True))
        ]
        self.biases = [tf.Variable(tf.zeros([units]), name=f"{name}/bias_{i}") for i, units in enumerate(sizes[1:])]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns `float32[..., sizes[-1]]` for inputs `float32[..., sizes[0]]`."""
        hidden = inputs
        for i, (weight, bias) in enumerate(zip(self._weights, self.biases, strict=True)):
            hidden = tf.matmul(hidden, weight) + bias
            if i < self._num_hidden:
                hidden = self._activation(hidden)
        return hidden


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution with square kernels.

    Attributes:
        inputs: Height, width and channels of its input.
        filters: Channels of its output.
        kernel: Height and width of a kernel.
        stride: Step between two positions of a kernel.
        padding: "VALID" for no padding, or "SAME" for as many positions as `inputs` has pixels, divided by the stride.
        gain: Scale of the initial weights.
    """

    inputs: tuple[int, int, int]
    filters: int
    kernel: int
    stride: int
    padding: Literal["SAME", "VALID"]
    gain: float = math.sqrt(2.0)

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Height, width and channels of the output."""
        lost = self.kernel - 1 if self.padding == "VALID" else 0
        height, width = (-(-(side - lost) // self.stride) for side in self.inputs[:2])
        return height, width, self.filters

    @property
    def patch(self) -> int:
        """Number of inputs of one kernel."""
        return self.kernel**2 * self.inputs[2]


class CNN(tf.Module):
    """Convolutions and a dense layer, each followed by ReLU. Subclasses define the convolutions.

    Args:
        shape: Height, width and channels of an image. Height and width must be `SMALLEST` or more.
        rng: Draws the initial weights.
        normalizer: Normalizes uint8 images. None to divide them by 255.
    """

    LAYERS: ClassVar[Sequence[tuple[int, int, int]]]  # filters, kernel, stride
    PADDING: ClassVar[Literal["SAME", "VALID"]]
    NUM_OUTPUTS: ClassVar[int]
    SMALLEST: ClassVar[int]  # pixels

    def __init__(self, shape: Sequence[int], *, rng: np.random.Generator, normalizer: ImageNormalizer | None = None):
        super().__init__(name="cnn")
        self._normalizer = normalizer
        self._convolutions = self.convolutions(shape)
        self._kernels, self._biases = [], []
        for i, convolution in enumerate(self._convolutions):
            size = convolution.kernel
            weight = orthogonal(convolution.patch, convolution.filters, convolution.gain, rng)
            weight = weight.reshape(size, size, -1, convolution.filters)
            self._kernels.append(tf.Variable(weight, name=f"cnn/kernel_{i}"))
            self._biases.append(tf.Variable(tf.zeros([convolution.filters]), name=f"cnn/bias_{i}"))
        sizes = [math.prod(self._convolutions[-1].outputs), self.NUM_OUTPUTS]
        self._dense = MLP(sizes, activation="relu", output_gain=None, rng=rng, name="dense")

    @classmethod
    def convolutions(cls, shape: Sequence[int]) -> list[Convolution]:
        """Returns the sizes of all convolutions for images `[H, W, C]`; the last one precedes the dense layer."""
        found: list[Convolution] = []
        for filters, kernel, stride in cls.LAYERS:
            height, width, channels = found[-1].outputs if found else shape
            found.append(Convolution((height, width, channels), filters, kernel, stride, cls.PADDING))
        return found

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Returns `float32[B, NUM_OUTPUTS]` for `uint8[B, H, W, C]`, or for scaled images `float32[B, H, W, C]`."""
        kernels = [tf.convert_to_tensor(kernel) for kernel in self._kernels]
        pixels = tf.cast(images, tf.float32)
        if images.dtype == tf.uint8:  # scaling the first kernel is cheaper than scaling the images
            if self._normalizer is None:
                kernels[0] /= 255.0
            else:
                mean, scale = self._normalizer.parameters()
                pixels -= mean
                kernels[0] *= scale
        layers = [
            functools.partial(_convolved, kernel, bias, convolution)
            for kernel, bias, convolution in zip(kernels, self._biases, self._convolutions, strict=True)
        ]
        hidden = self._applied(layers, pixels)
        return self._dense(tf.reshape(hidden, [tf.shape(hidden)[0], math.prod(hidden.shape[1:])]))

    def _applied(self, layers: Sequence[Layer], hidden: tf.Tensor) -> tf.Tensor:
        """Returns the input of the dense layer, `float32[B, ...]`."""
        for layer in layers:
            hidden = tf.nn.relu(layer(hidden))
        return hidden


def _convolved(kernel: tf.Tensor, bias: tf.Tensor, sizes: Convolution, images: tf.Tensor) -> tf.Tensor:
    # TensorFlow fuses a convolution, `bias_add` and ReLU into one oneDNN primitive on CPUs.
    return tf.nn.bias_add(tf.nn.conv2d(images, kernel, sizes.stride, sizes.padding), bias)


class NatureCNN(CNN):
    """The network of Mnih et al., Nature, 2015: three convolutions without padding."""

    LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    PADDING = "VALID"
    NUM_OUTPUTS = 512
    SMALLEST = 36


class SmallCNN(CNN):
    """Two 3x3 convolutions, for images of a few pixels, in which every pixel has a meaning."""

    LAYERS = ((16, 3, 1), (32, 3, 2))
    PADDING = "SAME"
    NUM_OUTPUTS = 128
    SMALLEST = 5


class ImpalaCNN(CNN):
    """The residual network of Espeholt et al., 2018, "IMPALA".

    It has three stages of 16, 32 and 32 channels. Each has a convolution, max pooling that halves height and width, and
    two residual blocks.
    """

    NUM_OUTPUTS = 256
    SMALLEST = 5
    CHANNELS = (16, 32, 32)

    @classmethod
    def convolutions(cls, shape: Sequence[int]) -> list[Convolution]:
        """Returns the sizes of all convolutions for images `[H, W, C]`; the last one precedes the dense layer.

        Only a convolution that is directly followed by ReLU, which halves the variance, has a gain of sqrt(2).
        """
        found = []
        height, width, channels = shape
        for filters in cls.CHANNELS:
            found.append(Convolution((height, width, channels), filters, 3, 1, "SAME", gain=1.0))
            height, width, channels = -(-height // 2), -(-width // 2), filters
            first = Convolution((height, width, channels), filters, 3, 1, "SAME")
            found += 2 * [first, dataclasses.replace(first, gain=1.0)]
        return found

    def _applied(self, layers: Sequence[Layer], hidden: tf.Tensor) -> tf.Tensor:
        for i in range(0, len(layers), 5):
            hidden = tf.nn.max_pool2d(layers[i](hidden), 3, 2, "SAME")
            for k in (i + 1, i + 3):
                hidden += layers[k + 1](tf.nn.relu(layers[k](tf.nn.relu(hidden))))
        return tf.nn.relu(hidden)


CNNS: dict[str, type[CNN]] = {"nature": NatureCNN, "impala": ImpalaCNN, "small": SmallCNN}
"""The network for each value of `Config.cnn`."""


def cnn_for(choice: str, height: int, width: int) -> type[CNN] | None:
    """Returns the network that `Config.cnn` chooses, or None if the images are too small for it and must be flattened.

    The height and the width are in pixels.
    """
    cnn = CNNS[choice]
    return cnn if min(height, width) >= cnn.SMALLEST else None
