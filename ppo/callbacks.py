"""Callbacks: the base class `Callback`, and callbacks that log a run to Weights & Biases or to MLflow."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo.config import Config

if TYPE_CHECKING:
    from ppo.policies.policy import Policy
    from ppo.run.scores import Evaluation, Result
    from ppo.run.status import Status


class StopTraining(Exception):
    """Raise this in a callback to interrupt a run once the update in progress, if any, is complete.

    The run is saved but not evaluated, and can be resumed. `Callback.stop` finishes a run instead; if both happen in
    one update, the run is interrupted. Other callbacks are still called. This exception has no effect while a run is
    finishing: in the evaluation, the report and the checkpoint that follow its last update, and in `on_end`.
    """


class Callback:
    """Base class of callbacks: override the methods you need.

    Training waits while a callback runs. An exception in a callback ends the run at once, except `StopTraining`, which
    ends it after the current update. `ppo.callbacks` has callbacks for Weights & Biases and MLflow.

    Attributes:
        config: The settings of the run.
        run_path: The run folder.
        policies: From `on_start` on: the policies that are being trained, by the name of their group of agents, with
            their current weights. The policy of envs with one agent is "".
        policy: The policy in `policies`, if there is exactly one. Call it with observations; see `ppo.Policy`.
    """

    config: Config
    run_path: Path
    policies: dict[str, Policy]
    policy: Policy

    def log(self, name: str, value: float) -> None:
        """Adds a number to the next report: in metrics.jsonl, TensorBoard, Weights & Biases and MLflow.

        The last value of each name counts. A value that is logged after the last report of a run is lost. The name must
        not be the name of one of ppo's metrics.
        """
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"log({name!r}, ...) needs a number, but got {value!r}") from error
        self.__dict__.setdefault("_logged", {})[name] = number  # subclasses need not call our constructor

    def stop(self, reason: str) -> None:
        """Finishes the run after the current update, as if it had reached `total_steps`: evaluates, reports and saves.

        The reason, such as "success rate 0.95", is for messages, `evaluation.json` and `Result.stopped`.
        """
        self.__dict__.setdefault("_reason", str(reason) or "no reason given")

    def on_status(self, status: Status) -> None:
        """Called once, before the envs are built, with an object that says what training is doing at any time."""

    def on_start(self, config: Config, env_steps: int) -> None:
        """Called once, before the first update. `env_steps` is greater than 0 if the run is resumed."""

    def on_update(self, report: dict[str, Any]) -> None:
        """Called after every update with all metrics, under the same names as in metrics.jsonl."""

    def on_report(self, report: dict[str, Any]) -> None:
        """Called with the metrics of each report in metrics.jsonl.

        Reports are due every `report_interval` env-steps, at each periodic evaluation and when the run finishes.
        """

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        """Called after every evaluation, including the final one. `evaluation.deterministic` says how it acted."""

    def on_checkpoint(self, env_steps: int, path: Path) -> None:
        """Called after every checkpoint with the checkpoint's folder."""

    def on_warning(self, message: str) -> None:
        """Called with a description of each problem that does not end the run."""

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Called once for each callback whose `on_start` was called, however training ends.

        Args:
            result: How the run ended, if it finished or a signal or `StopTraining` interrupted it. Otherwise None.
            error: The exception that ended the run. Otherwise None. It is raised again after this call. If this method
                also raises, the second exception becomes a note of the first.
        """


_PARAMETERS = {
    name: [*inspect.signature(method).parameters][1:]
    for name, method in vars(Callback).items()
    if name.startswith("on_")
}
"""The arguments with which training calls each method."""


def checked(callbacks: Callback | Iterable[Callback]) -> list[Callback]:
    """Returns the callbacks as a list.

    Raises TypeError if one is not a `Callback`, such as a function or a class, or if a method does not accept the
    arguments with which training calls it, perhaps hours later. Warns of `on_...` methods that training never calls.
    """
    given = [callbacks] if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable) else list(callbacks)
    for one in given:
        if not isinstance(one, Callback):
            raise TypeError(
                f"callbacks contains {one!r}, which is not a ppo.Callback: derive a class from ppo.Callback, override "
                "on_update, and pass an instance"
            )
        for name, parameters in _PARAMETERS.items():
            try:
                inspect.signature(getattr(one, name)).bind(*parameters)
            except ValueError:  # some built-in functions have no signature
                pass
            except TypeError as error:
                method = f"{type(one).__name__}.{name}"
                raise TypeError(f"{method} must accept the arguments ({', '.join(parameters)}): {error}") from None
        known = _PARAMETERS.keys()
        if unknown := sorted(name for name in dir(one) if name.startswith(("on_", "_on_")) and name not in known):
            message = f"training never calls {', '.join(unknown)} of {type(one).__name__}: it calls only "
            hint = (
                ". SB3 calls _on_step after every step; ppo calls on_update after every update"
                if "_on_step" in unknown
                else ""
            )
            warnings.warn(message + ", ".join(_PARAMETERS) + hint, stacklevel=3)
    return given


class Callbacks(Callback):
    """Calls several callbacks in order. Records `StopTraining` in `interrupted`; other exceptions propagate at once.

    Attributes:
        interrupted: Whether a callback has raised `StopTraining`.
    """

    def __init__(self, callbacks: Iterable[Callback]):
        self._callbacks = list(callbacks)
        self._started: list[Callback] = []
        self.interrupted = False

    def attach(self, config: Config, run_path: Path) -> None:
        """Gives all callbacks the settings and the folder of a run, and drops what an earlier run has left in them."""
        self.interrupted = False
        for one in self._callbacks:
            for name in ("_logged", "_reason", "policies", "policy"):
                vars(one).pop(name, None)
            vars(one).update(config=config, run_path=run_path)  # the class may be a frozen dataclass

    def attach_policies(self, make: Callable[[], dict[str, Policy]]) -> None:
        """Gives each callback policies of its own, because recurrent policies remember what they have seen."""
        for one in self._callbacks:
            policies = vars(one)["policies"] = make()
            if len(policies) == 1:
                (vars(one)["policy"],) = policies.values()

    @property
    def reason(self) -> str | None:
        """Why a callback wants to finish the run; see `stop`. None if none does."""
        return next((vars(one)["_reason"] for one in self._callbacks if "_reason" in vars(one)), None)

    @property
    def should_stop(self) -> bool:
        """Whether the run should end after the current update."""
        return self.interrupted or self.reason is not None

    def logged(self) -> dict[str, float]:
        """Returns the values of `log` since the last call, by name."""
        return {name: value for one in self._callbacks for name, value in vars(one).pop("_logged", {}).items()}

    def on_status(self, status: Status) -> None:
        self._call("on_status", status)

    def on_start(self, config: Config, env_steps: int) -> None:
        for callback in self._callbacks:
            self._started.append(callback)  # before the call, which may raise halfway through
            self._call("on_start", config, env_steps, callbacks=[callback])

    def on_update(self, report: dict[str, Any]) -> None:
        self._call("on_update", report, copies=True)

    def on_report(self, report: dict[str, Any]) -> None:
        self._call("on_report", report, copies=True)

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        self._call("on_evaluation", env_steps, evaluation, copies=True)

    def on_checkpoint(self, env_steps: int, path: Path) -> None:
        self._call("on_checkpoint", env_steps, path)

    def on_warning(self, message: str) -> None:
        self._call("on_warning", message)

    def _call(
        self, name: str, *arguments: Any, callbacks: Iterable[Callback] | None = None, copies: bool = False
    ) -> None:
        """Calls a method of the given callbacks, or of all; with `copies`, each gets copies of the arguments."""
        for callback in self._callbacks if callbacks is None else callbacks:
            try:
                returned = getattr(callback, name)(*(copy.deepcopy(arguments) if copies else arguments))
            except StopTraining:  # only recorded, because the update is completed first
                self.interrupted = True
                continue
            if returned is False:
                method = f"{type(callback).__name__}.{name}"
                raise TypeError(f"{method} returned False, which stops nothing: raise ppo.StopTraining, or return None")

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Calls every callback that was started, even if one of them raises.

        Raises:
            Exception: The first exception of a callback, with the later ones as notes. If `error` is given, all
                of them become notes of `error`, and nothing is raised.
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


def wandb(*, upload: bool = False, **options: Any) -> Callback:
    """Returns a callback that logs the settings, the reports and the final score to Weights & Biases.

    W&B's own settings decide whether anything is sent: `mode=` here, the variable WANDB_MODE, or `wandb offline`. Its
    default is to send everything. If the process has an active W&B run, the callback logs to it and leaves it open.
    Otherwise, a resumed run continues its W&B run. W&B's steps are env-steps and continue from the W&B run's last step.

    Args:
        upload: Whether to upload the run folder as an artifact at the end, unless training fails.
        **options: Arguments of `wandb.init`, such as `project`, `name`, `mode` and `dir`.

    Raises:
        ImportError: If wandb is not installed.
    """
    return _WandB(_imported("wandb", WANDB_ERROR_REPORTING="false"), options, upload)


def mlflow(*, upload: bool = False, **options: Any) -> Callback:
    """Returns a callback that logs the settings, the reports and the final score to MLflow.

    MLflow's own settings decide where the data goes: `mlflow.set_tracking_uri`, or the variable MLFLOW_TRACKING_URI.
    Its default is a local database. If the thread has an active MLflow run, the callback logs to it and leaves it open.
    Otherwise, a resumed run continues its MLflow run. Steps are env-steps and continue from the MLflow run's last step.
    MLflow's usage telemetry is off unless the variable MLFLOW_DISABLE_TELEMETRY says otherwise.

    Args:
        upload: Whether to log the run folder as artifacts at the end, unless training fails.
        **options: Arguments of `mlflow.start_run`, such as `run_name`, `experiment_id` and `run_id`.

    Raises:
        ImportError: If mlflow is not installed.
    """
    return _MLflow(_imported("mlflow", MLFLOW_DISABLE_TELEMETRY="true"), options, upload)


def _imported(name: str, **environment: str) -> Any:
    """Imports a package. First sets variables that stop it from contacting its vendor, unless the user has set them."""
    for variable, value in environment.items():
        os.environ.setdefault(variable, value)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"ppo.callbacks.{name} needs the package {name}: `pip install 'vecenv-ppo[{name}]'`"
        ) from error


class _Tracker(Callback):
    """Logs to a run of a tracker. The run folder stores that run's id and last step, so a resumed run can continue it.

    The tracker's steps are env-steps. An offset is added if the tracker's run already holds later steps: training
    repeats steps after a crash, or an earlier training logged to the same run. W&B drops values of earlier steps.
    """

    name: str

    def __init__(self, package: Any, options: dict[str, Any], upload: bool):
        self._package, self._options, self._upload = package, options, upload
        self._run: Any = None
        self._offset = 0

    def on_start(self, config: Config, env_steps: int) -> None:
        self._run = None  # drops the run of an earlier training
        known = self._known().get(self.name, {"id": None, "step": 0})
        active = self._active()
        self._is_ours = active is None
        self._run = self._open(known["id"]) if active is None else active
        self._id, last = self._position()
        last = max(last, known["step"] if self._id == known["id"] else 0)
        # W&B continues a run one step after its last step.
        self._offset = last - env_steps if last > env_steps + 1 else 0
        self._remember(last)
        self._log_settings(dataclasses.asdict(config))

    def on_report(self, report: dict[str, Any]) -> None:
        step = self._offset + report["env_steps"]
        self._log(_numbers(report), step)
        self._remember(step)

    def _active(self) -> Any:
        """Returns the run that the script has started, or None."""
        raise NotImplementedError

    def _open(self, run_id: str | None) -> Any:
        """Returns the run with this id, or a new run if there is none."""
        raise NotImplementedError

    def _position(self) -> tuple[str, int]:
        """Returns the id and the last step of the run."""
        raise NotImplementedError

    def _log_settings(self, settings: dict[str, Any]) -> None:
        raise NotImplementedError

    def _log(self, numbers: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _known(self) -> dict[str, Any]:
        """Returns the ids and last steps in the run folder, by tracker."""
        try:
            return json.loads((self.run_path / "trackers.json").read_text())
        except (OSError, ValueError):
            return {}

    def _remember(self, step: int) -> None:
        from ppo.run.files import write_atomically  # not above: callbacks of users need only the settings

        known = self._known() | {self.name: {"id": self._id, "step": step}}
        write_atomically(self.run_path / "trackers.json", json.dumps(known) + "\n")


class _WandB(_Tracker):
    """See `wandb`."""

    name = "wandb"

    def _active(self) -> Any:
        return self._package.run

    def _open(self, run_id: str | None) -> Any:
        again = {} if run_id is None else {"id": run_id, "resume": "allow"}
        return self._package.init(**{**again, **self._options})

    def _position(self) -> tuple[str, int]:
        return self._run.id, self._run.step

    def _log_settings(self, settings: dict[str, Any]) -> None:
        self._run.config.update(settings, allow_val_change=True)  # a resumed run may have changed settings

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

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


class _MLflow(_Tracker):
    """See `mlflow`."""

    name = "mlflow"

    def _active(self) -> Any:
        return self._package.active_run()

    def _open(self, run_id: str | None) -> Any:
        if run_id is not None:
            try:
                return self._package.start_run(**{"run_id": run_id, **self._options})
            except self._package.MlflowException:  # it was deleted, or is in another database
                pass
        return self._package.start_run(**self._options)

    def _position(self) -> tuple[str, int]:
        run_id = self._run.info.run_id
        history = self._package.MlflowClient().get_metric_history(run_id, "env_steps")
        return run_id, max((metric.step for metric in history), default=0)

    def _log_settings(self, settings: dict[str, Any]) -> None:
        # MLflow refuses to change a parameter, so a run that is logged to again keeps its first settings.
        known = self._package.get_run(self._id).data.params
        self._package.log_params({name: value for name, value in settings.items() if name not in known})

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self._package.log_metrics(numbers, step=step)

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        if self._run is None:  # `start_run` failed
            return
        status = "FAILED" if result is None else "KILLED" if result.interrupted else "FINISHED"
        try:
            if result is not None:
                self._package.log_metrics(_final(result), step=self._offset + result.env_steps)
                if self._upload:
                    self._package.log_artifacts(str(result.path), artifact_path="run")
        finally:
            if self._is_ours:
                self._package.end_run(status)


def _numbers(report: dict[str, Any]) -> dict[str, float]:
    """Returns the finite metrics. For example, there is no mean return before the first episode ends."""
    return {name: float(value) for name, value in report.items() if value is not None and math.isfinite(value)}


def _final(result: Result) -> dict[str, float]:
    """Returns the score of the final policy, or nothing if a signal or `StopTraining` interrupted the run."""
    scores = {} if result.evaluation is None else result.evaluation.summary()
    return {f"final_{name}": float(value) for name, value in scores.items()}
