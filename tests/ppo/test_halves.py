"""Tests of --halves: two graph loops step the halves concurrently, and the result is the same as without halves."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

import ppo
import vecenv
from ppo.callbacks import Callback
from ppo.config import Config, ConfigError
from ppo.envs import training_envs, wants_halves
from ppo.run.folder import Run
from ppo.trainer import Trainer
from vecenv.mujoco import Ant

SMALL = Config(env="Ant-v5", num_envs=6, num_steps=8, minibatch_size=16, epochs=2, total_steps=10**6, halves=True)


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    """Pretends that TensorFlow has two threads. It has only one in these tests, which is slow but correct."""
    monkeypatch.setattr("ppo.envs.num_threads", lambda: 2)


def parameters(folder, config, updates=3):
    with training_envs(config, None) as envs:
        trainer = Trainer(config, Run.create(folder, "run", config), envs, Callback())
        trainer.begin()
        for _ in range(updates):
            report = trainer.iterate()
        found = [variable.numpy() for variable in trainer.agent.variables]
        trainer.close()
        return len(envs.groups), report["kl"], found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"env": "Hopper-v5", "recurrent": "gru", "frame_stack": 3},
        pytest.param({"num_envs": 64, "minibatch_size": 128}, marks=pytest.mark.slow),
        pytest.param({"env": "examples.catch:Catch-v0", "recurrent": "gru", "num_workers": 0}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 0}, marks=pytest.mark.slow),
    ],
)
def test_halves_learn_the_same_as_one_group(tmp_path, settings):
    apart, together = (
        parameters(tmp_path, dataclasses.replace(SMALL, **settings, halves=halves)) for halves in (True, False)
    )
    assert (apart[0], together[0]) == (2, 1)
    for one, other in zip(apart[2], together[2], strict=True):
        # A matrix product with half as many rows may differ in the last bit, and Adam amplifies the difference.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert apart[1] == pytest.approx(together[1], rel=1e-3) and apart[1] > 0


def test_an_interrupted_run_in_halves_resumes_exactly(tmp_path):
    class Stop(ppo.Callback):
        def on_update(self, report):
            if report["env_steps"] == 96:
                raise ppo.StopTraining

    config = dataclasses.replace(SMALL, total_steps=192, eval_episodes=1)
    whole = ppo.train(config, logdir=tmp_path)
    cut = ppo.train(config, callbacks=Stop(), logdir=tmp_path)
    assert cut.interrupted
    resumed = ppo.resume(cut.path)
    assert resumed.evaluation.summary() == whole.evaluation.summary()


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, False),
        ({"env": "HalfCheetah-v5", "halves": True}, True),
        ({"halves": False}, False),
    ],
)
def test_halves_are_used_where_they_are_requested(settings, wanted):
    assert wants_halves(dataclasses.replace(SMALL, **{"halves": None, **settings})) == wanted


@pytest.mark.parametrize("settings", [{"overlap": True}, {"num_workers": 2}, {"num_envs": 1, "minibatch_size": 8}])
def test_impossible_halves_are_rejected(settings):
    with pytest.raises(ConfigError, match="halves=True needs"):
        dataclasses.replace(SMALL, **settings)


def test_halves_of_envs_in_workers_are_rejected(tmp_path):
    config = dataclasses.replace(SMALL, env="CartPole-v1")
    with pytest.raises(ConfigError, match="halves=True: num_groups=2 needs envs that this process steps"):
        training_envs(config, None)


def test_with_one_thread_halves_are_not_used_and_requesting_them_is_an_error(monkeypatch):
    monkeypatch.setattr("ppo.envs.num_threads", lambda: 1)
    with training_envs(dataclasses.replace(SMALL, halves=None), None) as envs:
        assert len(envs.groups) == 1
    with pytest.raises(ConfigError, match="TF_NUM_INTEROP_THREADS=2"):
        training_envs(SMALL, None)


TWO_LOOPS = """
import threading, sys
from ppo.cli import load_tensorflow
load_tensorflow(halves=True)
import ppo, vecenv
from ppo.callbacks import Callback
from ppo.envs import num_threads
from vecenv.mujoco import TASKS, Hopper
assert num_threads() == 2
both, raised = threading.Barrier(2), threading.Event()
config = ppo.Config(env="Hopper-v5", num_envs=4, num_steps=8, minibatch_size=16, halves=True, total_steps=32,
                    eval_episodes=1)
"""

MEETING = """
class Meeting(Hopper):
    def before_step(self):
        if self.num_envs == 2:  # not in the evaluation
            both.wait(timeout=20)  # for the step of the other half
        return super().before_step()

TASKS["Hopper-v5"] = Meeting
assert ppo.train(config, logdir=sys.argv[1]).env_steps == 32
"""

RAISING = """
class Raising(Hopper):
    def before_step(self):
        if not both.wait(timeout=20):
            raise OSError("no torque")
        return super().before_step()

class Late(vecenv.AsyncVectorEnv):
    '''One half starts another step after the other half has failed.'''

    def step_group(self, share, slot, actions=None):
        try:
            super().step_group(share, slot, actions)
        except OSError:
            raised.set()
            raise
        assert raised.wait(timeout=20)
        super().step_group(share, slot, actions)

TASKS["Hopper-v5"] = Raising
envs = Late(vecenv.Batched(Raising, 4), num_workers=0, num_groups=2, **ppo.vector_options(config))
try:
    ppo.train(config, envs, logdir=sys.argv[1])
except OSError as error:
    assert "during step" in error.__notes__[0], error.__notes__
    print(error)
"""


def in_two_loops(code, folder):
    environment = {name: value for name, value in os.environ.items() if name != "TF_NUM_INTEROP_THREADS"}
    words = [sys.executable, "-c", TWO_LOOPS + code, str(folder)]
    return subprocess.run(words, env=environment, check=True, timeout=120, capture_output=True, text=True).stdout


def test_the_halves_step_concurrently(tmp_path):
    in_two_loops(MEETING, tmp_path)


def test_an_error_in_one_half_ends_the_run_whatever_the_other_half_does(tmp_path):
    assert "no torque" in in_two_loops(RAISING, tmp_path)


def test_envs_passed_by_the_user_step_in_groups_only_if_they_were_built_with_groups(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"halves=True requires an env id"):
        training_envs(SMALL, lambda: None)
    options = ppo.vector_options(SMALL)
    with vecenv.AsyncVectorEnv(vecenv.Batched(Ant, 6), num_workers=0, num_groups=2, **options) as envs:
        training_envs(SMALL, envs)
        monkeypatch.setattr("ppo.envs.num_threads", lambda: 1)
        with pytest.raises(ConfigError, match="the vector env has groups, but TensorFlow has one inter-op thread"):
            training_envs(SMALL, envs)


@pytest.mark.slow
def test_a_run_in_halves_can_be_resumed_without_halves(tmp_path):
    config = dataclasses.replace(SMALL, total_steps=96, eval_episodes=1)
    run = ppo.train(config, logdir=tmp_path)
    assert ppo.resume(run.path, total_steps=144, halves=False, num_workers=2).env_steps == 144
