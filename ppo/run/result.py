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
        evaluation: Evaluation of the final policy; None if the run was stopped early.
        signal: Number of the signal that stopped the run, or None.
    """

    path: Path
    env_steps: int
    evaluation: Evaluation | None
    signal: int | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped early."""
        return self.evaluation is None
