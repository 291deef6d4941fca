"""Episodes: the generator, the progress and the returns of each env's episode, and the infos of episodes that end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode

from vecenv import tree
from vecenv.rows.infos import Column, columns_of_mask

Infos = dict[str, Any]

_EXAMPLE = np.random.default_rng(0)  # gives an empty result its shape and dtype


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


class Episodes:
    """The episodes of N envs.

    Args:
        num_envs: N.
        max_steps: Steps after which an episode is truncated; None for no limit.
        autoreset_mode: With `NEXT_STEP`, an env whose episode is over begins the next one instead of being stepped.

    Attributes:
        steps: Steps since each episode began, `int64[N]`.
        over: Whether the episode of an env has ended, or has never begun, `bool[N]`.
        returns: For each reward term, its sum over each episode, `float64[N]`.
        generators: Each env's generator, or None before its first reset.
        seeds: The seed of each generator, or None before the first reset.
        all_begun: Whether every env has begun an episode.
    """

    def __init__(self, num_envs: int, max_steps: int | None, autoreset_mode: AutoresetMode):
        self._max_steps, self._autoreset_mode = max_steps, autoreset_mode
        self.steps = np.zeros(num_envs, np.int64)
        self.over = np.ones(num_envs, np.bool_)
        self.returns: dict[str, np.ndarray] = {}
        self.generators: list[np.random.Generator | None] = [None] * num_envs
        self.seeds: list[int | None] = [None] * num_envs
        self.all_begun = False

    def due(self, chosen: np.ndarray) -> np.ndarray | None:
        """Returns which of these envs, `bool[N]`, must begin an episode before they can be stepped; None if none must.

        Raises:
            gymnasium.error.ResetNeeded: If the autoreset mode leaves this to the caller, or an env was never reset.
        """
        if not self.all_begun:
            raise gym.error.ResetNeeded("Cannot call env.step() before calling env.reset()")
        if not np.count_nonzero(self.over):
            return None
        due = self.over & chosen
        if not np.count_nonzero(due):
            return None
        if self._autoreset_mode != AutoresetMode.NEXT_STEP:
            raise gym.error.ResetNeeded(f"envs {np.flatnonzero(due).tolist()} must be reset before they are stepped")
        return due

    def restart(self, ids: np.ndarray, seeds: Sequence[int | None] | None) -> Generators:
        """Sets the steps and returns of these envs to 0; returns their generators.

        An env gets a new generator if `seeds`, one per env, has a seed for it, or if it has none yet.
        """
        for i in ids.tolist():
            seed = None if seeds is None else seeds[i]
            if seed is not None or self.generators[i] is None:
                self.generators[i], self.seeds[i] = seeding.np_random(seed)
        self.steps[ids] = 0
        for returns in self.returns.values():
            returns[ids] = 0.0
        return Generators(self.generators)[ids]

    def begin(self, ids: np.ndarray) -> None:
        """Notes that the episodes of these envs, which were restarted, have begun."""
        self.over[ids] = False
        self.all_begun = self.all_begun or None not in self.generators

    def count_step(self, ids: np.ndarray | None) -> None:
        """Adds a step to the episodes of these envs, or of all envs."""
        if ids is None:
            self.steps += 1
        else:
            self.steps[ids] += 1

    def add_rewards(self, terms: dict[str, np.ndarray], stepped: np.ndarray) -> None:
        """Adds reward terms, `float64[N]`, to the returns of the envs that were stepped, `bool[N]`."""
        for term, values in terms.items():
            if term not in self.returns:
                self.returns[term] = np.zeros(len(self.steps))
            np.add(self.returns[term], values, out=self.returns[term], where=stepped)

    def at_limit(self) -> np.ndarray:
        """Returns which episodes have reached the limit of steps: a new array `bool[N]`."""
        if self._max_steps is None:
            return np.zeros(len(self.steps), np.bool_)
        return self.steps >= self._max_steps

    def end(self, ended: np.ndarray, chosen: np.ndarray) -> None:
        """Notes which of the chosen envs have ended their episodes in a step; both are `bool[N]`."""
        np.copyto(self.over, ended, where=chosen)

    def return_infos(self) -> Infos:
        """Returns the info `return/TERM` of each reward term: copies of its returns."""
        return {f"return/{term}": values.copy() for term, values in self.returns.items()}


def final_columns(infos: Infos, observations: Any, space: gym.Space, ended: np.ndarray) -> list[Column]:
    """Returns `final_info` and `final_obs` of the envs whose episodes ended, `bool[N]`.

    The final observations are copies of rows of `observations`, nested like `space`, the space of one env.
    """
    envs, finals = np.flatnonzero(ended), []
    for i in envs:
        finals.append(tree.nest(space, lambda path, i=i: tree.pick(observations, path)[i].copy()))  # type: ignore[misc]
    return [Column("final_info", envs, tuple(columns_of_mask(infos, ended))), Column("final_obs", envs, finals)]
