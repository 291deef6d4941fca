"""Tests of ppo/model/networks.py: networks compute their formulas and share the right layers."""

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from ppo import Config
from ppo.model.agent import ActorCritic
from ppo.model.networks import MLP, ImpalaCNN, NatureCNN, SmallCNN, cnn_for, orthogonal
from ppo.model.normalize import ImageNormalizer, Statistics
from ppo.model.observations import Observations

RNG = np.random.default_rng(0)
VECTOR = Observations(gym.spaces.Box(-1, 1, (5,)), Config(normalize_observations=False), mask_size=None)


@pytest.mark.parametrize(("rows", "columns"), [(17, 64), (64, 64), (64, 6), (64, 1)])
def test_initial_weights_are_orthogonal_with_the_given_gain(rows, columns):
    weight = orthogonal(rows, columns, 2.0, np.random.default_rng(0)).astype(np.float64)
    gram = weight @ weight.T if rows <= columns else weight.T @ weight
    np.testing.assert_allclose(gram, 4.0 * np.eye(min(rows, columns)), atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("tanh", np.tanh),
        ("relu", lambda x: np.maximum(x, 0)),
        ("elu", lambda x: np.where(x > 0, x, np.exp(x) - 1)),
    ],
)
def test_an_mlp_is_dense_layers_with_the_activation_in_between(activation, formula):
    mlp = MLP([3, 4, 2], activation=Config(activation=activation).activation, output_gain=1.0, rng=RNG, name="mlp")
    w0, w1, b0, b1 = [variable.numpy() for variable in mlp.variables]
    x = np.array([[1.0, -2.0, 0.5]], np.float32)
    np.testing.assert_allclose(mlp(tf.constant(x)), formula(x @ w0 + b0) @ w1 + b1, rtol=1e-5)


def test_initial_actions_hardly_depend_on_the_observation_and_the_seed_determines_the_weights():
    def network(seed):
        return ActorCritic(Config(value_layers=(32,), seed=seed), VECTOR, num_outputs=2)

    x = tf.random.stateless_normal([100, 5], [0, 0])
    outputs, values = network(0).outputs(x), network(0).values(x, {})
    assert np.abs(outputs).max() < 0.05 and values.shape == (100,)
    np.testing.assert_array_equal(network(1).outputs(x), network(1).outputs(x))
    assert (network(1).outputs(x).numpy() != network(2).outputs(x).numpy()).any()


def test_policy_and_value_have_separate_layers():
    network = ActorCritic(Config(), VECTOR, num_outputs=2)
    x = tf.random.stateless_normal([100, 5], [0, 0])
    with tf.GradientTape(persistent=True) as tape:
        outputs, values = network.outputs(x), network.values(x, {})
    of_policy, of_value = (tape.gradient(y, network.trainable_variables) for y in (outputs, values))
    assert all((a is None) != (b is None) for a, b in zip(of_policy, of_value, strict=True))


def windows(images, size, stride, padding, fill=0.0):
    """Returns the windows that a kernel of this size covers, `[B, H', W', size, size, C]`."""
    if padding == "SAME":
        missing = [max((-(-side // stride) - 1) * stride + size - side, 0) for side in images.shape[1:3]]
        around = [(total // 2, total - total // 2) for total in missing]
        images = np.pad(images, [(0, 0), *around, (0, 0)], constant_values=fill)
    found = np.lib.stride_tricks.sliding_window_view(images, (size, size), (1, 2))[:, ::stride, ::stride]
    return np.moveaxis(found, 3, -1)


def parts_of(cnn):
    """Returns the kernels, their biases, and the weight and the bias of the last layer."""
    by_rank = {rank: [variable for variable in cnn.variables if len(variable.shape) == rank] for rank in (4, 2, 1)}
    (weight,), (*biases, last) = by_rank[2], by_rank[1]
    return by_rank[4], biases, weight, last


def convolved(cnn, i, images):
    kernels, biases, *_ = parts_of(cnn)
    kernel, bias, sizes = kernels[i].numpy(), biases[i].numpy(), cnn._convolutions[i]
    assert images.shape[1:] == sizes.inputs
    result = np.einsum("nhwyxc,yxcf->nhwf", windows(images, sizes.kernel, sizes.stride, sizes.padding), kernel) + bias
    assert result.shape[1:] == sizes.outputs
    return result


def plain(cnn, hidden):
    for i in range(len(parts_of(cnn)[0])):
        hidden = relu(convolved(cnn, i, hidden))
    return hidden


def residual(cnn, hidden):
    for i in (0, 5, 10):
        hidden = windows(convolved(cnn, i, hidden), 3, 2, "SAME", fill=-np.inf).max(axis=(3, 4))
        hidden = hidden + convolved(cnn, i + 2, relu(convolved(cnn, i + 1, relu(hidden))))
        hidden = hidden + convolved(cnn, i + 4, relu(convolved(cnn, i + 3, relu(hidden))))
    return relu(hidden)


def relu(x):
    return np.maximum(x, 0)


CASES = {
    "nature": (NatureCNN, (45, 38, 3), plain),  # the first stride divides neither side
    "small": (SmallCNN, (7, 6, 3), plain),
    "impala": (ImpalaCNN, (13, 10, 2), residual),
}


def cnn_of(kind, shape, normalizer=None):
    """Returns a network with biases other than 0."""
    rng = np.random.default_rng(0)
    cnn = kind(shape, rng=rng, normalizer=normalizer)
    for bias in parts_of(cnn)[1]:
        bias.assign(rng.normal(size=bias.shape, scale=0.1))
    return cnn


@pytest.mark.parametrize("case", CASES)
def test_a_cnn_equals_its_formula(case):
    kind, shape, formula = CASES[case]
    cnn = cnn_of(kind, shape)
    images = RNG.integers(0, 256, (4, *shape), np.uint8)
    weight, bias = (variable.numpy() for variable in parts_of(cnn)[2:])
    expected = relu(formula(cnn, images / 255.0).reshape(4, -1) @ weight + bias)
    assert expected.shape == (4, kind.NUM_OUTPUTS) and expected.std() > 0.05
    np.testing.assert_allclose(cnn(tf.constant(images)), expected, rtol=1e-4, atol=1e-5)
    scaled = tf.constant(images / 255.0, tf.float32)  # floats are scaled already
    np.testing.assert_allclose(cnn(scaled), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_cnn_subtracts_pixel_means_and_divides_by_one_deviation(case):
    kind, shape, _ = CASES[case]
    images = RNG.integers(0, 256, (6, *shape), np.uint8)
    normalizer = ImageNormalizer(shape)
    bytes_in, floats_in = cnn_of(kind, shape, normalizer=normalizer), cnn_of(kind, shape)
    found = bytes_in(tf.constant(images))  # without statistics, divided by 255
    np.testing.assert_allclose(found, floats_in(tf.constant(images)), rtol=1e-4, atol=1e-5)
    mean, variance = images.mean(axis=0) / 255, images.var(axis=0) / 255**2
    normalizer.moments.merge(Statistics(tf.constant(6.0, tf.float64), tf.constant(mean), tf.constant(variance)))
    deviation = np.sqrt(images.var(axis=0).mean())
    assert abs(images.std() - deviation) > 0.05 * deviation  # a pixel's variance over time is not that of an image
    expected = floats_in(tf.constant((images - images.mean(axis=0)) / deviation, tf.float32))
    np.testing.assert_allclose(bytes_in(tf.constant(images)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_of_a_cnn_are_orthogonal_float32_variables_with_different_names(case):
    kind, shape, _ = CASES[case]
    cnn = cnn_of(kind, shape)
    kernels = parts_of(cnn)[0]
    for kernel, sizes in zip(kernels, cnn._convolutions, strict=True):
        flat = kernel.numpy().reshape(-1, sizes.filters).astype(np.float64)
        assert kernel.shape == (sizes.kernel, sizes.kernel, sizes.inputs[2], sizes.filters)
        gram = flat.T @ flat if len(flat) >= sizes.filters else flat @ flat.T
        np.testing.assert_allclose(gram, sizes.gain**2 * np.eye(len(gram)), atol=1e-5)
    assert all(variable.dtype == tf.float32 for variable in cnn.trainable_variables)
    assert len({variable.name for variable in cnn.trainable_variables}) == 2 * len(kernels) + 2


@pytest.mark.parametrize(
    ("choice", "size", "expected"),
    [
        ("nature", (84, 36), NatureCNN),
        ("nature", (35, 84), None),
        ("impala", (84, 84), ImpalaCNN),
        ("impala", (5, 5), ImpalaCNN),
        ("small", (84, 84), SmallCNN),
        ("small", (4, 84), None),
    ],
)
def test_a_cnn_reads_images_of_its_smallest_size_or_more(choice, size, expected):
    assert cnn_for(choice, *size) is expected
