"""How a Gaussian sample u becomes an action of a bounded Box, entry by entry.

There is no inverse: float32 actions near a bound, or far from zero, do not determine u.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import numpy as np
import tensorflow as tf
from gymnasium import spaces

import vecenv

_NODES, _WEIGHTS = (x.astype(np.float32) for x in np.polynomial.hermite_e.hermegauss(21))
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()  # Gauss-Hermite quadrature of a mean over a standard normal


class Transform(Protocol):
    """A strictly increasing function of each entry of `float32[..., A]`."""

    def forward(self, u: tf.Tensor) -> tf.Tensor:
        """Returns the actions."""

    def log_slope(self, u: tf.Tensor) -> tf.Tensor:
        """Returns log |da / du|, which a density of u loses when it becomes one of actions."""

    def mean_log_slope(self, mean: tf.Tensor, std: tf.Tensor) -> tf.Tensor:
        """Returns the mean of `log_slope` over a normal u, which its entropy gains."""


class Clip:
    """Actions are samples; the engine clips what an env gets to its bounds."""

    def forward(self, u: tf.Tensor) -> tf.Tensor:
        return u

    def log_slope(self, u: tf.Tensor) -> tf.Tensor:
        return tf.zeros([])

    def mean_log_slope(self, mean: tf.Tensor, std: tf.Tensor) -> tf.Tensor:
        return tf.zeros([])


class Rescale:
    """[-1, 1] becomes [low, high]; what lies beyond is clipped by the engine."""

    def __init__(self, space: spaces.Box):
        self._middle = ((space.high.astype(np.float64) + space.low) / 2).astype(np.float32).reshape(-1)
        self._half = ((space.high.astype(np.float64) - space.low) / 2).astype(np.float32).reshape(-1)

    def forward(self, u: tf.Tensor) -> tf.Tensor:
        return self._middle + self._half * u

    def log_slope(self, u: tf.Tensor) -> tf.Tensor:
        return tf.constant(np.log(self._half))

    def mean_log_slope(self, mean: tf.Tensor, std: tf.Tensor) -> tf.Tensor:
        return self.log_slope(mean)


class Tanh(Rescale):
    """tanh(u) in (-1, 1), rescaled to (low, high) (Haarnoja et al., 2018, arXiv 1801.01290, appendix C)."""

    def forward(self, u: tf.Tensor) -> tf.Tensor:
        return super().forward(tf.tanh(u))

    def log_slope(self, u: tf.Tensor) -> tf.Tensor:
        # log(1 - tanh(u)^2) without the difference that would lose all digits
        return 2.0 * (math.log(2.0) - u - tf.nn.softplus(-2.0 * u)) + np.log(self._half)

    def mean_log_slope(self, mean: tf.Tensor, std: tf.Tensor) -> tf.Tensor:
        at_nodes = self.log_slope(tf.expand_dims(mean, 0) + tf.expand_dims(std, 0) * _along_first(_NODES, mean))
        return tf.reduce_sum(at_nodes * _along_first(_WEIGHTS, mean), axis=0)


def transform_for(name: Literal["clip", "rescale", "tanh"], space: spaces.Box) -> Transform:
    """Returns the transform of that name.

    Raises:
        vecenv.UnsupportedSpace: If the space has no finite bounds to map to.
    """
    if name == "clip":
        return Clip()
    if not space.is_bounded("both") or (space.high <= space.low).any():
        raise vecenv.UnsupportedSpace(
            f"actions cannot be mapped to {space}, whose bounds are not finite or leave no room: use "
            "--action-transform clip, or wrap the env in gymnasium.wrappers.RescaleAction"
        )
    widest, narrowest = np.abs([space.low, space.high]).max(), np.min(space.high.astype(np.float64) - space.low)
    if space.dtype == np.float16 or narrowest < 1e-3 * widest or widest > 1e30:
        raise vecenv.UnsupportedSpace(
            f"actions cannot be mapped to {space} without losing their digits, as its range is too narrow for "
            "its offset, too wide, or of half precision: wrap the env in gymnasium.wrappers.RescaleAction"
        )
    return Rescale(space) if name == "rescale" else Tanh(space)


def _along_first(values: np.ndarray, like: tf.Tensor) -> np.ndarray:
    return values.reshape([-1] + [1] * len(like.shape))
