"""Tests of callbacks: how a run ends, what shows its progress, and what logs it elsewhere."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import ppo
from ppo import Evaluation, Result
from ppo.callbacks import Callback, Callbacks, checked
from tests.ppo.runs import command

CONFIG = ppo.Config(env="CartPole-v1", total_steps=4096)
EVALUATION = Evaluation(np.array([1.0, 3.0]), np.array([1, 3]))
REPORT = {
    "env_steps": 2048, "return_mean": 5.5, "length_mean": None, "kl": float("nan"), "entropy": 1.0, "wall_s": 2.0,
    "learning_rate": 3e-4, "steps_per_s": 9.0, "collect_steps_per_s": 19.0, "learn_steps_per_s": 18.0,
}  # fmt: skip
LOGGED = {name: value for name, value in REPORT.items() if name not in ("length_mean", "kl")}  # the finite metrics
FINAL = {f"final_{name}": float(value) for name, value in EVALUATION.summary().items()}


class Recorder(Callback):
    """Records starts and ends, and raises the given exceptions in them."""

    def __init__(self, calls, *, start=None, end=None):
        self._calls, self._start, self._end = calls, start, end

    def on_start(self, config, env_steps):
        self._calls.append((self, "start"))
        if self._start is not None:
            raise self._start

    def on_end(self, result, error):
        self._calls.append((self, result, error))
        if self._end is not None:
            raise self._end


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Returns `ppo.train` with a fake training loop, which calls `on_start`, `on_report` and then the test's `body`."""

    def train(body, callbacks, **options):
        def run_training(config, run, callback, **_):
            callback.attach(config, run.path)
            callback.on_start(config, 0)
            callback.on_report(REPORT)
            return body(Result(run.path, 4096, EVALUATION))

        monkeypatch.setattr("ppo.trainer.run_training", run_training)
        return ppo.train(CONFIG, callbacks=callbacks, logdir=tmp_path / "runs", **options)

    return train


def fail(result):
    raise ZeroDivisionError("first")


def stopped(result):
    return Result(result.path, 2048, None)


@pytest.mark.parametrize("body", [lambda result: result, stopped])
def test_every_callback_is_told_once_how_a_run_ended(train, body):
    calls = []
    one, two = Recorder(calls), Recorder(calls)
    result = train(body, [one, two])
    assert calls == [(one, "start"), (two, "start"), (one, result, None), (two, result, None)]


@pytest.mark.parametrize("error", [ZeroDivisionError("first"), KeyboardInterrupt()])
def test_every_callback_is_told_once_of_the_error_that_ended_a_run(train, error):
    def fail(result):
        raise error

    calls = []
    one, two = Recorder(calls), Recorder(calls)
    with pytest.raises(type(error)) as raised:
        train(fail, [one, two])
    assert raised.value is error
    assert calls == [(one, "start"), (two, "start"), (one, None, error), (two, None, error)]


def test_only_callbacks_that_were_started_are_told_of_the_end(train):
    calls, error = [], ValueError("in on_start")
    one, two, three = Recorder(calls), Recorder(calls, start=error), Recorder(calls)
    with pytest.raises(ValueError, match="in on_start"):
        train(fail, [one, two, three])
    assert calls == [(one, "start"), (two, "start"), (one, None, error), (two, None, error)]


def test_the_error_of_training_stays_visible_when_a_callback_raises_at_the_end(train):
    calls = []
    callbacks = [Recorder(calls, end=OSError("disk full")), Recorder(calls, end=ppo.StopTraining()), Recorder(calls)]
    with pytest.raises(ZeroDivisionError, match="first") as raised:
        train(fail, callbacks)
    assert raised.value.__notes__ == ["Recorder.on_end then raised OSError('disk full')."]
    assert len(calls) == 6  # all three callbacks were told


def test_the_first_error_at_the_end_of_a_finished_run_is_raised_after_all_callbacks_were_told(train):
    calls = []
    callbacks = [Recorder(calls, end=error) for error in (ppo.StopTraining(), OSError("disk full"), KeyError("more"))]
    with pytest.raises(OSError, match="disk full") as raised:
        train(lambda result: result, callbacks)
    assert raised.value.__notes__ == ["Recorder.on_end then raised KeyError('more')."] and len(calls) == 6


class Stops(ppo.Callback):
    def __init__(self, method):
        setattr(self, method, self._stop)

    def _stop(self, *arguments):
        raise ppo.StopTraining


CALLS = {
    "on_status": [None],
    "on_start": [CONFIG, 0],
    "on_update": [{}],
    "on_report": [{}],
    "on_evaluation": [0, EVALUATION],
    "on_checkpoint": [0, Path("step_0")],
    "on_warning": ["once"],
}


@pytest.mark.parametrize("method", CALLS)
def test_stop_training_is_recorded_and_all_callbacks_are_called(method):
    called = []
    last = ppo.Callback()
    setattr(last, method, lambda *arguments: called.append(list(arguments)))
    callbacks = Callbacks([Stops(method), last])
    assert not callbacks.should_stop
    getattr(callbacks, method)(*CALLS[method])
    assert called == [CALLS[method]] and callbacks.interrupted and callbacks.should_stop
    callbacks.attach(CONFIG, Path())  # another run
    assert not callbacks.should_stop


def test_a_callback_with_wrong_parameters_is_an_error_before_training(tmp_path):
    class Wrong(ppo.Callback):
        def on_evaluation(self, evaluation):
            pass

    with pytest.raises(TypeError, match=r"Wrong\.on_evaluation must accept the arguments \(env_steps, evaluation\)"):
        ppo.train(CONFIG, callbacks=[Wrong()], logdir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_method_that_training_never_calls_is_a_warning():
    class Wrong(ppo.Callback):
        def on_step(self):
            pass

        def _on_training_start(self):  # SB3's name
            pass

    message = "never calls _on_training_start, on_step of Wrong: it calls only on_status, on_start, on_update"
    with pytest.warns(UserWarning, match=message):
        checked([Wrong()])
    Wrong._on_step = Wrong.on_step
    with pytest.warns(UserWarning, match="it calls only on_status, .*SB3 calls _on_step after every step; ppo calls"):
        checked([Wrong()])


@pytest.mark.parametrize("method", CALLS)
def test_false_which_stops_training_in_sb3_is_an_error(method):
    one = ppo.Callback()
    setattr(one, method, lambda *arguments: False)
    with pytest.raises(TypeError, match=rf"Callback\.{method} returned False, .* raise ppo\.StopTraining"):
        getattr(Callbacks([one]), method)(*CALLS[method])


def test_a_reason_to_stop_is_not_an_interruption():
    one = ppo.Callback()
    callbacks = Callbacks([ppo.Callback(), one])
    one.stop("solved")
    assert callbacks.should_stop and not callbacks.interrupted and callbacks.reason == "solved"


def test_callbacks_need_nothing_of_ppo_but_the_settings():
    code = "import sys, ppo.callbacks; print(sorted(name for name in sys.modules if name.startswith('ppo.')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "['ppo.callbacks', 'ppo.config', 'ppo.kwargs']\n"


def test_callbacks_that_were_never_started_are_told_nothing():
    calls = []
    Callbacks([Recorder(calls)]).on_end(None, ValueError())
    assert not calls


def test_train_shows_progress_unless_told_otherwise(train, capsys):
    train(lambda result: result, [])
    out = capsys.readouterr().out
    assert out.startswith("training CartPole-v1 for 4,096 steps\n") and out.count("2,048 steps") == 1
    train(lambda result: result, [], progress=False)
    assert capsys.readouterr().out == ""


def test_a_callback_starts_each_run_afresh(train):
    class Stops(Callback):
        def on_end(self, result, error):
            self.log("late", 1.0)
            self.stop("late")

    callback = Stops()
    for _ in range(2):
        train(lambda result: result, callback)
        combined = Callbacks([callback])
        assert combined.reason == "late"
        combined.attach(CONFIG, Path("runs"))
        assert combined.reason is None and combined.logged() == {} and callback.config == CONFIG


def test_only_numbers_can_be_logged():
    with pytest.raises(TypeError, match=r"log\('speeds', ...\) needs a number, but got \[1, 2\]"):
        Callback().log("speeds", [1, 2])


class FakeWandB(types.ModuleType):
    """Records what a W&B run is told."""

    def __init__(self, active=False):
        super().__init__("wandb")
        self.calls, self.id, self.step = [], "one", 0
        self.config = types.SimpleNamespace(update=lambda values, **options: self.calls.append(("config", values)))
        self.summary = types.SimpleNamespace(update=lambda values: self.calls.append(("summary", values)))
        self.run = self if active else None

    def init(self, **options):
        self.calls.append(("init", options))
        return self

    def log(self, values, step):
        assert step >= self.step  # W&B would drop the values
        self.calls.append(("log", values, step))
        self.step = step

    def log_artifact(self, path, name, type):
        self.calls.append(("artifact", path, name, type))

    def finish(self, exit_code):
        self.calls.append(("finish", exit_code))


class FakeMLflow(types.ModuleType):
    """Records what an MLflow run is told."""

    def __init__(self, active=False, params=()):
        super().__init__("mlflow")
        self.calls = []
        self.info = types.SimpleNamespace(run_id="id")
        self.data = types.SimpleNamespace(params=dict.fromkeys(params))
        self._active = self if active else None

    def active_run(self):
        return self._active

    def start_run(self, **options):
        self.calls.append(("start", options))
        return self

    def get_run(self, run_id):
        return {"id": self}[run_id]

    def log_params(self, params):
        self.calls.append(("params", params))

    def MlflowClient(self):
        return self

    def get_metric_history(self, run_id, key):
        assert (run_id, key) == ("id", "env_steps")
        metrics = [call for call in self.calls if call[0] == "metrics" and key in call[1]]
        return [types.SimpleNamespace(step=step) for *_, step in metrics]

    def log_metrics(self, metrics, step):
        self.calls.append(("metrics", metrics, step))

    def log_artifacts(self, path, artifact_path):
        self.calls.append(("artifacts", path, artifact_path))

    def end_run(self, status):
        self.calls.append(("end", status))


@pytest.fixture
def fake(monkeypatch):
    """Returns a function that installs a fake package for one test. Environment variables are restored as well."""

    def fake(package):
        monkeypatch.setitem(sys.modules, package.__name__, package)
        return package

    monkeypatch.setattr(os, "environ", dict(os.environ))
    return fake


SETTINGS = dataclasses.asdict(CONFIG)


def test_wandb_gets_the_settings_the_reports_and_the_final_score(train, fake):
    package = fake(FakeWandB())
    callback = ppo.callbacks.wandb(project="walkers", mode="offline")
    assert not package.calls  # the W&B run starts when training does
    train(lambda result: result, callback)
    assert package.calls == [
        ("init", {"project": "walkers", "mode": "offline"}),
        ("config", SETTINGS),
        ("log", LOGGED, 2048),
        ("summary", FINAL),
        ("finish", 0),
    ]
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_mlflow_gets_the_settings_the_reports_and_the_final_score(train, fake):
    package = fake(FakeMLflow())
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "false"
    train(lambda result: result, ppo.callbacks.mlflow(run_name="one"))
    assert package.calls == [
        ("start", {"run_name": "one"}),
        ("params", SETTINGS),
        ("metrics", LOGGED, 2048),
        ("metrics", FINAL, 4096),
        ("end", "FINISHED"),
    ]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"  # the user's choice


def test_the_run_folder_is_uploaded_only_on_request(train, fake):
    wandb, mlflow = fake(FakeWandB()), fake(FakeMLflow())
    path = train(lambda result: result, [ppo.callbacks.wandb(upload=True), ppo.callbacks.mlflow(upload=True)]).path
    assert wandb.calls[-2] == ("artifact", str(path), path.name, "run")
    assert mlflow.calls[-2] == ("artifacts", str(path), "run")


@pytest.mark.parametrize(("body", "code", "status"), [(fail, 1, "FAILED"), (stopped, 0, "KILLED")])
def test_wandb_and_mlflow_runs_finish_however_training_ends(train, fake, body, code, status):
    wandb, mlflow = fake(FakeWandB()), fake(FakeMLflow())
    with contextlib.suppress(ZeroDivisionError):
        train(body, [ppo.callbacks.wandb(), ppo.callbacks.mlflow()])
    assert wandb.calls[-1] == ("finish", code) and mlflow.calls[-1] == ("end", status)
    assert not any("final_return_mean" in str(call) for call in (*wandb.calls, *mlflow.calls))


def test_an_active_run_is_used_and_stays_open(train, fake):
    wandb, mlflow = fake(FakeWandB(active=True)), fake(FakeMLflow(active=True, params=("env", "seed")))
    train(lambda result: result, [ppo.callbacks.wandb(), ppo.callbacks.mlflow()])
    assert [call[0] for call in wandb.calls] == ["config", "log", "summary"]
    assert [call[0] for call in mlflow.calls] == ["params", "metrics", "metrics"]
    # MLflow refuses to change a parameter.
    assert mlflow.calls[0][1] == {name: value for name, value in SETTINGS.items() if name not in ("env", "seed")}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_trainings_in_one_active_run_follow_one_another(train, fake, name):
    """Their env-steps begin at 0 again, and W&B would drop what is below its last step."""
    package = fake({"wandb": FakeWandB, "mlflow": FakeMLflow}[name](active=True))
    for _ in range(3):
        train(lambda result: result, getattr(ppo.callbacks, name)())
    logged = [call for call in package.calls if call[0] in ("log", "metrics") and "env_steps" in call[1]]
    assert [values for _, values, _ in logged] == [LOGGED] * 3
    steps = [step for *_, step in logged]
    assert steps[0] == 2048 and steps[1] - steps[0] == 2048 and steps[2] > steps[1]


@pytest.mark.parametrize("lost", [0, 512])
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_resumed_run_continues_the_run_of_the_tracker_above_its_last_step(tmp_path, fake, name, lost):
    """After a crash, the checkpoint precedes the last steps that were reported."""
    package = fake({"wandb": FakeWandB, "mlflow": FakeMLflow}[name]())
    for start, end in ((0, 2048), (2048 - lost, 4096)):
        callbacks = Callbacks([getattr(ppo.callbacks, name)()])  # of another process
        callbacks.attach(CONFIG, tmp_path)
        callbacks.on_start(CONFIG, start)
        callbacks.on_report({**REPORT, "env_steps": end})
        callbacks.on_end(None, RuntimeError())
    begun, again = (call[1] for call in package.calls if call[0] in ("init", "start"))
    assert begun == {} and again == {"wandb": {"id": "one", "resume": "allow"}, "mlflow": {"run_id": "id"}}[name]
    assert [call[2] for call in package.calls if call[0] in ("log", "metrics")] == [2048, 4096 + lost]


def test_a_run_of_mlflow_that_is_gone_is_replaced(tmp_path, fake, monkeypatch):
    package = fake(FakeMLflow())
    package.MlflowException = KeyError
    start_run = package.start_run
    monkeypatch.setattr(package, "start_run", lambda run_id=None: {"new": start_run()}[run_id or "new"])
    (tmp_path / "trackers.json").write_text('{"mlflow": {"id": "gone", "step": 4096}}')
    callbacks = Callbacks([ppo.callbacks.mlflow()])
    callbacks.attach(CONFIG, tmp_path)
    callbacks.on_start(CONFIG, 2048)
    callbacks.on_report({**REPORT, "env_steps": 4096})
    assert package.calls[-1][2] == 4096
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"mlflow": {"id": "id", "step": 4096}}


def test_a_logger_that_cannot_begin_does_not_hide_why(train, fake):
    wandb, mlflow = fake(FakeWandB()), fake(FakeMLflow())
    for package, name in ((wandb, "init"), (mlflow, "start_run")):
        setattr(package, name, lambda **options: 1 / 0)
        with pytest.raises(ZeroDivisionError) as raised:
            train(lambda result: result, getattr(ppo.callbacks, package.__name__)())
        assert not hasattr(raised.value, "__notes__") and not package.calls


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_an_error_before_training_that_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=rf"ppo.callbacks.{name} needs the package {name}: `pip install 'vecenv-ppo\[{name}\]'"
    ):
        getattr(ppo.callbacks, name)()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_tracker_is_an_error_of_the_command_before_training(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ppo.ConfigError, match=rf"--track {name}: .*`pip install 'vecenv-ppo\[{name}\]'`"):
        command("train", ["--env", "CartPole-v1", "--track", name, "--logdir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_the_command_tracks_a_run_and_tells_how_to_resume_it_with_the_tracker(fake, monkeypatch, tmp_path, capsys):
    packages = [fake(FakeWandB()), fake(FakeMLflow())]

    def run_training(config, run, callback, **_):
        callback.attach(config, run.path)
        callback.on_start(config, 0)
        callback.on_report(REPORT)
        return Result(run.path, 2048, None)

    monkeypatch.setattr("ppo.trainer.run_training", run_training)
    words = ["--env", "CartPole-v1", "--total-steps", "4096", "--logdir", str(tmp_path), "--num-workers", "0"]
    assert command("train", [*words, "--track", "wandb", "mlflow"]) == 130
    assert ("log", LOGGED, 2048) in packages[0].calls and ("metrics", LOGGED, 2048) in packages[1].calls
    (run,) = tmp_path.iterdir()
    resume = capsys.readouterr().out.splitlines()[-1].partition("ppo train ")[2]
    assert resume.startswith(f"--resume {run} ") and "--track wandb mlflow" in resume


def test_wandb_itself_works_offline(train, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for hook in ("exit", "excepthook"):
        monkeypatch.setattr(sys, hook, getattr(sys, hook))  # W&B replaces both for the rest of the process
    monkeypatch.chdir(tmp_path)
    for variable in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    callback = ppo.callbacks.wandb(project="walkers", mode="offline", upload=True)
    train(lambda result: result, callback)
    assert wandb.run is None
    wandb.teardown()  # waits for the process that writes the file
    (log,) = tmp_path.rglob("*.wandb")
    assert b"final_return_mean" in log.read_bytes()


def test_mlflow_itself_works_with_a_local_database(train, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with contextlib.suppress(ZeroDivisionError):
        train(fail, ppo.callbacks.mlflow(run_name="broken"))
    train(lambda result: result, ppo.callbacks.mlflow(run_name="whole", upload=True))
    assert mlflow.active_run() is None
    found = {run.info.run_name: run for run in mlflow.search_runs(output_format="list")}
    assert {name: run.info.status for name, run in found.items()} == {"whole": "FINISHED", "broken": "FAILED"}
    whole = found["whole"]
    assert whole.data.params == {name: str(value) for name, value in SETTINGS.items()}
    assert whole.data.metrics == pytest.approx({**LOGGED, **FINAL})
    history = mlflow.MlflowClient().get_metric_history(whole.info.run_id, "return_mean")
    assert [(point.step, point.value) for point in history] == [(2048, 5.5)]
    assert (Path(whole.info.artifact_uri.removeprefix("file://")) / "run" / "config.json").exists()
    with mlflow.start_run(run_id=whole.info.run_id):  # log to the same run again
        train(lambda result: result, ppo.callbacks.mlflow())
        assert mlflow.active_run() is not None
