"""`Callback`: receives updates, evaluations and checkpoints during training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo.config import Config
from ppo.run.status import Status

if TYPE_CHECKING:
    from ppo.results.evaluation import Evaluation
    from ppo.trainer import Result


class StopTraining(Exception):
    """Raise this in a callback to end a run early. The run is saved and can be resumed."""


class Callback:
    """Base class of callbacks: override the methods you need.

    Training waits while a callback runs. An exception in a callback ends the run. `ppo.callbacks` has callbacks for
    Weights & Biases and MLflow.
    """

    def on_status(self, status: Status) -> None:
        """Called once, before the envs are built, with an object that says what training is doing at any time."""

    def on_start(self, config: Config, env_steps: int) -> None:
        """Called once, before the first update. `env_steps` is greater than 0 if the run is resumed."""

    def on_update(self, report: dict[str, Any]) -> None:
        """Called after every update with all metrics, under the same names as in metrics.jsonl."""

    def on_report(self, report: dict[str, Any]) -> None:
        """Called every `report_interval` env-steps with the metrics written to metrics.jsonl."""

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        """Called after every evaluation of the deterministic policy, including the final one."""

    def on_checkpoint(self, env_steps: int, path: Path) -> None:
        """Called after every checkpoint with the checkpoint's folder."""

    def on_warning(self, message: str) -> None:
        """Called with a description of each problem that does not end the run."""

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Called once for each callback whose `on_start` was called, however training ends.

        Args:
            result: How the run ended, if it finished or was stopped early. Otherwise None.
            error: The exception that ended the run. Otherwise None. It is raised again after this call, with an
                exception of this method as a note.
        """


@contextmanager
def announced(callback: Callback) -> Iterator[Status]:
    """Gives a callback the status of a run that begins now and ends with the block."""
    status = Status("building the environments")
    try:
        callback.on_status(status)
        yield status
    finally:
        status.ended.set()


class Callbacks(Callback):
    """Several callbacks as one. They are called in order."""

    def __init__(self, callbacks: Iterable[Callback]):
        self._callbacks = list(callbacks)
        self._started: list[Callback] = []

    def on_status(self, status: Status) -> None:
        for callback in self._callbacks:
            callback.on_status(status)

    def on_start(self, config: Config, env_steps: int) -> None:
        for callback in self._callbacks:
            self._started.append(callback)  # before the call, which may raise after it has begun something
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

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Calls every callback that was started, even if one of them raises.

        Raises:
            Exception: The first exception of a callback, with the later ones as notes. If `error` is given, it gets
                all of them as notes, and nothing is raised.
        """
        started, self._started = self._started, []
        raised = error
        for callback in started:
            try:
                callback.on_end(result, error)
            except StopTraining:  # there is nothing left to stop
                pass
            except Exception as failure:
                if raised is None:
                    raised = failure
                else:
                    raised.add_note(f"{type(callback).__name__}.on_end then raised {failure!r}.")
        if raised is not error and raised is not None:
            raise raised
