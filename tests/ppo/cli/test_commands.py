"""Tests of the commands as a user types them: their output, files and exit codes."""

import ast
import configparser
import dataclasses
import errno
import fcntl
import functools
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import pytest

import ppo
import vecenv
from ppo import Config, ConfigError, Result, Run, RunError
from ppo import cli as commands
from ppo.__main__ import COMMANDS
from ppo.config import SETTINGS
from ppo.errors import FaultyEnv
from ppo.run.signals import STOPPING, stop_on_signal
from tests.ppo.runs import QUICKLY_COMPILED, command, only_run, parsed, reports, train

ROOT = Path(__file__).parents[3]
SMALL = ["--env", "CartPole-v1", "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--epochs", "2",
         "--report-interval", "64", "--checkpoint-interval", "128", "--eval-episodes", "3",
         "--num-workers", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Returns a finished run and what the command printed."""
    with redirect_stdout(io.StringIO()) as output:
        run = train(*SMALL, "--total-steps", 512, logdir=tmp_path_factory.mktemp("with space"))
    return run, output.getvalue()


@pytest.fixture
def finished(printed):
    """Returns a finished run."""
    return printed[0]


def test_a_run_folder_contains_config_versions_metrics_events_and_checkpoints(finished):
    assert finished.path.name.endswith("-CartPole-v1")
    assert finished.read_config().num_envs == 4
    assert json.loads((finished.path / "versions.json").read_text())["tensorflow"]
    assert list(finished.path.glob("events.out.tfevents.*"))
    rows = reports(finished)
    assert [row["env_steps"] for row in rows] == list(range(64, 513, 64))
    assert {"env_steps", "wall_s", "steps_per_s", "return_mean", "learning_rate", "approx_kl"} <= set(rows[-1])
    names = [path.name for path in sorted(finished.checkpoints.iterdir())]
    assert names == ["best", *(f"step_{n:012d}" for n in (256, 384, 512))]


def test_evaluate_prints_one_json_object_with_a_fresh_seed_that_reproduces_it(finished, capsys):
    outputs = []
    for again in (lambda: [], lambda: [], lambda: ["--seed", str(outputs[1]["seed"])]):
        assert command("evaluate", [str(finished.path), "--episodes", "5", "--json", *again()]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] != outputs[1] == outputs[2] and outputs[0]["episodes"] == 5
    assert len({outputs[0]["seed"], outputs[1]["seed"], finished.read_config().seed}) == 3
    assert outputs[0]["return_mean"] == outputs[0]["length_mean"] >= 1 and outputs[0]["return_std"] >= 0


TALKATIVE = """
import ctypes, os, gymnasium
print("import")
class Talkative(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        print("built")
    def step(self, action):
        print("step", flush=True)
        os.write(1, b"descriptor")
        ctypes.CDLL(None).printf(b"from C")
        return self.env.step(action)
    def close(self):
        print("closed")
        self.env.close()
"""


def talkative_run(finished, folder):
    """Writes the module into the folder, and returns a copy of the run that names its wrapper."""
    (folder / "talkative.py").write_text(TALKATIVE)
    copy = shutil.copytree(finished.path, folder / "runs" / "copy")
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**values, "wrappers": ["talkative:Talkative"]}))
    return copy


def test_what_envs_print_in_this_process_does_not_reach_the_results_on_stdout(tmp_path, finished, monkeypatch, capfd):
    monkeypatch.syspath_prepend(tmp_path)
    run = talkative_run(finished, tmp_path)
    values = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**values, "num_workers": 0}))
    words = [str(run), "--trust-modules", "--episodes", "2"]
    assert command("evaluate", [*words, "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["episodes"] == 2
    assert all(word in err for word in ("import", "built", "step", "descriptor", "from C", "closed"))
    assert command("evaluate", words) == 0
    assert re.fullmatch(r"deterministic policy: .*\n", capfd.readouterr().out)


@pytest.mark.slow
def test_what_envs_print_in_workers_does_not_reach_the_results_on_stdout(tmp_path, finished):
    words = [str(talkative_run(finished, tmp_path)), "--trust-modules", "--episodes", "2"]
    for name, more in (("evaluate", ["--json"]), ("visualize", ["--seconds", "0.1"])):
        done = run_command("ppo", name, *words, *more, cwd=tmp_path)
        assert done.returncode == 0 and all(word in done.stderr for word in ("import", "built", "step", "from C"))
        if name == "evaluate":
            assert json.loads(done.stdout)["episodes"] == 2
        else:
            assert all(": return " in line for line in done.stdout.splitlines())


def test_what_a_custom_network_prints_does_not_reach_the_results_of_export(tmp_path, monkeypatch, capfd):
    def exported(run, *arguments, **options):
        print("tracing")
        return Path("out"), 0.0

    monkeypatch.setattr("ppo.results.export.export", exported)
    monkeypatch.setattr("ppo.results.export.names_in", lambda path: "names")
    (tmp_path / "config.json").touch()
    assert command("export", [str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("out: on random observations") and out.splitlines()[1:] == ["names"] and "tracing" in err


def test_evaluation_changes_nothing_in_the_run(finished, capsys):
    before = {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()}
    command("evaluate", [str(finished.path), "--episodes", "2"])
    assert re.search(r"2 episodes, seed \d+$", capsys.readouterr().out)
    assert {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()} == before


@pytest.mark.slow  # tests/ppo/test_seeds.py compares two workers with none
def test_the_same_seed_gives_the_same_metrics_with_one_worker_and_with_two(tmp_path, finished):
    two = train(*SMALL, "--num-workers", 2, "--total-steps", 512, logdir=tmp_path)
    assert reports(two, times=False) == reports(finished, times=False)


def test_resume_continues_from_the_checkpoint_and_drops_later_reports(tmp_path, finished, capsys):
    shutil.copytree(finished.path, tmp_path / finished.path.name)
    run = only_run(tmp_path)
    with run.metrics.open("a") as metrics:
        metrics.write('{"env_steps": 576, "lost": true}\n{"env_ste')  # as a killed run leaves them
    assert command("train", ["--resume", str(run.path), "--total-steps", "640"]) == 0
    board = next(shlex.split(line) for line in capsys.readouterr().out.splitlines() if "tensorboard" in line)
    assert board[-2:] == ["--logdir", str(tmp_path)]  # the run's log folder, not the default one
    rows = reports(run)
    assert [row["env_steps"] for row in rows] == list(range(64, 641, 64))
    assert not any("lost" in row for row in rows)
    walls = [row["wall_s"] for row in rows]
    assert walls == sorted(walls)
    episodes = [row["episodes"] for row in rows]
    assert episodes == sorted(episodes)
    assert run.read_config().total_steps == 640


def test_a_run_cannot_be_resumed_with_fewer_steps_than_it_has_taken(tmp_path, finished):
    run = Run.open(shutil.copytree(finished.path, tmp_path / "run"))
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    message = "total_steps=448 is less than the 512 env-steps that .*run has taken.*: to train for .* more, .* to 960"
    for resume in (
        lambda: command("train", ["--resume", run.path, "--total-steps", "448"]),
        lambda: ppo.resume(run, total_steps=448, progress=False),
    ):
        with pytest.raises(ConfigError, match=message):
            resume()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert ppo.resume(run, total_steps=449, progress=False).env_steps == 512  # the last update is complete


@pytest.mark.slow
def test_training_accepts_observations_and_actions_of_any_kind(tmp_path):
    for env in ("Acrobot-v1", "MountainCarContinuous-v0", "Blackjack-v1", "Taxi-v4"):
        argv = [*SMALL, "--total-steps", "64", "--logdir", str(tmp_path / env)]
        argv[1] = env
        assert command("train", argv) == 0


# Invalid input: one clear sentence, exit code 2, and no files.


@pytest.fixture
def run_here(capsys):
    """Returns a function that runs a command in this process, and returns its exit code and its output."""

    def run_here(name, *words):
        with pytest.raises(SystemExit) as ended:
            commands.main(functools.partial(importlib.import_module(f"ppo.cli.{name}").command, words))
        return Done(ended.value.code, *capsys.readouterr())

    return run_here


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_command(*words, cwd=None):
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, cwd=cwd)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], None),
        (["--config", "cartpole"], "cartpole"),
        (["--config", "cartpole", "--seed", "3"], "cartpole"),
        (["--config", "cartpole", "--env", "Acrobot-v1"], None),  # None: the name of the env
    ],
)
def test_a_run_has_the_name_of_a_preset_only_on_the_env_of_the_preset(monkeypatch, words, name):
    class Called(Exception):
        pass

    def train(config, **where):
        raise Called(where["name"])

    monkeypatch.setattr(ppo, "train", train)
    with pytest.raises(Called) as caught:
        command("train", words)
    assert caught.value.args == (name,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "cartpol"], "unknown preset 'cartpol'.*Did you mean 'cartpole'"),
        (["--env", "HalfCheeta-v5"], "Did you mean: `HalfCheetah`"),
        (["--minibatch-size", "100"], "minibatch_size=100 does not divide.*nearest size that does is 128"),
        (["--num-envs", "0"], "num_envs=0 is out of range"),
        (["--num-workers", "9", "--num-envs", "8"], "num_workers=9 is more than num_envs=8"),
        (["--resume", "nowhere"], "there is no folder nowhere or runs/nowhere, so it is not a run"),
        (["--totl-steps", "5"], "--total-steps"),
        (["--num-workers", "1.5"], "'1.5' is not an integer"),
        (["arm:Arm-v0", "--total-steps", "5"], "unexpected argument 'arm:Arm-v0': write --env arm:Arm-v0"),
        (["cartpole"], "unexpected argument 'cartpole': write --config cartpole"),
        (["--env", "nomod:X-v0"], "the module 'nomod' cannot be imported"),
    ],
)
def test_invalid_input_is_a_one_sentence_error_that_says_what_to_write(tmp_path, monkeypatch, run_here, words, message):
    monkeypatch.chdir(tmp_path)
    done = run_here("train", *words)
    assert done.returncode == 2, done
    assert not list(tmp_path.glob("runs/*"))
    assert "Traceback" not in done.stderr
    assert re.search(message, " ".join((done.stderr + done.stdout).split())), done.stderr


def test_integer_settings_may_be_written_with_an_exponent():
    config = parsed(
        "--total-steps", "1e5", "--num-workers", "2e0", "--num-steps", "None", "--policy-layers", "8", "1e1"
    )
    assert config == Config(total_steps=100_000, num_workers=2, policy_layers=(8, 10))


def test_the_settings_of_a_help_group_may_be_anywhere_in_the_config(monkeypatch):
    monkeypatch.setattr("ppo.cli.train.SETTINGS", dict(sorted(SETTINGS.items())))
    assert parsed("--gamma", "0.9") == Config(gamma=0.9)


def test_errors_distinguish_a_folder_that_is_not_a_run_from_a_damaged_run(tmp_path, finished, run_here):
    (tmp_path / "empty").mkdir()
    done = run_here("train", "--resume", str(tmp_path / "empty"))
    assert done.returncode == 2 and "holds no config.json, so it is not a run" in done.stderr
    copy = tmp_path / "copy"
    shutil.copytree(finished.path, copy)
    for data in copy.rglob("state.*"):
        data.write_bytes(data.read_bytes()[:50])
    for words in (["train", "--resume", str(copy), "--total-steps", "1024"], ["evaluate", str(copy)]):
        done = run_here(*words)
        assert done.returncode == 2 and "all 3 are damaged" in done.stderr and "Traceback" not in done.stderr
    (copy / "config.json").write_text("{")
    done = run_here("evaluate", str(copy))
    assert done.returncode == 2 and "config.json cannot be read" in done.stderr
    assert re.search(r"this is vecenv-ppo \S+: restore a backup, or start a new run\.$", done.stderr.strip())


@pytest.mark.parametrize("missing", ["spaces.json", "checkpoints"])
@pytest.mark.parametrize("command", ["train", "evaluate", "visualize", "export"])
def test_a_run_that_ended_before_its_first_checkpoint_is_an_error_that_says_so(tmp_path, missing, command):
    run = Run.create(tmp_path, "killed", Config(env="CartPole-v1"))
    if missing == "checkpoints":
        space = gym.spaces.Box(-1, 1, (2,))
        run.write_spaces({"": (space, space)}, given=False)
    words = ["--resume", str(run.path)] if command == "train" else [str(run.path)]
    with pytest.raises(RunError, match=r"ended before its first checkpoint.* Start a new run\.") as caught:
        importlib.import_module(f"ppo.cli.{command}").command(words)
    assert "Error" not in str(caught.value)


def test_a_run_whose_spaces_are_lost_is_not_said_to_have_no_checkpoint(tmp_path, finished):
    copy = shutil.copytree(finished.path, tmp_path / "copy")
    (copy / "spaces.json").unlink()
    for name, words in (("evaluate", [str(copy)]), ("train", ["--resume", str(copy)])):
        with pytest.raises(RunError, match=r"spaces\.json cannot be read.*[Rr]estore a backup"):
            importlib.import_module(f"ppo.cli.{name}").command(words)


def test_a_resumed_run_cannot_change_a_setting_that_its_checkpoint_depends_on(finished, run_here):
    done = run_here("train", "--resume", str(finished.path), "--num-envs", "8")
    assert done.returncode == 2 and "num_envs would change" in done.stderr


def test_a_resume_that_fails_changes_nothing(tmp_path, finished):
    copy = tmp_path / "copy"
    shutil.copytree(finished.path, copy)
    for index in copy.rglob("state.index"):
        index.write_bytes(b"")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="all 3 are damaged"):
        command("train", ["--resume", str(copy), "--total-steps", "1024"])
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_a_run_cannot_be_trained_twice_at_the_same_time(finished):
    with finished.locked(), pytest.raises(RunError, match="being trained by another process"):
        command("train", ["--resume", str(finished.path), "--total-steps", "1024"])


def test_a_file_system_without_locks_and_without_fsync_is_one_warning(tmp_path, monkeypatch, capfd):
    for number in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):

        def refuse(file, operation, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", refuse)
        monkeypatch.setattr(os, "fsync", lambda descriptor: refuse(descriptor, 0, errno.EINVAL))
        warned = []
        with Run.create(tmp_path, "run", Config()).locked(warned.append):
            assert len(warned) == 1 and "cannot lock files" in warned[0] and os.strerror(number) in warned[0]
    assert command("train", [*SMALL, "--total-steps", "64", "--logdir", str(tmp_path)]) == 0
    assert capfd.readouterr().out.count("cannot lock files") == 1


@pytest.mark.parametrize("number", [errno.EWOULDBLOCK, errno.EACCES])  # the second one on older CIFS clients
def test_a_run_locked_by_another_machine_is_not_trained(tmp_path, monkeypatch, number):
    def refuse(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = Run.create(tmp_path, "run", Config())
    with pytest.raises(RunError, match="being trained by another process"), run.locked():
        pass


@pytest.mark.parametrize("number", [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 15))])
def test_an_interrupted_run_is_saved_and_says_how_to_resume(tmp_path, number):
    words = [sys.executable, "-m", "ppo", "train", *SMALL, "--total-steps", "100000000", "--logdir", str(tmp_path)]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **QUICKLY_COMPILED},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # `nohup` ignores SIGHUP in all its descendants
    )
    while "steps/s" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    os.killpg(process.pid, number)  # signals the workers too, as terminals and batch systems do
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in errors, errors
    assert "everything is saved in" in output and "--resume" in output
    run = only_run(tmp_path)
    newest = sorted(run.checkpoints.iterdir())[-1]
    assert json.loads((newest / "progress.json").read_text())["update"] > 0


@pytest.mark.parametrize("error", [vecenv.WorkerDied, vecenv.EnvError, FaultyEnv, OSError])
def test_an_error_that_ends_a_run_says_how_to_resume_it(tmp_path, finished, run_here, monkeypatch, error):
    copy = Path(shutil.copytree(finished.path, tmp_path / "copy"))
    monkeypatch.setattr("ppo.trainer.Trainer.collect", lambda self: raises(error("why")))
    done = run_here("train", "--resume", str(copy), "--total-steps", "1024")
    *_, resume = (line for line in done.stderr.splitlines() if line.startswith("to resume:"))
    assert shlex.split(resume)[-3:] == ["train", "--resume", str(copy)]
    assert ("add --on-worker-death restart" in done.stderr) == (error is vecenv.WorkerDied)


def test_a_run_that_diverged_does_not_say_how_to_resume_it(tmp_path, finished, run_here, monkeypatch):
    copy = Path(shutil.copytree(finished.path, tmp_path / "copy"))
    monkeypatch.setattr("ppo.trainer.Trainer.collect", lambda self: raises(ppo.TrainingDiverged("why")))
    done = run_here("train", "--resume", str(copy), "--total-steps", "1024")
    assert done.returncode == 1 and "to resume:" not in done.stderr


def test_a_run_whose_folder_is_gone_does_not_say_how_to_resume_it(tmp_path, finished, run_here, monkeypatch):
    copy = Path(shutil.copytree(finished.path, tmp_path / "copy"))
    monkeypatch.setattr("ppo.trainer.Trainer.collect", lambda self: (shutil.rmtree(copy), raises(OSError("why"))))
    done = run_here("train", "--resume", str(copy), "--total-steps", "1024")
    assert "is gone" in done.stderr and "to resume:" not in done.stderr and "first checkpoint" not in done.stderr


def test_a_broken_pipe_of_an_env_is_an_error_unlike_that_of_stdout(tmp_path, finished, run_here, monkeypatch):
    error = BrokenPipeError("the simulator is gone")
    error.add_note("raised by env 0 during step")
    copy = Path(shutil.copytree(finished.path, tmp_path / "copy"))
    monkeypatch.setattr("ppo.trainer.Trainer.collect", lambda self: raises(error))
    done = run_here("train", "--resume", str(copy), "--total-steps", "1024")
    assert done.returncode == 1 and "the simulator is gone" in done.stderr


def test_an_error_before_the_first_checkpoint_does_not_say_how_to_resume(tmp_path, run_here, monkeypatch):
    monkeypatch.setattr("ppo.trainer.Trainer.collect", lambda self: raises(vecenv.WorkerDied("worker 0 died")))
    done = run_here("train", *SMALL, "--logdir", str(tmp_path))
    assert done.returncode == 1 and done.stderr.startswith(
        "error: worker 0 died\nThe run ended before its first checkpoint"
    )


@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_a_file_that_an_env_cannot_read_is_a_fault_of_the_env(num_workers, run_here):
    done = run_here(
        "train", "--env", "HalfCheetah-v5", "--env-kwargs", "xml_file=./nope.xml", "--num-workers", num_workers
    )
    assert done.returncode == 1 and re.search(r"nope\.xml does not exist\nraised by env", done.stderr), done


def raises(error):
    raise error


@pytest.mark.slow
def test_an_env_that_raises_ends_the_run_with_only_its_own_traceback(tmp_path):
    words = list(SMALL)
    words[1] = "tests.registered:Raising-v0"
    done = run_command("ppo", "train", *words, "--logdir", str(tmp_path), cwd=ROOT)
    assert done.returncode == 1 and re.search("in worker [01] raised during step", done.stderr), done.stderr
    assert done.stderr.count("Traceback") == 1 and "unsupported operand" in done.stderr


@pytest.mark.slow  # tests/ppo/test_trainer.py checks the error
def test_a_run_with_a_dead_worker_ends_with_a_clear_error(tmp_path):
    words = [sys.executable, "-m", "ppo", "train", *SMALL, "--total-steps", "100000000", "--logdir", str(tmp_path)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **QUICKLY_COMPILED},
    )  # fmt: skip
    while "steps/s" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    forked = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_forked_by(process.pid, int(pid))]
    os.kill(max(forked), signal.SIGKILL)  # the lowest pid is the fork server
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "was killed by SIGKILL" in errors and "Traceback" not in errors, errors
    assert re.search(rf"is saved up to env-step [\d,]+ in {only_run(tmp_path).path}, and can be resumed", errors), (
        errors
    )


def _is_forked_by(session: int, pid: int) -> bool:
    """Returns whether a process belongs to a session and is its fork server or one of its workers."""
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as words:
            return int(stat.read().rpartition(")")[2].split()[3]) == session and "forkserver" in words.read()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow  # tests/ppo/run/test_display.py closes streams, too
def test_a_closed_output_pipe_does_not_end_training(tmp_path):
    words = [sys.executable, "-m", "ppo", "train", *SMALL, "--total-steps", "512", "--logdir", str(tmp_path)]
    environment = {**os.environ, **QUICKLY_COMPILED}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert "training" in process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 0 and "training continues" in errors and "Traceback" not in errors, errors
    assert json.loads((only_run(tmp_path).path / "evaluation.json").read_text())["env_steps"] == 512


@pytest.mark.parametrize("command", ["visualize", pytest.param("export", marks=pytest.mark.slow)])
def test_sigterm_leaves_no_partial_output(tmp_path, finished, command):
    """The signal arrives as soon as a partial file exists."""
    out = tmp_path / "out"
    words = [sys.executable, "-m", "ppo", command, str(finished.path), "--outdir", str(out)]
    words += ["--episodes", "1000"] if command == "visualize" else []
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(out.glob(".part-*/*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and errors.endswith("terminated\n"), errors
    if out.exists():  # the signal arrived after the output was complete
        (left,) = out.iterdir()
        assert command == "export" and left.suffix == ".savedmodel" and (left / "saved_model.pb").exists()


@pytest.fixture
def handlers():
    """Restores the signal handlers after the test, in which no signal is ignored, even under `nohup`."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("raised", [RunError("TensorFlow replaced the interrupt"), None])
@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "terminated")],
)
def test_a_signal_ends_the_command_even_if_its_exception_is_replaced_or_caught(capsys, raised, number, word):
    def command():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if raised:
                raise raised from None
        return 0

    with pytest.raises(SystemExit) as ended:
        commands.main(command)
    assert ended.value.code == 128 + number and capsys.readouterr().err == f"{word}\n"
    commands.load_tensorflow()  # a later command in the same process is not interrupted


def lost(import_tensorflow):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        import_tensorflow()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("command", [lambda: lost(commands.load_tensorflow), lambda: raises(KeyboardInterrupt)])
def test_an_interrupt_ends_the_command_even_if_tensorflow_lost_it_or_another_handler_raised_it(capsys, command):
    def whole():
        command()
        print("continued")
        return 0

    with pytest.raises(SystemExit) as ended:
        commands.main(whole)
    assert ended.value.code == 130 and capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number):
    """A shell starts the background jobs of a script with SIGINT ignored. `nohup` ignores SIGHUP."""
    signal.signal(number, signal.SIG_IGN)

    def command():
        os.kill(os.getpid(), number)
        with stop_on_signal() as stop:
            os.kill(os.getpid(), number)
            assert not stop.wait(0.1)
        assert signal.getsignal(number) == signal.SIG_IGN
        return 7

    with pytest.raises(SystemExit) as ended:
        commands.main(command)
    assert ended.value.code == 7


@pytest.mark.parametrize("text", ["{}", '{"env": "CartPole-v1"}'])
def test_a_config_that_lacks_settings_is_an_error(tmp_path, finished, text):
    shutil.copytree(finished.path, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(text)
    with pytest.raises(RunError, match="are missing: the file is damaged, or from another version"):
        command("evaluate", [str(tmp_path / "run")])


def test_the_seed_of_an_evaluation_is_checked(finished):
    with pytest.raises(ConfigError, match="seed"):
        command("evaluate", [str(finished.path), "--seed", "-1"])


def test_the_commands_that_training_suggests_can_be_run(printed):
    run, output = printed
    evaluation, best, board = [shlex.split(line) for line in output.splitlines() if " -m " in line]
    assert " " in str(run.path) and board[-2:] == ["--logdir", str(run.path.parent)]
    words = ["ppo", "evaluate", str(run.path), "--episodes", "20", "--checkpoint", "best"]
    assert best[best.index("ppo") :] == words and evaluation[evaluation.index("ppo") :] == words[:-2]
    assert command("evaluate", best[best.index("ppo") + 2 :]) == 0


@pytest.mark.parametrize("place", ["in the current folder", "elsewhere", "on the PATH", "in a deleted folder"])
@pytest.mark.parametrize("called", ["script", "module"])
def test_suggested_commands_name_the_program_that_was_called(tmp_path, monkeypatch, capsys, called, place):
    """`python` need not be the interpreter that can import ppo."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("ppo", "python"):
        (programs / name).write_text("")
        (programs / name).chmod(0o755)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path if place == "in the current folder" else tmp_path / "elsewhere")
    if place == "in a deleted folder":
        (tmp_path / "elsewhere").rmdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}" if place == "on the PATH" else os.environ["PATH"])
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr(sys, "argv", [str(programs / "ppo" if called == "script" else ROOT / "ppo" / "__main__.py")])
    folder = {"in the current folder": "venv/bin/", "on the PATH": ""}.get(place, f"{programs}/")
    monkeypatch.setattr(ppo, "train", lambda *_, **options: Result(tmp_path / "run", 64, None))
    assert command("train", ["--env", "CartPole-v1"]) == 130
    resuming = capsys.readouterr().out.splitlines()[-1].removeprefix("to resume:   ")
    wanted = f"{folder}ppo train " if called == "script" else f"{folder}python -m ppo train "
    assert resuming.startswith(wanted)


def test_suggested_commands_trust_the_module_of_the_env(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [*SMALL[2:], "--env", "examples.crawler:Crawler-v0", "--num-workers", "0", "--logdir", str(tmp_path)]
    assert command("train", [*words, "--total-steps", "64"]) == 0
    printed = next(
        shlex.split(line.removeprefix("next:")) for line in capsys.readouterr().out.splitlines() if "next:" in line
    )
    assert printed[1:4] == ["-m", "ppo", "evaluate"] and command("evaluate", [*printed[4:-1], "1"]) == 0
    monkeypatch.setattr(ppo, "resume", lambda run, **options: Result(only_run(tmp_path).path, 64, None))
    command("train", ["--resume", str(only_run(tmp_path).path), "--trust-modules"])
    resume = next(line for line in capsys.readouterr().out.splitlines() if "to resume:" in line)
    with pytest.raises(RunError, match="pass --trust-modules"):
        parsed("--resume", only_run(tmp_path).path)
    config = parsed(*shlex.split(resume.partition("ppo train")[2]))
    assert config.env == "examples.crawler:Crawler-v0"


ELSEWHERE = {
    *("shm-size", "head", "help"),  # of docker, of ray, and of all commands
    *("tf-xla-persistent-cache-directory", "tf-xla-persistent-cache-device-types"),  # of XLA
}


def test_every_flag_that_ppo_names_exists():
    """Messages name flags of the trainer and its commands, never arguments of the engine."""
    arguments = [*(importlib.import_module(f"ppo.cli.{c}").Arguments for c in COMMANDS)]
    known = {field.name.replace("_", "-") for kind in (Config, *arguments) for field in dataclasses.fields(kind)}
    named = set()
    for file in (ROOT / "ppo").rglob("*.py"):
        texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        named |= {flag for text in texts if isinstance(text, str) for flag in re.findall(r"--([a-z][a-z-_]+)", text)}
    flags = {flag.removeprefix("no-").replace("_", "-") for flag in named}
    assert flags - known == ELSEWHERE and len(flags) > 20


# Starting the commands: ppo/__main__.py.


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_ppo_without_a_command_lists_the_commands_without_importing_their_packages(tmp_path, words):
    for name in ("tensorflow", "tyro", "gymnasium", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('was imported')\n")
    done = run_command("ppo", *words, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", done.stdout, flags=re.MULTILINE), done.stdout


def test_every_command_module_is_listed():
    files = {file.stem for file in (ROOT / "ppo" / "cli").glob("*.py")}
    assert files == {*COMMANDS, "__init__"}


def test_the_error_for_an_unknown_command_names_the_closest_command():
    done = run_command("ppo", "evalute", "--help")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == (
        "error: unknown command 'evalute': use one of train, evaluate, visualize, plot, export. "
        "Did you mean 'evaluate'?\n"
    )


def test_an_interrupt_while_a_command_is_imported_ends_it_quietly(tmp_path):
    """An imported module raises the signal and turns the KeyboardInterrupt into an ImportError, as C extensions do."""
    (tmp_path / "tyro.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    [None for _ in range(10**6)]\n"
        "except KeyboardInterrupt:\n    raise ImportError('numpy could not be imported') from None\n"
    )
    done = run_command("ppo", "train", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_command_in_a_deleted_folder_is_an_error_in_one_line(tmp_path):
    (here := tmp_path / "here").mkdir()
    code = f"import os; os.rmdir({str(here)!r}); from ppo.__main__ import main; main(['evaluate', 'runs/x'])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: the current folder has been deleted: change to another one\n"


def test_console_scripts_can_import_modules_from_the_current_folder(tmp_path):
    """`python -m ppo` can do so too. The scripts mimic pip's and are in another folder."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    scripts = dict(line.split(" = ") for line in parser["options.entry_points"]["console_scripts"].split("\n") if line)
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text("import gymnasium as gym\ngym.register('Mine-v0', lambda: 1 / 0)\n")
    for name, entry in scripts.items():
        module, function = entry.split(":")
        script = tmp_path / name
        script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
        done = run_command_file(script, "--help", cwd=here)
        assert done.returncode == 0 and "usage: " in done.stdout, (name, done.stderr)
    done = run_command_file(tmp_path / "ppo", "train", *SMALL[2:], "--env", "mine:Mine-v0", cwd=here)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr, done.stderr


def run_command_file(file, *words, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(file), *words], capture_output=True, text=True, timeout=120, cwd=cwd, env=environment
    )


def test_a_segmentation_fault_prints_a_message(tmp_path):
    (tmp_path / "tyro.py").write_text("import ctypes\nctypes.string_at(0)\n")
    done = run_command("ppo", "train", *SMALL, cwd=tmp_path)
    assert done.returncode == -signal.SIGSEGV and "Fatal Python error: Segmentation fault" in done.stderr
