"""Wrappers that Gymnasium lacks: IgnoreKeys, and RandomStart and FrameDelta from batch-ppo (2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from vecenv.spaces import Path, leaves


class RandomStart(gym.Wrapper, RecordConstructorArgs):
    """Begins each episode with a random number of random actions, 0 to `max_steps`.

    The env's seed determines the number and the actions. If the episode ends during these steps, the wrapper
    resets the env and draws again. Inner wrappers see these steps: the wrappers of `gymnasium.make` count them as part
    of the episode and of its time limit.

    Args:
        env: An env whose action space can be sampled.
        max_steps: The largest number of random actions, 1 or more.

    Raises:
        ValueError: If `max_steps` is less than 1.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv.wrappers import RandomStart
        >>> env = RandomStart(gym.make("CartPole-v1"), max_steps=5)
        >>> observation, info = env.reset(seed=0)
    """

    def __init__(self, env: gym.Env, max_steps: int):
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: it must be 1 or more, because 0 random actions have no effect")
        RecordConstructorArgs.__init__(self, max_steps=max_steps)
        gym.Wrapper.__init__(self, env)
        self.max_steps = max_steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Returns the observation after the random actions, and the reset's info updated with each step's info."""
        observation, info = self.env.reset(seed=seed, options=options)
        actions = deepcopy(self.env.action_space)  # a copy: sampling must not advance the env's own space
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
    """Returns the difference between each observation and the previous one. A reset returns the observation itself.

    Args:
        env: An env whose observation space is a Box of floats, or of integers of up to 32 bits. Floats keep their
            dtype. Differences of integers are signed and twice as wide, so that they cannot overflow.

    Raises:
        ValueError: If the env has another observation space.

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
                "FrameDelta needs a Box of floats, or of integers of up to 32 bits, but the observation space is "
                f"{space}: convert it first, for example with gymnasium.wrappers.FlattenObservation or DtypeObservation"
            )
        dtype = _WIDER.get(space.dtype, space.dtype)
        low, high = space.low.astype(dtype), space.high.astype(dtype)
        with np.errstate(over="ignore"):  # the difference of large bounds may be infinite
            # First observations are within the env's own bounds, differences within the differences of these bounds.
            low, high = np.minimum(low, low - high), np.maximum(high, high - low)
        self.observation_space = spaces.Box(low, high, dtype=dtype)
        self._last = np.zeros(space.shape, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Returns the first observation unchanged."""
        self._last = np.zeros_like(self._last)
        return super().reset(seed=seed, options=options)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Returns the difference from the previous observation."""
        last, self._last = self._last, np.array(observation, dtype=self._last.dtype)  # a copy: envs may reuse arrays
        return self._last - last


_WIDER = {
    np.dtype(narrow): np.dtype(wide)
    for narrow, wide in {
        "int8": "int16", "uint8": "int16", "int16": "int32", "uint16": "int32", "int32": "int64", "uint32": "int64",
    }.items()
}  # fmt: skip
"""For each integer dtype, a dtype that holds every difference of two of its values."""


class IgnoreKeys(gym.ObservationWrapper, RecordConstructorArgs):
    """Drops keys of a Dict observation, for example texts that no network can read.

    Args:
        env: An env whose observation space is a Dict.
        keys: The keys to drop. "outer/key" or "outer.key" names a key of a nested Dict.

    Raises:
        TypeError: If `keys` is a string.
        ValueError: If the space has no such key, or no key is left. The message lists the keys.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv.wrappers import IgnoreKeys
        >>> class MissionEnv(gym.Env):
        ...     observation_space = gym.spaces.Dict(mission=gym.spaces.Text(9), sight=gym.spaces.Box(0, 1))
        >>> IgnoreKeys(MissionEnv(), ["mission"]).observation_space
        Dict('sight': Box(0.0, 1.0, (1,), float32))
    """

    def __init__(self, env: gym.Env, keys: Sequence[str]):
        if isinstance(keys, str):  # its letters would be taken for keys
            raise TypeError(f"keys={keys!r} is a string: pass a list of keys")
        RecordConstructorArgs.__init__(self, keys=keys)
        gym.ObservationWrapper.__init__(self, env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ValueError(f"the observation space has no keys to ignore: it is {space}, not a Dict")
        self._drops: dict[Any, Any] = {}
        for key in keys:
            path = _path_of(key, space)
            if path is None:
                raise ValueError(f"the observation space has no key {key!r} to ignore: it has {_keys_of(space)}")
            drops = self._drops
            for outer in path[:-1]:
                drops = drops.setdefault(outer, {})
            drops[path[-1]] = None
            space = _space_without(env.observation_space, self._drops)
        if not leaves(space):
            raise ValueError(f"ignoring {list(keys)} leaves nothing to observe: drop fewer keys")
        self.observation_space = space

    def observation(self, observation: Any) -> Any:
        """Returns the observation without the ignored keys."""
        return _without(observation, self._drops)


def _without(members: Mapping[Any, Any], drops: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the members without the keys that `drops` maps to None. Other keys in `drops` lead to nested dicts."""
    return {
        key: _without(member, drops[key]) if key in drops else member
        for key, member in members.items()
        if drops.get(key, drops) is not None
    }


def _space_without(space: Any, drops: Mapping[Any, Any]) -> spaces.Dict:
    return spaces.Dict(
        [  # pairs keep their order
            (key, _space_without(member, drops[key]) if key in drops else member)
            for key, member in space.spaces.items()
            if drops.get(key, drops) is not None
        ]
    )


def _path_of(key: str, space: gym.Space) -> Path | None:
    """Returns the path of a key in nested Dicts, or None if there is none. A key may itself contain a separator."""
    if not isinstance(space, spaces.Dict):
        return None
    if key in space.spaces:
        return (key,)
    for outer, member in space.spaces.items():
        for separator in "/.":
            if key.startswith(f"{outer}{separator}"):
                inner = _path_of(key[len(f"{outer}{separator}") :], member)
                if inner is not None:
                    return (outer, *inner)
    return None


def _keys_of(space: gym.Space) -> list[str]:
    """Returns the keys that can be ignored."""
    return sorted({"/".join(map(str, path)) for path, _ in leaves(space)})
