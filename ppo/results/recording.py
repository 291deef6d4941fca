"""Recorded: an env in a worker process that draws and records itself; loads no TensorFlow there."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import RecordVideo

from vecenv.opengl import ADVICE


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Makes the env in its worker: one that says whether it can draw, and records what it draws."""

    make: Callable[[], gym.Env]
    folder: Path
    prefix: str
    episodes: int
    backend: str | None = None

    def __call__(self) -> gym.Env:
        if self.backend is not None:
            os.environ["MUJOCO_GL"] = self.backend
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # which pygame draws with; there is no display either
        env = _Drawable(self.make())
        if env.render_mode != "rgb_array":
            return env
        return RecordVideo(env, str(self.folder), name_prefix=self.prefix, episode_trigger=self.episodes.__gt__)


def make_drawing(env_id: str) -> gym.Env:
    """Makes an env that draws, also of an id that is registered as a vector env alone."""
    try:
        return gym.make(env_id, render_mode="rgb_array")
    except gym.error.Error:
        spec = gym.registry.get(env_id.rpartition(":")[2])
        if spec is None or spec.entry_point is not None:
            raise
    mode = gym.VectorizeMode.VECTOR_ENTRY_POINT
    return _Alone(gym.make_vec(env_id, num_envs=1, vectorization_mode=mode, render_mode="rgb_array"))


class _Alone(gym.Env):
    """The only env of a vector env, as an env."""

    def __init__(self, envs: gym.vector.VectorEnv):
        self._envs, self.metadata, self.render_mode = envs, envs.metadata, envs.render_mode
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, _ = self._envs.reset(seed=seed, options=options)
        return self._first(observations), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observations, rewards, terminated, truncated, _ = self._envs.step(np.asarray(action)[None])
        return self._first(observations), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        frames = self._envs.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self._envs.close()

    def _first(self, observations: Any) -> Any:
        return next(gym.vector.utils.iterate(self._envs.observation_space, observations))


class _Drawable(gym.Wrapper):
    """An env that is asked first whether it can draw."""

    def why_not(self) -> str | None:
        """Draws one frame; returns why it could not, or None."""
        if self.render_mode != "rgb_array":
            return "it was made without render_mode='rgb_array'"
        try:
            self.env.reset()
            frame = self.env.render()
        except Exception as error:  # of whatever library it draws with
            advice = f". {ADVICE}" if "mujoco" in sys.modules else ""
            return f"{type(error).__name__}: {error}{advice}"
        return None if isinstance(frame, np.ndarray) else f"its render() returned {type(frame).__name__}, and no array"
