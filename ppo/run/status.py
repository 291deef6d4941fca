"""What training and evaluations are doing right now, for displays that must not fall silent.

The thread that trains or evaluates writes these objects, and any other thread may read them at any time. A display
therefore needs neither a lock nor a call per step: it reads once or a few times per second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vecenv.ingraph import InGraphVectorEnv


@dataclass
class Tally:
    """Counts the episodes and steps that an evaluation has played.

    Attributes:
        total: Episodes to play.
        limit: Steps after which the env truncates an episode; None if unknown.
        episodes: Episodes that have ended.
        steps: Env-steps, summed over all envs.
        longest: Steps so far of the longest episode in progress.
    """

    total: int
    limit: int | None = None
    episodes: int = 0
    steps: int = 0
    longest: int = 0

    @property
    def fraction(self) -> float:
        """How much has been played, from 0 to 1. An unfinished episode counts in part if the limit is known."""
        unfinished = min(self.longest / self.limit, 1.0) if self.limit else 0.0
        return min((self.episodes + unfinished) / self.total, 1.0)

    def __str__(self) -> str:
        return f"{self.episodes:,} of {self.total:,} episodes, {self.steps:,} steps"


@dataclass(frozen=True)
class _Activity:
    name: str
    detail: Callable[[], object] | None = None
    env_steps: Callable[[], int] | None = None


class Status:
    """What a training run is doing, as `str(status)`.

    Args:
        activity: The first activity.

    Attributes:
        ended: Set when training has ended, however it ended.
    """

    def __init__(self, activity: str) -> None:
        self.ended = threading.Event()
        self._activity = _Activity(activity)

    def now(self, activity: str) -> None:
        """Announces the activity outside of any `doing` block."""
        self._activity = _Activity(activity)

    @contextmanager
    def doing(
        self, name: str, detail: Callable[[], object] | None = None, env_steps: Callable[[], int] | None = None
    ) -> Iterator[None]:
        """Announces what the block does.

        Args:
            name: What it does, such as "evaluating".
            detail: Returns how far it has come, as an object whose `str` a display shows.
            env_steps: Returns how many env-steps of training it has taken.
        """
        # One assignment replaces all three, so a reader never sees the name of one activity and a function of another.
        before, self._activity = self._activity, _Activity(name, detail, env_steps)
        try:
            yield
        finally:
            self._activity = before

    def collecting(self, envs: InGraphVectorEnv, *, training: bool) -> AbstractContextManager[None]:
        """Announces a rollout, with the steps taken so far.

        Args:
            envs: The envs that are stepped.
            training: Whether the rollout trains the policy. The first one only initializes the normalizers.
        """

        def taken() -> int:
            return envs.steps * envs.num_envs

        def detail() -> str:
            return f"{taken():,} of {envs.num_steps * envs.num_envs:,} steps"

        if training:
            return self.doing("collecting", detail, taken)
        return self.doing("initializing the normalizers", detail)

    @contextmanager
    def playing(self, name: str, episodes: int) -> Iterator[Tally]:
        """Announces an evaluation or a recording, and yields the tally that the block must update."""
        tally = Tally(episodes)
        with self.doing(name, lambda: tally):
            yield tally

    @property
    def env_steps(self) -> int:
        """Env-steps of the rollout in progress; 0 if none is."""
        count = self._activity.env_steps
        return 0 if count is None else count()

    def __str__(self) -> str:
        activity = self._activity
        return activity.name if activity.detail is None else f"{activity.name}: {activity.detail()}"


def ticking(function: Callable[[], None], ended: threading.Event, *, every_s: float) -> threading.Thread:
    """Starts a thread that calls `function` every `every_s` seconds until `ended` is set, and returns it."""

    def run() -> None:
        while not ended.wait(every_s):
            function()

    thread = threading.Thread(target=run, name="ticking", daemon=True)
    thread.start()
    return thread
