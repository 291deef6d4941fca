"""Recurrent cores: a GRU, an LSTM, and a scan over the steps of a rollout."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ppo.model.networks import orthogonal


class Sequences(NamedTuple):
    """How the states of a rollout form sequences, for a recurrent core.

    Attributes:
        begins: Whether an episode begins in each state, `bool[T, N]`.
        state: Memory before the first step, `float32[N, S]`.
    """

    begins: tf.Tensor
    state: tf.Tensor


class Core(tf.Module):
    """A recurrent layer with several gates, whose memory is one vector per env, zero at the start of an episode.

    The recurrent weights of each gate are orthogonal.

    Attributes:
        state_size: Length S of the memory.
    """

    state_size: int

    def __init__(self, num_inputs: int, units: int, num_gates: int, *, rng: np.random.Generator, name: str):
        super().__init__(name=name)
        recurrent = [orthogonal(units, units, 1.0, rng) for _ in range(num_gates)]
        self._input = tf.Variable(orthogonal(num_inputs, num_gates * units, 1.0, rng), name="input")
        self._recurrent = tf.Variable(np.concatenate(recurrent, axis=1), name="recurrent")
        self._bias = tf.Variable(tf.zeros([num_gates * units]), name="bias")

    def project(self, features: tf.Tensor) -> tf.Tensor:
        """Returns the part of `step` that depends only on `features: float32[..., F]`, for any number of steps."""
        return tf.matmul(features, self._input) + self._bias

    def step(self, projected: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        """Returns the next memory, `float32[B, S]`."""
        raise NotImplementedError

    def output(self, state: tf.Tensor) -> tf.Tensor:
        """Returns the part of the memory that the heads read, `float32[..., units]`."""
        return state


class GRU(Core):
    """Gated recurrent unit that resets after the matrix product (Cho et al., 2014, arXiv 1406.1078, version 1).

    z = sigmoid(x W_z + h U_z),  r = sigmoid(x W_r + h U_r),  n = tanh(x W_n + r * (h U_n)),  h' = (1 - z) n + z h
    """

    def __init__(self, num_inputs: int, units: int, *, rng: np.random.Generator):
        super().__init__(num_inputs, units, 3, rng=rng, name="gru")
        self.state_size = units

    def step(self, projected: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        z_input, r_input, n_input = tf.split(projected, 3, axis=-1)
        z_state, r_state, n_state = tf.split(tf.matmul(state, self._recurrent), 3, axis=-1)
        z, r = tf.sigmoid(z_input + z_state), tf.sigmoid(r_input + r_state)
        return (1.0 - z) * tf.tanh(n_input + r * n_state) + z * state


class LSTM(Core):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997) with forget gates (Gers et al., 2000).

    i, f, o = sigmoid(x W + h U),  g = tanh(x W_g + h U_g),  c' = f c + i g,  h' = o tanh(c')

    The memory is (h, c). The bias of f starts at 1, so that an untrained layer forgets little.
    """

    def __init__(self, num_inputs: int, units: int, *, rng: np.random.Generator):
        super().__init__(num_inputs, units, 4, rng=rng, name="lstm")
        self.state_size = 2 * units
        self._bias.assign(np.repeat([0.0, 1.0, 0.0, 0.0], units).astype(np.float32))

    def step(self, projected: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        h, c = tf.split(state, 2, axis=-1)
        i, f, o, g = tf.split(projected + tf.matmul(h, self._recurrent), 4, axis=-1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.concat([tf.sigmoid(o) * tf.tanh(c), c], axis=-1)

    def output(self, state: tf.Tensor) -> tf.Tensor:
        return state[..., : self.state_size // 2]


CORES = {"gru": GRU, "lstm": LSTM}


def scan(core: Core, features: tf.Tensor, state: tf.Tensor, begins: tf.Tensor) -> tf.Tensor:
    """Returns the memory after each of T steps, `float32[T, B, S]`.

    Args:
        core: The layer.
        features: `float32[T, B, F]`.
        state: Memory before the first step, `float32[B, S]`.
        begins: Whether a new episode begins at each step, `bool[T, B]`. The memory is cleared before such a step.
    """

    def step(state: tf.Tensor, now: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        projected, begins_now = now
        return core.step(projected, tf.where(begins_now[:, None], 0.0, state))

    return tf.scan(step, (core.project(features), begins), initializer=state)


def flat(nested: Any) -> Any:
    """Reshapes every `[T, N, ...]` of a nested structure to `[T * N, ...]`."""
    return tf.nest.map_structure(
        lambda column: tf.reshape(column, [column.shape[0] * column.shape[1], *column.shape[2:]]), nested
    )
