"""With halves, envs and all that is learnt are as without; two loops step them at the same time."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import ppo
import vecenv
from ppo import halves
from ppo.callbacks import Callback
from ppo.config import Config, ConfigError
from ppo.envs import training_envs
from ppo.loop import Trainer
from ppo.run import Run
from vecenv.mujoco import Ant

SMALL = Config(env="Ant-v5", num_envs=6, num_steps=8, minibatch_size=16, epochs=2, total_steps=10**6, halves=True)


@pytest.fixture(autouse=True)
def loops(monkeypatch):
    monkeypatch.setattr("ppo.envs.num_loops", lambda: 2)  # the tests have TensorFlow with one thread: slow, but right


def parameters(folder, config, updates=3):
    with training_envs(config, None) as envs:
        trainer = Trainer(config, Run.create(folder, "run", config), envs, Callback())
        trainer.begin()
        for _ in range(updates):
            report = trainer.iterate()
        found = [variable.numpy() for variable in trainer._agent.variables]
        trainer.close()
        return len(envs.shares), report["kl"], found


@pytest.mark.parametrize(
    "settings",
    [{}, {"env": "Hopper-v5", "recurrent": "gru"}, {"num_envs": 64, "minibatch_size": 128}, {"num_workers": 0}],
)
def test_halves_learn_the_same_as_all_envs_together(tmp_path, settings):
    apart, together = (
        parameters(tmp_path, dataclasses.replace(SMALL, **settings, halves=both)) for both in (True, False)
    )
    assert (apart[0], together[0]) == (2, 1)
    for one, other in zip(apart[2], together[2], strict=True):
        # A product of matrices of half as many rows may differ in the last bit, as those of the GRU do.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 if "recurrent" in settings else 0)
    assert apart[1] == pytest.approx(together[1], rel=1e-3) and apart[1] > 0


def test_a_run_in_halves_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path):
    class Stop(ppo.Callback):
        def on_update(self, report):
            if report["env_steps"] == 96:
                raise ppo.StopTraining

    config = dataclasses.replace(SMALL, total_steps=192, eval_episodes=1)
    whole = ppo.train(config, logdir=tmp_path)
    cut = ppo.train(config, callbacks=Stop(), logdir=tmp_path)
    assert cut.interrupted
    resumed = ppo.train(config, logdir=tmp_path, resume=cut.path)
    assert resumed.evaluation.summary() == whole.evaluation.summary()


class Breaks(Ant):
    """Raises in env 5's half at the third step."""

    calls = 0

    def outcome(self, before, actions):
        self.calls += 1
        if self.calls == 3 and self.num_envs == 3 and self.data.qpos[0, 0] != 0:
            raise OSError("no torque")
        return super().outcome(before, actions)


def test_an_env_that_raises_in_a_half_ends_the_run_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setitem(vecenv.mujoco.TASKS, "Ant-v5", Breaks)
    with pytest.raises(OSError, match="no torque") as raised:
        ppo.train(SMALL, logdir=tmp_path)
    assert any(note in str(raised.value.__notes__) for note in ("envs 0:3 during step", "envs 3:6 during step"))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"env": "Humanoid-v5"}, True),
        ({"env": "HalfCheetah-v5"}, False),
        ({"env": "CartPole-v1"}, False),
        ({"env": "HalfCheetah-v5", "halves": True}, True),
        ({"halves": False}, False),
        ({"backend": "python"}, False),
        ({"num_workers": 2}, False),
        ({"overlap": True}, False),
        ({"num_envs": 1, "minibatch_size": 8}, False),
    ],
)
def test_there_are_halves_where_they_are_faster_or_asked_for(settings, wanted, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    config = dataclasses.replace(SMALL, **{"halves": None, **settings})
    assert halves.wants_halves(config) == wanted
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert halves.wants_halves(config) == bool(config.halves)


@pytest.mark.parametrize("settings", [{"overlap": True}, {"num_workers": 2}, {"num_envs": 1, "minibatch_size": 8}])
def test_halves_that_cannot_be_are_refused(settings):
    with pytest.raises(ConfigError, match="halves is for"):
        dataclasses.replace(SMALL, **settings)


def test_halves_of_envs_in_workers_are_refused(tmp_path):
    config = dataclasses.replace(SMALL, env="CartPole-v1")
    with pytest.raises(ConfigError, match="halves=True: num_shares=2 is about envs that this process steps"):
        training_envs(config, None)


def test_with_one_thread_there_are_halves_only_if_asked_for_and_then_it_is_an_error(monkeypatch):
    monkeypatch.setattr("ppo.envs.num_loops", lambda: 1)
    with training_envs(dataclasses.replace(SMALL, halves=None), None) as envs:
        assert len(envs.shares) == 1
    with pytest.raises(ConfigError, match="TF_NUM_INTEROP_THREADS=2"):
        training_envs(SMALL, None)


MEETING = """
    import threading, sys
    from ppo.commands import load_tensorflow
    load_tensorflow(halves=True)
    import vecenv
    from ppo.callbacks import Callback
    from ppo.config import Config
    from ppo.envs import training_envs
    from ppo.halves import num_loops
    from ppo.loop import Trainer
    from ppo.run import Run
    from vecenv.mujoco import TASKS, Hopper

    both = threading.Barrier(2)

    class Meeting(Hopper):
        def before_step(self):
            both.wait(timeout=20)  # for the step of the other half
            return super().before_step()

    assert num_loops() == 2
    TASKS["Hopper-v5"] = Meeting
    config = Config(env="Hopper-v5", num_envs=4, num_steps=8, minibatch_size=16, halves=True)
    with training_envs(config, None) as envs:
        trainer = Trainer(config, Run.create(sys.argv[1], "run", config), envs, Callback())
        trainer.begin()
        trainer.iterate()
"""


def test_the_halves_are_stepped_at_the_same_time(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TF_NUM_INTEROP_THREADS"}
    words = [sys.executable, "-c", textwrap.dedent(MEETING), str(tmp_path)]
    subprocess.run(words, env=environment, check=True, timeout=120)
