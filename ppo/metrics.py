"""metrics.py: what a run reports: episodes while training, one line of JSON and TensorBoard scalars a report."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.run import Run, RunError, write_atomically
from vecenv.ingraph import Rollout

WINDOW = 100  # episodes in the mean of return and length

GROUPS = {
    "return_mean": "returns",
    "length_mean": "returns",
    "eval_return_mean": "returns",
    "eval_return_std": "returns",
    "steps_per_s": "speed",
    "wall_s": "speed",
}
"""TensorBoard group of each metric; the others are in "update"."""


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
        env_steps: Reports of later steps are removed: they are of a part of the run that was lost
            when it was interrupted, and will be written again.

    Raises:
        RunError: From all methods, if the folder cannot be written, such as on a full disk.
    """

    def __init__(self, run: Run, env_steps: int):
        self._run = run
        with self._telling():
            if run.metrics.exists():
                lines = run.metrics.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _is_until(line, env_steps)]
                write_atomically(run.metrics, "".join(line + "\n" for line in kept))
            self._file = run.metrics.open("ab", buffering=0)
            self._events = tf.summary.create_file_writer(str(run.path))

    def write(self, report: Mapping[str, float | int | None]) -> None:
        """Writes one report; values that are not finite become null."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in report.items()
        }
        line = (json.dumps(plain) + "\n").encode()
        with self._telling():
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with self._events.as_default(step=report["env_steps"]):
                for name, value in plain.items():
                    if value is not None and name != "env_steps":
                        tf.summary.scalar(f"{GROUPS.get(name, 'update')}/{name}", value)

    def close(self) -> None:
        """Finishes both files."""
        self._file.close()
        with self._telling():
            self._events.close()

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
