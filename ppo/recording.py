"""recording.py: Recorded: an env in a worker process that draws and records itself; loads no TensorFlow there."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

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
