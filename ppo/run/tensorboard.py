"""TensorBoardWriter: scalars in groups, hyperparameters, histograms of weights, videos."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorboard.plugins.hparams import api as hparams
from tensorboard.plugins.image import metadata as image_plugin

from ppo.config import Config

GROUPS = {
    "returns": ("return_mean", "length_mean", "episodes", "eval_return_mean", "eval_return_std"),
    "losses": ("policy_loss", "value_loss", "entropy", "explained_variance"),
    "kl": ("kl", "approx_kl", "clip_fraction", "kl_penalty"),
    "optimizer": ("learning_rate", "grad_norm", "gradient_steps"),
    "normalizer": ("return_scale",),
    "speed": ("steps_per_s", "collect_steps_per_s", "learn_steps_per_s", "wall_s"),
}
"""TensorBoard's group of each metric."""

_TAGS = {name: f"{group}/{name}" for group, names in GROUPS.items() for name in names}

MAX_FRAMES = 100  # of a video in TensorBoard, which loads all of it at once
MAX_SIDE = 240  # its pixels


class TensorBoardWriter:
    """Writes a run's events for TensorBoard.

    Args:
        folder: Where the event file goes; what is there already stays.
        config: Shown as the run's hyperparameters.
    """

    def __init__(self, folder: Path, config: Config):
        self._events = tf.summary.create_file_writer(str(folder))
        plain = {name: value if isinstance(value, (bool, int, float)) else str(value)
                 for name, value in dataclasses.asdict(config).items()}  # fmt: skip
        with self._events.as_default(step=0):
            hparams.hparams(plain, trial_id=folder.name)

    def scalars(self, report: Mapping[str, float | None], env_steps: int) -> None:
        """Writes the metrics of a report that have a value."""
        with self._events.as_default(step=env_steps):
            for name, value in report.items():
                if value is not None and name in _TAGS:
                    tf.summary.scalar(_TAGS[name], value)

    def histograms(self, variables: Iterable[tf.Variable], env_steps: int) -> None:
        """Writes the distribution of the entries of each variable."""
        with self._events.as_default(step=env_steps):
            for index, variable in enumerate(variables):
                tf.summary.histogram(f"weights/{index:02d}_{variable.name.partition(':')[0]}", variable)

    def video(self, file: Path, env_steps: int) -> None:
        """Writes an MP4 as a moving picture: each so-many-th frame, made smaller."""
        import imageio.v3 as imageio
        import imageio_ffmpeg

        count, _ = imageio_ffmpeg.count_frames_and_secs(str(file))
        stride = -(-count // MAX_FRAMES)
        frames = itertools.islice(imageio.imiter(file, plugin="FFMPEG"), 0, None, stride)
        small = np.stack([_small(frame) for frame in frames])
        picture = imageio.imwrite("<bytes>", small, extension=".gif", duration=50, loop=0)
        # As tf.summary.image would write it, but for the encoding: TensorBoard shows GIFs as they are.
        metadata = image_plugin.create_summary_metadata(display_name=None, description="the deterministic policy")
        tensor = tf.constant([str(small.shape[2]), str(small.shape[1]), picture])
        with self._events.as_default(step=env_steps):
            tf.summary.write("video/deterministic", tensor, metadata=metadata)

    def close(self) -> None:
        """Finishes the event file."""
        self._events.close()


def _small(frame: np.ndarray) -> np.ndarray:
    step = -(-max(frame.shape) // MAX_SIDE)
    return frame[::step, ::step].copy()  # of all of it, nothing is to be kept
