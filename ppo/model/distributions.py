"""Distributions over actions: Gaussians for Box spaces, choices for discrete spaces, products for nested spaces.

Every method is a pure function, so a rollout draws all its noise at once, and an update computes the log-probabilities
of a whole batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
import tensorflow as tf
from gymnasium import spaces

import vecenv
from vecenv.tree import Path, children, leaves, name_of, nest, pick

_NODES, _WEIGHTS = (x.astype(np.float32) for x in np.polynomial.hermite_e.hermegauss(21))
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()  # Gauss-Hermite quadrature of a mean over a standard normal
_BELOW_1 = np.nextafter(np.float32(1), np.float32(0))  # the largest float32 below 1
_TINY = np.finfo(np.float32).tiny  # lower bound of uniform noise, so that its logarithm is finite

FAR = 1e6
"""Distance from 0 beyond which a bound of a Box, such as the largest float32, does not scale its actions."""

MAX_CHOICES = 2**16
"""Maximum number of integers in the range of an integer Box entry. Each integer has its own logit."""


class Distribution(Protocol):
    """Functions of `outputs: float32[..., num_outputs]`, the parameters that the policy computes.

    `log_prob` takes samples: the values that were drawn before they became actions. For a Gaussian, they are the values
    u before they were scaled, or squashed, because float32 rounds the action a(u). For a discrete space, they are the
    action itself, and for a nested space, a tuple of the samples of all leaves.

    Attributes:
        num_outputs: Number of parameters.
        num_free: Number of trailing parameters that may be variables, independent of the observation.
        mask_size: Number of entries of an action mask, one for each of the leading parameters, which are logits. None
            if actions cannot be masked.
        mask_groups: Ranges of mask entries, each of which must allow at least one entry.
    """

    num_outputs: int
    num_free: int
    mask_size: int | None = None
    mask_groups: Sequence[slice] = ()

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        """Returns the noise that `sample` needs for a batch of this shape, `float32[*shape, num_outputs - num_free]`.

        Equal seeds give equal noise.
        """

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> Any:
        """Returns actions, in the shapes, dtypes and nesting of the action space."""

    def mode(self, outputs: tf.Tensor) -> Any:
        """Returns the most likely actions; for a squashed Gaussian, the squashed mean."""

    def samples(self, outputs: tf.Tensor, noise: tf.Tensor, actions: Any) -> Any:
        """Returns the samples of the actions that `sample` returned for `outputs` and `noise`."""
        return self.recover(actions)

    def recover(self, actions: Any) -> Any:
        """Returns the samples of actions whose noise is unknown, as exactly as float32 allows."""

    def log_prob(self, outputs: tf.Tensor, samples: Any) -> tf.Tensor:
        """Returns the log-density or log-probability of the actions that the samples became, `float32[...]`."""

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the entropy in nats, `float32[...]`."""

    def rewarded_entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the entropy that the objective rewards, in nats, `float32[...]`."""
        return self.entropy(outputs)

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns KL(old || new) in nats, `float32[...]`."""


class DiagonalGaussian(Distribution):
    """Independent normal distributions of the action's entries. Outputs: means, then log standard deviations.

    A sample u becomes the action a(u) = middle + half * u, so means and deviations are in units of half the range of
    the entry. An entry without two bounds within `FAR` of 0 has middle 0 and half 1.

    log p(a) = sum_i -(u_i - mean_i)^2 / (2 std_i^2) - log std_i - log(2 pi) / 2 - log half_i

    The objective rewards the entropy of an entry with bounds up to std_i = 1 / sqrt(3), that of uniform actions.

    The engine clips actions to the bounds of the space.
    """

    _far = FAR

    def __init__(self, space: spaces.Box):
        self._space = space
        self.num_free = math.prod(space.shape)
        self.num_outputs = 2 * self.num_free
        low, high = space.low.astype(np.float64).reshape(-1), space.high.astype(np.float64).reshape(-1)
        bounded = (low >= -self._far) & (high <= self._far) & (low < high)
        low, high = np.where(bounded, [low, high], [[-1.0], [1.0]])
        self._middle, self._half = ((low + high) / 2).astype(np.float32), ((high - low) / 2).astype(np.float32)
        # Clipped noise costs nothing, so noise earns entropy only up to the deviation of uniform actions.
        self._useful_log_std = np.where(bounded, -0.5 * math.log(3), np.inf).astype(np.float32)
        self._log_volume = float(np.sum(np.log(self._half, dtype=np.float64)))  # of the actions of the unit cube of u

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_normal([*shape, self.num_free], seed)

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self._action(self._drawn(outputs, noise))

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        return self._action(self._split(outputs)[0])

    def samples(self, outputs: tf.Tensor, noise: tf.Tensor, actions: tf.Tensor) -> tf.Tensor:
        return self._drawn(outputs, noise)

    def recover(self, actions: tf.Tensor) -> tf.Tensor:
        batch = tf.shape(actions)[: len(actions.shape) - len(self._space.shape)]
        entries = tf.reshape(tf.cast(actions, tf.float32), tf.concat([batch, [self.num_free]], axis=0))
        return (entries - self._middle) / self._half

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split(outputs)
        z = (samples - mean) * tf.exp(-log_std)
        of_entries = -0.5 * tf.square(z) - log_std - 0.5 * math.log(2 * math.pi)
        return tf.reduce_sum(of_entries, axis=-1) - self._log_volume

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        return self._entropy_of(self._split(outputs)[1])

    def rewarded_entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        return self._entropy_of(tf.minimum(self._split(outputs)[1], self._useful_log_std))

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        # sum_i log(std / old_std) + (old_std / std)^2 / 2 + ((old_mean - mean) / std)^2 / 2 - 1/2
        (old_mean, old_log_std), (mean, log_std) = self._split(old_outputs), self._split(outputs)
        z, log_ratio = (old_mean - mean) * tf.exp(-log_std), old_log_std - log_std
        return tf.reduce_sum(0.5 * (tf.square(z) + tf.exp(2.0 * log_ratio) - 1.0) - log_ratio, axis=-1)

    def _entropy_of(self, log_std: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(log_std + 0.5 * math.log(2 * math.pi * math.e), axis=-1) + self._log_volume

    def _split(self, outputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return outputs[..., : self.num_free], outputs[..., self.num_free :]

    def _drawn(self, outputs: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split(outputs)
        return mean + tf.exp(log_std) * noise

    def _action(self, u: tf.Tensor) -> tf.Tensor:
        """Returns the action for a sample `float32[..., A]`."""
        return _shaped(self._middle + self._half * u, self._space)


class SquashedGaussian(DiagonalGaussian):
    """A Gaussian whose sample u becomes an action within the bounds (Haarnoja et al., 2018, arXiv 1801.01290, app. C).

    a(u) = middle + half * tanh(u),  log p(a) = log p(u) - sum_i log |da_i / du_i|. The KL is the KL of the Gaussians.
    """

    _far = math.inf  # see `_check_bounds`

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        return super().log_prob(outputs, samples) - tf.reduce_sum(self._log_slope(samples), axis=-1)

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        mean, log_std = self._split(outputs)
        nodes, weights = (values.reshape([-1] + [1] * len(mean.shape)) for values in (_NODES, _WEIGHTS))
        at_nodes = self._log_slope(tf.expand_dims(mean, 0) + tf.expand_dims(tf.exp(log_std), 0) * nodes)
        return super().entropy(outputs) + tf.reduce_sum(at_nodes * weights, axis=[0, -1])

    def rewarded_entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        return self.entropy(outputs)  # of actions within the bounds

    def _action(self, u: tf.Tensor) -> tf.Tensor:
        return super()._action(tf.tanh(u))

    def recover(self, actions: tf.Tensor) -> tf.Tensor:
        # |tanh(u)| rounds to 1 if |u| > 9, so an action at a bound is mapped to the largest |u| below that.
        return tf.atanh(tf.clip_by_value(super().recover(actions), -_BELOW_1, _BELOW_1))

    def _log_slope(self, u: tf.Tensor) -> tf.Tensor:
        """Returns the logarithm of the derivative of tanh."""
        # log(1 - tanh(u)^2), in a form that does not cancel for large |u|
        return 2.0 * (math.log(2.0) - u - tf.nn.softplus(-2.0 * u))


class _Discrete(Distribution):
    """Base class of distributions over discrete actions, with `num_outputs` logits that can be masked one by one.

    `noise` must be such that `mode(outputs + noise)` is a sample.
    """

    num_free = 0

    def __init__(self, space: gym.Space, num_outputs: int):
        self._space = space
        self.num_outputs = num_outputs
        self.mask_size = num_outputs

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        return self.mode(outputs + noise)

    def recover(self, actions: tf.Tensor) -> tf.Tensor:
        return actions

    def _uniform(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_uniform([*shape, self.num_outputs], seed, minval=_TINY)


class Categorical(_Discrete):
    """One independent choice per entry of the action. Outputs: the logits of all choices, entry by entry.

    Args:
        space: The space of the actions.
        counts: Number of choices of each entry.
        start: Choice k of an entry is the action `start + k`.
    """

    def __init__(self, space: gym.Space, counts: Sequence[int], start: np.ndarray):
        super().__init__(space, sum(counts))
        self._counts, self._start = counts, start
        ends = np.cumsum(counts).tolist()
        self.mask_groups = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        # Gumbel noise: the argmax of logits + noise is a sample from their softmax.
        return -tf.math.log(-tf.math.log(self._uniform(shape, seed)))

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        choices = tf.stack([tf.argmax(logits, axis=-1) for logits in self._split(outputs)], axis=-1)
        return _shaped(choices + self._start, self._space)

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([tf.shape(outputs)[:-1], [len(self._counts)]], axis=0)
        choices = tf.reshape(tf.cast(samples, tf.int64), shape) - self._start
        chosen = [
            tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(choices[..., i], self._counts[i]), axis=-1)
            for i, logits in enumerate(self._split(outputs))
        ]
        return tf.add_n(chosen)

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        log_probs = [tf.nn.log_softmax(logits) for logits in self._split(outputs)]
        return -tf.add_n([tf.reduce_sum(tf.exp(log_prob) * log_prob, axis=-1) for log_prob in log_probs])

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        total = tf.zeros(tf.shape(outputs)[:-1])
        for old_logits, logits in zip(self._split(old_outputs), self._split(outputs), strict=True):
            old, new = tf.nn.log_softmax(old_logits), tf.nn.log_softmax(logits)
            total += tf.reduce_sum(tf.exp(old) * (old - new), axis=-1)
        return total

    def _split(self, outputs: tf.Tensor) -> list[tf.Tensor]:
        return [outputs] if len(self._counts) == 1 else tf.split(outputs, self._counts, axis=-1)


class Bernoulli(_Discrete):
    """Independent bits. Outputs: the logit of each bit being 1. A bit that the mask forbids stays 0."""

    def __init__(self, space: spaces.MultiBinary):
        super().__init__(space, math.prod(space.shape))

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        # Logistic noise: logit + noise is positive with probability sigmoid(logit).
        uniform = self._uniform(shape, seed)
        return tf.math.log(uniform) - tf.math.log1p(-uniform)

    def mode(self, outputs: tf.Tensor) -> tf.Tensor:
        return _shaped(outputs > 0.0, self._space)

    def log_prob(self, outputs: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        sign = 2.0 * tf.reshape(tf.cast(samples, tf.float32), tf.shape(outputs)) - 1.0
        return tf.reduce_sum(tf.math.log_sigmoid(sign * outputs), axis=-1)

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        return -tf.reduce_sum(self._expected(outputs, outputs), axis=-1)

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self._expected(old_outputs, old_outputs) - self._expected(old_outputs, outputs), axis=-1)

    def _expected(self, weights: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns each bit's expected log-probability under the logits `outputs`, for bits drawn from `weights`."""
        ones, zeros = tf.sigmoid(weights), tf.sigmoid(-weights)
        return ones * tf.math.log_sigmoid(outputs) + zeros * tf.math.log_sigmoid(-outputs)


class Product(Distribution):
    """Independent distributions of the leaves of a Dict or Tuple.

    log p(a) = sum_i log p_i(a_i). Entropies and KLs add up as well.

    Outputs: the logits of all discrete leaves, then the means of all Gaussians, then their log standard deviations.
    Within each of these groups, the leaves keep the order of the space. The action mask has the order of the logits.
    """

    def __init__(self, space: gym.Space, parts: dict[Path, Distribution]):
        self._space = space
        # The logits come first, because a mask covers the first outputs.
        self._parts = dict(sorted(parts.items(), key=lambda item: item[1].mask_size is None))
        self._fixed = [part.num_outputs - part.num_free for part in self._parts.values()]
        self._free = [part.num_free for part in self._parts.values()]
        self.num_free = sum(self._free)
        self.num_outputs = sum(self._fixed) + self.num_free
        groups = []
        for part, end in zip(self._parts.values(), np.cumsum(self._fixed).tolist(), strict=True):
            if part.mask_size is not None:
                self.mask_size, begin = end, end - part.mask_size
                groups += [slice(begin + group.start, begin + group.stop) for group in part.mask_groups]
        self.mask_groups = groups

    def noise(self, shape: list[int], seed: tf.Tensor) -> tf.Tensor:
        seeds = [tf.random.experimental.stateless_fold_in(seed, i) for i in range(len(self._parts))]
        noises = [part.noise(shape, part_seed) for part, part_seed in zip(self._parts.values(), seeds, strict=True)]
        return tf.concat(noises, axis=-1)

    def sample(self, outputs: tf.Tensor, noise: tf.Tensor) -> Any:
        of_parts = zip(self._parts.items(), self._split(outputs), tf.split(noise, self._fixed, axis=-1), strict=True)
        return self._nested({path: part.sample(params, drawn) for (path, part), params, drawn in of_parts})

    def mode(self, outputs: tf.Tensor) -> Any:
        of_parts = zip(self._parts.items(), self._split(outputs), strict=True)
        return self._nested({path: part.mode(params) for (path, part), params in of_parts})

    def samples(self, outputs: tf.Tensor, noise: tf.Tensor, actions: Any) -> Any:
        of_parts = zip(self._parts.items(), self._split(outputs), tf.split(noise, self._fixed, axis=-1), strict=True)
        return tuple(part.samples(params, drawn, pick(actions, path)) for (path, part), params, drawn in of_parts)

    def recover(self, actions: Any) -> Any:
        return tuple(part.recover(pick(actions, path)) for path, part in self._parts.items())

    def log_prob(self, outputs: tf.Tensor, samples: Any) -> tf.Tensor:
        of_parts = zip(self._parts.values(), self._split(outputs), samples, strict=True)
        return tf.add_n([part.log_prob(params, sample) for part, params, sample in of_parts])

    def entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        of_parts = zip(self._parts.values(), self._split(outputs), strict=True)
        return tf.add_n([part.entropy(params) for part, params in of_parts])

    def rewarded_entropy(self, outputs: tf.Tensor) -> tf.Tensor:
        of_parts = zip(self._parts.values(), self._split(outputs), strict=True)
        return tf.add_n([part.rewarded_entropy(params) for part, params in of_parts])

    def kl(self, old_outputs: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        of_parts = zip(self._parts.values(), self._split(old_outputs), self._split(outputs), strict=True)
        return tf.add_n([part.kl(old, new) for part, old, new in of_parts])

    def _split(self, outputs: tf.Tensor) -> list[tf.Tensor]:
        """Returns the outputs of each part."""
        *fixed, free = tf.split(outputs, [*self._fixed, self.num_free], axis=-1)
        stds = tf.split(free, self._free, axis=-1)
        return [
            tf.concat([params, std], axis=-1) if count else params
            for params, std, count in zip(fixed, stds, self._free, strict=True)
        ]

    def _nested(self, by_path: dict[Path, tf.Tensor]) -> Any:
        return nest(self._space, by_path.__getitem__)


def _shaped(flat: tf.Tensor, space: gym.Space) -> tf.Tensor:
    """Reshapes and casts `[..., A]` to actions of the space."""
    shape = list(space.shape or ())
    actions = tf.reshape(flat, tf.concat([tf.shape(flat)[:-1], shape], axis=0))
    return tf.cast(tf.ensure_shape(actions, [*flat.shape[:-1], *shape]), space.dtype)


def for_space(space: gym.Space, *, transform: Literal["clip", "tanh"] = "clip") -> Distribution:
    """Returns the distribution for an action space.

    Args:
        space: Space of one action.
        transform: How a sample u becomes an action of a Box. "clip": the engine clips it to the bounds. "tanh": tanh(u)
            is mapped from [-1, 1] to the bounds.

    Raises:
        vecenv.UnsupportedSpace: If there is no distribution for the space, or the transform needs other bounds.
    """
    if children(space) is None:
        return _for_leaf(space, transform)
    parts: dict[Path, Distribution] = {}
    for path, leaf in leaves(space):
        try:
            parts[path] = _for_leaf(leaf, transform)
        except vecenv.UnsupportedSpace as error:
            raise vecenv.UnsupportedSpace(f"{name_of('action', path)}: {error}") from None
    if not parts:
        raise vecenv.UnsupportedSpace(f"the action space {space} has no entries, so there is nothing to learn")
    return Product(space, parts)


def _for_leaf(space: gym.Space, transform: Literal["clip", "tanh"]) -> Distribution:
    if space.shape is not None and 0 in space.shape:
        raise vecenv.UnsupportedSpace(f"the action space {space} has no entries, so there is nothing to learn")
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        if transform == "clip":
            return DiagonalGaussian(space)
        _check_bounds(space)
        return SquashedGaussian(space)
    if isinstance(space, spaces.Box):
        return Categorical(space, _counts_of(space), np.reshape(space.low, -1).astype(np.int64))
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n
        return Categorical(space, np.reshape(counts, -1).tolist(), np.reshape(space.start, -1).astype(np.int64))
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(space)
    raise vecenv.UnsupportedSpace(
        f"ppo has no policy for the action space {space}: it needs Box, Discrete, MultiDiscrete, MultiBinary, or a "
        "Dict or Tuple of these. Wrap the env so that it takes one of these."
    )


def _counts_of(space: spaces.Box) -> list[int]:
    """Returns the number of integers in the range of each entry of an integer Box."""
    bounds = zip(np.ravel(space.low).tolist(), np.ravel(space.high).tolist(), strict=True)
    counts = [int(high) - int(low) + 1 for low, high in bounds]
    if max(counts) > MAX_CHOICES:
        raise vecenv.UnsupportedSpace(
            f"ppo learns one logit for each integer in {space}, and an entry has {max(counts):,} integers: "
            f"at most {MAX_CHOICES:,} are supported. Narrow the bounds, or wrap the env so that it takes floats."
        )
    return counts


def _check_bounds(space: spaces.Box) -> None:
    if not space.is_bounded("both") or (space.high <= space.low).any():
        raise vecenv.UnsupportedSpace(
            f"actions cannot be mapped to {space}: its bounds are not finite, or a lower bound is not below its upper "
            "bound. Use --action-transform clip, or wrap the env in gymnasium.wrappers.RescaleAction."
        )
    widest, narrowest = np.abs([space.low, space.high]).max(), np.min(space.high.astype(np.float64) - space.low)
    if space.dtype == np.float16 or narrowest < 1e-3 * widest or widest > 1e30:
        raise vecenv.UnsupportedSpace(
            f"actions cannot be mapped to {space} without losing precision: its range is narrow compared with its "
            "offset, or too wide, or its dtype is float16. Wrap the env in gymnasium.wrappers.RescaleAction."
        )
