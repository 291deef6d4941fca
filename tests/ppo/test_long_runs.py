"""Tests that long runs survive interruptions, kills, full disks and invalid numbers."""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np
import pytest

import ppo
import vecenv
from ppo.run import resume
from tests.helpers import limited_file_sizes
from tests.ppo.envs import TurnsBad
from tests.ppo.runs import QUICKLY_COMPILED, checkpoints, reports, variables

CONFIG = ppo.Config(
    total_steps=8 * 128,
    num_envs=4,
    num_steps=32,
    minibatch_size=64,
    epochs=2,
    checkpoint_interval=10**9,
    report_interval=128,
    eval_episodes=1,
)


class StopAfter(ppo.Callback):
    def __init__(self, env_steps):
        self.env_steps, self.warnings = env_steps, []

    def on_update(self, report):
        if report["env_steps"] == self.env_steps:
            raise ppo.StopTraining

    def on_warning(self, message):
        self.warnings.append(message)


FRAMES = {"env": "Pendulum-v1", "num_workers": 1, "wrappers": ('FrameStackObservation:{"stack_size": 3}',)}
SETTINGS = [
    {"env": "Pendulum-v1", "num_workers": 2},
    {"env": "CartPole-v1", "recurrent": "gru"},
    {"env": "Hopper-v5"},
    {"env": "Taxi-v4", "info_masks": True},
    {"env": "Ant-v5", "num_workers": 2},
]
SLOW = [pytest.mark.slow, pytest.mark.xla]


@pytest.mark.parametrize(
    ("settings", "stops"),
    [(FRAMES, [3]), *(pytest.param(settings, [3, 6], marks=SLOW) for settings in SETTINGS)],
    ids=str,
)
def test_an_interrupted_run_reaches_the_same_parameters_as_an_uninterrupted_run(tmp_path, settings, stops):
    config = dataclasses.replace(CONFIG, **settings)
    whole = ppo.train(config, logdir=tmp_path / "whole")
    callback = StopAfter(stops[0] * 128)
    part = ppo.train(config, logdir=tmp_path / "part", callbacks=[callback])
    for stop in stops[1:]:
        callback.env_steps = stop * 128
        ppo.resume(part.path, callbacks=[callback])
    callback.env_steps = None
    resumed = ppo.resume(part.path, callbacks=[callback])
    assert not callback.warnings
    expected = reports(whole.path, times=False)
    assert reports(resumed.path, times=False) == expected and len(expected) == 8
    one, other = variables(whole.path), variables(resumed.path)
    assert one.keys() == other.keys() and len(one) > 20
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)
    np.testing.assert_array_equal(whole.evaluation.returns, resumed.evaluation.returns)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Returns the folder of a run that a callback stopped after three updates."""
    config = dataclasses.replace(CONFIG, env="CartPole-v1", checkpoint_interval=128)
    return ppo.train(config, logdir=tmp_path_factory.mktemp("stopped"), callbacks=[StopAfter(3 * 128)]).path


def test_training_progress_survives_damaged_env_states(tmp_path, stopped):
    callback, path = StopAfter(4 * 128), shutil.copytree(stopped, tmp_path / "run")
    (checkpoints(path)[-1] / "envs.npz").write_bytes(b"damaged")
    result = ppo.resume(path, callbacks=[callback])
    assert result.env_steps == 4 * 128 and "envs.npz holds no env states" in callback.warnings[0]
    assert "because their states cannot be restored" in callback.warnings[0]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1e-9, [False, False, True]),  # the stop rewrote the last checkpoint
        pytest.param(1e9, [True, True, True], marks=pytest.mark.slow),
    ],
)
def test_env_states_that_are_slow_to_save_are_saved_rarely_and_at_the_end(tmp_path, monkeypatch, share, expected):
    monkeypatch.setattr(resume, "MAX_STATES_S", 0.0)
    monkeypatch.setattr(resume, "STATES_SHARE", share)
    callback = StopAfter(4 * 128)
    config = dataclasses.replace(CONFIG, env="CartPole-v1", checkpoint_interval=128)
    path = ppo.train(config, logdir=tmp_path, callbacks=[callback]).path
    states = [(folder / "envs.npz").exists() for folder in checkpoints(path)]
    assert states == expected


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_envs_whose_state_cannot_be_restored_begin_fresh_episodes_which_each_run_says_once(tmp_path, num_workers):
    config = dataclasses.replace(CONFIG, env="Hopper-v5", backend="python", num_workers=num_workers)
    callback = StopAfter(3 * 128)
    part = ppo.train(config, logdir=tmp_path, callbacks=[callback])
    before = variables(part.path)
    assert len(callback.warnings) == 1
    assert re.search("checkpoints do not hold .*HopperEnv does not define get_state", callback.warnings.pop())
    callback.env_steps = 4 * 128
    ppo.resume(part.path, callbacks=[callback])
    assert len(callback.warnings) == 1
    assert re.search("the envs begin fresh episodes.*HopperEnv does not define get_state", callback.warnings[0])
    name = next(name for name in before if "optimizers/0/steps" in name)
    assert variables(part.path)[name] == before[name] / 3 * 4  # the learner continued from its checkpoint


# Kills.

COMMAND = [sys.executable, "-m", "ppo", "train", "--env", "CartPole-v1", "--num-envs", "4", "--num-steps", "16",
           "--minibatch-size", "32", "--epochs", "2", "--total-steps", "100000000", "--checkpoint-interval", "64",
           "--report-interval", "64", "--num-workers", "2"]  # fmt: skip
QUICKLY = {**os.environ, **QUICKLY_COMPILED}


def newest(run):
    found = checkpoints(run) if (run / "config.json").exists() else []
    return int(found[-1].name.split("_")[1]) if found else 0


@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_a_run_killed_at_any_moment_can_be_resumed(tmp_path, kills):
    """With a checkpoint after each update, most kills interrupt the writing of a checkpoint."""
    rng, run, before = random.Random(kills), None, 0
    for _ in range(kills):
        words = ["--logdir", str(tmp_path)] if run is None else ["--logdir", str(tmp_path), "--resume", str(run)]
        log = (tmp_path / "log.txt").open("w") if tmp_path.exists() else None
        process = subprocess.Popen(
            [*COMMAND, *words], stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=QUICKLY
        )
        while run is None or newest(run) <= before:  # each attempt must make progress
            assert process.poll() is None, (tmp_path / "log.txt").read_text()
            run = run or next((path.parent for path in tmp_path.glob("*/checkpoints")), None)
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1))
        os.killpg(process.pid, signal.SIGKILL) if rng.random() < 0.5 else process.kill()
        process.wait()
        before = newest(run)
    stop = StopAfter(newest(run) + 64)
    assert ppo.resume(run, callbacks=[stop]).env_steps == stop.env_steps
    steps = [row["env_steps"] for row in reports(run)]
    assert steps == sorted(set(steps))


# A full disk. A limit on file sizes stands in for it: a write fails when the file is half written.


class Limits(ppo.Callback):
    """Limits the sizes of files after 128 env-steps."""

    def __init__(self, limit, stack):
        self.limit, self.stack = limit, stack

    def on_update(self, report):
        if report["env_steps"] == 128:
            self.stack.enter_context(limited_file_sizes(self.limit))


@pytest.mark.parametrize("limit", [3000, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 20_000))])
def test_a_full_disk_is_an_error_that_keeps_the_last_good_checkpoint(tmp_path, limit):
    config = dataclasses.replace(CONFIG, env="CartPole-v1", total_steps=10**6, num_workers=2, checkpoint_interval=128)
    error = pytest.raises(ppo.RunError, match=r"cannot write .*File too large")
    with error, ExitStack() as stack:
        ppo.train(config, logdir=tmp_path, callbacks=Limits(limit, stack), progress=False)
    (run,) = tmp_path.iterdir()
    last = newest(run)
    assert last >= 128
    stop = StopAfter(last + 128)
    assert ppo.resume(run, callbacks=[stop]).env_steps == stop.env_steps
    assert not stop.warnings


# A deleted run folder.


class Deletes(ppo.Callback):
    """Deletes or moves the log folder after 128 env-steps, and counts the updates that follow."""

    def __init__(self, logdir, moved=False):
        self.logdir, self.moved, self.updates = logdir, moved, 0

    def on_update(self, report):
        self.updates += report["env_steps"] > 128
        if report["env_steps"] == 128:
            self.logdir.rename(self.logdir.with_name("moved")) if self.moved else shutil.rmtree(self.logdir)


class Stops(ppo.Callback):
    def on_update(self, report):
        if report["env_steps"] == 256:
            raise ppo.StopTraining


NEVER = 10**9


@pytest.mark.parametrize("moved", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("settings", "stop"),
    [
        ({"report_interval": 128}, ()),
        ({"report_interval": NEVER, "checkpoint_interval": 128}, ()),
        pytest.param({"report_interval": NEVER, "eval_interval": 128}, (), marks=pytest.mark.slow),
        ({"report_interval": NEVER}, (Stops(),)),
    ],
    ids=["report", "checkpoint", "evaluation", "stop"],
)
def test_a_run_whose_folder_is_gone_ends_at_its_next_write(tmp_path, settings, stop, moved):
    config = dataclasses.replace(CONFIG, env="CartPole-v1", num_workers=0, **settings)
    logdir = tmp_path / "runs"
    deletes = Deletes(logdir, moved)
    with pytest.raises(ppo.RunError, match=r"the run folder .*/runs/\d+-.* is gone: it was deleted or moved") as caught:
        ppo.train(config, logdir=logdir, callbacks=[deletes, *stop])
    assert not getattr(caught.value, "__notes__", [])  # the error says everything
    assert not logdir.exists() and deletes.updates == len(stop)


# Invalid numbers.


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reward", r"env 2 returned reward inf at step 5 of the rollout that began after 128 env-steps"),
        ("observation", r"env 2 returned nan in its final observation at \['place'\] at step 5 of the rollout"),
    ],
)
@pytest.mark.parametrize("checked_by", ["engine", pytest.param("trainer", marks=pytest.mark.slow)])
def test_training_stops_before_it_uses_a_value_that_is_not_finite(tmp_path, fault, message, checked_by):
    config = dataclasses.replace(CONFIG, checkpoint_interval=128)
    envs = [lambda i=i: TurnsBad(fault if i == 2 else None) for i in range(4)]
    if checked_by == "trainer":
        options = {**ppo.vector_options(config), "finite_observations": False}
        with vecenv.SyncVectorEnv(envs, **options) as vector, pytest.raises(ppo.TrainingDiverged, match=message):
            ppo.train(config, vector, logdir=tmp_path)
    else:
        with pytest.raises((ppo.TrainingDiverged, vecenv.EnvError)) as caught:
            ppo.train(config, envs, logdir=tmp_path)
        text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "env 2" in text and "step 5 of the rollout that began after 128 env-steps" in text
    (run,) = tmp_path.iterdir()
    assert newest(run) == 128
    assert all(np.isfinite(values).all() for values in variables(run).values() if values.dtype.kind == "f")


@pytest.mark.slow
def test_the_error_for_a_mask_that_forbids_every_action_names_the_env(tmp_path):
    class Stuck(TurnsBad):
        def step(self, action):
            observation, reward, _, _, info = super().step(action)
            return observation, reward, False, False, info

    envs = [lambda i=i: Stuck("mask" if i == 1 else None) for i in range(4)]
    with pytest.raises(ppo.NothingAllowed, match="env 1 forbade every action in its action_mask at step 6"):
        ppo.train(CONFIG, envs, logdir=tmp_path)
    # No action follows the end of an episode, so the mask may forbid every action there.
    envs = [lambda: TurnsBad("mask")] * 4
    assert not ppo.train(CONFIG, envs, logdir=tmp_path).interrupted


def test_a_checkpoint_of_another_version_is_an_error_that_says_so(tmp_path, stopped):
    run = shutil.copytree(stopped, tmp_path / "run")
    file = checkpoints(run)[-1] / "progress.json"
    values = json.loads(file.read_text())
    del values["episodes"]
    file.write_text(json.dumps(values))
    with pytest.raises(ppo.RunError, match=r"lacks 'episodes', so it comes from another version of ppo: use"):
        ppo.resume(run, progress=False)
