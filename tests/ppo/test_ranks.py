"""Several ranks average what they learn; a rank that is lost ends the others; nothing is left behind."""

import functools
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import ppo
from ppo import Config, ConfigError, Run, cli
from ppo.algorithm.optimizer import Adam
from ppo.algorithm.ranks import Cluster, Exchange, RankLost, Ranks
from ppo.callbacks import Callbacks
from ppo.cli import launch
from ppo.envs import training_envs
from ppo.model.normalize import RunningMoments, statistics_of
from ppo.results.policy import load_agent
from ppo.run.ranks import TIMEOUT_S, is_first_rank, number_of_ranks, use_slurm
from ppo.trainer import Trainer, run_training
from tests.helpers import stop_process, wait_for_end
from tests.ppo.runs import QUICKLY_COMPILED, command, reports, rewound, untrained_run

SETTINGS = {"env": "Pendulum-v1", "num_envs": 4, "num_steps": 16, "minibatch_size": 32, "epochs": 2, "eval_episodes": 2}
FLAGS = [
    word
    for name, value in SETTINGS.items()
    for word in (f"--{name.replace('_', '-')}", str(value))
]  # fmt: skip
UPDATES = 10
STEPS = UPDATES * 64


def slow(values):
    """Marks a case that takes long and differs little from the others."""
    return pytest.param(*values, marks=pytest.mark.slow)


def train(folder, *flags, ranks=2, output=subprocess.PIPE, environment=QUICKLY_COMPILED):
    """Starts `ppo train --ranks` in its own process group, with these environment variables besides the given ones."""
    words = [sys.executable, "-m", "ppo", "train", *FLAGS, "--logdir", folder, "--ranks", ranks, *flags]
    return subprocess.Popen(
        list(map(str, words)), stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def finished(process, timeout=150):
    """Waits for the end of a run; returns its exit code and its output."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def only_run(folder):
    (path,) = folder.iterdir()
    return path


def descendants(pid):
    """Returns the pids of all running children of a process, of their children, and so on, oldest first."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(sorted(tuple(map(int, line.split())) for line in listed.splitlines()))
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def ranks_of(process, count=2):
    """Waits until all ranks of a launcher have been started, and returns their pids, rank 0 first."""
    while len(children := descendants(process.pid)) < count:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return children[:count]


def wait_for_reports(folder, process, number=1):
    while not any(len(file.read_text().splitlines()) >= number for file in folder.glob("*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


class InThreads(Ranks):
    """One of several ranks that are threads of this process. Combines their values independently of `Cluster`."""

    def __init__(self, number, count, shared):
        self.number, self.count, self._shared = number, count, shared

    def messages(self, message):
        values, barrier = self._shared
        values[self.number] = message
        barrier.wait(60)
        found = list(values)
        barrier.wait(60)  # all have read the values
        return found

    def sum(self, values):
        total, *others = (np.frombuffer(one) for one in self.messages(np.asarray(values, np.float64).tobytes()))
        for other in others:
            total = total + other
        return total


def in_threads(count, work):
    """Returns `work(ranks)` of each of `count` ranks."""
    shared = [None] * count, threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, [InThreads(number, count, shared) for number in range(count)]))


def learned_by(trainer):
    return [variable.numpy() for team in trainer.teams for module in (team.agent, *team.learner.optimizers)
            for variable in module.variables]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "flags"),
    [
        (2, {}),
        slow((2, {"normalize_advantages": False, "lr_schedule": "kl_adaptive"})),
        slow((2, {"objective": "kl_penalty", "kl_target": 1e-4, "recompute_advantages": False})),
        slow((4, {"min_log_std": -0.5, "learning_rate": 3e-3, "num_envs": 8})),
        slow((2, {"recurrent": "gru"})),
    ],
)
def test_ranks_of_several_processes_compute_what_threads_of_one_process_compute(
    tmp_path, monkeypatch, undisturbed, count, flags
):
    """Only the processes compile their updates."""
    monkeypatch.setenv("SIGNAL", str(tmp_path / "none"))
    run = undisturbed(count, *(word for name, value in flags.items() for word in _flag(name, value)))
    settings = {**SETTINGS, "env": "tests.ppo.test_ranks:SignalsItsRank", "num_workers": 0, **flags}
    config = Config(**settings, total_steps=STEPS, report_interval=64)

    def work(ranks):
        run, each = Run.create(tmp_path / "threads", str(ranks.number), config), []
        with training_envs(config.share(count), None) as envs:
            trainer = Trainer(config, run, envs, Callbacks([]), ranks=ranks)
            trainer.begin()
            while not trainer.progress.finished:
                metrics = trainer.iterate()
                each.append((metrics, learned_by(trainer)))
            trainer.close()
        return each

    first, *others = in_threads(count, work)
    for other in others:  # bit for bit after each update
        for (metrics, learned), (metrics_of_other, learned_by_other) in zip(first, other, strict=True):
            assert metrics["kl"] == metrics_of_other["kl"]
            for mine, theirs in zip(learned, learned_by_other, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    for one, (metrics, _) in zip(reports(run), first, strict=True):
        for name in ("env_steps", "episodes", "gradient_steps"):
            assert one[name] == metrics[name]
        for name in ("kl", "policy_loss", "value_loss", "explained_variance", "return_scale", "grad_norm"):
            assert one[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name
    variables = load_agent(Run(run), print).variables
    for mine, theirs in zip(variables, first[-1][1], strict=False):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-4, atol=1e-5)


def test_an_update_of_ranks_is_the_mean_of_updates_and_merges_all_samples():
    """Copies of an agent and a learner each learn from data of their own; NumPy combines them in a plain loop."""
    count, rng = 3, np.random.default_rng(0)
    batches = [rng.normal(number, 1 + number, [50, 4]) for number in range(count + 1)]  # the first was seen by all
    gradients = rng.normal(size=[count, 4]).astype(np.float32)

    class Learning(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights, self.own = tf.Variable(tf.ones([4])), tf.Variable(0.0, trainable=False)
            self.moments = RunningMoments((4,), name="moments")
            self.optimizer = Adam([self.weights], epsilon=1e-5, max_grad_norm=1.0)
            self.moments.merge(statistics_of(tf.constant(batches[0])))

        def update(self, number):
            self.optimizer.apply([tf.constant(gradients[number])], tf.constant(0.1))
            self.moments.merge(statistics_of(tf.constant(batches[number + 1])))
            self.own.assign(float(number))

    def work(ranks):
        module = Learning()
        exchange = Exchange(ranks, [module], [module.own])
        exchange.begin()
        module.update(ranks.number)
        return module, exchange.finish({"loss": float(ranks.number)})

    found = in_threads(count, work)
    alone = [Learning() for _ in range(count)]
    for number, module in enumerate(alone):
        module.update(number)
    for number, (module, metrics) in enumerate(found):
        assert metrics == {"loss": 1.0}
        assert float(module.own) == number
        assert int(module.optimizer.steps) == 1
        for variable, *each in zip(module.weights, *(other.weights for other in alone), strict=True):
            assert float(variable) == pytest.approx(np.mean(each), rel=1e-6)
        for mine, *each in zip(module.optimizer.variables, *(o.optimizer.variables for o in alone), strict=True):
            np.testing.assert_allclose(mine.numpy(), np.mean([one.numpy() for one in each], axis=0), rtol=1e-6)
        samples = np.concatenate(batches)
        assert float(module.moments.count) == len(samples)
        np.testing.assert_allclose(module.moments.mean.numpy(), samples.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(module.moments.variance.numpy(), samples.var(axis=0), rtol=1e-12)


def _flag(name, value):
    name = name.replace("_", "-")
    if value is False:
        return [f"--no-{name}"]
    return [f"--{name}", str(value)]


@pytest.mark.slow  # `test_a_run_resumes_with_any_number_of_ranks` covers this
def test_the_same_command_gives_the_same_metrics(tmp_path):
    runs = []
    for name in ("first", "second"):
        code, output = finished(train(tmp_path / name, "--total-steps", STEPS, "--report-interval", 64))
        assert code == 0, output
        runs.append(only_run(tmp_path / name))
    first, second = (reports(run, times=False) for run in runs)
    assert first == second
    assert len(first) == UPDATES


@pytest.mark.parametrize(
    ("how", "victim", "count"),
    [
        ("killed", 1, 2),
        slow(("killed", 0, 2)),
        slow(("killed", 2, 4)),
        slow(("stopped", 0, 2)),
        slow(("stopped", 1, 2)),
        slow(("stopped", 2, 4)),
    ],
)
def test_a_lost_rank_ends_the_run_which_can_be_resumed(tmp_path, monkeypatch, how, victim, count):
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    size = ("--minibatch-size", 64 // count)
    flags = ("--total-steps", 10**7, "--report-interval", 64, "--checkpoint-interval", 640, *size)
    process = train(tmp_path / "runs", *flags, ranks=count)
    ranks = ranks_of(process, count)
    wait_for_reports(tmp_path / "runs", process, 12)
    everyone = descendants(process.pid)
    if how == "killed":
        os.kill(ranks[victim], signal.SIGKILL)
    else:
        stop_process(ranks[victim])
    code, output = finished(process, timeout=90)
    assert code == 1, output
    assert f"rank {victim} of {count}" in output, output
    wait_for_end(everyone)
    assert not list(temporary.iterdir())
    run = only_run(tmp_path / "runs")
    assert f"-m ppo train --resume {run} --ranks {count}" in output
    if how == "killed":
        return  # the next test resumes such a run
    steps = reports(run)[-1]["env_steps"]
    code, output = finished(train(tmp_path, "--resume", run, "--total-steps", steps + 640, *size, ranks=count))
    assert code == 0, output
    assert "fresh episodes" not in output
    assert reports(run)[-1]["env_steps"] >= steps + 640


@pytest.mark.slow
def test_a_run_that_is_suspended_as_a_whole_goes_on(tmp_path):
    process = train(tmp_path, "--total-steps", 10**7, "--report-interval", 64)
    wait_for_reports(tmp_path, process, 3)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(1.25 * TIMEOUT_S)  # the ranks are suspended for longer than any timeout
    number = len(reports(only_run(tmp_path)))
    os.killpg(process.pid, signal.SIGCONT)
    wait_for_reports(tmp_path, process, number + 300)
    process.send_signal(signal.SIGINT)
    code, output = finished(process)
    assert code == 128 + signal.SIGINT, output


class SignalsItsRank(gym.Wrapper):
    """At step 100 of an env, the last rank deletes a file and sends itself the signal that the file named."""

    def __init__(self):
        super().__init__(gym.make("Pendulum-v1"))
        self._steps = 0

    def step(self, action):
        self._steps += 1
        file = Path(os.environ["SIGNAL"])
        if self._steps == 100 and file.exists():
            config = json.loads(os.environ["TF_CONFIG"])
            if config["task"]["index"] == len(config["cluster"]["worker"]) - 1:
                name = file.read_text()
                file.unlink()
                os.kill(os.getpid(), signal.Signals[name])
        return super().step(action)

    def get_state(self):
        return self._steps

    def set_state(self, state):
        self._steps = state


DISTURBED = (
    "--env", "tests.ppo.test_ranks:SignalsItsRank", "--num-workers", 0, "--total-steps", STEPS,
    "--report-interval", 64, "--checkpoint-interval", 128,
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns a function that returns the finished run of some ranks that received no signal."""

    @functools.cache
    def undisturbed(ranks, *flags):
        folder = tmp_path_factory.mktemp("undisturbed")
        environment = {"SIGNAL": str(folder / "none"), **QUICKLY_COMPILED}
        code, output = finished(train(folder / "runs", *DISTURBED, *flags, ranks=ranks, environment=environment))
        assert code == 0, output
        return only_run(folder / "runs")

    return undisturbed


@pytest.mark.slow  # the next tests about lost ranks, resumed runs and the command of a restart are the quick ones
@pytest.mark.parametrize(("ranks", "name"), [(2, "SIGKILL"), (2, "SIGSTOP"), (1, "SIGKILL")])
def test_a_restarted_run_reaches_the_end_of_an_undisturbed_run(tmp_path, undisturbed, ranks, name):
    (tmp_path / "signal").write_text(name)
    environment = {"SIGNAL": str(tmp_path / "signal"), **QUICKLY_COMPILED}
    flags = (*DISTURBED, "--restarts", 1)
    code, output = finished(train(tmp_path / "restarted", *flags, ranks=ranks, environment=environment))
    assert code == 0, output
    run = only_run(tmp_path / "restarted")
    assert "restart 1 of 1: from the last checkpoint" in output
    expected = undisturbed(ranks)
    assert reports(run, times=False) == reports(expected, times=False)
    np.testing.assert_array_equal(weights_of(run), weights_of(expected))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "faults"), [("killed", 4), ("stopped", 2)])  # a stop may take 5 minutes to notice
@pytest.mark.timeout(3600)
def test_a_run_survives_faults_at_random_moments(tmp_path, how, faults):
    """`RANK_FAULTS` overrides `faults`. Some hit a rank that is starting, restoring or saving a checkpoint."""
    faults = int(os.environ.get("RANK_FAULTS") or faults)
    flags = (
        "--total-steps", faults * 8 * STEPS, "--report-interval", 64, "--checkpoint-interval", 640,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    with (tmp_path / "output.txt").open("w") as output:
        process = train(tmp_path / "disturbed", *flags, "--restarts", faults, output=output)
        before: list[int] = []
        for _ in range(faults):
            ranks = new_ranks_of(process, before)
            wait_at_random(rng, tmp_path / "disturbed")
            assert process.poll() is None, "the run ended before all faults had happened"
            victim = ranks[rng.integers(len(ranks))]
            if how == "killed":
                os.kill(victim, signal.SIGKILL)
            else:
                stop_process(victim)
            before = ranks
        assert process.wait(timeout=600) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert (tmp_path / "output.txt").read_text().count(f" of {faults}: from ") == faults
    code, text = finished(train(tmp_path / "undisturbed", *flags), timeout=600)
    assert code == 0, text
    run = max((tmp_path / "disturbed").iterdir())  # a fault before the first checkpoint leaves an older folder
    expected = only_run(tmp_path / "undisturbed")
    assert reports(run, times=False) == reports(expected, times=False)
    np.testing.assert_array_equal(weights_of(run), weights_of(expected))


def wait_at_random(rng, folder):
    """Waits up to 8 seconds, so that the ranks may still be starting, or for up to 30 more reports."""
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 8))
        return

    def updates():
        return max((len(file.read_text().splitlines()) for file in folder.glob("*/metrics.jsonl")), default=0)

    wanted, deadline = updates() + rng.integers(30), time.monotonic() + 60
    while updates() < wanted and time.monotonic() < deadline:
        time.sleep(0.01)


def new_ranks_of(process, before):
    """Waits until the launcher has replaced the ranks with the given pids, and returns the pids of the new ones.

    Ranks that start wait for a stopped one for ten timeouts.
    """
    while len(children := descendants(process.pid)[:2]) < 2 or set(children) & set(before):
        assert process.poll() is None, "the ranks were not started again"
        time.sleep(0.05)
    return children


def test_a_run_with_unusable_settings_is_not_restarted(tmp_path):
    code, output = finished(train(tmp_path, "--restarts", 3, "--env", "NoSuchEnv-v0"))
    assert code == 2, output
    assert "restart 1" not in output


def start_in_slurm(folder, *flags, job, seeds=(0, 0)):
    """Starts two tasks of a Slurm job step on this machine, with these seeds."""
    step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(job)}
    words = [sys.executable, "-m", "ppo", "train", *FLAGS, "--logdir", folder, "--ranks", "slurm", *flags]
    return [
        subprocess.Popen(
            [*map(str, words), "--seed", str(seed)], env={**os.environ, **step, "SLURM_PROCID": str(number)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number, seed in enumerate(seeds)
    ]  # fmt: skip


@pytest.mark.slow  # `test_ranks_with_different_settings_end_with_an_error_on_each` starts such tasks, too
def test_the_tasks_of_a_slurm_job_step_are_ranks(tmp_path):
    tasks = start_in_slurm(tmp_path, "--total-steps", STEPS, job=os.getpid())
    outputs = [finished(task) for task in tasks]
    assert [code for code, _ in outputs] == [0, 0], outputs
    assert "rank 1 of 2 waits" in outputs[1][1]
    assert (only_run(tmp_path) / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("n[9-10],gpu", "n9"), ("gpu1,n[2-3]", "gpu1"), ("n[007,012-14]", "n007"), ("r[1-2]n[04-5]-ib,x", "r1n04-ib")],
)
def test_rank_0_of_a_slurm_job_step_is_on_the_first_host(monkeypatch, hosts, first):
    step = {"STEP_NODELIST": hosts, "STEP_NUM_TASKS": "5", "JOB_ID": "64", "PROCID": "3"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("TF_CONFIG", "")
    use_slurm()
    found = json.loads(os.environ["TF_CONFIG"])
    assert found["cluster"]["worker"][0] == f"{first}:16448"
    assert found["task"] == {"type": "worker", "index": 3}
    assert number_of_ranks() == 5 and not is_first_rank()


def test_without_a_slurm_job_step_there_are_no_slurm_ranks(tmp_path):
    with pytest.raises(ConfigError, match="needs the environment of a Slurm job step"):
        command("train", [*FLAGS, "--logdir", tmp_path, "--ranks", "slurm"])


def weights_of(run):
    return np.concatenate([variable.numpy().ravel() for variable in load_agent(Run(run), print).variables])


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [((), (1,)), slow(((), (2,))), slow((("--recurrent", "gru"), (2, 1)))],
)
def test_a_run_resumes_with_any_number_of_ranks(tmp_path, monkeypatch, capfd, undisturbed, flags, numbers):
    """With the same number, it repeats the rest of an undisturbed run; with another, the episodes continue."""
    monkeypatch.setenv("SIGNAL", str(tmp_path / "none"))
    whole = undisturbed(2, *flags)
    for ranks in numbers:
        run = rewound(whole, tmp_path / f"resumed-{ranks}")
        words = ["--resume", run, *DISTURBED[:2], "--trust-modules"]
        if ranks == 1:
            assert command("train", [*FLAGS, "--logdir", tmp_path, "--ranks", 1, *words]) == 0
            output = "".join(capfd.readouterr())
        else:
            code, output = finished(train(tmp_path, *words, ranks=ranks))
            assert code == 0, output
        assert "run folder: " in output and "fresh episodes" not in output
        assert [one["episodes"] for one in reports(run)] == [one["episodes"] for one in reports(whole)]
        if ranks == 2:
            np.testing.assert_array_equal(weights_of(run), weights_of(whole))


@pytest.mark.slow  # `test_a_callback_of_rank_0_ends_the_run_on_all_ranks` is the quick version
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_ranks_after_an_update(tmp_path, number):
    process = train(tmp_path, "--total-steps", 10**7, "--report-interval", 64, "--num-workers", 0)
    ranks = ranks_of(process)
    wait_for_reports(tmp_path, process)
    process.send_signal(number)
    code, output = finished(process, timeout=90)
    assert code == 128 + number, output
    assert f"train --resume {only_run(tmp_path)} --ranks 2" in output
    wait_for_end(ranks)


@pytest.mark.parametrize("training", [False, slow((True,))])
def test_ranks_end_with_their_launcher(tmp_path, training):
    process = train(tmp_path, "--total-steps", 10**7, "--report-interval", 64)
    ranks = ranks_of(process)
    if training:
        wait_for_reports(tmp_path, process)
    process.kill()
    wait_for_end(ranks)
    process.communicate()


@pytest.mark.slow
def test_the_error_of_a_rank_is_shown(tmp_path):
    flags = ("--env", "tests.ppo.test_ranks:FailsOnOneRank", "--total-steps", 10**7, "--num-workers", 0)
    code, output = finished(train(tmp_path, *flags))
    assert code == 1, output
    assert "this env fails" in output
    assert "on rank 1, whose env 0 is env 2." in output
    assert "rank 1 of 2" in output
    assert "no checkpoint yet" in output and "to resume:" not in output


def failing_ranks(monkeypatch, code, path=None, signals=()):
    """Makes all launched ranks fail; returns a list to which each launch adds its arguments and its number of ranks.

    Args:
        monkeypatch: The fixture.
        code: The exit code.
        path: Folder of a run with a checkpoint, or None.
        signals: The signals that arrive while the ranks run.
    """
    launches = []

    def fail(words, count, note):
        launches.append(([*words], count))
        if path is not None:
            note.write_text(path)
        return code, True

    monkeypatch.setattr(launch, "_run", fail)
    monkeypatch.setattr(cli, "received", lambda: list(signals))
    return launches


def resumable(folder):
    """Returns a run that ranks can resume."""
    box = gym.spaces.Box(-1, 1, (3,))
    return str(untrained_run(folder, box, box, given=False, **SETTINGS).path)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_restart_resumes_the_new_run_or_repeats_the_command_that_resumes_a_run(
    tmp_path, monkeypatch, capsys, resumes
):
    flags = ["--ranks", "2", "--restarts", "1"]
    words = ["--resume", resumable(tmp_path), "--total-steps", "5000"] if resumes else ["--env", "CartPole-v1"]
    launches = failing_ranks(monkeypatch, 1, path="runs/NEW")
    assert command("train", [*words, *flags]) == 1
    again = [*words, *flags] if resumes else ["--resume", "runs/NEW", *flags]
    assert launches == [([*words, *flags], 2), (again, 2)]
    assert f"-m ppo train {' '.join(again)}\n" in capsys.readouterr().err


def test_the_command_that_resumes_a_run_allows_the_imports_that_the_run_needs(monkeypatch, capsys):
    failing_ranks(monkeypatch, 1, path="runs/NEW")
    words = ["--env", "tests.ppo.test_ranks:FailsOnOneRank", "--num-workers", "0", "--ranks", "2"]
    assert command("train", words) == 1
    assert "--resume runs/NEW --trust-modules --ranks 2\n" in capsys.readouterr().err


def test_a_command_that_cannot_succeed_is_not_repeated(tmp_path, monkeypatch, capsys):
    launches = failing_ranks(monkeypatch, launch.UNUSABLE)
    assert command("train", ["--resume", resumable(tmp_path), "--ranks", "2", "--restarts", "3"]) == 2
    assert len(launches) == 1 and not capsys.readouterr().err


def test_a_run_that_a_signal_stops_is_not_restarted(monkeypatch, capsys):
    launches = failing_ranks(monkeypatch, 1, path="runs/NEW", signals=[signal.SIGTERM])
    assert command("train", ["--env", "CartPole-v1", "--ranks", "2", "--restarts", "3"]) == 1
    assert len(launches) == 1 and "to resume:" in capsys.readouterr().err


def test_a_stopped_slurm_run_says_how_to_resume_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ppo.cli.train.use_slurm", lambda: None)
    monkeypatch.setattr(ppo, "train", lambda *_, **options: ppo.Result(tmp_path, 64, None))
    command("train", ["--env", "CartPole-v1", "--ranks", "slurm"])
    assert re.search(
        rf"to resume:   srun \S+ -m ppo train --resume {tmp_path} --ranks slurm\n", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        ([launch.LOST], [None, 1], 1),
        ([launch.LOST], [None, -signal.SIGKILL], 1),
        ([1], [-signal.SIGKILL], 1),
        ([None], [launch.LOST], 1),  # the first rank is stopped
        ([0], [None], 1),
        ([0], [None, 0], None),
    ],
)
def test_the_rank_that_caused_a_failure_is_named(monkeypatch, first, second, cause):
    """A rank that has lost another rank is the cause only if no other rank fails within the grace period."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    ranks = [
        SimpleNamespace(poll=itertools.chain(codes, itertools.repeat(codes[-1])).__next__) for codes in (first, second)
    ]
    assert launch._wait(ranks) == cause


def test_time_during_which_the_launcher_is_suspended_does_not_count_as_grace(monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(0, 60).__next__, sleep=time.sleep)  # suspended between polls
    monkeypatch.setattr(launch, "time", clock)
    polls = [itertools.chain(codes, itertools.repeat(0)).__next__ for codes in ([0], [None, None, None])]
    assert launch._wait([SimpleNamespace(poll=poll) for poll in polls]) is None


class FailsOnOneRank(gym.Wrapper):
    """An env that fails in the second rank."""

    def __init__(self):
        super().__init__(gym.make("Pendulum-v1"))

    def step(self, action):
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            raise ValueError("this env fails")
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("described_by", ["Slurm", "TF_CONFIG"])
def test_ranks_with_different_settings_end_with_an_error_on_each(tmp_path, described_by):
    if described_by == "Slurm":
        processes = start_in_slurm(tmp_path, "--num-workers", 0, job=os.getpid(), seeds=(0, 1))
    else:
        processes = []
        for number, addresses in enumerate([free_addresses(2)] * 2):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
            words = [sys.executable, "-m", "ppo", "train", *FLAGS, "--logdir", tmp_path, "--seed", number]
            processes.append(
                subprocess.Popen(
                    list(map(str, words)), env={**os.environ, "TF_CONFIG": json.dumps(task)}, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT, text=True,
                )
            )  # fmt: skip
    for process in processes:
        code, output = finished(process)
        assert code == 2, output
        assert "ranks 0 and 1 differ: seed is 0 and 1" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-envs", "5", "--minibatch-size", "20"], "2 ranks cannot share num_envs=5 equally"),
        (["--num-workers", "1"], "2 ranks cannot share num_workers=1 equally"),
        (["--ranks", "0"], "there cannot be 0 ranks"),
    ],
)
def test_unequal_shares_are_an_error(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        command("train", [*FLAGS, "--logdir", tmp_path, "--ranks", 2, *flags])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "unusable"),
        ('{"cluster": {"worker": ["a:1", "b:2"]}}', "is not in the cluster"),
        ('{"cluster": {"worker": ["a:1"], "ps": ["b:2"]}}', "jobs ['ps']"),
        ("[]", "unusable"),
    ],
)
def test_unusable_cluster_specs_are_errors(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError) as error:
        number_of_ranks()
    assert message in str(error.value)


def test_a_cluster_of_one_is_an_ordinary_run(monkeypatch):
    task = {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    assert number_of_ranks() == 1
    assert is_first_rank()


def exchanged(ranks):
    """Exchanges values of many sizes; returns what this rank has received."""
    found = []
    for size in (3, 20_000, 3_000_000, 0):
        values = np.random.default_rng([size, ranks.number]).standard_normal(size)
        found += [ranks.sum(values), ranks.gathered(values[:10].reshape(-1, 1))]
    for length in (0, 5, 3_000_000, 5):
        found += [np.frombuffer(text.encode(), np.uint8) for text in ranks.texts(str(ranks.number) * length)]
    return [*found, *(np.array(ranks.any(condition)) for condition in (ranks.number == 1, False))]


@pytest.mark.parametrize("count", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_exchange_values_of_any_size(count):
    addresses = free_addresses(count)

    def attend(number):
        with closing(Cluster(addresses, number, start_s=30, timeout_s=8)) as ranks:
            return exchanged(ranks)

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(attend, range(count)))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
    mine = iter(found[0])
    for size in (3, 20_000, 3_000_000, 0):
        values = [np.random.default_rng([size, r]).standard_normal(size) for r in range(count)]
        np.testing.assert_allclose(next(mine), np.sum(values, axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(next(mine), np.stack([one[:10].reshape(-1, 1) for one in values]))
    for length in (0, 5, 3_000_000, 5):
        assert [next(mine).tobytes().decode() for _ in range(count)] == [str(r) * length for r in range(count)]
    assert [bool(value) for value in mine] == [True, False]


FINISHED = """
import sys
import ppo

class Stops(ppo.Callback):
    def on_update(self, report):
        if report["env_steps"] == 128:
            self.log("custom", 5)
            self.stop("enough")

config = ppo.Config(env="Pendulum-v1", num_envs=4, num_steps=16, minibatch_size=32, eval_episodes=2)
result = ppo.train(config, logdir=sys.argv[1], callbacks=Stops(), progress=False)
print(result.env_steps, result.stopped, len(result.evaluation.returns))
"""


@pytest.mark.slow  # `test_a_callback_of_rank_0_ends_the_run_on_all_ranks` is the quick version
def test_a_callback_finishes_a_run_of_several_ranks(tmp_path):
    assert outputs_of(2, FINISHED, tmp_path) == ["128 enough 2\n"] * 2
    (path,) = tmp_path.iterdir()
    (row,) = reports(path)
    assert (row["env_steps"], row["custom"]) == (128, 5.0)
    assert (path / "checkpoints" / "step_000000000128").is_dir()


class Ends(ppo.Callback):
    """Ends a run after two updates."""

    def __init__(self, method, finishes):
        self._finishes = finishes
        setattr(self, method, self._end)

    def _end(self, first, *_):
        if (first["env_steps"] if isinstance(first, dict) else first) == 128:
            if not self._finishes:
                raise ppo.StopTraining
            self.stop("enough")


@pytest.mark.parametrize(
    ("method", "total_steps", "finishes"),
    [
        ("on_update", 192, True),
        pytest.param("on_report", 192, False, marks=pytest.mark.slow),
        ("on_checkpoint", 128, False),
    ],
)
def test_a_callback_of_rank_0_ends_the_run_on_all_ranks(tmp_path, method, total_steps, finishes):
    intervals = {"report_interval": 64, "checkpoint_interval": 64}
    config = Config(**SETTINGS, **intervals, num_workers=0, total_steps=total_steps)

    def work(ranks):
        run = Run.create(tmp_path / str(ranks.number), "run", config)
        callbacks = Callbacks([Ends(method, finishes)] if ranks.number == 0 else [])
        return run_training(config, run, callbacks, ranks=ranks)

    for result in in_threads(2, work):
        assert (result.env_steps, result.stopped) == (128, "enough" if finishes else None)
        assert result.interrupted is not finishes


def outputs_of(count, script, *arguments):
    """Runs a script as each of `count` ranks; returns what they print."""
    addresses = free_addresses(count)
    ranks = []
    for number in range(count):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
        command = [sys.executable, "-c", script, *map(str, arguments)]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count
    return outputs


def free_addresses(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def test_ranks_connect_in_any_order_and_ignore_strangers():
    addresses, how = free_addresses(5), {"start_s": 30, "timeout_s": 8}
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(Cluster, addresses, 0, **how)
        with connected(addresses[0]) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            ranks = {number: Cluster(addresses, number, **how) for number in (3, 1, 4, 2)}
            ranks[0] = first.result()
        answers = [pool.submit(ranks[number].texts, str(number)) for number in range(5)]
        assert [answer.result() for answer in answers] == [["0", "1", "2", "3", "4"]] * 5
    for rank in ranks.values():
        rank.close()


def connected(address):
    """Returns a connection to an address at which a rank is about to listen."""
    host, port = address.split(":")
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)))
        time.sleep(0.01)


def test_a_rank_names_the_ranks_that_have_not_started():
    addresses = free_addresses(3)
    late = f"rank 0 has waited 1 s for rank 1 \\({addresses[1]}\\), rank 2 \\({addresses[2]}\\)"
    with pytest.raises(ConnectionError, match=late):
        Cluster(addresses, 0, start_s=1, timeout_s=8)
    with pytest.raises(ConnectionError, match=f"rank 2 has waited 1 s for rank 0 \\({addresses[0]}\\)"):
        Cluster(addresses, 2, start_s=1, timeout_s=8)


def test_a_busy_rank_is_not_lost_and_a_silent_one_is():
    """All ranks learn which rank is lost, even if it is not the one whose message they wait for."""
    addresses = free_addresses(3)
    with ThreadPoolExecutor(3) as pool:
        starting = [pool.submit(Cluster, addresses, number, start_s=30, timeout_s=0.8) for number in range(3)]
        first, second, third = (one.result(30) for one in starting)
        answers = [pool.submit(rank.texts, "") for rank in (first, second)]
        time.sleep(3)  # several timeouts, during which the third rank only says that it lives
        assert not any(answer.done() for answer in answers)
        third.texts("")
        assert [answer.result(30) for answer in answers] == [["", "", ""]] * 2
        third._closed.set()  # it falls silent, but its connection stays open
        answers = [pool.submit(rank.texts, "") for rank in (first, second)]
        for answer in answers:
            with pytest.raises(RankLost, match="rank 2 of 3"):
                answer.result(30)
        for rank in (first, second, third):
            rank.close()


@pytest.mark.slow
def test_a_rank_that_does_not_read_yet_is_not_lost():
    addresses = free_addresses(2)
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(Cluster, addresses, number, start_s=30, timeout_s=0.8) for number in range(2)]
        first, second = (one.result(30) for one in starting)
        text = "x" * 50_000_000  # more than the connection can hold
        answer = pool.submit(second.texts, text)
        time.sleep(3)  # several timeouts, during which the first rank computes
        assert not answer.done()
        assert first.texts("") == ["", text] == answer.result(30)
        for rank in (first, second):
            rank.close()


def test_a_port_in_use_is_an_error():
    (address,) = free_addresses(1)
    message = f"rank 0 cannot listen at {address}: .*in use"
    with socket.create_server(("127.0.0.1", int(address.split(":")[1]))), pytest.raises(ConfigError, match=message):
        Cluster([address, "127.0.0.1:1"], 0, start_s=1, timeout_s=8)
    with pytest.raises(ConfigError, match="'nowhere' is not a valid rank address"):
        Cluster(["nowhere", address], 0, start_s=1, timeout_s=8)
