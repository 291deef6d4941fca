"""Callback: what a training run tells to whoever wants to know."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo.config import Config

if TYPE_CHECKING:
    from ppo.results.evaluation import Evaluation


class StopTraining(Exception):
    """Raise it in a callback to end a run early; what was learnt is saved, and the run can be resumed."""


class Callback:
    """Derive from it and override what you need; by itself it does nothing.

    A run waits while a callback works. What a callback raises ends the run.
    """

    def on_start(self, config: Config, env_steps: int) -> None:
        """Called once before the first update, with the steps taken before a resumed run was interrupted."""

    def on_update(self, report: dict[str, Any]) -> None:
        """Called after every update with all metrics: those of metrics.jsonl."""

    def on_report(self, report: dict[str, Any]) -> None:
        """Called every `report_interval` env-steps with what was written to metrics.jsonl."""

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        """Called after each evaluation of the deterministic policy, the last one included."""

    def on_checkpoint(self, env_steps: int, path: Path) -> None:
        """Called after each checkpoint with its folder."""

    def on_warning(self, message: str) -> None:
        """Called when something is wrong that does not end the run."""


class Callbacks(Callback):
    """Several callbacks as one; each is called in turn."""

    def __init__(self, callbacks: Iterable[Callback]):
        self._callbacks = list(callbacks)

    def on_start(self, config: Config, env_steps: int) -> None:
        for callback in self._callbacks:
            callback.on_start(config, env_steps)

    def on_update(self, report: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_update(report)

    def on_report(self, report: dict[str, Any]) -> None:
        for callback in self._callbacks:
            callback.on_report(report)

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(env_steps, evaluation)

    def on_checkpoint(self, env_steps: int, path: Path) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(env_steps, path)

    def on_warning(self, message: str) -> None:
        for callback in self._callbacks:
            callback.on_warning(message)
