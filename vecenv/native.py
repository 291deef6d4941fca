"""Which registered envs are stepped all in one call: vector envs, and Gymnasium's tasks by vecenv.mujoco."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv import specs
from vecenv.errors import NotNative

# Gymnasium's own tasks, under whatever id and with whatever arguments they are registered.
_ENTRY_POINT = re.compile(r"gymnasium\.envs\.mujoco\.\w+_v5:(\w+)Env")
_RENDER_MODES = (None, "rgb_array", "depth_array", "rgbd_tuple")


class RegisteredVectorEnv:
    """Builds the vector env of a spec that has a `vector_entry_point` and no other; for `Batched`.

    Args:
        source: The spec of the env, or "module:id", whose module is imported in the process that builds the env.
        env_kwargs: As for `gymnasium.make`.

    Attributes:
        num_threads: Threads of each vector env, if it is a `MujocoVectorEnv`; None for one per core.
    """

    def __init__(self, source: EnvSpec | str, env_kwargs: dict[str, Any]):
        self._source = source
        self._env_kwargs = env_kwargs
        self.num_threads: int | None = None

    def __call__(self, *, num_envs: int, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env."""
        spec = specs.load(self._source)
        entry_point = spec.vector_entry_point
        make: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        how: dict[str, Any] = {"autoreset_mode": autoreset_mode, **self._arguments(spec)}
        if how["max_episode_steps"] is None:
            del how["max_episode_steps"]
        module = sys.modules.get("vecenv.mujoco")
        if module is not None and isinstance(make, type) and issubclass(make, module.MujocoVectorEnv):
            how["num_threads"] = self.num_threads
        return make(num_envs=num_envs, **how)

    def _arguments(self, spec: EnvSpec) -> dict[str, Any]:
        """Returns the arguments of the env itself, and `max_episode_steps`, which is None for no limit."""
        arguments = {**spec.kwargs, **self._env_kwargs}
        limit = self._env_kwargs.get("max_episode_steps")
        limit = spec.max_episode_steps if limit is None else limit
        arguments.pop("disable_env_checker", None)
        return {**arguments, "max_episode_steps": None if limit == -1 else limit}


class NativeTask(RegisteredVectorEnv):
    """Builds the vector env of one of Gymnasium's tasks."""

    def __call__(self, *, num_envs: int, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env.

        Raises:
            NotNative: If there is none for this task, these arguments, or what is installed here; with the reason.
        """
        try:
            from vecenv.mujoco import TASKS
        except ImportError as error:
            raise NotNative(str(error)) from error
        spec = specs.load(self._source)
        name = _task_name(spec)
        task: Callable[..., VectorEnv] | None = TASKS.get(f"{name}-v5")
        if task is None:
            raise NotNative(f"vecenv.mujoco has no {name}")
        try:
            arguments = self._arguments(spec)
            return task(num_envs, num_threads=self.num_threads, autoreset_mode=autoreset_mode, **arguments)
        except Exception as error:  # as ordinary envs they may be well, or have an error of their own
            raise NotNative(f"{type(error).__name__}: {error}") from error


def _task_name(spec: EnvSpec) -> str | None:
    """Returns which of Gymnasium's own tasks this is, such as "Hopper"; None if it is none of them."""
    found = _ENTRY_POINT.fullmatch(spec.entry_point) if isinstance(spec.entry_point, str) else None
    return found and found[1]


def why_not(spec: EnvSpec, env_kwargs: dict[str, Any], wrappers: Any) -> str | None:
    """Returns why these envs cannot be native, as far as it shows before they are built; None if they may be.

    An empty reason is not worth telling: nobody would expect such an env to be native.
    """
    if _task_name(spec) is None:
        return ""
    if wrappers or spec.additional_wrappers:
        return "wrappers need single envs"
    mode = env_kwargs.get("render_mode", spec.kwargs.get("render_mode"))
    if mode not in _RENDER_MODES:
        return f"render_mode={mode!r} needs single envs"
    return None
