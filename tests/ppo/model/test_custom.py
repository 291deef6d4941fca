"""Tests of ppo/model/custom.py: custom networks are used, trained and checked."""

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from ppo import Config, ConfigError
from ppo.model.agent import Agent
from ppo.model.networks import MLP
from ppo.model.observations import Observations


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


def no_values(inputs, num_outputs, seed):
    import keras

    return keras.Sequential([keras.Input(inputs.shape[1:]), keras.layers.Dense(num_outputs)])


def takes_no_seed(inputs, num_outputs):
    raise AssertionError("never called")


def calls_a_layer(inputs, num_outputs, seed):
    import keras

    return keras.layers.Dense(num_outputs)(inputs)


@pytest.mark.parametrize("network", ["takes_no_seed", "calls_a_layer"])
def test_an_error_in_the_function_of_a_network_says_how_it_is_called(network):
    with pytest.raises((TypeError, ValueError)) as caught:
        agent_of(network)
    (note,) = caught.value.__notes__
    assert f":{network}, which is called as function(inputs, num_outputs, seed)" in note and "TensorSpecs" in note


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
        ("no_values", r"the shapes are one tensor \(2, 2\)$"),
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
