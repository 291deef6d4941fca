"""Refuses runs that need more memory, or more memory mappings, than are available."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym

import vecenv
from ppo.config import Config, ConfigError
from ppo.model import distributions
from ppo.model.networks import cnn_for
from ppo.model.observations import Observations

MIB = 2**20
TENSORFLOW = 300 * MIB  # measured: what XLA needs to compile the smallest update of a policy for vectors
TENSORFLOW_IMAGES = 120 * MIB  # measured: what an update without XLA and the weights of the default CNN need
OUTPUT_COPIES = 7  # measured: noise, outputs of both policies and their log-probabilities, for a whole rollout
MAPPINGS_OF_POLICY = 800  # measured: compiling the update of a policy takes 400 to 800 memory mappings
OTHER_MAPPINGS = 1_200  # a reserve for envs and libraries
MAPS, MAX_MAP_COUNT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def check_memory(config: Config, spaces: tuple[gym.Space, gym.Space], *, held_bytes: int) -> None:
    """Raises ConfigError if training would need more memory than is available. Does nothing if that is unknown.

    Counts the rollouts, the update's copies of their observations, the policy's outputs, the layers' activations for a
    minibatch, and TensorFlow itself, but neither weights nor the layers of a custom network. Rollouts in shared memory
    do not count, because the engine has already allocated them.

    Args:
        config: The settings of a team.
        spaces: The observation space and the action space of an agent.
        held_bytes: Memory for rollouts that the collector allocates in this process.
    """
    space, acted = spaces
    plain = dataclasses.replace(config, normalize_observations=False, critic_keys=())  # allocates no statistics
    observations = Observations(space, plain, mask_size=None)
    inputs = [(tuple(spec.shape[1:]), spec.dtype.size) for spec in observations.specs.values()]
    observation = sum(math.prod(shape) * size for shape, size in inputs)  # bytes
    outputs = 4 * distributions.for_space(acted).num_outputs  # bytes for one observation
    activations = outputs
    if config.network is None:
        activations += 4 * sum((*config.policy_layers, *config.value_layers))
        for shape, _ in inputs:
            if len(shape) == 3 and (network := cnn_for(config.cnn, *shape[:2])) is not None:
                numbers = math.prod(shape) + sum(math.prod(layer.outputs) for layer in network.convolutions(shape))
                activations += 4 * numbers
    copies = 2 if observations.has_images else 4  # XLA, which compiles the update for vectors, also transposes them
    rollouts = (copies * observation + OUTPUT_COPIES * outputs) * (config.num_steps + 1) * config.num_envs + held_bytes
    # Every layer has an output before and after its nonlinearity, and a gradient.
    minibatch = config.minibatch_size * (observation + 3 * activations)
    needed = rollouts + minibatch + (TENSORFLOW_IMAGES if observations.has_images else TENSORFLOW)
    available = vecenv.available_memory()
    if available is not None and needed > available:
        raise ConfigError(
            f"training would need about {_text(needed)} of memory, but {_text(available)} is available. The rollouts "
            f"need {_text(rollouts)}: lower --num-envs or --num-steps. A minibatch needs {_text(minibatch)}: lower "
            "--minibatch-size. Smaller observations, and actions with fewer choices, reduce both."
        )


def check_mappings(num_policies: int) -> None:
    """Raises ConfigError if training could need more memory mappings than the kernel allows, if both numbers are known.

    TensorFlow keeps every function that XLA has compiled until the process ends, which takes hundreds of mappings for
    each policy. Beyond the limit, XLA crashes the process.
    """
    try:
        number, most = len(MAPS.read_bytes().splitlines()), int(MAX_MAP_COUNT.read_text())
    except (OSError, ValueError):
        return
    needed = num_policies * MAPPINGS_OF_POLICY + OTHER_MAPPINGS
    if number + needed > most:
        raise ConfigError(
            f"training may need {needed:,} more memory mappings, but this process has {number:,} of the {most:,} that "
            "the kernel allows. TensorFlow never frees the mappings of earlier runs. Start each run in its own "
            "process, raise vm.max_map_count, or train fewer policies."
        )


@contextmanager
def naming_settings(config: Config) -> Iterator[None]:
    """Turns the engine's `SharedMemoryFull` into a `ConfigError` that names the trainer's settings."""
    try:
        yield
    except vecenv.SharedMemoryFull as error:
        needed = "memory" if error.needed_bytes is None else _text(error.needed_bytes)
        free = "" if error.available_bytes is None else f" ({_text(error.available_bytes)} is available)"
        shared = error.limit is None or "/dev/shm" in error.limit
        advice = ", or provide more shared memory: `docker run --shm-size=2g`; elsewhere, see `df -h /dev/shm`"
        raise ConfigError(
            f"the rollouts of {config.num_envs} envs x {config.num_steps} steps need {needed}, but there is no room in "
            f"{error.limit or 'memory'}{free}. Lower --num-envs or --num-steps{advice if shared else ''}."
        ) from error


def _text(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / MIB:.0f} MiB"
