"""CustomNetwork: a network of the user's own in the place of `ActorCritic`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ppo.config import ConfigError
from ppo.model.observations import Inputs, Observations
from vecenv.spaces import nest


class CustomNetwork(tf.Module):
    """Wraps what the function named by `config.network` returns.

    The function is called as `function(inputs, num_outputs, seed)`:
        inputs: `tf.TensorSpec`s of what the network will be called with, nested as the observation space
            is (without "action_mask"): `float32[None, F]`, normalised, for all but images, which are
            `uint8[None, H, W, C]`.
        num_outputs: What the policy must give: the mean of each entry of a Box action (with
            `state_dependent_std` followed by as many logarithms of deviations, to which `initial_log_std` is
            added), or the logits of all discrete choices.
        seed: For initial weights.
    It returns a callable with `trainable_variables`, a `tf.Module` or a Keras model, that maps a batch
    of inputs to `(outputs: float32[B, num_outputs], values: float32[B] or [B, 1])`.

    Raises:
        ConfigError: If there is no such function, or what it returns does not fit.
    """

    core = None

    def __init__(self, name: str, observations: Observations, num_outputs: int, *, seed: int):
        super().__init__(name="custom_network")
        self._nest = lambda inputs: _nested(observations, inputs)
        network = _function(name)(self._nest(observations.specs), num_outputs, seed)
        if not callable(network):
            raise ConfigError(f"--network {name} returned {network!r}, which cannot be called")
        self._call = tf.function(lambda inputs: network(inputs))  # which converts an `if` or a `for` over tensors
        self._check(name, observations, num_outputs)
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
        self._check_gradients(name, observations)

    @property
    def trainable_variables(self) -> tuple[tf.Variable, ...]:
        """What the user's network calls so."""
        return tuple(self._trained)

    def features(self, inputs: Inputs) -> Any:
        """Returns inputs `[B, ...]` as the user's network takes them."""
        return self._nest(inputs)

    def policy(self, hidden: Any) -> tf.Tensor:
        """Returns the policy's outputs `float32[B, num_outputs]`."""
        return self._heads(hidden)[0]

    def value(self, hidden: Any) -> tf.Tensor:
        """Returns the values `float32[B]`."""
        return self._heads(hidden)[1]

    def _heads(self, hidden: Any) -> tuple[tf.Tensor, tf.Tensor]:
        outputs, values = self._call(hidden)
        return tf.cast(outputs, tf.float32), tf.reshape(tf.cast(values, tf.float32), [tf.shape(outputs)[0]])

    def _check(self, name: str, observations: Observations, num_outputs: int) -> None:
        returned = self._call(self._example(observations))
        pair = isinstance(returned, (tuple, list)) and len(returned) == 2
        shapes = [tuple(part.shape) for part in returned] if pair else str(returned)
        if shapes not in ([(2, num_outputs), (2,)], [(2, num_outputs), (2, 1)]):
            raise ConfigError(
                f"--network {name} must return (outputs, values) of shapes (B, {num_outputs}) and (B,), but for B = 2 "
                f"it returned {shapes}"
            )

    def _check_gradients(self, name: str, observations: Observations) -> None:
        with tf.GradientTape() as tape:
            both = tf.add_n([tf.reduce_sum(part) for part in self._heads(self._example(observations))])
        gradients = tape.gradient(both, self._trained)
        unused = [v.name for v, gradient in zip(self._trained, gradients, strict=True) if gradient is None]
        if unused:
            raise ConfigError(
                f"--network {name} has variables that neither outputs nor values depend on, {unused}: leave them out, "
                "or create them with trainable=False"
            )

    def _example(self, observations: Observations) -> Any:
        return self._nest({key: tf.zeros([2, *s.shape[1:]], s.dtype) for key, s in observations.specs.items()})


def _function(name: str) -> Callable:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--network {name} cannot be imported: {error}. Write it as module:function, where the module can be "
            "imported from the folder you are in."
        ) from error


def _variable(variable: Any) -> tf.Variable:
    return variable if isinstance(variable, tf.Variable) else variable.value


def _nested(observations: Observations, values: dict[str, Any]) -> Any:
    """Nests values by leaf as the observation space is, leaving out the mask."""
    names = {path: name for name, path in observations.paths.items()}

    def without_mask(nested: Any) -> Any:
        if isinstance(nested, dict):
            return {key: without_mask(value) for key, value in nested.items() if value is not None}
        return tuple(map(without_mask, nested)) if isinstance(nested, tuple) else nested

    return without_mask(nest(observations.space, lambda path: values[names[path]] if path in names else None))
