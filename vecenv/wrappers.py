"""IgnoreKeys: a wrapper that drops keys of a Dict observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from vecenv.spaces import Path, leaves, nest, pick


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
        for key in keys:
            path = _path_of(key, space)
            if path is None:
                raise ValueError(f"the observation space has no key {key!r} to ignore: it has {_keys_of(space)}")
            space = _without(space, path)
        if not leaves(space):
            raise ValueError(f"ignoring {list(keys)} leaves nothing to observe: drop fewer keys")
        self.observation_space = space

    def observation(self, observation: Any) -> Any:
        """Returns the observation without the ignored keys."""
        return nest(self.observation_space, lambda path: pick(observation, path))


def _without(space: spaces.Dict, path: Path) -> spaces.Dict:
    """Returns the space without the leaf or the nested Dict at this path."""
    members: dict[Any, Any] = dict(space.spaces)
    if len(path) == 1:
        del members[path[0]]
    else:
        members[path[0]] = _without(members[path[0]], path[1:])
    return spaces.Dict(list(members.items()))  # pairs keep their order


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
