"""What training and evaluations are doing right now, for displays that must not fall silent.

The thread that trains or evaluates writes a status and tallies, and any other thread may read them at any time. A
display therefore needs neither a lock nor a call per step: it reads once or a few times per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo.run.signals import Stop

if TYPE_CHECKING:
    from ppo.algorithm.collector import Collector


@dataclass
class Tally:
    """The `episodes` that have ended, of the `total` to play, and the env-steps over all envs: as `str(tally)`."""

    total: int = 0
    doing: str = "evaluating"
    episodes: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.doing}: {self.episodes:,} of {self.total:,} episodes, {self.steps:,} steps"


class Status:
    """What a run is doing: its activity is a text, or an object whose `str` changes as the activity proceeds.

    `stop` is the event that ends the run early, if there is one.
    """

    def __init__(self, activity: object, stop: Stop | None = None) -> None:
        self.activity = activity
        self._stop = stop

    def __str__(self) -> str:
        return str(self.activity)

    @property
    def stopping(self) -> str | None:
        """How the run will end, or None if no stop was requested."""
        if self._stop is None or not self._stop.is_set():
            return None
        kept = self._stop.kept()
        if kept is None:
            return "stopping at once, because nothing has been learned yet"
        doing = self.activity
        rest = f" after this update ({doing.left:,} more env-steps)" if isinstance(doing, Collecting) else ""
        return f"stopping{rest}. A second Ctrl-C or SIGTERM stops at once; {kept}"

    @contextmanager
    def doing(self, activity: object) -> Iterator[None]:
        """Announces what the block does."""
        before, self.activity = self.activity, activity
        try:
            yield
        finally:
            self.activity = before


@dataclass(frozen=True)
class Collecting:
    """A rollout, shown as the env-steps that a collector has taken so far, and what they are taken for."""

    collector: Collector
    total: int
    doing: str = "collecting"

    @property
    def left(self) -> int:
        """Env-steps until the rollout is complete."""
        return self.total - self.collector.steps

    def __str__(self) -> str:
        return f"{self.doing}: {self.collector.steps:,} of {self.total:,} steps"
