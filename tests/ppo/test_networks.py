"""Tests of ppo/networks.py."""

import numpy as np
import pytest
import tensorflow as tf

from ppo.networks import MLP, ActorCritic, orthogonal


@pytest.mark.parametrize(("rows", "columns"), [(17, 64), (64, 64), (64, 6), (64, 1)])
def test_initial_weights_are_orthogonal_with_the_gain_asked_for(rows, columns):
    weight = orthogonal(rows, columns, 2.0, np.random.default_rng(0)).astype(np.float64)
    gram = weight @ weight.T if rows <= columns else weight.T @ weight
    np.testing.assert_allclose(gram, 4.0 * np.eye(min(rows, columns)), atol=1e-5)


def test_an_mlp_is_dense_layers_with_tanh_between():
    mlp = MLP(3, [4], 2, activation="tanh", output_gain=1.0, rng=np.random.default_rng(0), name="mlp")
    w0, w1, b0, b1 = [variable.numpy() for variable in (*mlp._weights, *mlp._biases)]
    x = np.array([[1.0, -2.0, 0.5]], np.float32)
    np.testing.assert_allclose(mlp(tf.constant(x)), np.tanh(x @ w0 + b0) @ w1 + b1, rtol=1e-5)


def test_first_actions_hardly_depend_on_the_state_and_the_seed_decides_the_weights():
    def network(seed):
        return ActorCritic(
            num_inputs=5,
            num_outputs=2,
            log_std=-0.5,
            policy_layers=(64, 64),
            value_layers=(32,),
            activation="tanh",
            seed=seed,
        )

    x = tf.random.stateless_normal([100, 5], [0, 0])
    assert np.abs(network(0).policy(x)).max() < 0.05
    np.testing.assert_array_equal(network(1).policy(x), network(1).policy(x))
    assert (network(1).policy(x).numpy() != network(2).policy(x).numpy()).any()
    assert network(0).value(x).shape == (100,)
    np.testing.assert_array_equal(network(0).log_std, np.full(2, -0.5, np.float32))
