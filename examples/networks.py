"""Custom networks for `ppo train --network`, described in docs/custom-networks.md."""

import keras
from keras import layers


def small_cnn(inputs, num_outputs, seed):
    """For an image, `uint8[None, H, W, C]`."""
    keras.utils.set_random_seed(seed)
    image = keras.Input(inputs.shape[1:], dtype=inputs.dtype)
    hidden = layers.Rescaling(1 / 255)(image)
    hidden = layers.Conv2D(16, 8, strides=4, activation="relu")(hidden)
    hidden = layers.Flatten()(layers.Conv2D(32, 4, strides=2, activation="relu")(hidden))
    return keras.Model(image, heads(hidden, num_outputs))


def minigrid(inputs, num_outputs, seed):
    """For MiniGrid's Dict: "image" is a small image, 7 x 7 x 3 numbers in a row, and "direction" is one-hot."""
    keras.utils.set_random_seed(seed)
    observation = {key: keras.Input(spec.shape[1:], name=key) for key, spec in inputs.items()}
    grid = layers.Reshape((7, 7, 3))(observation["image"])
    grid = layers.Flatten()(layers.Conv2D(16, 3, activation="relu")(grid))
    hidden = layers.Dense(64, activation="tanh")(layers.Concatenate()([grid, observation["direction"]]))
    return keras.Model(observation, heads(hidden, num_outputs))


def heads(hidden, num_outputs):
    """The policy's outputs, near 0 at first so that early actions vary, and the values."""
    small = keras.initializers.Orthogonal(0.01)
    return [layers.Dense(num_outputs, kernel_initializer=small)(hidden), layers.Dense(1)(hidden)]
