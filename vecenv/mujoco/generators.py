"""Generators: the random generators of several envs, used like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_EXAMPLE = np.random.default_rng(0)  # determines the shape of no draws


class Generators(tuple[Any, ...]):
    """The generators of n envs, with the methods of `numpy.random.Generator`.

    Each method is called once per generator, and the results are stacked: `uniform(-1, 1, 3)` returns float64[n, 3].
    An integer index returns one generator; an array of indices or a mask `bool[n]` returns `Generators`.
    """

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, np.ndarray):
            return super().__getitem__(index)
        chosen = np.flatnonzero(index) if index.dtype == np.bool_ else index
        return Generators(map(super().__getitem__, chosen.tolist()))

    def __getattr__(self, name: str) -> Callable[..., np.ndarray]:
        method = getattr(np.random.Generator, name)

        def draw(*args: Any, **kwargs: Any) -> np.ndarray:
            if not self:
                return np.array([method(_EXAMPLE, *args, **kwargs)])[:0]
            return np.array([method(rng, *args, **kwargs) for rng in self])

        return draw
