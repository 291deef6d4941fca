"""Custom networks, named by `Config.network`, that replace `ActorCritic`."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ppo.config import ConfigError
from ppo.model.observations import Inputs, Observations
from ppo.runtime.graphs import graph_function

_OUTPUTS, _VALUES = "(outputs)", "(values)"  # names of what the network returns; no leaf has these names


class CustomNetwork(tf.Module):
    """Wraps a network returned by a user-defined function, whose name is "module:function".

    The function is called as `function(inputs, num_outputs, seed)`:
        inputs: A `tf.TensorSpec` for each input of the network, nested as the observation space is, without
            "action_mask". Images of at least 36 x 36 pixels are `uint8[None, H, W, C]`. All other leaves
            are `float32[None, F]`: normalized numbers, one-hot vectors or bits.
        num_outputs: Length of the policy's output: the logits of all discrete choices, then the mean of each entry of
            a float Box action.
        seed: Seed for the initial weights.
    It returns a new `tf.Module`, Keras model or other callable with `trainable_variables`. The callable maps a batch of
    inputs to `(outputs: float32[B, num_outputs], values: float32[B] or float32[B, 1])`. Alternatively, the function
    returns a tuple of two networks: the policy, which computes the outputs, and the value function.

    Attributes:
        can_compile: Whether XLA may compile the gradient. False if the network itself calls a `tf.function`.
        shares_layers: Whether one network computes both the outputs and the values.

    Raises:
        ConfigError: If the function cannot be imported, or the network violates this contract.
    """

    core = None

    def __init__(self, name: str, observations: Observations, num_outputs: int, *, seed: int):
        super().__init__(name="custom_network")
        self._nested: Callable[[Inputs], Any] = observations.nested
        function = _function(name)
        try:
            returned = function(self._nested(observations.specs), num_outputs, seed)
        except Exception as error:
            error.add_note(
                f"raised by {name}, which is called as function(inputs, num_outputs, seed). `inputs` holds "
                "TensorSpecs: make a Keras input of each with keras.Input(spec.shape[1:]) (docs/custom-networks.md)."
            )
            raise
        networks = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned,)
        if not all(map(callable, networks)):
            raise ConfigError(
                f"--network {name} returned {returned!r}, which cannot be called: return a network, or a tuple of two"
            )

        # This applies AutoGraph without a graph function. The gradient of a nested graph function receives constants,
        # such as the axis of a concatenation, as outputs of that function. To know them, XLA takes all inputs of the
        # function as constants. It would then compile each update again, because the rollout is an input, and calls
        # after the gradient steps would still see the old weights, which are inputs, too.
        self._calls = [tf.autograph.to_graph(_as_function(network)) for network in networks]
        self.shares_layers = len(networks) == 1
        example = {key: tf.zeros([2, *spec.shape[1:]], spec.dtype) for key, spec in observations.specs.items()}
        traced = graph_function(self._both)
        self._check_shapes(name, traced(self._nested(example)), num_outputs)
        self.can_compile = not _calls_functions(traced.get_concrete_function(self._nested(example)).graph)
        # A Keras variable holds the TensorFlow variable that gradients and checkpoints need.
        self._all = [_variable(variable) for network in networks for variable in getattr(network, "variables", ())]
        trained = [[_variable(v) for v in getattr(network, "trainable_variables", ())] for network in networks]
        self._trained, self._of_values = [*itertools.chain(*trained)], trained[-1]
        self._check_variables(name, networks, trained, example)

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """The variables that the wrapped network declares as trainable."""
        return tuple(self._trained)

    @property
    def value_variables(self) -> tuple[tf.Variable, ...]:
        """The value function's variables; empty if one network computes both outputs and values."""
        return () if self.shares_layers else tuple(self._of_values)

    def _check_shapes(self, name: str, returned: Any, num_outputs: int) -> None:
        pair = isinstance(returned, (tuple, list)) and len(returned) == 2 and all(map(tf.is_tensor, returned))
        one = f"one tensor {tuple(returned.shape)}" if tf.is_tensor(returned) else str(returned)
        shapes = [tuple(part.shape) for part in returned] if pair else one
        if shapes not in ([(2, num_outputs), (2,)], [(2, num_outputs), (2, 1)]):
            contract = (
                "must return (outputs, values)"
                if self.shares_layers
                else "returned two networks: the first must return outputs and the second values,"
            )
            raise ConfigError(
                f"--network {name} {contract} of shapes (B, {num_outputs}) and (B,). With B = 2, "
                f"the shapes are {shapes}"
            )

    def _check_variables(
        self, name: str, networks: Sequence[Any], trained: Sequence[list[tf.Variable]], example: Inputs
    ) -> None:
        if wrong := [variable.name for variable in self._trained if variable.dtype != tf.float32]:
            raise ConfigError(f"--network {name} has variables that are not float32: {wrong}")
        if bare := [network for network, variables in zip(networks, trained, strict=True) if not variables]:
            raise ConfigError(
                f"--network {name} returned {bare[0]!r}, which has no trainable_variables: return a tf.Module or a "
                "Keras model"
            )
        pairs: list[tuple[tf.Variable, Any]] = []
        used: list[set[int]] = []  # also variables that a network reads but does not declare
        for network, call, variables in zip(networks, self._calls, trained, strict=True):
            with tf.GradientTape() as tape:
                heads = tf.nest.flatten(call(self._nested(example)))
                total = tf.add_n([tf.reduce_sum(tf.cast(head, tf.float32)) for head in heads])
            declared = [_variable(variable) for variable in getattr(network, "variables", ())]
            used.append({id(variable) for variable in (*tape.watched_variables(), *declared, *variables)})
            pairs += zip(variables, tape.gradient(total, variables), strict=True)
        if not self.shares_layers and set.intersection(*used):
            raise ConfigError(
                f"--network {name} returned two networks that have variables in common: return one network that "
                "computes both outputs and values"
            )
        if unused := [variable.name for variable, gradient in pairs if gradient is None]:
            raise ConfigError(
                f"--network {name} has variables that do not affect what their network returns, {unused}: remove them, "
                "or create them with trainable=False"
            )

    def _both(self, nested: Any) -> tuple[Any, Any]:
        """Returns the outputs and the values as the wrapped networks return them."""
        returned = [call(nested) for call in self._calls]
        return returned[0] if self.shares_layers else tuple(returned)

    def encode(self, inputs: Inputs) -> Inputs:
        """Adds the outputs and the values to `inputs: [B, ...]` if one network computes both."""
        if not self.shares_layers:
            return inputs
        outputs, values = self._calls[0](self._nested(inputs))
        return {**inputs, _OUTPUTS: outputs, _VALUES: values}

    def features(self, encoded: Inputs) -> Inputs:
        """Returns the encoded inputs."""
        return encoded

    def outputs(self, hidden: Inputs) -> tf.Tensor:
        """Returns the policy's outputs `float32[B, num_outputs]` for the features."""
        outputs = hidden[_OUTPUTS] if self.shares_layers else self._calls[0](self._nested(hidden))
        return tf.cast(outputs, tf.float32)

    def values(self, hidden: Inputs, encoded: Inputs) -> tf.Tensor:
        """Returns the values `float32[B]` for the features."""
        values = hidden[_VALUES] if self.shares_layers else self._calls[1](self._nested(hidden))
        return tf.reshape(tf.cast(values, tf.float32), [-1])


def _as_function(network: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls a network, because AutoGraph converts only functions."""

    def call(inputs: Any) -> Any:
        return network(inputs)

    return call


def _function(name: str) -> Callable:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--network {name} cannot be imported: {error}. Write it as module:function, with a module that can be "
            "imported from the current folder."
        ) from error


def _calls_functions(graph: Any) -> bool:
    """Returns whether a graph, or a branch or a loop in it, calls another graph function."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op.endswith("PartitionedCall") for node in nodes)


def _variable(variable: Any) -> tf.Variable:
    return variable if isinstance(variable, tf.Variable) else variable.value
