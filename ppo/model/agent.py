"""The agent: the normalizers, networks and distribution that make up a policy and its value function."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.config import Config, ConfigError
from ppo.model import distributions
from ppo.model.checks import check_mask
from ppo.model.custom import CustomNetwork
from ppo.model.networks import CNN, MLP, cnn_for
from ppo.model.observations import MASK, Inputs, Observations
from ppo.model.recurrent import CORES, Core, Sequences, flat, scan
from ppo.runtime.graphs import graph_function, in_order, straight_through
from ppo.seeds import network_seed
from vecenv.tree import Path, nest, pick

Hidden: TypeAlias = "tf.Tensor | Inputs"
"""What `outputs` and `values` of a network read: features `float32[B, F]`, or a custom network's encoded inputs."""

HOST = "/CPU:0"
"""The device that steps the envs. An agent that acts must be on the same device."""

FORBIDDEN = -1e9
"""Logit of a masked action. Its probability is 0, and every derived quantity stays finite."""


class Predictions(NamedTuple):
    """The predictions of an agent for a batch of B states.

    Attributes:
        outputs: Parameters of the distribution over actions, `float32[B, num_outputs]`.
        values: Value estimates, `float32[B]`.
        memory: Memory of the recurrent core after each state, `float32[B, S]`.
    """

    outputs: tf.Tensor
    values: tf.Tensor
    memory: tf.Tensor


class ActorCritic(tf.Module):
    """The default network: CNNs for images, a recurrent core if there is one, then the heads.

    The policy and the value function share the CNNs and the core, and have hidden layers of their own. The inputs that
    only the value function reads bypass the core: they are appended to the input of the value function's hidden layers.
    Initial weights follow Andrychowicz et al. (2021), "What Matters in On-Policy Reinforcement Learning?": they are
    orthogonal, and the weights of the policy's last layer are small, so that the initial policy hardly depends on the
    observation.

    Args:
        config: Sizes and kinds of all layers.
        observations: Describes the inputs: `uint8[B, H, W, C]` for images, `float32[B, H, W, C]` for small images,
            `float32[B, F]` for other leaves.
        num_outputs: Length of the policy's output.

    Attributes:
        core: The recurrent core, or None.
        shares_layers: Whether the policy and the value function have layers in common.
    """

    can_compile = True

    def __init__(self, config: Config, observations: Observations, num_outputs: int):
        super().__init__(name="actor_critic")
        specs, critic, normalizers = observations.specs, observations.critic, observations.image_normalizers
        rng = np.random.default_rng(network_seed(config.seed))
        self._cnns: dict[str, CNN] = {}
        widths = {name: spec.shape[1] for name, spec in specs.items()}
        for name, spec in specs.items():
            if len(spec.shape) == 4 and (cnn := cnn_for(config.cnn, *spec.shape[1:3])) is not None:
                self._cnns[name] = cnn(spec.shape[1:], rng=rng, normalizer=normalizers.get(name))
                widths[name] = cnn.NUM_OUTPUTS
        self._names = [name for name in specs if name not in critic]
        self._critic_names = tuple(name for name in specs if name in critic)
        width = sum(widths[name] for name in self._names)
        self.core: Core | None = None
        if config.recurrent != "none":
            self.core = CORES[config.recurrent](width, config.recurrent_units, rng=rng)
            width = config.recurrent_units
        mlp = functools.partial(MLP, activation=config.activation, rng=rng)
        critic_width = width + sum(widths[name] for name in self._critic_names)
        policy_sizes, value_sizes = [width, *config.policy_layers, num_outputs], [critic_width, *config.value_layers, 1]
        self.shares_layers = bool(self._cnns) or self.core is not None
        self._policy = mlp(policy_sizes, output_gain=config.policy_output_gain, name="policy")
        self._value = mlp(value_sizes, output_gain=1.0, name="value")

    @property
    def value_variables(self) -> tuple[tf.Variable, ...]:
        """The variables that only the value function uses."""
        return self._value.trainable_variables

    def encode(self, inputs: Inputs) -> Inputs:
        """Replaces the images of `inputs: [B, ...]` with the outputs of the CNNs, `float32[B, F]`."""
        return {**inputs, **{name: cnn(inputs[name]) for name, cnn in self._cnns.items()}}

    def features(self, encoded: Inputs) -> tf.Tensor:
        """Concatenates the policy's leaves of the encoded inputs to `float32[B, F]`."""
        parts = [encoded[name] for name in self._names]
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis=-1)

    def outputs(self, hidden: tf.Tensor) -> tf.Tensor:
        """Returns the policy's outputs `float32[B, num_outputs]` for the features, or for the output of the core."""
        return self._policy(hidden)

    def values(self, hidden: tf.Tensor, encoded: Inputs) -> tf.Tensor:
        """Returns the values `float32[B]`, which also depend on the encoded inputs that the policy does not read."""
        if self._critic_names:
            hidden = tf.concat([hidden, *(encoded[name] for name in self._critic_names)], axis=-1)
        return tf.squeeze(self._value(hidden), axis=-1)


class Agent(tf.Module):
    """Maps batches of observations to actions and values. The constructor takes the spaces of one env.

    Attributes:
        distribution: Turns the policy's outputs into actions, log-probabilities, entropies and KLs.
        observations: Turns observations into the networks' inputs, and owns their normalizers.
        action_space: Space of one action.
        network: Encodes the inputs one state at a time, computes `features` of the encoded inputs, and `outputs` and
            `values` from the features or, if there is a `core`, from its output.
        state_size: Length S of the recurrent memory of one env; 0 without a recurrent core.
        become: A graph function that copies all variables of another agent with the same spaces and settings.
        arguments: The arguments of the constructor.

    Raises:
        vecenv.UnsupportedSpace: If there is no policy or no network for the spaces.
        ConfigError: If the custom network violates its contract.
    """

    def __init__(self, config: Config, observation_space: gym.Space, action_space: gym.Space):
        super().__init__(name="agent")
        self.action_space = action_space
        self.distribution = distributions.for_space(action_space, transform=config.action_transform)
        self.observations = Observations(observation_space, config, mask_size=self.distribution.mask_size)
        free = [config.initial_log_std] * self.distribution.num_free
        num_outputs = self.distribution.num_outputs - len(free)
        self.network: CustomNetwork | ActorCritic
        if config.network is not None:
            self.network = CustomNetwork(config.network, self.observations, num_outputs, seed=network_seed(config.seed))
        else:
            self.network = ActorCritic(config, self.observations, num_outputs)
        self.arguments = (config, observation_space, action_space)
        self._min_log_std = config.min_log_std
        self.log_std = tf.Variable(free, name="log_std") if free else None
        self.state_size = 0 if self.network.core is None else self.network.core.state_size
        self._act = graph_function(self.mode, input_signature=self.signature)
        seed = tf.TensorSpec([2], tf.int32)
        self._act_sampled = graph_function(self.sample, input_signature=[*self.signature, seed])
        self.become = graph_function(self._become)

    @property
    def description(self) -> str:
        """One line about the inputs, the layers and the number of parameters."""
        config = self.arguments[0]
        layers = f"custom network {config.network}"
        if config.network is None:
            cnn = [f"{config.cnn} CNN"] if self.observations.has_images else []
            core = [] if config.recurrent == "none" else [f"{config.recurrent} {config.recurrent_units}"]
            heads = [("policy", config.policy_layers), ("value", config.value_layers)]
            units = [" ".join([name, *map(str, sizes)]) for name, sizes in heads]
            layers = f"{', '.join([*cnn, *core, *units])} ({config.activation})"
        count = sum(math.prod(variable.shape) for variable in self.learned)
        return f"{self.observations.description} -> {layers}; {count:,} parameters"

    @property
    def signature(self) -> list[Any]:
        """The TensorSpecs of a batch of observations and of its memory, which are the arguments of `mode`."""
        return [batch_specs(self.observations.space), tf.TensorSpec([None, self.state_size])]

    def outputs(self, hidden: Hidden, encoded: Inputs) -> tf.Tensor:
        """Returns the parameters of the distribution over actions, `float32[B, distribution.num_outputs]`.

        Args:
            hidden: The first result of `advance` or `unroll`.
            encoded: The encoded inputs, which include the action mask if there is one.
        """
        outputs = self.network.outputs(hidden)
        if self.log_std is not None:
            log_std = self.log_std.read_value()
            log_std = straight_through(tf.maximum(log_std, self._min_log_std), log_std)
            log_std = tf.broadcast_to(log_std, [tf.shape(outputs)[0], self.distribution.num_free])
            outputs = tf.concat([outputs, log_std], axis=-1)
        if self.observations.has_mask:
            size = self.distribution.mask_size
            if size == self.distribution.num_outputs:  # spares every step two copies
                outputs = tf.where(encoded[MASK], outputs, FORBIDDEN)
            else:
                outputs = tf.concat([tf.where(encoded[MASK], outputs[:, :size], FORBIDDEN), outputs[:, size:]], axis=-1)
        return outputs

    def values(self, hidden: Hidden, encoded: Inputs) -> tf.Tensor:
        """Returns the values `float32[B]` for the first result of `advance` or `unroll` and the encoded inputs."""
        return self.network.values(hidden, encoded)

    def step(self, observations: Any, state: tf.Tensor) -> Predictions:
        """Returns predictions for one state of each env.

        Args:
            observations: Observations `[N, ...]`, nested like the space.
            state: Memory before these states, `float32[N, S]`.
        """
        encoded = self.network.encode(self.observations.inputs(observations))
        hidden, state = self.advance(encoded, state)
        return Predictions(self.outputs(hidden, encoded), self.values(hidden, encoded), state)

    def advance(self, encoded: Inputs, state: tf.Tensor) -> tuple[Hidden, tf.Tensor]:
        """Returns the input of `outputs` and `values` for one state of each env, and the memory after that state.

        Args:
            encoded: Encoded inputs `[N, ...]`.
            state: Memory before these states, `float32[N, S]`.
        """
        hidden, core = self.network.features(encoded), self.network.core
        if core is not None:
            state = core.step(core.project(hidden), state)
            hidden = core.output(state)
        return hidden, state

    def unroll(self, encoded: Inputs, sequences: Sequences | None) -> tuple[Hidden, tf.Tensor]:
        """Does the same as `advance` for T consecutive states of each of N envs, with B = T * N, ordered by time.

        Args:
            encoded: Encoded inputs `[T * N, ...]`.
            sequences: The sequences that the states form; may be None without a recurrent core.
        """
        hidden = self.network.features(encoded)
        core = self.network.core
        memory = tf.zeros([tf.shape(tf.nest.flatten(encoded)[0])[0], 0])
        if core is not None:
            assert sequences is not None and not isinstance(hidden, dict)  # only custom networks return a dict
            begins, state = sequences
            memory = scan(core, tf.reshape(hidden, [*begins.shape, hidden.shape[-1]]), state, begins)
            hidden, memory = flat((core.output(memory), memory))
        return hidden, memory

    def sample(self, observations: Any, state: tf.Tensor, seed: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Returns sampled actions `[N, ...]` and the next memory, for observations `[N, ...]` and a seed `int32[2]`."""
        outputs, _, after = self.step(observations, state)
        return self.distribution.sample(outputs, self.distribution.noise([tf.shape(state)[0]], seed)), after

    def mode(self, observations: Any, state: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Returns the most likely actions `[N, ...]` and the next memory, for observations `[N, ...]`."""
        outputs, _, state = self.step(observations, state)
        return self.distribution.mode(outputs), state

    def act(
        self, observations: Any, state: np.ndarray, *, checked: bool = True, seed: np.ndarray | None = None
    ) -> tuple[Any, np.ndarray]:
        """Returns what `mode` returns, or what `sample` returns if there is a seed, as NumPy arrays.

        Args:
            observations: Observations `[N, ...]`.
            state: Memory before these states, `float32[N, S]`.
            checked: Whether a mask that forbids every action is an error.
            seed: Seed of sampled actions, `int32[2]`. None: the most likely actions.

        Raises:
            NothingAllowed: If a mask forbids every action.
        """
        if checked:
            self.check_mask(observations)
        with tf.device(HOST), in_order(self.runs_in_order):
            found = self._act(observations, state) if seed is None else self._act_sampled(observations, state, seed)
        actions, after = found
        return tf.nest.map_structure(lambda leaf: leaf.numpy(), actions), after.numpy()

    def check_mask(self, observations: Any) -> None:
        """Raises NothingAllowed if a mask in a batch of NumPy observations forbids every action."""
        if self.observations.has_mask:
            check_mask(self.observations.mask(observations)[None], self.distribution.mask_groups, "this call")

    def initial_state(self, num_envs: int) -> np.ndarray:
        """Returns the memory at the start of an episode, `float32[N, S]`."""
        return np.zeros([num_envs, self.state_size], np.float32)

    @property
    def runs_in_order(self) -> bool:
        """Whether `in_order` suits the networks.

        TensorFlow fuses a CNN's operations only in its parallel executor, and custom graph functions are traced for it.
        """
        return not self.observations.has_images and self.network.can_compile

    def untrained_copy(self) -> Agent:
        """Returns another agent with the same spaces and settings on the host, with initial weights. See `become`.

        Raises:
            ConfigError: If a custom network is the same object as this agent's.
        """
        with tf.device(HOST):
            copy = Agent(*self.arguments)
        if {id(variable) for variable in self.variables} & {id(variable) for variable in copy.variables}:
            raise ConfigError(
                f"--network {self.arguments[0].network} returned the same variables twice: make the function return a "
                "new network each time it is called, because the run needs several copies"
            )
        return copy

    @property
    def on_host(self) -> bool:
        """Whether all variables are on the CPU. Acting then copies no weights from an accelerator."""
        return all(tf.DeviceSpec.from_string(v.device).device_type == "CPU" for v in self.variables)

    def _become(self, other: Agent) -> None:
        for mine, theirs in zip(self.variables, other.variables, strict=True):
            mine.assign(tf.raw_ops.DeepCopy(x=theirs.read_value()))

    @property
    def learned(self) -> list[tf.Variable]:
        """The variables that gradients change."""
        return [*self.network.trainable_variables, *([] if self.log_std is None else [self.log_std])]

    @property
    def learned_groups(self) -> list[list[tf.Variable]]:
        """The variables of `learned` in groups that share no layers: the policy's, then the value function's.

        There is a single group if they share layers, or if that is unknown.
        """
        if self.network.shares_layers:
            return [self.learned]
        values = {id(variable) for variable in self.network.value_variables}
        return [
            [variable for variable in self.learned if id(variable) not in values],
            [variable for variable in self.learned if id(variable) in values],
        ]

    def raise_log_std(self, minimum: float) -> None:
        """Raises each log std to a minimum. Far below it, gradients would take many steps to change the policy."""
        if self.log_std is not None:
            self.log_std.assign(tf.maximum(self.log_std, minimum))

    def inward(self, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Returns the gradients of some variables, with 0 where a log std below its minimum would fall further."""

        def inward(gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
            if variable is not self.log_std:
                return gradient
            below = self.log_std.read_value() < self._min_log_std
            return tf.where(below & (gradient > 0), 0.0, gradient)  # descent moves against the gradient

        return [inward(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]


def batch_specs(space: gym.Space) -> Any:
    """Returns the TensorSpecs of a batch of any size, `[None, ...]`, nested like the space."""

    def spec(path: Path) -> tf.TensorSpec:
        leaf = pick(space, path)
        return tf.TensorSpec([None, *leaf.shape], leaf.dtype)

    return nest(space, spec)
