"""Adapters for Stable-Baselines3: `SubprocVecEnv`, a drop-in for SB3's, and `VecEnvAdapter` for any vecenv vector env.

SB3's `reset` returns only observations. Its `step` returns four values, with infos as a list of dicts. When an episode
ends, the env resets in the same step and its info holds the last observation. Gymnasium calls this SAME_STEP autoreset.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from vecenv.rows.arguments import autoreset_mode_of
from vecenv.rows.batched import ADVICE, Batched
from vecenv.rows.infos import split_infos
from vecenv.state import layers_of
from vecenv.tree import enclosing
from vecenv.vector.async_vector_env import AsyncVectorEnv
from vecenv.vector.vector_env import PooledVectorEnv

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise ImportError(
        "vecenv.adapters.sb3 needs Stable-Baselines3: pip install stable-baselines3 (on a machine without a GPU, "
        "install a CPU build of torch first to save gigabytes)"
    ) from error

Indices = None | int | Iterable[int]


class VecEnvAdapter(VecEnv):
    """Adapts a vecenv vector env to Stable-Baselines3's `VecEnv`.

    A `Batched`, such as a MuJoCo task in C++, has no single envs: `get_attr` reads attributes of the vector env,
    `env_is_wrapped` returns False for each env, and `set_attr` and `env_method` raise TypeError.

    Args:
        envs: A vector env with SAME_STEP autoreset. `close` closes it, too.

    Raises:
        TypeError: If it is not a vector env of vecenv.
        ValueError: If the vector env has another autoreset mode.
    """

    def __init__(self, envs: PooledVectorEnv):
        build = "build it with vecenv.make(ENV, NUM_ENVS, vector_kwargs={'autoreset_mode': 'SameStep'})"
        if not isinstance(envs, PooledVectorEnv):
            raise TypeError(
                f"VecEnvAdapter needs an AsyncVectorEnv or a SyncVectorEnv of vecenv, but got {envs!r}: {build}"
            )
        if envs.autoreset_mode != AutoresetMode.SAME_STEP:
            raise ValueError(
                f"the vector env's autoreset_mode is {envs.autoreset_mode}, but SB3 needs SAME_STEP: {build}"
            )
        self.envs = envs
        envs._actions.same_kind = False  # SB3's PPO sends floats for MultiBinary and for Boxes of integers
        self._batched = isinstance(envs.env_fns, Batched)  # whether there are no single envs
        self._actions: np.ndarray | None = None  # held from step_async to step_wait for a SyncVectorEnv
        observed = enclosing(envs.single_observation_space, envs.observation_space)
        super().__init__(envs.num_envs, observed, envs.single_action_space)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Sets the seeds of the next reset: env i gets `seed + i`. None draws a seed."""
        if seed is None:  # SB3 itself draws from 32 bits, but ale-py accepts only 31
            seed = int(np.random.randint(2**31 - self.num_envs))
        return super().seed(seed)

    def reset(self) -> Any:
        """Resets every env and returns the observations `[N, ...]`."""
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        # Envs with the same options are reset together; usually these are all envs.
        left = list(range(self.num_envs))
        while left:
            options = self._options[left[0]]
            # Compared as bytes, because options may hold arrays.
            alike = [i for i in left if pickle.dumps(self._options[i]) == pickle.dumps(options)]
            left = [i for i in left if i not in alike]
            mask = np.isin(np.arange(self.num_envs), alike)
            given = dict(options) if mask.all() else {**options, "reset_mask": mask}
            observations, infos = self.envs.reset(seed=list(self._seeds), options=given or None)
            each = split_infos(infos, self.num_envs)
            for i in alike:
                self.reset_infos[i] = each[i]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Begins a step with a batch of actions, or a list of one action per env; `step_wait` returns the results."""
        if isinstance(actions, list) and isinstance(self.action_space, (spaces.Dict, spaces.Tuple)):
            actions = concatenate(self.action_space, actions, create_empty_array(self.action_space, self.num_envs))
        if isinstance(self.envs, AsyncVectorEnv):
            self.envs.step_async(actions)
        else:
            self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Returns observations, float64 rewards[N], bool dones[N], and one info per env in a list, as in SB3."""
        result: Any = self.envs.step_wait() if isinstance(self.envs, AsyncVectorEnv) else self.envs.step(self._actions)
        observations, rewards, terminated, truncated, batched = result
        infos = split_infos(batched, self.num_envs)
        dones = terminated | truncated
        reset_infos = self.reset_infos = [*self.reset_infos]  # a new list, as in SB3, because the caller may keep it
        for i in np.flatnonzero(dones):
            # `final_info` is the info of the last step. The remaining keys come from the reset.
            final_info, final = infos[i].pop("final_info", {}), infos[i].pop("final_obs")
            reset_infos[i], infos[i] = infos[i], {**final_info, "terminal_observation": final}
        for info, cut in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = cut
        return observations, rewards, dones, infos

    def close(self) -> None:
        """Closes the vector env."""
        self.envs.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Returns an RGB image of each env."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"The render mode is {self.render_mode}, but this method assumes it is `rgb_array` to obtain images.",
                stacklevel=2,
            )
            return [None] * self.num_envs
        return list(self.envs.render() or ())

    def has_attr(self, attr_name: str) -> bool:
        """Returns whether every env has this attribute."""
        if self._batched:
            return super().has_attr(attr_name)
        return all(self._apply(lambda env: env.has_wrapper_attr(attr_name), None))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Returns an attribute of the envs at these indices."""
        if self._batched:
            if callable(getattr(VectorEnv, attr_name, None)):  # the vector env's own get_attr would call it
                raise AttributeError(f"{attr_name!r} is a method of the vector env, not an attribute of an env")
            values = self.envs.get_attr(attr_name)
            return [values[i] for i in self._get_indices(indices)]
        return self._apply(lambda env: env.get_wrapper_attr(attr_name), indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets an attribute of the envs at these indices."""
        self._apply(lambda env: setattr(env, attr_name, value), indices)

    def env_method(self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any) -> list:
        """Calls a method of the envs at these indices."""
        return self._apply(lambda env: env.get_wrapper_attr(method_name)(*method_args, **method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Indices = None) -> list[bool]:
        """Returns whether each env at these indices is wrapped in this class."""
        if self._batched:
            return [False for _ in self._get_indices(indices)]
        # Classes are compared by name: to unpickle `wrapper_class`, workers would have to import SB3 and torch.
        name = (wrapper_class.__module__, wrapper_class.__qualname__)

        def names(env: gym.Env) -> set[tuple[str, str]]:
            return {(kind.__module__, kind.__qualname__) for layer in layers_of(env) for kind in type(layer).__mro__}

        return [name in found for found in self._apply(names, indices)]

    def _apply(self, function: Callable[[gym.Env], Any], indices: Indices) -> list[Any]:
        if self._batched:
            raise TypeError(f"all envs are stepped in one call, so there is no single env. {ADVICE}")
        indices, count = list(self._get_indices(indices)), self.num_envs
        if wrong := [i for i in indices if not -count <= i < count]:
            raise IndexError(f"there is no env {wrong[0]}: with {count} envs, an index must be {-count} to {count - 1}")
        ids = [i % count for i in indices]  # -1 is the last env, as in a list
        return self.envs.apply(function, ids) if ids else []


class SubprocVecEnv(VecEnvAdapter):
    """A drop-in replacement for `stable_baselines3.common.vec_env.SubprocVecEnv`.

    Args:
        env_fns: One function per env, each returning a new env. As in SB3, the bounds of observations may differ.
        start_method: The argument `context` of `AsyncVectorEnv`.
        **vector_kwargs: Further arguments of `AsyncVectorEnv`, such as `num_workers`.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv.adapters.sb3 import SubprocVecEnv
        >>> venv = SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 4)
        >>> venv.reset().shape
        (4, 4)
        >>> venv.close()
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]], start_method: str | None = None, **vector_kwargs: Any):
        same_step = AutoresetMode.SAME_STEP
        mode = autoreset_mode_of(vector_kwargs.pop("autoreset_mode", same_step))
        if mode != same_step:
            raise ValueError(f"autoreset_mode={mode.name} is not supported, because SB3 needs SAME_STEP: omit it")
        how: dict[str, Any] = {"context": start_method, "observation_mode": "different", **vector_kwargs}
        super().__init__(AsyncVectorEnv(env_fns, autoreset_mode=same_step, **how))
