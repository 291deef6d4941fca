"""Seeds for the `reset` of a vector env, in a form that it accepts.

Gymnasium's `SyncVectorEnv` accepts a list with one seed per env. Other vector envs accept only an array (ale-py), or
only one int for all their envs (Gymnasium's `CartPoleVectorEnv`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

Seeds = Sequence[int | None]

_REJECTED = (TypeError, ValueError, AssertionError, gym.error.Error)
"""Exceptions that a vector env raises if it does not accept a form of seeds."""


class SeedForm:
    """Resets a vector env with seeds in the first form that it accepts, and uses the same form from then on.

    Args:
        env: The vector env.
    """

    def __init__(self, env: VectorEnv):
        self._env = env
        self._form: Callable[[Seeds, np.ndarray | None], Any] | None = None

    def reset(self, seeds: Seeds, mask: np.ndarray | None, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the vector env and returns its observations and infos.

        Args:
            seeds: One seed per env.
            mask: `bool[n]`, the envs to reset; None for all.
            **arguments: The remaining arguments of `reset`.

        Raises:
            ValueError: If the vector env accepts only a form that cannot express these seeds.
            Exception: What the vector env raises for a list, if it has accepted no form yet. A note says what is wrong
                with the seeds if it accepts only one int.
        """
        if all(seed is None for seed in seeds):
            return self._env.reset(seed=None, **arguments)
        if self._form is not None:
            return self._env.reset(seed=self._form(seeds, mask), **arguments)
        result, self._form = self._first_accepted(seeds, mask, arguments)
        return result

    def _first_accepted(self, seeds: Seeds, mask: np.ndarray | None, arguments: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the result of `reset`, and the form of the seeds."""
        errors = []
        for form in (_as_list, _as_array, _as_int):
            try:
                return self._env.reset(seed=form(seeds, mask), **arguments), form  # type: ignore[arg-type]
            except _REJECTED as error:
                errors.append(error)
        # The env may have rejected the seeds for another reason, so the form of an int is only a guess.
        errors[0].add_note(f"One int as the seed of {type(self._env).__name__} did not work either: {errors[-1]}")
        raise errors[0]


def _as_list(seeds: Seeds, mask: np.ndarray | None) -> list[int | None]:
    return list(seeds)


def _as_array(seeds: Seeds, mask: np.ndarray | None) -> np.ndarray:
    """Returns the seeds of the envs to reset, as ale-py expects them."""
    chosen = [seed for i, seed in enumerate(seeds) if mask is None or mask[i]]
    if None in chosen:
        raise ValueError(f"this vector env accepts a seed for every env or for none, but got {chosen}")
    return np.array(chosen, np.int64)


def _as_int(seeds: Seeds, mask: np.ndarray | None) -> int:
    first = seeds[0]
    if first is None or list(seeds) != list(range(first, first + len(seeds))):
        raise ValueError(
            f"this vector env accepts one int as the seed of all its envs, so their seeds must be consecutive, but got "
            f"{list(seeds)}. Pass one int, or build single envs, for example with backend='python'"
        )
    return first
