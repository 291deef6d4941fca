"""Tests of ppo/model: networks compute their formulas and share the right layers, and custom networks are checked."""

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from ppo import Config, ConfigError
from ppo.model.agent import ActorCritic, Agent
from ppo.model.networks import MLP, ImpalaCNN, NatureCNN, SmallCNN, cnn_for, orthogonal
from ppo.model.normalize import ImageNormalizer, Statistics
from ppo.model.observations import Observations
from ppo.model.recurrent import GRU, LSTM, scan

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


def agent_of(network, observation_space=None, **settings):
    config = Config(network=f"{__name__}:{network}", **settings)
    space = observation_space or gym.spaces.Box(-1, 1, (3,))
    return Agent(config, space, gym.spaces.Box(-1, 1, (2,)))


def module_network(inputs, num_outputs, seed):
    rng = np.random.default_rng(seed)

    class Network(tf.Module):
        def __init__(self):
            super().__init__()
            mlp = functools.partial(MLP, activation="relu", output_gain=1.0, rng=rng)
            self.policy = mlp([inputs.shape[1], 4, num_outputs], name="p")
            self.value = mlp([inputs.shape[1], 4, 1], name="v")

        def __call__(self, x):
            return self.policy(x), self.value(x)

    return Network()


def two_networks(inputs, num_outputs, seed):
    """Returns a policy and a value function, each with a `call` that returns one tensor."""
    import keras

    keras.utils.set_random_seed(seed)
    return tuple(
        keras.Sequential([keras.Input(inputs.shape[1:]), keras.layers.Dense(4, "tanh"), keras.layers.Dense(size)])
        for size in (num_outputs, 1)
    )


def value_function_first(inputs, num_outputs, seed):
    return two_networks(inputs, num_outputs, seed)[::-1]


def list_of_networks(inputs, num_outputs, seed):
    return list(two_networks(inputs, num_outputs, seed))


def networks_with_a_common_layer(inputs, num_outputs, seed):
    import keras

    hidden = keras.layers.Dense(4, "tanh")
    return tuple(
        keras.Sequential([keras.Input(inputs.shape[1:]), hidden, keras.layers.Dense(size)]) for size in (num_outputs, 1)
    )


def policy_that_reads_the_value_function(inputs, num_outputs, seed):
    """Returns a policy that reads a variable of the other network without declaring it."""
    policy, value = tf.Module(), tf.Module()
    value.weight = tf.Variable(tf.ones([inputs.shape[1], 1]))
    policy.weight = tf.Variable(tf.ones([1, num_outputs]))

    class Policy(tf.Module):
        trainable_variables = (policy.weight,)

        def __call__(self, x):
            return tf.stop_gradient(x @ value.weight) @ policy.weight

    class Value(tf.Module):
        trainable_variables = (value.weight,)

        def __call__(self, x):
            return x @ value.weight

    return Policy(), Value()


def outputs_of_two_dtypes(inputs, num_outputs, seed):
    """Returns a network whose values are float32 and whose outputs are not."""
    network = module_network(inputs, num_outputs, seed)

    def call(x):
        outputs, values = network(x)
        return tf.cast(outputs, tf.bfloat16), values

    call.trainable_variables = network.trainable_variables
    return call


def kept_network(inputs, num_outputs, seed, kept=[]):  # noqa: B006
    """Returns the same network each time, which is wrong."""
    if not kept:
        kept.append(module_network(inputs, num_outputs, seed))
    return kept[0]


def test_a_custom_network_that_is_not_new_cannot_be_copied():
    agent = agent_of("kept_network")
    with pytest.raises(ConfigError, match=r"kept_network returned the same variables twice: make the function return"):
        agent.untrained_copy()


def keras_network(inputs, num_outputs, seed):
    import keras

    keras.utils.set_random_seed(seed)
    x = keras.Input(inputs.shape[1:])
    hidden = keras.layers.Dense(8, activation="tanh")(x)
    frozen = keras.layers.Dense(8, activation="tanh", trainable=False)(hidden)
    return keras.Model(x, [keras.layers.Dense(num_outputs)(frozen), keras.layers.Dense(1)(frozen)])


def convolutional_network(inputs, num_outputs, seed):
    import keras

    keras.utils.set_random_seed(seed)
    image, bits = (keras.Input(spec.shape[1:], dtype=spec.dtype.name) for spec in inputs)
    hidden = keras.layers.Rescaling(1 / 255)(image)
    hidden = keras.layers.Conv2D(4, 8, strides=4, activation="relu")(hidden)
    hidden = keras.layers.Concatenate()([keras.layers.Flatten()(hidden), bits])
    return keras.Model((image, bits), [keras.layers.Dense(num_outputs)(hidden), keras.layers.Dense(1)(hidden)])


def dict_network(inputs, num_outputs, seed):
    assert set(inputs) == {"a", "b"} and isinstance(inputs["b"], tuple)
    weight = tf.Variable(tf.ones([inputs["a"].shape[1], num_outputs]))

    class Network(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def __call__(self, x):
            return tf.matmul(x["a"], self.weight), x["b"][1][:, 0]

    return Network()


@pytest.mark.parametrize(("network", "variables"), [("module_network", 9), ("keras_network", 7), ("two_networks", 9)])
def test_a_custom_network_is_used_and_its_variables_are_trained(network, variables):
    agent = agent_of(network, normalize_observations=False)
    assert len(agent.learned) == variables  # includes log_std, excludes frozen variables
    actions, _ = agent.act(np.ones((5, 3), np.float32), agent.initial_state(5))
    assert actions.shape == (5, 2) and np.abs(actions).max() > 0
    np.testing.assert_array_equal(
        actions, agent_of(network).act(np.ones((5, 3), np.float32), agent.initial_state(5))[0]
    )
    with tf.GradientTape() as tape:
        hidden = agent.network.features(agent.network.encode({"observation": tf.ones([4, 3])}))
        loss = tf.reduce_sum(agent.network.outputs(hidden)) + tf.reduce_sum(agent.network.values(hidden, {}))
    assert all(g is not None for g in tape.gradient(loss, agent.network.trainable_variables))


def test_a_custom_network_receives_the_leaves_nested_like_the_space():
    space = gym.spaces.Dict(
        a=gym.spaces.Discrete(3), b=gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2, 2)), gym.spaces.MultiBinary(2)])
    )
    agent = agent_of("dict_network", space)
    observations = {"a": tf.constant([1, 2]), "b": (tf.zeros([2, 2, 2]), tf.constant([[0, 1], [1, 0]], tf.int8))}
    hidden = agent.network.features(agent.network.encode(agent.observations.inputs(observations)))
    np.testing.assert_array_equal(agent.network.outputs(hidden), np.ones((2, 2)))
    np.testing.assert_array_equal(agent.network.values(hidden, {}), [0.0, 1.0])


@pytest.mark.parametrize(
    "mask", [gym.spaces.MultiBinary(2), gym.spaces.Tuple([gym.spaces.MultiBinary(2)])], ids=["array", "tuple"]
)
def test_a_custom_network_does_not_receive_the_mask(mask):
    space = gym.spaces.Dict(x=gym.spaces.Box(-1, 1, (3,)), action_mask=mask)
    observations = Observations(space, Config(normalize_observations=False), mask_size=2)
    assert observations.nested(observations.specs) == {"x": tf.TensorSpec([None, 3], tf.float32)}


def returns_nothing(inputs, num_outputs, seed):
    return None


def unused_variable(inputs, num_outputs, seed):
    network = module_network(inputs, num_outputs, seed)
    network.forgotten = tf.Variable(1.0, name="forgotten")
    return network


def wrong_shape(inputs, num_outputs, seed):
    network = module_network(inputs, num_outputs + 1, seed)
    return network


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("nowhere", "cannot be imported"),
        ("returns_nothing", "cannot be called"),
        ("networks_with_a_common_layer", "two networks that have variables in common"),
        ("policy_that_reads_the_value_function", "two networks that have variables in common"),
        (
            "value_function_first",
            r"two networks: the first must return outputs .* the shapes are \[\(2, 1\), \(2, 2\)\]",
        ),
        ("list_of_networks", "cannot be called: return a network, or a tuple of two"),
        ("unused_variable", "variables that do not affect what their network returns, .'forgotten"),
        ("wrong_shape", r"must return \(outputs, values\) of shapes \(B, 2\)"),
    ],
)
def test_the_error_for_an_unsuitable_network_says_what_is_required(network, message):
    with pytest.raises(ConfigError, match=message):
        agent_of(network)
    with pytest.raises(ConfigError, match="cannot be combined"):
        dataclasses.replace(Config(network="a:b"), recurrent="gru", minibatch_size=64)


def test_a_network_may_return_outputs_and_values_of_different_dtypes():
    predicted = agent_of("outputs_of_two_dtypes").step(np.ones((4, 3), np.float32), np.zeros((4, 0), np.float32))
    assert predicted.outputs.dtype == predicted.values.dtype == tf.float32
