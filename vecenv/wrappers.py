"""RandomStart and FrameDelta: wrappers of the 2017 project that Gymnasium does not have."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs


class RandomStart(gym.Wrapper, RecordConstructorArgs):
    """Begins each episode with 0 to `max_steps` random actions, whose number is as random as they are.

    All follows from the seed of the env. An episode that ends meanwhile is begun again. Wrappers inside this one see
    these steps: those of `gymnasium.make` count them as part of the episode and of its time limit.

    Args:
        env: With an action space that can be sampled.
        max_steps: Most random actions, 1 or more.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv.wrappers import RandomStart
        >>> env = RandomStart(gym.make("CartPole-v1"), max_steps=5)
        >>> observation, info = env.reset(seed=0)
    """

    def __init__(self, env: gym.Env, max_steps: int):
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: it must be 1 or more, or the wrapper does nothing")
        RecordConstructorArgs.__init__(self, max_steps=max_steps)
        gym.Wrapper.__init__(self, env)
        self.max_steps = max_steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Returns the observation after the random actions; the info is that of the reset, updated by their steps'."""
        observation, info = self.env.reset(seed=seed, options=options)
        actions = deepcopy(self.env.action_space)  # whoever seeded the env's own goes on drawing from it undisturbed
        actions.seed(int(self.np_random.integers(2**31)))
        left = self._draw_number()
        while left:
            observation, _, terminated, truncated, step_info = self.env.step(actions.sample())
            info = {**info, **step_info}
            left -= 1
            if terminated or truncated:
                observation, info = self.env.reset(options=options)
                left = self._draw_number()
        return observation, info

    def _draw_number(self) -> int:
        return int(self.np_random.integers(self.max_steps, endpoint=True))


class FrameDelta(gym.ObservationWrapper, RecordConstructorArgs):
    """Gives the difference of each observation from the one before; at a reset the observation itself.

    Args:
        env: With a Box of floats or integers as observation space. Floats keep their dtype; differences of integers
            are signed and twice as wide, so that they fit.

    Raises:
        ValueError: If the observation space is another.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv.wrappers import FrameDelta
        >>> env = FrameDelta(gym.make("CartPole-v1"))
        >>> first, _ = env.reset(seed=0)
        >>> delta, *_ = env.step(0)  # the second observation is first + delta
    """

    def __init__(self, env: gym.Env):
        RecordConstructorArgs.__init__(self)
        gym.ObservationWrapper.__init__(self, env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or not (space.dtype.kind == "f" or space.dtype in _WIDER):
            raise ValueError(
                f"FrameDelta needs a Box of floats, or of integers of up to 32 bits, to subtract from each other, but "
                f"the observation space is {space}: convert it first, as gymnasium.wrappers.FlattenObservation or "
                "DtypeObservation do"
            )
        dtype = _WIDER.get(space.dtype, space.dtype)
        low, high = space.low.astype(dtype), space.high.astype(dtype)
        with np.errstate(over="ignore"):  # bounds so large that their difference is infinite
            # A first observation lies within the old bounds, a difference within the others.
            low, high = np.minimum(low, low - high), np.maximum(high, high - low)
        self.observation_space = spaces.Box(low, high, dtype=dtype)
        self._last = np.zeros(space.shape, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Returns the first observation as it is."""
        self._last = np.zeros_like(self._last)
        return super().reset(seed=seed, options=options)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Returns the difference from the observation before."""
        last, self._last = self._last, np.array(observation, dtype=self._last.dtype)  # a copy: envs may reuse theirs
        return self._last - last


_WIDER = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in {
        "int8": "int16", "uint8": "int16", "int16": "int32", "uint16": "int32", "int32": "int64", "uint32": "int64",
    }.items()
}  # fmt: skip
"""Of an integer dtype, the one that holds every difference of two."""
