"""Estimates how much memory a run needs, and refuses runs that need more memory or mappings than are available."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import vecenv
from ppo.config import Config, ConfigError
from ppo.model import distributions
from ppo.model.networks import cnn_for
from ppo.model.observations import SMALL_IMAGE, check_readable, critic_paths, image_axes
from vecenv.spaces import leaves

FLOAT = 4  # bytes
XLA_PROGRAMS = 300 * 2**20  # bytes, measured: XLA needs this to compile even the smallest networks
PROGRAMS = 60 * 2**20  # bytes, measured: TensorFlow needs this if the policy sees images, without XLA

MAPPINGS_OF_TEAM = 800  # measured: compiling the update of a policy takes 400 to 800 memory mappings
OTHER_MAPPINGS = 1_200  # a reserve for envs and libraries
MAPS, MAX_MAP_COUNT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


@dataclass(frozen=True)
class Footprint:
    """Estimated peak memory of training in bytes, excluding the rollouts themselves.

    With T steps, N envs, minibatches of B samples, and W weights in total:
        weights: 4 W bytes each for the weights, Adam's two moments, the gradient, the update step
            the second copy of the weights. If initialization needs more, 4 W bytes plus three float64 copies of the
            largest matrix.
        batch: For all (T + 1) N states of a rollout: the networks' inputs, twice, because final observations are
            evaluated too; and the input and output of the largest layer, twice, because XLA transposes them. Layers of
            a CNN do not count, because it reads a minibatch at a time. For the same reason, an image that is not
            small counts once, even if `frame_stack` puts it into several stacks.
        minibatch: For B samples: the networks' inputs; and the input and output of every layer, twice, because each
            has a gradient.
        programs: Constant: what TensorFlow needs to build the update; more if XLA compiles it.
    Images are stored as bytes, and small images as floats. Custom networks are not counted.
    Together with the rollouts, the estimate is within a factor of 1.5 of the measured peak of real runs.
    """

    weights: int
    batch: int
    minibatch: int
    programs: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.batch + self.minibatch + self.programs


def footprint(config: Config, observation_space: gym.Space, action_space: gym.Space) -> Footprint:
    """Returns the estimate for the settings and the spaces of one training env; see `Footprint` for the formula."""
    check_readable(observation_space)
    distribution = distributions.for_space(action_space, transform=config.action_transform)
    critics = critic_paths(observation_space, config.critic_keys, masked=distribution.mask_size is not None)
    seen = stored = 0  # bytes of one observation as network input, and in a rollout
    width = critic_width = 0  # features after the CNNs that the policy reads, and those that only the critic reads
    of_cnns: list[tuple[int, int]] = []  # input and output of each layer of a CNN, per sample, in bytes
    layers: list[tuple[int, int]] = []  # the same for the other layers
    matrices: list[int] = []  # number of weights
    sees_images = False
    cnn_choice = config.cnn if config.network is None else "nature"
    for path, leaf in leaves(observation_space):
        sizes = leaf.shape or ()
        axes = image_axes(leaf, cnn_choice) if isinstance(leaf, gym.spaces.Box) else None
        if axes is None:
            features = _features(leaf)
            size = FLOAT * features
            seen, stored = seen + size, stored + size
        else:
            sees_images = True
            rows, columns, *others = (sizes[axis] for axis in axes)
            small = min(rows, columns) < SMALL_IMAGE
            size = math.prod(sizes) * (FLOAT if small else 1)
            # The statistics of a small image are computed from all stacks at once.
            seen, stored = seen + size, stored + size
            cnn = cnn_for(cnn_choice, rows, columns)
            assert cnn is not None
            features = cnn.NUM_OUTPUTS
            convolutions = cnn.convolutions((rows, columns, math.prod(others)))
            flat = math.prod(convolutions[-1].outputs)
            of_cnns += [(FLOAT * math.prod(layer.inputs), FLOAT * math.prod(layer.outputs)) for layer in convolutions]
            of_cnns.append((FLOAT * flat, FLOAT * features))
            matrices += [*(layer.patch * layer.filters for layer in convolutions), flat * features]
        if path in critics:
            critic_width += features
        else:
            width += features
    if config.network is None:
        for units in _dense_layers(config, width, critic_width, distribution.num_outputs):
            layers += [(FLOAT * rows, FLOAT * columns) for rows, columns in itertools.pairwise(units)]
            matrices += [rows * columns for rows, columns in itertools.pairwise(units)]
    else:
        of_cnns, layers, matrices = [], [], []
    widest = max((rows + columns for rows, columns in layers), default=0)
    states, copies = (config.num_steps + 1) * config.num_envs, 5
    return Footprint(
        weights=max(copies * FLOAT * sum(matrices), FLOAT * sum(matrices) + 3 * 8 * max(matrices, default=0)),
        batch=states * (2 * stored + 2 * widest),
        minibatch=config.minibatch_size * (seen + 2 * sum(map(sum, [*of_cnns, *layers]))),
        programs=PROGRAMS if sees_images else XLA_PROGRAMS,
    )


def _features(leaf: Any) -> int:
    if isinstance(leaf, gym.spaces.Discrete):
        return int(leaf.n)
    return int(np.sum(leaf.nvec)) if isinstance(leaf, gym.spaces.MultiDiscrete) else math.prod(leaf.shape or ())


def _dense_layers(config: Config, width: int, critic_width: int, outputs: int) -> list[list[int]]:
    """Returns the layer sizes of each perceptron; a recurrent core counts as a layer that outputs its gates."""
    found = []
    if config.recurrent != "none":
        gates = (3 if config.recurrent == "gru" else 4) * config.recurrent_units
        found.append([width + config.recurrent_units, gates])
        width = config.recurrent_units
    if config.share_layers:
        last = config.policy_layers[-1]
        return [*found, [width, *config.policy_layers], [last, outputs], [last, 1]]
    return [*found, [width, *config.policy_layers, outputs], [width + critic_width, *config.value_layers, 1]]


def check_memory(config: Config, envs: vecenv.AsyncVectorEnv | vecenv.SyncVectorEnv) -> None:
    """Raises ConfigError if training would need more memory than is available. Does nothing if that is unknown.

    Args:
        config: The settings.
        envs: The training envs. Rollouts in shared memory are already allocated, so they are not counted.
    """
    needs = footprint(config, envs.single_observation_space, envs.env_action_space)
    rollouts = 0 if getattr(envs, "num_workers", 0) else sum(array.nbytes for array in envs.arrays.values())
    available = vecenv.available_memory()
    if available is None or needs.total + rollouts <= available:
        return
    parts = {
        f"rollouts {size_of(rollouts)} (lower --num-envs or --num-steps)": rollouts,
        f"weights {size_of(needs.weights)} (lower --policy-layers or --value-layers)": needs.weights,
        f"a batch {size_of(needs.batch)} (lower --num-envs or --num-steps)": needs.batch,
        f"a minibatch {size_of(needs.minibatch)} (lower --minibatch-size)": needs.minibatch,
    }
    largest = sorted((part for part in parts if parts[part]), key=lambda part: -parts[part])
    raise ConfigError(
        f"training would need about {size_of(needs.total + rollouts)} of memory, but {size_of(available)} is "
        f"available: {', '.join(largest)}. Smaller observations reduce all of these."
    )


def check_mappings(num_teams: int) -> None:
    """Raises ConfigError if training could need more memory mappings than the kernel allows.

    TensorFlow keeps every function that XLA has compiled until the process ends, which takes hundreds of mappings for
    each policy. Beyond the limit, XLA crashes the process. Does nothing if the system does not report both numbers.
    """
    try:
        number, most = len(MAPS.read_bytes().splitlines()), int(MAX_MAP_COUNT.read_text())
    except (OSError, ValueError):
        return
    needed = num_teams * MAPPINGS_OF_TEAM + OTHER_MAPPINGS
    if number + needed > most:
        of_teams, fewer = (f" for {num_teams} policies", "train fewer policies, ") if num_teams > 1 else ("", "")
        raise ConfigError(
            f"training may need {needed:,} more memory mappings{of_teams}, but this process has {number:,} of the "
            f"{most:,} that the kernel allows. TensorFlow never frees the mappings of earlier runs. Start each run in "
            f"its own process, {fewer}or raise vm.max_map_count."
        )


@contextmanager
def naming_settings(config: Config) -> Iterator[None]:
    """Turns the engine's `SharedMemoryFull` into a `ConfigError` that names the trainer's settings.

    Raises:
        ConfigError: If the block raises `SharedMemoryFull`.
    """
    try:
        yield
    except vecenv.SharedMemoryFull as error:
        needed, available = error.needed_bytes, error.available_bytes
        found = f", but {size_of(available)} is available" if available is not None else ""
        count, size = "two", "more memory than is available"
        if needed is not None:
            size = size_of(needed)
        raise ConfigError(
            f"{count} rollouts of {config.num_envs} envs x {config.num_steps} steps need {size}{found}. Lower "
            "--num-envs or --num-steps, or provide more shared memory: start a container with --shm-size=2g; "
            "elsewhere, see `df -h /dev/shm`."
        ) from error


def size_of(number: int) -> str:
    """Returns a number of bytes as text in GiB or MiB."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
