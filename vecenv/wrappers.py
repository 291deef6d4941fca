"""IgnoreKeys drops keys of a Dict observation. ActionMaskObservation adds the action mask that infos hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from vecenv.tree import Path, leaves, nest, pick

ACTION_MASK, OBSERVED = "action_mask", "observation"
"""Keys of an observation with a mask."""


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
        unknown = set(keys)
        self.observation_space = _without(space, keys, unknown)
        if unknown:
            known = sorted({"/".join(map(str, path)) for path, _ in leaves(space)})
            raise ValueError(f"the observation space has no key {min(unknown)!r} to ignore: it has {known}")
        if not leaves(self.observation_space):
            raise ValueError(f"ignoring {list(keys)} leaves nothing to observe: drop fewer keys")

    def observation(self, observation: Any) -> Any:
        """Returns the observation without the ignored keys."""
        return nest(self.observation_space, lambda path: pick(observation, path))


class ActionMaskObservation(gym.Wrapper, RecordConstructorArgs):
    """Adds the action mask that infos hold under "action_mask" to the observation.

    A Dict observation gets the key "action_mask"; any other becomes `{"observation": ..., "action_mask": ...}`. The
    mask has an entry for each choice of each discrete action, 1 if it is allowed: `MultiBinary(n)` for Discrete(n). An
    episode's last step may lack it.

    Args:
        env: An env whose infos hold masks: arrays, or tuples of arrays as for `MultiDiscrete.sample`.

    Raises:
        ValueError: If the action space has no discrete part, the observation already has a mask, or an info has none.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv.wrappers import ActionMaskObservation
        >>> observation, info = ActionMaskObservation(gym.make("Taxi-v4")).reset(seed=0)
        >>> observation["action_mask"]
        array([1, 1, 0, 0, 0, 0], dtype=int8)
    """

    def __init__(self, env: gym.Env):
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        space = env.observation_space
        self._is_wrapped = not isinstance(space, spaces.Dict)
        members = {OBSERVED: space} if self._is_wrapped else dict(space.spaces)  # type: ignore[attr-defined]
        if ACTION_MASK in members:
            raise ValueError(
                f"the observation already has the key {ACTION_MASK!r}: omit ActionMaskObservation (in ppo, info_masks)"
            )
        mask = mask_space(env.action_space)
        if mask is None:
            raise ValueError(
                f"no action mask can restrict the actions {env.action_space}: omit info_masks or ActionMaskObservation"
            )
        self.observation_space = spaces.Dict([*members.items(), (ACTION_MASK, mask)])
        self._mask: np.ndarray | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Returns the first observation with its mask, and the info."""
        observation, info = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        return self._masked(observation, info, ended=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Returns the result of the env's step, with the mask in the observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(observation, info, ended=terminated or truncated), reward, terminated, truncated, info

    def _masked(self, observation: Any, info: dict[str, Any], *, ended: bool) -> dict[Any, Any]:
        mask = info.get(ACTION_MASK)
        if mask is not None:
            self._mask = flat_mask(mask)
        elif not ended:
            raise ValueError(
                f"the info has no {ACTION_MASK!r}, but only the keys {list(info)}: omit ActionMaskObservation (in ppo, "
                "info_masks), or fix the env"
            )
        return {**({OBSERVED: observation} if self._is_wrapped else observation), ACTION_MASK: self._mask}


def mask_space(acted: gym.Space) -> gym.Space | None:
    """Returns the space of masks: an entry for each choice of each discrete action. None if no action is discrete."""
    counts = [
        leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec.sum()
        for _, leaf in leaves(acted)
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)
    ]
    return spaces.MultiBinary(int(sum(counts))) if counts else None


def flat_mask(mask: Any) -> np.ndarray:
    """Returns a mask as one array, `int8[M]`. The entries of a tuple are joined in order."""
    if isinstance(mask, tuple):
        return np.concatenate([np.ravel(flat_mask(part)) for part in mask])
    return (np.asarray(mask) != 0).astype(np.int8)


def _without(space: spaces.Dict, keys: Sequence[str], unknown: set[str], path: Path = ()) -> spaces.Dict:
    """Returns the space without the keys, which are removed from `unknown`."""
    members: list[tuple[Any, gym.Space]] = []  # pairs keep their order
    for key, member in space.spaces.items():
        inner = (*path, key)
        names = {separator.join(map(str, inner)) for separator in "/."}
        if isinstance(member, spaces.Dict):
            member = _without(member, keys, unknown, inner)
        if names.isdisjoint(keys):
            members.append((key, member))
        unknown -= names
    return spaces.Dict(members)
