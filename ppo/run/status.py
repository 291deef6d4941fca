"""What training and evaluations are doing right now, for displays that must not fall silent.

The thread that trains or evaluates writes a status and tallies, and any other thread may read them at any time. A
display therefore needs neither a lock nor a call per step: it reads once or a few times per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """What a run is doing: its activity is a text, or an object whose `str` changes as the activity proceeds."""

    def __init__(self, activity: object) -> None:
        self.activity = activity

    def __str__(self) -> str:
        return str(self.activity)

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

    def __str__(self) -> str:
        return f"{self.doing}: {self.collector.steps:,} of {self.total:,} steps"
