"""Conversion of observations into network inputs, leaf by leaf.

A Box becomes a normalized `float32[F]`; values that float32 would round are float64 until their mean is subtracted. An
image stays `uint8[H, W, C]`, because the CNN converts and normalizes images one minibatch at a time. A small image,
whose pixels may be categories or flags instead of intensities, becomes a normalized `float32[H, W, C]` if the CNN can
read it. Discrete and MultiDiscrete leaves become one-hot vectors, and MultiBinary leaves become float32 vectors. The
entry `action_mask` of a Dict specifies which discrete actions are allowed and is not a network input.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf
from gymnasium import spaces

import vecenv
from ppo.config import Config, ConfigError
from ppo.model.networks import CNNS, cnn_for
from ppo.model.normalize import ImageNormalizer, ObservationNormalizer, RunningMoments, Statistics
from vecenv.tree import FIXED_SPACES, Path, leaves, name_of, nest, pick
from vecenv.wrappers import ACTION_MASK

SMALL_IMAGE = 36
"""Height or width, in pixels, below which an image is small. Small images are normalized per channel, others per
pixel."""

MASK = ""
"""Name of the mask in `Inputs`. No leaf has this name."""

Inputs = dict[str, tf.Tensor]
"""A batch of network inputs `[B, ...]` by leaf name, with the mask `bool[B, M]` if there is one."""


class Leaf(tf.Module):
    """One leaf of an observation space, and its conversion into a network input.

    Args:
        shape: Shape of the network input for one observation.
        dtype: Dtype of the network input.
        convert: Maps a batch of values `[B, *leaf.shape]` to `[B, *shape]`, without the cast to `dtype`.

    Attributes:
        spec: Shape `[None, *shape]` and dtype of a batch of network inputs.
        normalizer: Normalizes the result; None to leave it unchanged. The CNN applies the normalizer of an image.
    """

    def __init__(self, shape: list[int], dtype: tf.DType, convert: Callable[[tf.Tensor], tf.Tensor]):
        super().__init__(name="leaf")
        self._convert = convert
        self.spec = tf.TensorSpec([None, *shape], dtype)
        self.normalizer: ObservationNormalizer | ImageNormalizer | None = None

    def raw(self, values: tf.Tensor) -> tf.Tensor:
        """Returns values `[B, *leaf.shape]` in the shape of `spec`, not yet normalized.

        The dtype is that of `spec`, or float64 if float32 would round values that are going to be normalized.
        """
        shifted = isinstance(self.normalizer, ObservationNormalizer)
        converted = self._convert(values)
        return tf.cast(converted, tf.float64 if shifted and is_rounded(converted.dtype) else self.spec.dtype)


class Observations(tf.Module):
    """Converts observations into network inputs, and owns the normalizers.

    Args:
        space: Space of one observation.
        config: The settings. With a custom network, images are what the CNN "nature" could read, and stay bytes.
        mask_size: Number of entries of an action mask. None if actions cannot be masked; "action_mask" is then an
            ordinary leaf.

    Attributes:
        space: Space of one observation.
        leaves: The leaves that the networks see, by name. A name is the leaf's keys joined by "/", or "observation" if
            the space is itself a leaf.
        paths: Path of each leaf in the space, by the same names.
        mask_paths: Paths of the leaves that form the action mask; empty without a mask.
        critic: Names of the leaves that only the value function reads.
        critic_paths: Paths of the leaves that only the value function reads.

    Raises:
        vecenv.UnsupportedSpace: If a leaf cannot be converted, or the mask has the wrong size.
        ConfigError: If a critic key does not exist, or nothing is left for the policy.
    """

    def __init__(self, space: gym.Space, config: Config, *, mask_size: int | None):
        super().__init__(name="observations")
        check_readable(space)
        cnn = config.cnn if config.network is None else "nature"
        self.space = space
        self.leaves: dict[str, Leaf] = {}
        self.paths: dict[str, Path] = {}
        self.mask_paths: list[Path] = []
        for path, leaf in leaves(space):
            _check_keys(space, path)
            if path[:1] == (ACTION_MASK,) and mask_size is not None:
                self.mask_paths.append(path)
                continue
            name = "/".join(map(str, path)) or "observation"
            while name in self.leaves:  # because a key contains a slash
                name += "'"
            self.paths[name] = path
            self.leaves[name] = converted = _leaf_for(leaf, cnn)
            if config.normalize_observations and isinstance(leaf, spaces.Box):
                shape = tuple(converted.spec.shape[1:])
                if converted.spec.dtype == tf.float32:
                    converted.normalizer = ObservationNormalizer(shape[-1], clip=config.observation_clip)
                elif config.network is None:
                    converted.normalizer = ImageNormalizer(shape)
        if self.mask_paths and mask_size is not None:
            _check_masks([pick(space, path) for path in self.mask_paths], mask_size)
        if not sum(math.prod(spec.shape[1:]) for spec in self.specs.values()):
            raise vecenv.UnsupportedSpace(f"the observation space {space} holds nothing that a network could see")
        self.critic_paths = critic_paths(space, config.critic_keys, masked=mask_size is not None)
        self.critic = frozenset(name for name, path in self.paths.items() if path in self.critic_paths)

    @property
    def has_mask(self) -> bool:
        """Whether the observations say which actions are allowed."""
        return bool(self.mask_paths)

    @property
    def has_images(self) -> bool:
        """Whether an input is an image."""
        return any(len(spec.shape) == 4 for spec in self.specs.values())

    @property
    def description(self) -> str:
        """The names and shapes of the networks' inputs."""
        return ", ".join(self._described(name) for name in self.leaves)

    def _described(self, name: str) -> str:
        leaf, used = pick(self.space, self.paths[name]), self.specs[name].shape[1:]
        if len(used) > 1:
            return f"{name} {_by(used)}"
        if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)):
            return f"{name} one-hot {_by(used)}"
        return f"{name} {_by(leaf.shape)} flattened to {_by(used)}" if len(leaf.shape) > 1 else f"{name} {_by(used)}"

    @property
    def specs(self) -> dict[str, tf.TensorSpec]:
        """Shape `[None, ...]` and dtype of each network input, by leaf name."""
        return {name: leaf.spec for name, leaf in self.leaves.items()}

    def raw(self, observations: Any) -> Inputs:
        """Returns observations `[B, ...]`, nested like the space, in the networks' shapes. See `Leaf.raw`."""
        inputs = {name: leaf.raw(pick(observations, self.paths[name])) for name, leaf in self.leaves.items()}
        if self.mask_paths:
            parts = [pick(observations, path) for path in self.mask_paths]
            inputs[MASK] = tf.concat([tf.cast(_flattened(part), tf.bool) for part in parts], axis=1)
        return inputs

    def normalized(self, raw: Inputs) -> Inputs:
        """Returns the network inputs for the result of `raw`. Does not change the statistics."""
        found = dict(raw)
        for name, normalizer in self._normalizers.items():
            if isinstance(normalizer, ObservationNormalizer):
                found[name] = normalizer(raw[name])
        return found

    def inputs(self, observations: Any) -> Inputs:
        """Returns the network inputs for observations `[B, ...]`."""
        return self.normalized(self.raw(observations))

    def statistics(self, raw: Inputs, weights: tf.Tensor | None = None) -> dict[str, Statistics]:
        """Returns the statistics of observations, by leaf name: of all vectors, and of a random sample of the images.

        Args:
            raw: The result of `raw` for a batch `[B, ...]`.
            weights: 0 for rows that do not count and 1 for all others, `float32[B]`; None if all count.
        """
        found = {}
        for name, normalizer in self._normalizers.items():
            rows, counts = raw[name], weights
            if isinstance(normalizer, ImageNormalizer):
                chosen = normalizer.chosen(tf.shape(rows)[0])
                rows, counts = tf.gather(rows, chosen), None if weights is None else tf.gather(weights, chosen)
            found[name] = normalizer.statistics(rows, counts)
        return found

    def merge(self, statistics: dict[str, Statistics]) -> None:
        """Adds a result of `statistics` to the running statistics, which scale all later observations."""
        for name, normalizer in self._normalizers.items():
            normalizer.moments.merge(statistics[name])

    def weaken(self, factor: float) -> None:
        """Multiplies the weight of the statistics so far by a factor."""
        for normalizer in self._normalizers.values():
            normalizer.moments.count.assign(normalizer.moments.count * factor)

    def nested(self, values: dict[str, Any]) -> Any:
        """Takes values by leaf name and returns them nested like the space, without the mask."""
        by_path = {path: values[name] for name, path in self.paths.items()}
        nested = nest(self.space, by_path.get)
        if self.mask_paths:
            del nested[ACTION_MASK]
        return nested

    def mask(self, observations: Any) -> np.ndarray:
        """Returns which actions the NumPy observations `[..., *shape]` allow, `bool[..., M]`. Requires a mask."""
        parts = [(pick(observations, path), pick(self.space, path).shape) for path in self.mask_paths]
        flat = [np.reshape(part, [*part.shape[: part.ndim - len(shape)], -1]) != 0 for part, shape in parts]
        return np.concatenate(flat, axis=-1)

    @property
    def shifted(self) -> list[tuple[Path, RunningMoments]]:
        """Path and statistics of each leaf whose mean is subtracted in float64, because float32 would round it."""
        return [
            (self.paths[name], normalizer.moments)
            for name, normalizer in self._normalizers.items()
            if isinstance(normalizer, ObservationNormalizer) and is_rounded(pick(self.space, self.paths[name]).dtype)
        ]

    @property
    def lacks_statistics(self) -> bool:
        """Whether a normalizer has no statistics yet."""
        return any(normalizer.moments.is_empty for normalizer in self._normalizers.values())

    @property
    def image_normalizers(self) -> dict[str, ImageNormalizer]:
        """The normalizers that the CNNs apply, by leaf name."""
        return {name: each for name, each in self._normalizers.items() if isinstance(each, ImageNormalizer)}

    @property
    def _normalizers(self) -> dict[str, ObservationNormalizer | ImageNormalizer]:
        return {name: leaf.normalizer for name, leaf in self.leaves.items() if leaf.normalizer is not None}


def critic_paths(space: gym.Space, keys: Sequence[str], *, masked: bool) -> frozenset[Path]:
    """Returns the paths of the observation leaves that only the value function reads.

    Args:
        space: Space of one observation.
        keys: Keys of `space`, or the joined keys of a nested space: "outer/inner". A key stands for all leaves below
            it.
        masked: Whether actions can be masked. The key "action_mask" is then not a network input.

    Raises:
        ConfigError: If a key does not exist, or the keys leave nothing for the policy.
    """
    if not keys:
        return frozenset()
    paths = [path for path, _ in leaves(space) if not (masked and path[:1] == (ACTION_MASK,))]
    below: dict[str, list[Path]] = {}
    for path in paths:
        for depth in range(1, len(path) + 1):
            below.setdefault("/".join(map(str, path[:depth])), []).append(path)
    if unknown := [key for key in keys if key not in below]:
        found = f"its keys are {', '.join(below)}" if below else "it has no keys"
        raise ConfigError(f"critic_keys={list(keys)} names {unknown}, which the observation space lacks: {found}")
    chosen = frozenset(path for key in keys for path in below[key])
    if len(chosen) == len(paths):
        raise ConfigError(
            f"critic_keys={list(keys)} leaves nothing for the policy to read: omit at least one of {', '.join(below)}"
        )
    return chosen


def image_axes(space: spaces.Box, cnn: str) -> tuple[int, ...] | None:
    """Returns the axes of an image: height, width, then the axes that become channels. None if a Box is not an image.

    An image is a Box of bytes, at least as high and wide as the CNN requires, with the axes `[H, W]`, `[H, W, C]`,
    `[C, H, W]`, or, for a stack of frames, `[F, H, W, C]` or `[F, C, H, W]`. If two axes could be the channels, the
    channels are the axis that leaves a square or, without a square, the smaller axis. A small image may also consist of
    bools, and it needs channels: a small table `[H, W]`, such as a board of numbered pieces, is a vector.

    `cnn` is `Config.cnn`.
    """
    shape = space.shape
    axes: tuple[int, ...]
    if len(shape) == 2:
        axes = (0, 1)
    elif len(shape) == 3:
        axes = (1, 2, 0) if _channels_first(*shape) else (0, 1, 2)
    elif len(shape) == 4:
        axes = (2, 3, 0, 1) if _channels_first(*shape[1:]) else (1, 2, 0, 3)
    else:
        return None
    height, width = (shape[axis] for axis in axes[:2])
    if min(height, width) < SMALL_IMAGE:
        suitable = space.dtype in (np.uint8, np.bool_) and len(shape) > 2
    else:
        suitable = space.dtype == np.uint8
    return axes if suitable and cnn_for(cnn, height, width) is not None else None


def image_warnings(space: gym.Space, cnn: str) -> list[str]:
    """Returns a warning for each Box that looks like an image but is flattened, so no layer knows which pixels touch.

    The arguments are the space of one observation and `Config.cnn`.
    """
    found = []
    for path, leaf in leaves(space):
        if not isinstance(leaf, spaces.Box) or image_axes(leaf, cnn) is not None:
            continue
        pixels = spaces.Box(0, 255, leaf.shape, np.uint8)
        if (axes := image_axes(pixels, "small")) is None:
            continue
        advice = []
        if image_axes(leaf, "small") is None:
            advice.append("make the env return pixels as uint8 from 0 to 255")
        if image_axes(pixels, cnn) is None:
            advice.append(
                f"use --cnn small or impala, because --cnn {cnn} needs {CNNS[cnn].SMALLEST} x "
                f"{CNNS[cnn].SMALLEST} pixels"
            )
        height, width = (leaf.shape[axis] for axis in axes[:2])
        found.append(
            f"{name_of('observation', path)}, {leaf.dtype} of shape {leaf.shape}, looks like an image of {height} x "
            f"{width} pixels, but dense layers read it as {math.prod(leaf.shape):,} separate numbers. If it is an "
            f"image, {' and '.join(advice)}."
        )
    return found


def _channels_first(first: int, second: int, third: int) -> bool:
    return first < third and first != second


def _leaf_for(space: Any, cnn: str) -> Leaf:
    if isinstance(space, spaces.Box) and (axes := image_axes(space, cnn)) is not None:
        height, width, *channels = (space.shape[axis] for axis in axes)
        shape = [height, width, math.prod(channels)]
        if min(height, width) >= SMALL_IMAGE:
            return Leaf(shape, tf.uint8, lambda values: _image(values, axes, shape))
        most = max(float(space.high.max()), 1.0)  # keeps values in [0, 1] if they are not normalized
        return Leaf(shape, tf.float32, lambda values: tf.cast(_image(values, axes, shape), tf.float32) / most)
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return Leaf([math.prod(space.shape)], tf.float32, _flattened)
    nvec = space.n if isinstance(space, spaces.Discrete) else space.nvec
    counts, start = np.reshape(nvec, -1).tolist(), np.reshape(space.start, -1).astype(np.int64)
    return Leaf([sum(counts)], tf.float32, lambda values: _one_hot(values, counts, start))


def is_rounded(dtype: Any) -> bool:
    """Returns whether float32 cannot hold all values of a dtype: float64 and integers of more than 16 bits."""
    dtype = tf.as_dtype(dtype)
    return dtype.size > 2 and dtype != tf.float32


def invalid(space: gym.Space, values: np.ndarray) -> np.ndarray | None:
    """Returns which values of a leaf no network can read, `bool[...]`, or None if it can read all.

    They are numbers that are not finite as float32, and discrete values outside the space, which have no one-hot form.
    """
    if np.issubdtype(space.dtype, np.inexact):
        with np.errstate(over="ignore"):
            found = ~np.isfinite(values.astype(np.float32, copy=False))
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        found = (values < space.start) | (values > space.start + (count - 1))  # start + count may overflow the dtype
    else:
        return None
    return found if found.any() else None


def check_readable(space: gym.Space) -> None:
    """Raises if no network can read a leaf of an observation space.

    Raises:
        vecenv.UnsupportedSpace: The message names the leaf and the wrapper that drops it.
    """
    for path, leaf in leaves(space):
        if isinstance(leaf, FIXED_SPACES):
            continue
        name, advice = "/".join(map(str, path)), "Wrap"
        if path and all(isinstance(pick(space, path[:depth]), spaces.Dict) for depth in range(len(path))):
            wrapper = f'vecenv.wrappers:IgnoreKeys:{{"keys": {json.dumps([name])}}}'
            advice = f"Drop it with --wrappers {shlex.quote(wrapper)}, or wrap"
        raise vecenv.UnsupportedSpace(
            f"ppo has no network for the observation space {leaf} of {name or 'observation'!r}: it needs Box, "
            f"Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these. {advice} the env so that it returns "
            "one of these."
        )


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _flattened(values: tf.Tensor) -> tf.Tensor:
    """Returns `[B, F]` for `[B, ...]`."""
    return values if len(values.shape) == 2 else tf.reshape(values, [tf.shape(values)[0], math.prod(values.shape[1:])])


def _image(values: tf.Tensor, axes: tuple[int, ...], shape: list[int]) -> tf.Tensor:
    """Returns `[B, H, W, C]` for images with the given `image_axes`."""
    if axes != tuple(range(len(axes))):
        values = tf.transpose(values, [0, *(axis + 1 for axis in axes)])
    return tf.reshape(values, [tf.shape(values)[0], *shape])


def _one_hot(values: tf.Tensor, counts: list[int], start: np.ndarray) -> tf.Tensor:
    """Returns the one-hot vectors of all entries, concatenated, `float32[B, sum(counts)]`."""
    choices = tf.reshape(tf.cast(values, tf.int64), [tf.shape(values)[0], len(counts)]) - start
    return tf.concat([tf.one_hot(choices[:, i], count) for i, count in enumerate(counts)], axis=1)


def _check_keys(space: gym.Space, path: Path) -> None:
    for depth, key in enumerate(path):
        if isinstance(pick(space, path[:depth]), spaces.Dict) and not isinstance(key, str):
            raise vecenv.UnsupportedSpace(f"the keys of the observation space {space} must be strings")


def _check_masks(masks: list[gym.Space], size: int) -> None:
    numbers = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)
    sizes = [math.prod(leaf.shape) if isinstance(leaf, numbers) else 0 for leaf in masks]
    if sum(sizes) != size or 0 in sizes:
        raise vecenv.UnsupportedSpace(
            f'the observation\'s "{ACTION_MASK}" is {masks}, but the action space needs {size} entries: one for each '
            f"choice of each discrete action, in the order of the action space. Use MultiBinary({size})."
        )
