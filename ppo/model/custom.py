"""Custom networks, named by `Config.network`, that replace `ActorCritic`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ppo.config import ConfigError
from ppo.graphs import graph_function
from ppo.model.observations import Inputs, Observations

_OUTPUTS, _VALUES = "(outputs)", "(values)"  # names of what the network returns; no leaf has these names


class CustomNetwork(tf.Module):
    """Wraps a network returned by a user-defined function.

    The function is called as `function(inputs, num_outputs, seed)`:
        inputs: A `tf.TensorSpec` for each input of the network, nested as the observation space is, without
            "action_mask". Images of 36 pixels or more are `uint8[None, H, W, C]`; all other leaves are
            `float32[None, F]`, normalized.
        num_outputs: Length of the policy's output: the logits of all discrete choices, then the mean of each entry of
            a float Box action.
        seed: Seed for the initial weights.
    It returns a new `tf.Module`, Keras model or other callable with `trainable_variables`. The callable maps a batch of
    inputs to `(outputs: float32[B, num_outputs], values: float32[B] or float32[B, 1])`.

    Args:
        name: The function, as "module:function".
        observations: Describes the inputs.
        num_outputs: Passed to the function.
        seed: Passed to the function.

    Attributes:
        can_compile: Whether XLA may compile the gradient. False if the network itself calls a `tf.function`.
        shares_layers: True: nobody knows whether the policy and the value function have layers in common.

    Raises:
        ConfigError: If the function cannot be imported, or the network violates this contract.
    """

    core = None

    def __init__(self, name: str, observations: Observations, num_outputs: int, *, seed: int):
        super().__init__(name="custom_network")
        self._nested: Callable[[Inputs], Any] = observations.nested
        network = _function(name)(self._nested(observations.specs), num_outputs, seed)
        if not callable(network):
            raise ConfigError(f"--network {name} returned {network!r}, which cannot be called")

        def call(inputs: Inputs) -> Any:
            return network(inputs)

        # This applies AutoGraph without a graph function. The gradient of a nested graph function receives constants,
        # such as the axis of a concatenation, as outputs of that function. To know them, XLA takes all inputs of the
        # function as constants. It would then compile each update again, because the rollout is an input, and calls
        # after the gradient steps would still see the old weights, which are inputs, too.
        self._call = tf.autograph.to_graph(call)
        example = {key: tf.zeros([2, *spec.shape[1:]], spec.dtype) for key, spec in observations.specs.items()}
        traced = graph_function(self._call)
        _check_shapes(name, traced(self._nested(example)), num_outputs)
        self.shares_layers = True
        self.can_compile = not _calls_functions(traced.get_concrete_function(self._nested(example)).graph)
        # A Keras variable holds the TensorFlow variable that gradients and checkpoints need.
        self._all = [_variable(variable) for variable in getattr(network, "variables", ())]
        self._trained = [_variable(variable) for variable in getattr(network, "trainable_variables", ())]
        if wrong := [variable.name for variable in self._trained if variable.dtype != tf.float32]:
            raise ConfigError(f"--network {name} has variables that are not float32: {wrong}")
        if not self._trained:
            raise ConfigError(
                f"--network {name} returned {network!r}, which has no trainable_variables: return a "
                "tf.Module or a Keras model"
            )
        with tf.GradientTape() as tape:
            total = tf.add_n([tf.reduce_sum(head) for head in self.features(self.encode(example))])
        gradients = zip(self._trained, tape.gradient(total, self._trained), strict=True)
        if unused := [variable.name for variable, gradient in gradients if gradient is None]:
            raise ConfigError(
                f"--network {name} has variables that affect neither outputs nor values, {unused}: remove them, or "
                "create them with trainable=False"
            )

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """The variables that the wrapped network declares as trainable."""
        return tuple(self._trained)

    def encode(self, inputs: Inputs) -> Inputs:
        """Adds what the wrapped network returns to `inputs: [B, ...]`."""
        outputs, values = self._call(self._nested(inputs))
        values = tf.reshape(tf.cast(values, tf.float32), [tf.shape(outputs)[0]])
        return {**inputs, _OUTPUTS: tf.cast(outputs, tf.float32), _VALUES: values}

    def features(self, encoded: Inputs) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the policy's outputs `float32[B, num_outputs]` and the values `float32[B]`."""
        return encoded[_OUTPUTS], encoded[_VALUES]

    def outputs(self, hidden: tuple[tf.Tensor, tf.Tensor], encoded: Inputs) -> tf.Tensor:
        """Returns the policy's outputs `float32[B, num_outputs]` for the features."""
        return hidden[0]

    def values(self, hidden: tuple[tf.Tensor, tf.Tensor], encoded: Inputs) -> tf.Tensor:
        """Returns the values `float32[B]` for the features."""
        return hidden[1]


def _function(name: str) -> Callable:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--network {name} cannot be imported: {error}. Write it as module:function, with a module that can be "
            "imported from the current folder."
        ) from error


def _check_shapes(name: str, returned: Any, num_outputs: int) -> None:
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    shapes = [tuple(part.shape) for part in returned] if pair else str(returned)
    if shapes not in ([(2, num_outputs), (2,)], [(2, num_outputs), (2, 1)]):
        raise ConfigError(
            f"--network {name} must return (outputs, values) of shapes (B, {num_outputs}) and (B,). With B = 2, "
            f"it returned {shapes}"
        )


def _calls_functions(graph: Any) -> bool:
    """Returns whether a graph, or a branch or a loop in it, calls another graph function."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op.endswith("PartitionedCall") for node in nodes)


def _variable(variable: Any) -> tf.Variable:
    return variable if isinstance(variable, tf.Variable) else variable.value
