"""Observations: what the networks see of an observation, leaf by leaf.

Box leaves become `float32[F]`, normalised; images stay uint8 until the CNN takes them, minibatch by
minibatch; Discrete and MultiDiscrete leaves become one-hot, MultiBinary ones float32. The leaf
`action_mask` of a Dict is not seen by the networks: it says which discrete actions are allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import tensorflow as tf
from gymnasium import spaces

import vecenv
from ppo.algorithm.normalize import ObservationNormalizer, num_features
from vecenv.spaces import Path, children, leaves, pick

ACTION_MASK = "action_mask"
"""Key of a Dict observation whose entries are not 0 where a discrete action is allowed."""

SMALLEST_IMAGE = 36
"""Pixels that the CNN needs in both directions; smaller images are flattened and normalised as vectors are."""

MASK = ""
"""Name under which inputs hold the mask, which no leaf has."""

Inputs = dict[str, tf.Tensor]
"""A batch of observations for the networks: `[B, ...]` by the name of the leaf, and the mask, `bool[B, M]`."""


class Leaf(Protocol):
    """How one leaf is presented."""

    spec: tf.TensorSpec  # of the result

    def raw(self, values: tf.Tensor) -> tf.Tensor:
        """Returns values `[B, *shape]` in the result's shape and dtype, not yet normalised."""

    def normalized(self, raw: tf.Tensor) -> tf.Tensor:
        """Returns them as the networks take them."""

    def update(self, raw: tf.Tensor) -> None:
        """Takes a batch into the statistics."""


class _Unchanging(tf.Module):
    """A leaf without statistics."""

    def normalized(self, raw: tf.Tensor) -> tf.Tensor:
        return raw

    def update(self, raw: tf.Tensor) -> None:
        pass


class _Vector(tf.Module):
    """Numbers of any shape and dtype: flattened to `float32[B, F]`."""

    def __init__(self, space: spaces.Box, *, clip: float, enabled: bool):
        super().__init__(name="vector")
        features = num_features(space.shape)
        self.spec = tf.TensorSpec([None, features], tf.float32)
        self.normalizer = ObservationNormalizer(features, clip=clip, enabled=enabled)

    def raw(self, values: tf.Tensor) -> tf.Tensor:
        return tf.cast(_flattened(values), tf.float32)

    def normalized(self, raw: tf.Tensor) -> tf.Tensor:
        return self.normalizer(raw)

    def update(self, raw: tf.Tensor) -> None:
        self.normalizer.update(raw)


class _Image(_Unchanging):
    """A picture of bytes, or a stack of them, with its channels last: `uint8[B, H, W, C]`."""

    def __init__(self, space: spaces.Box, axes: Sequence[int]):
        super().__init__(name="image")
        height, width, *others = axes
        self._order = [0, *(axis + 1 for axis in axes)]
        sizes = space.shape
        self.spec = tf.TensorSpec(
            [None, sizes[height], sizes[width], num_features([sizes[i] for i in others])], tf.uint8
        )

    def raw(self, values: tf.Tensor) -> tf.Tensor:
        if self._order != sorted(self._order):
            values = tf.transpose(values, self._order)
        return tf.reshape(values, [tf.shape(values)[0], *self.spec.shape[1:]])


class _OneHot(_Unchanging):
    """Numbers that are names: `float32[B, sum of counts]`."""

    def __init__(self, counts: np.ndarray, start: np.ndarray):
        super().__init__(name="one_hot")
        self._counts, self._start = np.reshape(counts, -1).tolist(), np.reshape(start, [1, -1]).astype(np.int64)
        self.spec = tf.TensorSpec([None, sum(self._counts)], tf.float32)

    def raw(self, values: tf.Tensor) -> tf.Tensor:
        choices = tf.reshape(tf.cast(values, tf.int64), [tf.shape(values)[0], len(self._counts)]) - self._start
        return tf.concat([tf.one_hot(choices[:, i], count) for i, count in enumerate(self._counts)], axis=1)


class _Bits(_Unchanging):
    """Flags: `float32[B, F]`."""

    def __init__(self, space: spaces.MultiBinary):
        super().__init__(name="bits")
        self.spec = tf.TensorSpec([None, num_features(space.shape)], tf.float32)

    def raw(self, values: tf.Tensor) -> tf.Tensor:
        return tf.cast(_flattened(values), tf.float32)


class Observations(tf.Module):
    """Owns one `Leaf` for each leaf of the observation space, and with it the statistics of the normalisers.

    Args:
        space: Of one observation.
        mask_size: How many entries a mask of the actions has; None where actions are not discrete, and a
            leaf named "action_mask" is a leaf like any other.
        clip: Bound on normalised values.
        normalize: Whether to normalise at all.

    Raises:
        vecenv.UnsupportedSpace: If a leaf has no presentation.
    """

    def __init__(self, space: gym.Space, *, mask_size: int | None, clip: float, normalize: bool):
        super().__init__(name="observations")
        self.space = space
        self.paths: dict[str, Path] = {}  # where in an observation each leaf lies
        self.leaves: dict[str, Leaf] = {}
        if _has_strange_keys(space):
            raise vecenv.UnsupportedSpace(f"the keys of the observation space {space} must be strings")
        self.mask_paths: list[Path] = []
        masks = []
        for path, leaf in leaves(space):
            if path[:1] == (ACTION_MASK,) and mask_size is not None:
                self.mask_paths.append(path)
                masks.append(leaf)
                continue
            name = "/".join(map(str, path)) or "observation"
            while name in self.paths:  # of keys that hold slashes themselves
                name += "'"
            self.paths[name] = path
            self.leaves[name] = _leaf_for(leaf, name, clip=clip, normalize=normalize)
        if masks and mask_size is not None:
            _check_masks(masks, mask_size)
        if not sum(num_features(spec.shape[1:]) for spec in self.specs.values()):
            raise vecenv.UnsupportedSpace(f"the observation space {space} holds nothing that a network could see")

    @property
    def has_mask(self) -> bool:
        """Whether the observations say which actions are allowed."""
        return bool(self.mask_paths)

    @property
    def specs(self) -> dict[str, tf.TensorSpec]:
        """What the networks see: shape `[None, ...]` and dtype by the name of the leaf."""
        return {name: leaf.spec for name, leaf in self.leaves.items()}

    def raw(self, observations: Any) -> Inputs:
        """Returns observations `[B, ...]`, nested as the space is, in shapes and dtypes for the networks."""
        inputs = {name: leaf.raw(pick(observations, self.paths[name])) for name, leaf in self.leaves.items()}
        if self.mask_paths:
            parts = [pick(observations, path) for path in self.mask_paths]
            inputs[MASK] = tf.concat([tf.cast(_flattened(part), tf.bool) for part in parts], axis=1)
        return inputs

    def mask(self, observations: Any) -> np.ndarray:
        """Returns which actions numpy observations `[..., *shape]` allow, `bool[..., M]`; there must be a mask."""
        parts = [(pick(observations, path), pick(self.space, path).shape) for path in self.mask_paths]
        flat = [np.reshape(part, [*part.shape[: part.ndim - len(shape)], -1]) != 0 for part, shape in parts]
        return np.concatenate(flat, axis=-1)

    def normalized(self, raw: Inputs) -> Inputs:
        """Returns what the networks take, with the statistics as they are."""
        return {**raw, **{name: leaf.normalized(raw[name]) for name, leaf in self.leaves.items()}}

    def inputs(self, observations: Any) -> Inputs:
        """Returns what the networks take for observations `[B, ...]`."""
        return self.normalized(self.raw(observations))

    @property
    def unseen(self) -> bool:
        """Whether a normalizer is in use that has no statistics yet."""
        return any(module.unseen for module in self.submodules if isinstance(module, ObservationNormalizer))

    def update(self, raw: Inputs) -> None:
        """Takes what `raw` returned into the statistics."""
        for name, leaf in self.leaves.items():
            leaf.update(raw[name])


def _flattened(values: tf.Tensor) -> tf.Tensor:
    """Returns `[B, F]` for `[B, ...]`."""
    return tf.reshape(values, [tf.shape(values)[0], num_features(values.shape[1:])])


def _has_strange_keys(space: gym.Space) -> bool:
    members = children(space) or []
    strange = isinstance(space, spaces.Dict) and any(not isinstance(key, str) for key, _ in members)
    return strange or any(_has_strange_keys(member) for _, member in members)


def _check_masks(masks: list[gym.Space], size: int) -> None:
    numbers = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)
    sizes = [num_features(leaf.shape) if isinstance(leaf, numbers) else 0 for leaf in masks]
    if sum(sizes) != size or 0 in sizes:
        raise vecenv.UnsupportedSpace(
            f'the observation\'s "{ACTION_MASK}" is {masks}, but the action space needs {size} entries: one for each '
            f"choice of each discrete action, in their order. Use MultiBinary({size})."
        )


def image_axes(space: spaces.Box) -> tuple[int, ...] | None:
    """Returns the axes of height, width, and then of all that become channels; None if a Box is no image.

    An image is a Box of bytes whose sides have 36 pixels or more: `[H, W]`, `[H, W, C]`, `[C, H, W]`, or frames
    `[F, H, W, C]`, `[F, C, H, W]`. Channels are the smaller of the two axes that may be them.
    """
    if space.dtype != np.uint8:
        return None
    shape = space.shape
    axes: tuple[int, ...]
    if len(shape) == 2:
        axes = (0, 1)
    elif len(shape) == 3:
        axes = (1, 2, 0) if shape[0] < shape[2] else (0, 1, 2)
    elif len(shape) == 4:
        axes = (2, 3, 0, 1) if shape[1] < shape[3] else (1, 2, 0, 3)
    else:
        return None
    return axes if min(shape[axis] for axis in axes[:2]) >= SMALLEST_IMAGE else None


def _leaf_for(space: gym.Space, name: str, *, clip: float, normalize: bool) -> Leaf:
    if isinstance(space, spaces.Box):
        axes = image_axes(space)
        return _Vector(space, clip=clip, enabled=normalize) if axes is None else _Image(space, axes)
    if isinstance(space, spaces.Discrete):
        return _OneHot(np.array([space.n]), np.array([space.start]))
    if isinstance(space, spaces.MultiDiscrete):
        return _OneHot(space.nvec, space.start)
    if isinstance(space, spaces.MultiBinary):
        return _Bits(space)
    raise vecenv.UnsupportedSpace(
        f"ppo has no network for the observation space {space} of {name!r}: it needs Box, Discrete, MultiDiscrete, "
        "MultiBinary, or Dict and Tuple of these. Wrap the env so that it gives one."
    )
