"""native.py: which envs of Gymnasium vecenv.mujoco steps in C++, and why one of them is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.errors import NotNative

# Gymnasium's own tasks, under whatever id and with whatever arguments they are registered.
_ENTRY_POINT = re.compile(r"gymnasium\.envs\.mujoco\.\w+_v5:(\w+)Env")
_RENDER_MODES = (None, "rgb_array", "depth_array", "rgbd_tuple")


class NativeTask:
    """Builds the vector env of one of Gymnasium's tasks; for `Batched`.

    Args:
        spec: Of the task.
        num_threads: Threads of each vector env; None for one per core.
        env_kwargs: As for `gymnasium.make`.
    """

    def __init__(self, spec: EnvSpec, num_threads: int | None, env_kwargs: dict[str, Any]):
        limit = env_kwargs.get("max_episode_steps")
        limit = spec.max_episode_steps if limit is None else limit
        self._name = _ENTRY_POINT.fullmatch(spec.entry_point)[1]
        self._num_threads = num_threads
        self._max_episode_steps = None if limit == -1 else limit
        self._kwargs = {**spec.kwargs, **env_kwargs}
        for name in ("max_episode_steps", "disable_env_checker"):
            self._kwargs.pop(name, None)

    def __call__(self, *, num_envs: int, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env.

        Raises:
            NotNative: If there is none for this task, these arguments, or what is installed here; with the reason.
        """
        try:
            from vecenv.mujoco import TASKS
        except ImportError as error:
            raise NotNative(str(error)) from error
        task: Callable[..., VectorEnv] | None = TASKS.get(f"{self._name}-v5")
        if task is None:
            raise NotNative(f"vecenv.mujoco has no {self._name}")
        how = {"max_episode_steps": self._max_episode_steps, "autoreset_mode": autoreset_mode}
        try:
            return task(num_envs, num_threads=self._num_threads, **how, **self._kwargs)
        except Exception as error:  # as ordinary envs they may be well, or have an error of their own
            raise NotNative(f"{type(error).__name__}: {error}") from error


def why_not(spec: EnvSpec, env_kwargs: dict[str, Any], wrappers: Any) -> str | None:
    """Returns why these envs cannot be native, as far as it shows before they are built; None if they may be.

    An empty reason is not worth telling: nobody would expect such an env to be native.
    """
    if not isinstance(spec.entry_point, str) or not _ENTRY_POINT.fullmatch(spec.entry_point):
        return ""
    if wrappers or spec.additional_wrappers:
        return "wrappers need single envs"
    mode = env_kwargs.get("render_mode", spec.kwargs.get("render_mode"))
    if mode not in _RENDER_MODES:
        return f"render_mode={mode!r} needs single envs"
    return None
