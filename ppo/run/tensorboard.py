"""TensorBoard's event file: scalars, hyperparameters and videos."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorboard.plugins.hparams import api as hparams
from tensorboard.plugins.image import metadata as image_plugin

from ppo.config import Config

MAX_FRAMES = 100  # of a video: TensorBoard loads the whole video at once
MAX_SIDE = 240  # pixels of a video's longer side


class TensorBoardWriter:
    """Writes a run's events.

    Args:
        folder: Folder for a new event file. Existing event files are kept.
        config: The settings, shown as hyperparameters.
    """

    def __init__(self, folder: Path, config: Config):
        # TensorFlow's own file names can be guessed, and TensorFlow would follow a link with such a name.
        self._events = tf.summary.create_file_writer(str(folder), filename_suffix=f".{secrets.token_hex(8)}.v2")
        plain = {name: value if isinstance(value, (bool, int, float)) else str(value)
                 for name, value in dataclasses.asdict(config).items()}  # fmt: skip
        with self._events.as_default(step=0):
            hparams.hparams(plain, trial_id=folder.name)

    def scalars(self, values: Mapping[str, float], env_steps: int) -> None:
        """Writes scalars by their tags, "group/name"."""
        with self._events.as_default(step=env_steps):
            for tag, value in values.items():
                tf.summary.scalar(tag, value)

    def video(self, file: Path, env_steps: int) -> None:
        """Writes an MP4 as an animated GIF of at most `MAX_FRAMES` frames and `MAX_SIDE` pixels per side."""
        import imageio.v3 as imageio
        import imageio_ffmpeg

        count, _ = imageio_ffmpeg.count_frames_and_secs(str(file))
        stride = -(-count // MAX_FRAMES)
        frames = itertools.islice(imageio.imiter(file, plugin="FFMPEG"), 0, None, stride)
        small = np.stack([_downscaled(frame) for frame in frames])
        gif = imageio.imwrite("<bytes>", small, extension=".gif", duration=50, loop=0)
        # The event equals that of tf.summary.image, except that the image is a GIF, which TensorBoard animates.
        metadata = image_plugin.create_summary_metadata(display_name=None, description="the deterministic policy")
        tensor = tf.constant([str(small.shape[2]), str(small.shape[1]), gif])
        with self._events.as_default(step=env_steps):
            tf.summary.write("video/deterministic", tensor, metadata=metadata)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._events.close()


def _downscaled(frame: np.ndarray) -> np.ndarray:
    step = -(-max(frame.shape) // MAX_SIDE)
    return frame[::step, ::step].copy()  # a view would keep the whole frame in memory
