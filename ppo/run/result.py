"""What `ppo.train` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppo.results.evaluation import Evaluation


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        path: The run folder.
        env_steps: Env-steps taken, including those before an interruption.
        evaluation: Evaluation of the final policy; None if the run was interrupted.
        signal: Number of the signal that interrupted the run, or None.
        stopped: The reason for which a callback finished the run before `total_steps`, or None.
    """

    path: Path
    env_steps: int
    evaluation: Evaluation | None
    signal: int | None = None
    stopped: str | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal or `StopTraining` ended the run. `ppo.resume` continues it."""
        return self.evaluation is None
