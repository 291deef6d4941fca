"""Tests of ppo/trainer.py, ppo/run/progress.py and ppo/run/resume.py."""

import copy
import dataclasses
import errno
import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import ppo
import vecenv
from ppo import Config, Evaluation, Run, TrainingDiverged, evaluate_run
from ppo.callbacks import Callback, Callbacks, StopTraining
from ppo.collectors import collector_for
from ppo.run.checkpoint import Checkpoints
from ppo.run.progress import Progress
from ppo.run.resume import EnvStates, Saver
from ppo.run.status import Status
from ppo.trainer import Trainer, run_training
from tests.helpers import CountingEnv
from tests.ppo.envs import (
    Fails,
    KillsOnce,
    RewardTurnsBad,
    Unwilling,
    hangs,
    kills_the_worker,
    make_failing,
    raises_value_error,
)
from tests.ppo.runs import checkpoints, reports

CONFIG = Config(
    env="Faulty-v0",
    total_steps=640,
    num_envs=2,
    num_workers=1,
    num_steps=16,
    epochs=1,
    minibatch_size=32,
    checkpoint_interval=32,
    report_interval=100_000,
    eval_episodes=2,
)


class Thousands(gym.Env):
    """Returns observations around 5,000 and rewards of 0 or 1,000; an episode takes 20 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        return self._observe(), 1000.0 * action, self._steps == 20, False, {}

    def _observe(self):
        return self.np_random.normal(5000.0, 300.0, 2).astype(np.float32)


@contextmanager
def trainer_of(folder, config, source=None):
    with collector_for(config, source, None, None, pytest.fail) as collector:
        trainer = Trainer(config, Run.create(folder, "run", config), collector, Callbacks([]), source)
        with closing(trainer):
            trainer.begin()
            yield trainer


def iterate(trainer):
    """Makes an update, and returns its metrics."""
    return trainer.learn(trainer.collect())


@pytest.fixture
def register():
    def register(bad):
        gym.register("Faulty-v0", entry_point=lambda: RewardTurnsBad(bad))

    yield register
    gym.registry.pop("Faulty-v0", None)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (float("nan"), r"env 0 returned reward nan at step 4 of the rollout that began after 160 env-steps"),
        pytest.param(float("inf"), r"env 0 returned reward inf at step 4", marks=pytest.mark.slow),
        pytest.param(
            1e38,
            r"_loss is (nan|inf) in the update after|grad_norm is (nan|inf) in the update after",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_error_of_a_diverging_run_says_where_and_no_later_checkpoint_is_saved(register, tmp_path, bad, message):
    register(bad)
    config = dataclasses.replace(CONFIG, normalize_rewards=False)
    run = Run.create(tmp_path, "x", config)
    with pytest.raises(TrainingDiverged, match=message):
        run_training(config, run, Callbacks([]))
    assert checkpoints(run)[-1].name == "step_000000000160"
    # The last checkpoint is valid. The restored envs continue exactly where they stopped, so they reach the same fault.
    assert evaluate_run(run, 3).lengths.tolist() == [20, 20, 20]
    with pytest.raises(TrainingDiverged, match=message):
        run_training(config, run, Callbacks([]), resume=True)


@pytest.mark.parametrize("given", [False, True], ids=["functions", "a vector env"])
@pytest.mark.parametrize("settings", [{}, pytest.param({"recurrent": "gru"}, marks=pytest.mark.slow)], ids=str)
def test_the_first_update_learns_from_normalized_observations(tmp_path, settings, given):
    config = dataclasses.replace(CONFIG, num_workers=0, **settings)
    source = vecenv.SyncVectorEnv([Thousands] * 2, **ppo.vector_options(config)) if given else Thousands
    with trainer_of(tmp_path, config, source) as trainer:
        (team,) = trainer.teams
        seen, update = [], team.learner.update_in_graph

        def spy(collected, *arguments):
            observations = collected.rollout.observations[:-1]
            seen.append(team.agent.observations.inputs(tf.reshape(observations, [-1, 2]))["observation"].numpy())
            seen.append(float(team.learner.rewards.moments.count))
            return update(collected, *arguments)

        team.learner.update_in_graph = spy
        report = iterate(trainer)
        inputs, rewards = seen
        assert np.abs(inputs).max() < 5 and np.abs(inputs.mean(axis=0)).max() < 0.5 and rewards == 32
        assert trainer.progress.env_steps == report["env_steps"] == 32  # the first rollout is not counted
        # A 20-step episode spans this rollout of 16 steps and the next, in which it ends, so it counts.
        assert report["episodes"] == 2 and report["length_mean"] == 20
        iterate(trainer)
        assert trainer.collector.collect_in_graph.experimental_get_tracing_count() == 1
        assert update.experimental_get_tracing_count() == 1
    if given:
        source.close()


def test_reports_count_the_episodes_of_exactly_the_env_steps_that_they_count(tmp_path):
    config = dataclasses.replace(CONFIG, num_workers=0)
    with trainer_of(tmp_path, config, functools.partial(CountingEnv, 0, length=1)) as trainer:
        for _ in range(2):
            report = iterate(trainer)
            assert report["episodes"] == report["env_steps"]


def test_no_rollout_precedes_the_first_update_if_nothing_is_normalized(tmp_path):
    config = dataclasses.replace(CONFIG, num_workers=0, normalize_observations=False, normalize_rewards=False)
    with trainer_of(tmp_path, config, Thousands) as trainer:
        (team,) = trainer.teams
        team.learner.observe = lambda _: pytest.fail("a rollout was collected")
        assert iterate(trainer)["episodes"] == 0


class Scaled(gym.Env):
    """A point to push to the origin, with a given observation scale, reward scale and reward offset."""

    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, scale=1.0, reward_scale=1.0, reward_offset=0.0):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self._scale, self._reward_scale, self._reward_offset = scale, reward_scale, reward_offset

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._steps = self.np_random.normal(size=2), 0
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        self._place = self._place + 0.1 * action + self.np_random.normal(size=2) * 0.05
        reward = self._reward_offset - self._reward_scale * np.square(self._place).sum()
        return self._observe(), float(reward), False, self._steps == 50, {}

    def _observe(self):
        return (self._scale * self._place).astype(np.float32)


def kls_of(folder, updates=8, make=Scaled, **settings):
    """Returns the KL of each of the first `updates` updates."""
    config = Config(num_envs=16, num_workers=0, num_steps=32, checkpoint_interval=10**9, total_steps=10**6, **settings)
    with trainer_of(folder, config, make) as trainer:
        return np.array([iterate(trainer)["kl"] for _ in range(updates)])


@pytest.mark.slow
def test_the_scales_of_observations_and_rewards_hardly_change_the_size_of_updates(tmp_path):
    plain = kls_of(tmp_path).mean()
    for scale, reward_scale, reward_offset in ((1e4, 1e4, 1e5), (1e-4, 1e-4, 1e-2), (1.0, 1.0, -100.0)):
        kl = kls_of(tmp_path, make=functools.partial(Scaled, scale, reward_scale, reward_offset)).mean()
        assert 0.4 < kl / plain < 2.5, (scale, reward_scale, reward_offset, kl, plain)


@pytest.mark.slow
def test_the_kl_of_updates_stays_near_its_limit(tmp_path):
    free, limited = (kls_of(tmp_path, updates=16, kl_limit=limit)[4:] for limit in (None, 3e-3))
    assert free.mean() > 6e-3 and limited.mean() < 4e-3, (free, limited)


@pytest.mark.parametrize("overdue_s", [0.0, 600.0])
def test_a_checkpoint_is_due_if_the_last_one_is_too_long_ago_however_few_env_steps_followed(
    tmp_path, monkeypatch, overdue_s
):
    monkeypatch.setattr("ppo.run.resume.OVERDUE_S", overdue_s)
    saved = []

    class Listening(Callback):
        def on_checkpoint(self, env_steps, path):
            saved.append(env_steps)

    config = dataclasses.replace(
        CONFIG, env="CartPole-v1", num_workers=0, total_steps=96, checkpoint_interval=10**6, eval_episodes=1
    )
    ppo.train(config, logdir=tmp_path, callbacks=Listening())
    assert saved == ([32, 64, 96] if overdue_s == 0 else [96])


def test_the_scale_of_bounded_actions_does_not_matter(tmp_path):
    returns = []
    for low, high in ((-2, 2), (-1000, 1000), (0, 0.01)):
        wrapper = f'RescaleAction:{{"min_action": {low}, "max_action": {high}}}'
        config = dataclasses.replace(
            CONFIG, env="Pendulum-v1", env_kwargs={"max_episode_steps": 20}, wrappers=(wrapper,), num_workers=0,
            eval_episodes=4, total_steps=256,
        )  # fmt: skip
        returns.append(ppo.train(config, logdir=tmp_path).evaluation.returns)
    np.testing.assert_allclose(returns[1:], [returns[0]] * 2, rtol=1e-3)


def test_a_new_run_warns_of_settings_without_effect(tmp_path):
    warnings = []

    class Listening(Callback):
        def on_warning(self, message):
            warnings.append(message)

    config = dataclasses.replace(
        CONFIG, env="CartPole-v1", num_workers=0, total_steps=32, eval_episodes=1, recurrent_units=8, cnn="small",
        action_transform="tanh",
    )  # fmt: skip
    path = ppo.train(config, logdir=tmp_path, callbacks=Listening()).path
    assert warnings == [
        "settings have no effect, because recurrent is none: recurrent_units",
        "settings have no effect, because no observation is an image: cnn",
        "settings have no effect, because no action is continuous: action_transform",
    ]
    ppo.resume(path, total_steps=64, callbacks=Listening())
    assert not [message for message in warnings[3:] if "have no effect" in message]


@pytest.mark.parametrize("schedule", ["linear", pytest.param("constant", marks=pytest.mark.slow)])
def test_a_run_resumed_with_more_steps_follows_the_schedule_of_its_new_total_and_warns(tmp_path, schedule):
    warnings, rates = [], []

    class Listening(Callback):
        def on_warning(self, message):
            warnings.append(message)

        def on_update(self, report):
            rates.append(report["learning_rate"])

    config = dataclasses.replace(
        CONFIG, env="CartPole-v1", num_workers=0, total_steps=64, learning_rate=1e-2, lr_schedule=schedule,
        final_gamma=0.99, kl_limit=None, eval_episodes=1,
    )  # fmt: skip
    path = ppo.train(config, logdir=tmp_path, callbacks=Listening()).path
    ppo.resume(path, callbacks=Listening())
    assert len(rates) == 2 and not warnings
    ppo.resume(path, total_steps=128, callbacks=Listening())
    if schedule == "constant":
        assert rates == pytest.approx([1e-2] * 4) and not warnings
    else:
        assert rates == pytest.approx([1e-2, 5e-3, 5e-3, 2.5e-3])
        assert warnings == [
            "total_steps is 128 instead of 64, so the schedules change: learning_rate continues at 0.005 instead of 0"
        ]
    file = path / "versions.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "gymnasium": "1.2.2"}))
    ppo.resume(path, callbacks=Listening())
    assert warnings[-1] == (
        f"the run began with gymnasium 1.2.2 (now {gym.__version__}): the envs and results may differ"
    )


HOWS = ({"num_workers": 2}, {"backend": "python", "num_workers": 0}, {"backend": "python"})


@pytest.mark.slow  # tests/ppo/test_seeds.py compares numbers of workers
def test_runs_are_the_same_with_envs_in_cpp_or_python_and_with_or_without_workers(tmp_path):
    """All written metrics except times are equal: scores, losses and normalization."""
    found = []
    hopper = dataclasses.replace(
        CONFIG,
        env="Hopper-v5",
        total_steps=320,
        num_envs=4,
        minibatch_size=64,
        report_interval=64,
        checkpoint_interval=10**9,
    )
    for i, how in enumerate(({}, *HOWS)):
        run = Run.create(tmp_path, str(i), hopper)
        run_training(dataclasses.replace(hopper, **{"num_workers": None, **how}), run, Callbacks([]))
        found.append(reports(run, times=False))
    assert len(found[0]) == 5 and all(rows == found[0] for rows in found)


def test_a_checkpoint_during_a_rollout_holds_no_env_states(tmp_path):
    """The states would be newer than the parameters, and a resumed run would lack the rollout's first steps."""
    collector = SimpleNamespace(get_states=lambda: pytest.fail("get_states was called"))
    run, progress = Run.create(tmp_path, "run", Config()), Progress(Config())
    progress.ahead = True
    modules, how = {"module": tf.Module()}, {"actions": dict, "status": Status("training")}
    Saver(run, progress, collector, Callback(), modules, **how).save()
    (checkpoint,) = checkpoints(run)
    progress = json.loads((checkpoint / "progress.json").read_text())
    assert progress["why_fresh"] == "a rollout that was not trained on was in progress"


def test_the_time_of_an_evaluation_is_included_in_the_speed_of_the_next_report(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("ppo.run.metrics.time.perf_counter", lambda: now[0])
    config = Config(total_steps=4 * 2048, report_interval=2048, eval_interval=2048, checkpoint_interval=10**9)
    progress, rows = Progress(config), []

    def evaluate():
        now[0] += 6.0
        return Evaluation(np.zeros(1), np.zeros(1))

    trainer = SimpleNamespace(
        config=config,
        progress=progress,
        evaluate=evaluate,
        _callback=Callbacks([]),
        _writer=SimpleNamespace(write=lambda report, logged: rows.append(report)),
        _restarts=0,
    )
    for _ in range(2):
        for part in ("collect", "learn"):
            with progress.clock.spent_on(part):
                now[0] += 1.0
        progress.updates += 1
        report = {"env_steps": progress.env_steps, **progress.clock.read(progress.env_steps)}
        Trainer.report(trainer, report)
    assert [row["steps_per_s"] for row in rows] == [1024, 256]
    assert [row["collect_steps_per_s"] for row in rows] == [2048, 2048]


@pytest.mark.parametrize(
    ("fails", "error", "num_workers"),
    [
        (raises_value_error, ValueError, 0),
        (raises_value_error, vecenv.EnvError, 1),
        (kills_the_worker, vecenv.WorkerDied, 1),
        pytest.param(hangs, multiprocessing.TimeoutError, 1, marks=pytest.mark.slow),
    ],
)
def test_the_error_of_a_failed_rollout_names_the_step(tmp_path, fails, error, num_workers):
    config = dataclasses.replace(CONFIG, step_timeout_s=2, num_workers=num_workers)
    run = Run.create(tmp_path, "fails", config)
    with pytest.raises(error) as caught:
        run_training(config, run, Callbacks([]), envs=[functools.partial(Fails, fails)] * 2)
    assert caught.value.__notes__[-1:] == ["This was step 3 of the rollout that began after 0 env-steps."]


@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_no_step_that_is_trained_on_leads_from_a_cut_episode_into_the_episode_of_a_restarted_worker(tmp_path):
    config = dataclasses.replace(CONFIG, num_envs=4, num_workers=2, on_worker_death="restart")
    flag = tmp_path / "flag"
    with trainer_of(tmp_path, config, [functools.partial(KillsOnce, flag, index) for index in range(4)]) as trainer:
        assert iterate(trainer)["worker_restarts"] == 0
        flag.touch()
        metrics = iterate(trainer)
        assert metrics["worker_restarts"] == 1
        rollout = trainer.collector.envs.last_rollout()
        ended, restarted = rollout.terminated | rollout.truncated, rollout.episode_lengths < 5
        now, after = rollout.observations[:-1], rollout.observations[1:]
        np.testing.assert_array_equal((after - now)[~ended], [[0, 0, 1]] * np.sum(~ended))  # the next step, otherwise
        cut = ended & restarted
        assert cut.any(axis=0).sum() == 2 and rollout.truncated[cut].all()  # one worker died
        np.testing.assert_array_equal(rollout.final_observations[cut], now[cut])
        np.testing.assert_array_equal(rollout.rewards[cut], [0, 0])
        trainer.report(metrics, last=True)
        metrics = iterate(trainer)
        assert np.isfinite(metrics["value_loss"]) and metrics["worker_restarts"] == 0  # since the report
    with pytest.raises(ppo.ConfigError, match="on_worker_death='restart' needs worker processes"):
        dataclasses.replace(config, num_workers=0)


@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_an_evaluation_whose_worker_dies_is_played_again_and_counts_cut_episodes_at_last(tmp_path):
    class Warnings(Callback):
        def __init__(self):
            self.found = []

        def on_update(self, report):
            flag.touch()  # an evaluation follows the last update

        def on_warning(self, message):
            self.found.append(message)

    flag, warnings = tmp_path / "flag", Warnings()
    config = dataclasses.replace(CONFIG, total_steps=64, on_worker_death="restart", eval_episodes=4)
    how = {"callbacks": warnings, "logdir": tmp_path}
    result = ppo.train(
        config, functools.partial(CountingEnv, 0, 5), eval_envs=functools.partial(KillsOnce, flag), **how
    )
    assert result.evaluation.returns.tolist() == [15.0] * 4 and result.evaluation.lengths.tolist() == [5] * 4
    assert not flag.exists() and warnings.found == [
        "a worker died during the evaluation, which is therefore played again"
    ]
    flag.touch()
    warnings.found.clear()
    cut = evaluate_run(result.path, 2, envs=functools.partial(KillsOnce, flag, again=True), warn=warnings.found.append)
    assert cut.lengths.tolist() == [2, 2] and len(warnings.found) == 3
    assert warnings.found[-1] == (
        "a worker died in each of 3 attempts to evaluate: episodes that the last death cut off count with their "
        "returns so far"
    )


class Terminates(CountingEnv):
    """Sends SIGTERM to this process in the third step of an episode that does not end, if it is told to."""

    def __init__(self, stops, at):
        super().__init__(0, length=5)
        self._stops, self._at = stops, at

    def step(self, action):
        if self._stops() and self.steps == self._at:
            self.length = 10**9
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)


@pytest.mark.parametrize("stops_at", [64, pytest.param(96, marks=pytest.mark.slow)])
def test_a_signal_cuts_an_evaluation_short_and_the_resumed_run_makes_up_for_it(tmp_path, stops_at):
    class Records(Callback):
        def on_checkpoint(self, env_steps, path):
            saved.append(env_steps)

        def on_update(self, report):
            updates.append(report["env_steps"])

    saved, updates, path = [], [], tmp_path / "runs"
    settings = {"total_steps": 96, "eval_interval": 64, "report_interval": 32, "checkpoint_interval": 10**9}
    config = dataclasses.replace(CONFIG, num_workers=0, **settings)
    envs, how = functools.partial(CountingEnv, 0, 5), {"callbacks": Records(), "progress": False}
    stopping = functools.partial(Terminates, lambda: saved[-1:] == [stops_at], 3)
    stopped = ppo.train(config, envs, eval_envs=stopping, logdir=path, **how)
    assert stopped.interrupted and stopped.signal == signal.SIGTERM and stopped.env_steps == stops_at
    assert saved[-1] == stops_at and updates[-1] == stops_at  # saved before the signal, and once
    assert [report["env_steps"] for report in reports(stopped.path)] == list(range(32, stops_at, 32))
    resumed = ppo.resume(stopped.path, envs=envs, **how)
    whole = ppo.train(config, envs, logdir=tmp_path / "whole", **how)
    assert reports(resumed.path, times=False) == reports(whole.path, times=False)
    assert resumed.evaluation.to_json() == whole.evaluation.to_json()
    assert ppo.resume(whole.path, envs=envs, **how).evaluation.to_json() == whole.evaluation.to_json()
    assert reports(resumed.path, times=False) == reports(whole.path, times=False)  # nothing was reported twice


def test_a_signal_before_the_first_update_ends_a_run_and_leaves_no_folder(tmp_path):
    config, runs = dataclasses.replace(CONFIG, num_workers=0), tmp_path / "runs"
    with pytest.raises(KeyboardInterrupt):
        ppo.train(config, functools.partial(Terminates, lambda: True, 3), logdir=runs, progress=False)
    assert not list(runs.iterdir())


def test_a_worker_that_dies_after_a_callback_has_stopped_a_run_is_an_error(tmp_path):
    class Stops(Callback):
        def on_update(self, report):
            self.stop("enough")

    flag = tmp_path / "flag"
    flag.touch()
    how = {"eval_envs": functools.partial(KillsOnce, flag), "callbacks": Stops(), "logdir": tmp_path}
    with pytest.raises(vecenv.WorkerDied, match="exited with code 3"):
        ppo.train(CONFIG, functools.partial(CountingEnv, 0, 5), **how)


def test_callbacks_may_change_what_they_are_given(tmp_path):
    class Changes(Callback):
        def on_update(self, report):
            report["mine"] = 1.0

        on_report = on_update

        def on_evaluation(self, env_steps, evaluation):
            evaluation.returns[:] = -1.0
            evaluation.infos["mine"] = 1.0

    class Sees(Callback):
        def on_update(self, report):
            assert "mine" not in report

        on_report = on_update

        def on_evaluation(self, env_steps, evaluation):
            assert (evaluation.returns == 15.0).all() and not evaluation.infos

    config = dataclasses.replace(CONFIG, total_steps=64, eval_interval=32, report_interval=64, num_workers=0)
    envs = functools.partial(CountingEnv, 0, 5)
    result = ppo.train(config, envs, callbacks=[Changes(), Sees()], logdir=tmp_path)
    assert result.evaluation.returns.tolist() == [15.0, 15.0]
    assert len(reports(result.path)) == 2 and not any("mine" in report for report in reports(result.path))


def test_a_script_that_runs_functions_eagerly_trains_and_loads_with_graphs(tmp_path):
    config = dataclasses.replace(CONFIG, total_steps=64, num_workers=0)
    tf.config.run_functions_eagerly(True)
    try:
        result = ppo.train(config, functools.partial(CountingEnv, 0, 5), logdir=tmp_path)
        assert ppo.load_policy(result.path)(np.zeros(3)) in (0, 1)
        assert tf.config.functions_run_eagerly()
    finally:
        tf.config.run_functions_eagerly(False)


# Whatever ends a run, its last finished update is saved.


class Raises(Callback):
    """Raises an error in a given method when it is called after the fifth update, or calls a function there."""

    def __init__(self, method, error):
        self.steps = 0
        setattr(self, method, self._raise)
        self.error = error

    def _raise(self, report, *_):
        self.steps = report["env_steps"] if isinstance(report, dict) else report
        if self.steps == 160:
            raise copy.copy(self.error)  # whose traceback does not outlive the test, and with it the envs


RARELY = dataclasses.replace(CONFIG, env="Failing-v0", checkpoint_interval=10**9, report_interval=32, eval_episodes=1)
FIVE = 16 * 6 + 4  # a step of the rollout that follows the fifth update; the first rollout is not trained on
CAUSES = {
    "an env raises": ({"num_workers": 0, "env_kwargs": {"at": FIVE}}, ValueError),
    "an env raises in a worker": ({"env_kwargs": {"at": FIVE}}, vecenv.EnvError),
    "a worker dies": ({"env": "Dying-v0"}, vecenv.WorkerDied),
    "a reward is NaN": ({"env": "Diverging-v0", "env_kwargs": {"bad": float("nan")}}, TrainingDiverged),
    "a loss is NaN": (
        {"env": "Diverging-v0", "env_kwargs": {"bad": 1e38}, "normalize_rewards": False},
        TrainingDiverged,
    ),
    "an evaluation raises": ({"eval_env_kwargs": {"at": 3}, "eval_interval": 160}, vecenv.EnvError),
    "on_update raises": ({}, Raises("on_update", RuntimeError("mine"))),
    "on_report runs out of memory": ({}, Raises("on_report", MemoryError())),
    "on_evaluation raises": ({"eval_interval": 160}, Raises("on_evaluation", RuntimeError("mine"))),
    "on_update exits": ({}, Raises("on_update", SystemExit(7))),
    "an interrupt arrives in a callback": ({}, Raises("on_update", KeyboardInterrupt())),
}
RESUMED = ("an env raises", "a worker dies", "a loss is NaN")
QUICK = {"an env raises in a worker", "a worker dies", "a reward is NaN", "on_update raises"}


@pytest.fixture
def causes():
    gym.register("Failing-v0", entry_point=make_failing)
    gym.register("Dying-v0", entry_point=lambda: Fails(kills_the_worker, FIVE))
    gym.register("Diverging-v0", entry_point=RewardTurnsBad)
    yield
    for name in ("Failing-v0", "Dying-v0", "Diverging-v0"):
        gym.registry.pop(name, None)


def _saved(path):
    """Returns the tensors of the policy and the optimizer in a checkpoint."""
    reader = tf.train.load_checkpoint(str(path / "state"))
    names = [name for name in reader.get_variable_to_shape_map() if name.startswith(("agent", "learner"))]
    assert len(names) > 20
    # A resumed run without env states begins with running returns of 0.
    return {name: reader.get_tensor(name) for name in names if "running_return" not in name}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns a function that returns the tensors after five updates of a run whose envs do not fail."""

    @functools.cache
    def tensors(**how):
        source = functools.partial(RewardTurnsBad, 1.0)
        usual = dataclasses.replace(RARELY, num_workers=0, **how)
        path = ppo.train(usual, source, logdir=tmp_path_factory.mktemp("undisturbed"), callbacks=StopsAt(160)).path
        (checkpoint,) = checkpoints(path)
        return _saved(checkpoint)

    return lambda config: tensors(normalize_rewards=config.normalize_rewards)


@pytest.mark.usefixtures("causes")
@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=() if cause in QUICK else pytest.mark.slow) for cause in CAUSES]
)
def test_the_last_finished_update_is_saved_whatever_ends_the_run(tmp_path, undisturbed, cause):
    settings, raised = CAUSES[cause]
    config = dataclasses.replace(RARELY, **settings)
    callbacks = [raised] if isinstance(raised, Raises) else []
    error = type(raised.error) if callbacks else raised
    with pytest.raises(error) as caught:
        ppo.train(config, logdir=tmp_path / "runs", callbacks=callbacks)
    (run,) = (tmp_path / "runs").iterdir()
    (checkpoint,) = checkpoints(run)
    assert checkpoint.name == "step_000000000160"
    ending = "." if cause == "a loss is NaN" else ", and can be resumed."
    assert caught.value.__notes__[-1] == f"The run is saved up to env-step 160 in {run}{ending}"
    progress = json.loads((checkpoint / "progress.json").read_text())
    assert progress["episodes"]["count"] == 8  # at steps 20 to 80 of each env; a rollout that is lost does not count
    for (name, values), expected in zip(_saved(checkpoint).items(), undisturbed(config).values(), strict=True):
        np.testing.assert_array_equal(values, expected, err_msg=name)
    if cause in RESUMED:
        gym.register(config.env, entry_point=lambda **_: RewardTurnsBad(1.0))  # the fault is fixed
        assert ppo.resume(run, callbacks=StopsAt(224)).env_steps == 224


def test_an_error_stays_visible_if_the_run_cannot_be_saved(tmp_path):
    class Fills(Callback):
        """Makes the run folder unwritable as far as checkpoints are concerned, and raises an error."""

        def on_update(self, report):
            (run,) = tmp_path.iterdir()
            (run / "checkpoints").touch()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        ppo.train(RARELY, functools.partial(RewardTurnsBad, 1.0), logdir=tmp_path, callbacks=Fills())
    (note,) = caught.value.__notes__
    assert re.match(r"The run could not be saved at env-step 32: cannot write checkpoint .*File exists", note)
    assert list(tmp_path.iterdir())


def test_a_failed_checkpoint_is_reported_once_with_the_last_checkpoint(tmp_path, monkeypatch):
    save = Checkpoints.save

    def fails(self, step, *args, **kwargs):
        if step > 32:
            raise ppo.RunError("the disk is full")
        return save(self, step, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "save", fails)
    config = dataclasses.replace(RARELY, checkpoint_interval=32)
    with pytest.raises(ppo.RunError, match="the disk is full") as caught:
        ppo.train(config, functools.partial(RewardTurnsBad, 1.0), logdir=tmp_path)
    assert caught.value.__notes__ == [
        "The run could not be saved at env-step 64. Its last checkpoint is from env-step 32."
    ]


class Mourns(RewardTurnsBad):
    """Sends SIGINT to a process and raises, like an env whose simulator Ctrl-C has ended."""

    def __init__(self, pid):
        super().__init__(1.0)
        self.pid, self.left = pid, FIVE

    def step(self, action):
        self.left -= 1
        if self.left == 0:
            os.kill(self.pid, signal.SIGINT)
            raise BrokenPipeError("the simulator is gone")
        return super().step(action)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_env_error_after_a_signal_is_only_a_warning(tmp_path, num_workers):
    warnings = Notes()
    result = ppo.train(
        dataclasses.replace(RARELY, num_workers=num_workers), functools.partial(Mourns, os.getpid()),
        logdir=tmp_path, callbacks=warnings,
    )  # fmt: skip
    assert (result.env_steps, result.signal) == (160, signal.SIGINT)
    (warning,) = (one for one in warnings.warnings if "while the run was stopping" in one)
    assert "the simulator is gone" in warning and "env 0" in warning
    assert checkpoints(result.path)[-1].name == "step_000000000160"


def test_an_env_error_after_a_signal_is_saved_before_the_warning(tmp_path):
    class Refuses(Callback):
        def on_warning(self, message):
            if "while the run was stopping" in message:
                raise RuntimeError("no warnings, please")

    with pytest.raises(RuntimeError, match="no warnings, please"):
        ppo.train(RARELY, functools.partial(Mourns, os.getpid()), logdir=tmp_path, callbacks=Refuses())
    (run,) = tmp_path.iterdir()
    assert checkpoints(run)[-1].name == "step_000000000160"


def test_an_env_error_after_a_signal_is_told_even_if_the_run_cannot_be_saved(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise ppo.RunError("the disk is full")

    monkeypatch.setattr(Checkpoints, "save", fails)
    told = Notes()
    with pytest.raises(ppo.RunError, match="the disk is full"):
        ppo.train(RARELY, functools.partial(Mourns, os.getpid()), logdir=tmp_path, callbacks=told)
    assert any("the simulator is gone" in warning for warning in told.warnings)


@pytest.mark.parametrize(
    ("gone", "note"),
    [(False, "The run is saved up to env-step 32 in"), (True, "Also, the run folder .* is gone")],
)
def test_an_error_is_not_replaced_if_the_run_folder_does_not_answer_or_is_gone(tmp_path, monkeypatch, gone, note):
    is_file = Path.is_file

    def is_stale(path):
        if path.name == "config.json":
            raise OSError(errno.ESTALE, "stale")
        return is_file(path)

    class Loses(Callback):
        def on_update(self, report):
            if gone:
                shutil.rmtree(tmp_path / "runs")
            else:
                monkeypatch.setattr(Path, "is_file", is_stale)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        ppo.train(RARELY, functools.partial(RewardTurnsBad, 1.0), logdir=tmp_path / "runs", callbacks=Loses())
    (found,) = caught.value.__notes__
    assert re.match(note, found)


# Checkpoints when env states cannot be saved.


class StopsAt(Callback):
    def __init__(self, env_steps):
        self.env_steps = env_steps

    def on_update(self, report):
        if report["env_steps"] == self.env_steps:
            raise StopTraining


class Notes(Callback):
    def __init__(self):
        self.warnings = []

    def on_warning(self, message):
        self.warnings.append(message)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_while_env_states_are_saved_is_reported_once_and_training_continues(tmp_path, num_workers):
    config, notes = dataclasses.replace(CONFIG, total_steps=96, num_workers=num_workers), Notes()
    run = Run.create(tmp_path, "unwilling", config)
    envs = [functools.partial(Unwilling, raises_value_error)] * 2
    assert run_training(config, run, Callbacks([notes]), envs=envs).evaluation is not None
    assert [path.name for path in checkpoints(run)] == [f"step_{n:012d}" for n in (32, 64, 96)]
    (warning,) = notes.warnings
    assert "a resumed run begins new episodes" in warning and "ValueError: the motor is on fire" in warning
    assert "Traceback" not in warning
    longer = dataclasses.replace(config, total_steps=128)
    run_training(longer, run, Callbacks([notes]), envs=envs, resume=True)
    assert checkpoints(run)[-1].name == "step_000000000128"


@pytest.mark.parametrize("periodic", [True, False])
def test_training_progress_survives_a_worker_death_while_env_states_are_saved(tmp_path, periodic):
    config = dataclasses.replace(CONFIG, total_steps=96 if periodic else 32)
    run, envs = Run.create(tmp_path, "dies", config), [functools.partial(Unwilling, kills_the_worker)] * 2
    if periodic:
        with pytest.raises(vecenv.WorkerDied, match="exited with code 3"):
            run_training(config, run, Callbacks([]), envs=envs)
    else:  # no training remains
        assert run_training(config, run, Callbacks([]), envs=envs).evaluation is not None
    (path,) = checkpoints(run)
    progress = json.loads((path / "progress.json").read_text())
    assert path.name == "step_000000000032" and "exited with code 3" in progress["why_fresh"]


def test_a_checkpoint_without_env_states_is_written_before_states_that_may_take_long(tmp_path, monkeypatch):
    """A batch system may kill a process a few seconds after SIGTERM, while an env saves its state."""

    class Slow(RewardTurnsBad):
        def get_state(self):
            written.append([(path.name, (path / "envs.npz").exists()) for path in checkpoints(run)])

    monkeypatch.setattr("ppo.run.resume.MAX_STATES_S", 0.0)
    written, run = [], Run.create(tmp_path, "slow", CONFIG)
    config = dataclasses.replace(CONFIG, num_envs=1, minibatch_size=16, num_workers=0, checkpoint_interval=10**9)
    run_training(config, run, Callbacks([StopsAt(32)]), envs=functools.partial(Slow, 1.0))
    assert written == [[("step_000000000032", False)]]
    assert (checkpoints(run)[-1] / "envs.npz").exists()


@pytest.mark.filterwarnings("ignore:.*It is restarted")
@pytest.mark.parametrize("fails", [kills_the_worker, raises_value_error])
def test_checkpoints_hold_env_states_again_once_they_can_be_saved(tmp_path, fails):
    class Counts(Callback):
        def on_checkpoint(self, env_steps, path):
            states.append((path / "envs.npz").exists())
            if env_steps == 32:
                flag.touch()

    flag, states, notes = tmp_path / "flag", [], Notes()
    config = dataclasses.replace(CONFIG, total_steps=160, on_worker_death="restart")
    envs = [functools.partial(Unwilling, fails, flag)] * 2
    run_training(config, Run.create(tmp_path, "once", config), Callbacks([Counts(), notes]), envs=envs)
    assert states == [True, False, True, True, True]
    (warning,) = notes.warnings
    assert warning.startswith("for now, checkpoints do not hold the states of the envs, so a resumed run")


@pytest.mark.parametrize(
    ("error", "requests"),
    [(vecenv.NotRestorable("no"), 1), (vecenv.NotRestorableNow("not now"), 3), (ValueError("broken"), 3)],
    ids=["never", "not now", "raises"],
)
def test_only_env_states_that_can_never_be_saved_are_not_requested_again(error, requests):
    def get_states():
        requested.append(True)
        raise error

    requested, warnings = [], []
    states = EnvStates(SimpleNamespace(get_states=get_states), warnings.append)
    found = [states.omitted(periodic=True) or states.save() for _ in range(3)]
    assert len(requested) == requests and len(warnings) == 1 and len({one.why_fresh for one in found}) == 1
    assert all(one.content is None and one.settled == (requests == 1) for one in found)


def test_a_run_whose_env_states_can_never_be_saved_writes_each_later_checkpoint_once(tmp_path, monkeypatch):
    written, save = [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *call, **how: written.append(call[1]) or save(*call, **how))
    config, notes = dataclasses.replace(CONFIG, total_steps=96, num_workers=0), Notes()
    path = ppo.train(config, Scaled, logdir=tmp_path, callbacks=[notes, StopsAt(64)]).path
    assert written == [32, 32, 64]  # the first time, saving the states might have taken long
    (warning,) = notes.warnings
    assert "Scaled does not define get_state()" in warning
    # A resumed run says why its envs begin fresh episodes, and why they will again.
    (checkpoint,) = checkpoints(path)[-1:]
    progress = json.loads((checkpoint / "progress.json").read_text())
    (checkpoint / "progress.json").write_text(json.dumps({**progress, "why_fresh": "saving them took 5.0 s"}))
    ppo.resume(path, envs=Scaled, callbacks=notes)
    _, fresh, never = notes.warnings
    assert fresh.endswith("because the checkpoint was written without their states: saving them took 5.0 s")
    assert never == warning


def test_training_progress_survives_env_states_that_cannot_be_written(tmp_path, monkeypatch):
    def dumps(states):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(vecenv.state, "dumps", dumps)
    config, notes = dataclasses.replace(CONFIG, env="CartPole-v1", total_steps=96), Notes()
    run = Run.create(tmp_path, "deep", config)
    run_training(config, run, Callbacks([notes]))
    assert sorted(path.name[:5] for path in run.checkpoints.iterdir()) == ["best", *["step_"] * 3]
    assert len(notes.warnings) == 1 and "RecursionError" in notes.warnings[0]


@pytest.mark.slow  # tests/ppo/test_long_runs.py does this with Hopper-v5
@pytest.mark.parametrize("env", ["LunarLander-v3", "BipedalWalker-v3", "CarRacing-v3"])
def test_box2d_tasks_can_be_trained_saved_and_resumed(tmp_path, env):
    config, notes, stop = dataclasses.replace(CONFIG, env=env), Notes(), StopsAt(64)
    run = Run.create(tmp_path, "box2d", config)
    assert run_training(config, run, Callbacks([notes, stop])).interrupted
    assert len(notes.warnings) == 1 and f"{env[:-3]} does not define get_state()" in notes.warnings[0], notes.warnings
    stop.env_steps = 96
    assert run_training(config, run, Callbacks([notes, stop]), resume=True).env_steps == 96
    assert checkpoints(run)[-1].name == "step_000000000096"
