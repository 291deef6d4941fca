"""Tests of ppo/model/recurrent.py."""

import numpy as np
import pytest
import tensorflow as tf

from ppo.model.recurrent import GRU, LSTM, scan

RNG = np.random.default_rng(0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("kind", [GRU, LSTM])
def test_a_recurrent_core_equals_its_formulas_and_resets_where_an_episode_begins(kind):
    core = kind(3, 4, rng=RNG)
    x = RNG.normal(size=(6, 2, 3)).astype(np.float32)
    initial = RNG.normal(size=(2, core.state_size)).astype(np.float32)
    first = np.zeros((6, 2), np.bool_)
    first[3, 1] = True
    b, w, u = (variable.numpy() for variable in core.variables)  # sorted by name
    expected, state = [], initial
    for t in range(6):
        state = np.where(first[t][:, None], 0.0, state)
        if kind is GRU:
            (xz, xr, xn), (hz, hr, hn) = np.split(x[t] @ w + b, 3, axis=-1), np.split(state @ u, 3, axis=-1)
            z, r = sigmoid(xz + hz), sigmoid(xr + hr)
            state = (1 - z) * np.tanh(xn + r * hn) + z * state
        else:
            h, c = state[:, :4], state[:, 4:]
            i, f, o, g = np.split(x[t] @ w + b + h @ u, 4, axis=-1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            state = np.concatenate([sigmoid(o) * np.tanh(c), c], axis=-1)
        expected.append(state)
    found = scan(core, tf.constant(x), tf.constant(initial), tf.constant(first))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(core.output(found).numpy(), found.numpy()[..., :4])
