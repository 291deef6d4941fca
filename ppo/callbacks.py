"""Callbacks that log a run to Weights & Biases or to MLflow.

Both log the settings, every report with `env_steps` as its step, and the score of the final policy. `ppo.Callback` is
the base class for other callbacks.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
from typing import TYPE_CHECKING, Any

from ppo.config import Config
from ppo.run.callbacks import Callback

if TYPE_CHECKING:
    from ppo.trainer import Result


def wandb(*, upload: bool = False, **options: Any) -> Callback:
    """Returns a callback that logs a run to Weights & Biases.

    W&B's own settings decide whether anything is sent: `mode=` here, the variable WANDB_MODE, or `wandb offline`. Its
    default is to send everything. If the process has an active W&B run, the callback logs to it and leaves it open.

    Args:
        upload: Whether to upload the run folder as an artifact at the end, unless training fails.
        **options: Arguments of `wandb.init`, such as `project`, `name`, `mode` and `dir`.

    Raises:
        ImportError: If wandb is not installed.
    """
    return _WandB(_imported("wandb", WANDB_ERROR_REPORTING="false"), options, upload)


def mlflow(*, upload: bool = False, **options: Any) -> Callback:
    """Returns a callback that logs a run to MLflow.

    MLflow's own settings decide where: `mlflow.set_tracking_uri`, or the variable MLFLOW_TRACKING_URI. Its default is a
    local database. If the thread has an active MLflow run, the callback logs to it and leaves it open. MLflow's usage
    telemetry is off unless the variable MLFLOW_DISABLE_TELEMETRY says otherwise.

    Args:
        upload: Whether to log the run folder as artifacts at the end, unless training fails.
        **options: Arguments of `mlflow.start_run`, such as `run_name`, `experiment_id` and `run_id`.

    Raises:
        ImportError: If mlflow is not installed.
    """
    return _MLflow(_imported("mlflow", MLFLOW_DISABLE_TELEMETRY="true"), options, upload)


def _imported(name: str, **environment: str) -> Any:
    """Imports a package, with variables that keep it from contacting its vendor unless the user has set them."""
    for variable, value in environment.items():
        os.environ.setdefault(variable, value)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"ppo.callbacks.{name} needs the package {name}: `pip install -e '.[{name}]'`") from error


class _WandB(Callback):
    """See `wandb`."""

    def __init__(self, package: Any, options: dict[str, Any], upload: bool):
        self._package, self._options, self._upload = package, options, upload
        self._run: Any = None

    def on_start(self, config: Config, env_steps: int) -> None:
        self._is_ours = self._package.run is None
        self._run = self._package.init(**self._options) if self._is_ours else self._package.run
        # A resumed run may have changed settings.
        self._run.config.update(dataclasses.asdict(config), allow_val_change=True)

    def on_report(self, report: dict[str, Any]) -> None:
        self._run.log(_numbers(report), step=report["env_steps"])

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        if self._run is None:  # `init` failed
            return
        try:
            if result is not None:
                self._run.summary.update(_final(result))
                if self._upload:
                    self._run.log_artifact(str(result.path), name=result.path.resolve().name, type="run")
        finally:
            if self._is_ours:
                self._run.finish(exit_code=0 if error is None else 1)


class _MLflow(Callback):
    """See `mlflow`."""

    def __init__(self, package: Any, options: dict[str, Any], upload: bool):
        self._package, self._options, self._upload = package, options, upload
        self._run: Any = None

    def on_start(self, config: Config, env_steps: int) -> None:
        active = self._package.active_run()
        self._is_ours = active is None
        self._run = self._package.start_run(**self._options) if active is None else active
        # MLflow refuses to change a parameter, so a run that is logged to again keeps its first settings.
        known = self._package.get_run(self._run.info.run_id).data.params
        settings = dataclasses.asdict(config)
        self._package.log_params({name: value for name, value in settings.items() if name not in known})

    def on_report(self, report: dict[str, Any]) -> None:
        self._package.log_metrics(_numbers(report), step=report["env_steps"])

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        if self._run is None:  # `start_run` failed
            return
        status = "FAILED" if result is None else "KILLED" if result.interrupted else "FINISHED"
        try:
            if result is not None:
                self._package.log_metrics(_final(result), step=result.env_steps)
                if self._upload:
                    self._package.log_artifacts(str(result.path), artifact_path="run")
        finally:
            if self._is_ours:
                self._package.end_run(status)


def _numbers(report: dict[str, Any]) -> dict[str, float]:
    """Returns the finite metrics. For example, there is no mean return before the first episode ends."""
    return {name: float(value) for name, value in report.items() if value is not None and math.isfinite(value)}


def _final(result: Result) -> dict[str, float]:
    """Returns the score of the final policy, or nothing if the run was stopped early."""
    scores = {} if result.evaluation is None else result.evaluation.summary()
    return {f"final_{name}": float(value) for name, value in scores.items()}
