"""What a run reports: episodes while training, one line of JSON and TensorBoard scalars a report."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.config import Config
from ppo.run.folder import Run, RunError, write_atomically
from ppo.run.tensorboard import TensorBoardWriter
from vecenv.ingraph import Rollout

WINDOW = 100  # episodes in the mean of return and length

TIMES = ("steps_per_s", "collect_steps_per_s", "learn_steps_per_s", "wall_s")
"""Metrics that differ between two runs of the same seed."""


class Episodes:
    """Returns and lengths of the last episodes that ended while training."""

    def __init__(self) -> None:
        self.count = 0
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)

    def add(self, rollout: Rollout) -> None:
        """Takes in the episodes that ended in a rollout of numpy arrays, in the order in which they ended."""
        ended = np.logical_or(rollout.terminated, rollout.truncated)
        self.count += int(ended.sum())
        self.returns.extend(rollout.episode_returns[ended].tolist())
        self.lengths.extend(rollout.episode_lengths[ended].tolist())

    def summary(self) -> dict[str, float | int | None]:
        """Returns the means over the last 100 episodes, None before the first one has ended."""
        return {
            "episodes": self.count,
            "return_mean": float(np.mean(self.returns)) if self.returns else None,
            "length_mean": float(np.mean(self.lengths)) if self.lengths else None,
        }

    def state(self) -> dict[str, Any]:
        """Returns plain values from which `load` makes the same."""
        return {"count": self.count, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state` gave."""
        self.count = state["count"]
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])


class MetricsWriter:
    """Appends reports to `metrics.jsonl` and to TensorBoard events.

    Args:
        run: Whose folder to write to.
        config: Its settings.
        env_steps: Reports of later steps are removed: they are of a part of the run that was lost
            when it was interrupted, and will be written again.

    Raises:
        RunError: From all methods, if the folder cannot be written, such as on a full disk.
    """

    def __init__(self, run: Run, config: Config, env_steps: int):
        self._run = run
        with self._telling():
            if run.metrics.exists():
                lines = run.metrics.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _is_until(line, env_steps)]
                write_atomically(run.metrics, "".join(line + "\n" for line in kept))
            self._file = run.metrics.open("ab", buffering=0)
            self._tensorboard = TensorBoardWriter(run.path, config)

    def write(self, report: Mapping[str, Any]) -> None:
        """Writes one report; values that are not finite become null."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in report.items()
        }
        line = (json.dumps(plain) + "\n").encode()
        self._run.check_exists()  # writing to a deleted file would lose the data without an error
        with self._telling():
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._tensorboard.scalars(plain, report["env_steps"])

    def write_histograms(self, variables: Iterable[tf.Variable], env_steps: int) -> None:
        """Writes the distributions of weights."""
        self._run.check_exists()
        with self._telling():
            self._tensorboard.histograms(variables, env_steps)

    def write_video(self, file: Path, env_steps: int) -> None:
        """Shows a video in TensorBoard."""
        self._run.check_exists()
        with self._telling():
            self._tensorboard.video(file, env_steps)

    def close(self) -> None:
        """Finishes both files."""
        self._file.close()
        with self._telling():
            self._tensorboard.close()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise RunError(
                f"cannot write metrics into {self._run.path}: {error}. The checkpoints are as they were."
            ) from error


def _is_until(line: str, env_steps: int) -> bool:
    try:
        return json.loads(line)["env_steps"] <= env_steps
    except (ValueError, KeyError, TypeError):
        return False  # the line that a killed run did not finish
