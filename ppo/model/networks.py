"""Feed-forward layers: a multilayer perceptron, the CNN for images, and the initial weights of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

ACTIVATIONS = {"tanh": tf.tanh, "relu": tf.nn.relu}


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
        """Returns `float32[..., sizes[-1]]` for `float32[..., sizes[0]]`."""
        hidden = inputs
        for i, (weight, bias) in enumerate(zip(self._weights, self.biases, strict=True)):
            hidden = tf.matmul(hidden, weight) + bias
            if i < self._num_hidden:
                hidden = self._activation(hidden)
        return hidden


class NatureCNN(tf.Module):
    """Three convolutions and a dense layer, each followed by ReLU (Mnih et al., Nature, 2015).

    Args:
        shape: Height, width and channels of an image. Height and width must be 36 or more.
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
        sizes = [height * width * channels, self.NUM_OUTPUTS]
        self._dense = MLP(sizes, activation="relu", output_gain=None, rng=rng, name="dense")

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Returns `float32[B, 512]` for `uint8[B, H, W, C]`."""
        hidden = tf.cast(images, tf.float32) / 255.0
        for (_, kernel, stride), weight, bias in zip(self.LAYERS, self._kernels, self._biases, strict=True):
            patches = _patches(hidden, kernel, stride)
            flat = tf.reshape(patches, [tf.reduce_prod(tf.shape(patches)[:3]), weight.shape[0]])
            hidden = tf.nn.relu(tf.matmul(flat, weight) + bias)
            hidden = tf.reshape(hidden, [tf.shape(patches)[0], *patches.shape[1:3], weight.shape[1]])
        return self._dense(tf.reshape(hidden, [tf.shape(hidden)[0], math.prod(hidden.shape[1:])]))


def _patches(images: tf.Tensor, kernel: int, stride: int) -> tf.Tensor:
    """Returns the patches that a kernel covers, without padding: `float32[B, H', W', kernel * kernel * C]`.

    Patches turn a convolution and its gradient into matrix products. The update computes gradients inside a loop, where
    XLA's own gradient of a convolution takes twenty times as long on a CPU. The kernel size must be a multiple of the
    stride.
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
