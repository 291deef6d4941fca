"""Clock: how long a run has trained, and how fast it collects and learns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of training, and speeds since the last report.

    Args:
        wall_s: Seconds of training before this process began.
        env_steps: Steps taken in them.
    """

    def __init__(self, wall_s: float, env_steps: int):
        self._start = time.perf_counter() - wall_s
        self.restart(env_steps)

    @property
    def wall_s(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self._start

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Counts the time inside for "collect" or "learn"; evaluations and checkpoints are neither."""
        start = time.perf_counter()
        yield
        self._spent_s[part] += time.perf_counter() - start

    def read(self, env_steps: int) -> dict[str, float]:
        """Returns the seconds of training, and env-steps per second since the last `restart`.

        Of everything since then, with the evaluations, videos and checkpoints before this update, and of collecting
        and learning each as if it were alone.
        """
        now, (then, steps_then) = time.perf_counter(), self._last
        steps = env_steps - steps_then
        return {
            "wall_s": now - self._start,
            "steps_per_s": steps / (now - then),
            **{f"{part}_steps_per_s": steps / seconds for part, seconds in self._spent_s.items()},
        }

    def restart(self, env_steps: int) -> None:
        """Begins to count steps anew."""
        self._last = (time.perf_counter(), env_steps)
        self._spent_s = {"collect": 0.0, "learn": 0.0}
