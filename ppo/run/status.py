"""What training and evaluations are doing right now, for displays that must not fall silent.

The thread that trains or evaluates writes these objects, and any other thread may read them at any time. A display
therefore needs neither a lock nor a call per step: it reads once or a few times per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vecenv.ingraph import InGraphVectorEnv


@dataclass
class Tally:
    """Counts the episodes and env-steps that an evaluation has played, and shows them as `str(tally)`.

    Attributes:
        total: Episodes to play.
        doing: What the episodes are played for.
        episodes: Episodes that have ended.
        steps: Env-steps, summed over all envs.
    """

    total: int
    doing: str = "evaluating"
    episodes: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.doing}: {self.episodes:,} of {self.total:,} episodes, {self.steps:,} steps"


@dataclass(frozen=True)
class _Collecting:
    doing: str
    envs: InGraphVectorEnv

    def __str__(self) -> str:
        envs = self.envs
        return f"{self.doing}: {envs.steps * envs.num_envs:,} of {envs.num_steps * envs.num_envs:,} steps"


class Status:
    """What a run is doing, as `str(status)`.

    Attributes:
        activity: A text, or an object whose `str` changes as the activity proceeds.
    """

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

    def collecting(self, envs: InGraphVectorEnv, *, training: bool) -> AbstractContextManager[None]:
        """Announces a rollout. The first one does not train the policy: it only initializes the normalizers."""
        return self.doing(_Collecting("collecting" if training else "initializing the normalizers", envs))

    @contextmanager
    def playing(self, doing: str, episodes: int) -> Iterator[Tally]:
        """Announces an evaluation or a recording, and yields the tally that the block must update."""
        tally = Tally(episodes, doing)
        with self.doing(tally):
            yield tally
