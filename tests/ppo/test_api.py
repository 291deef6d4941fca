"""Tests of the Python API: ppo.train, callbacks, ppo.load_policy."""

import dataclasses
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
import vecenv
from ppo import Result, Run, evaluate_run
from ppo.seeds import evaluation_seeds
from tests.ppo.envs import make_cartpole
from tests.ppo.runs import QUICKLY_COMPILED, command, reports, untrained_run

CONFIG = ppo.Config(
    env="CartPole-v1",
    total_steps=256,
    num_envs=4,
    num_workers=0,
    num_steps=16,
    minibatch_size=32,
    epochs=2,
    checkpoint_interval=128,
    report_interval=128,
    eval_interval=128,
    eval_episodes=3,
)


class Recorder(ppo.Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, config, env_steps):
        self.calls.append(("start", env_steps))

    def on_update(self, report):
        self.calls.append(("update", report["env_steps"]))
        assert {"return_mean", "kl", "policy_loss", "steps_per_s", "wall_s"} <= set(report)

    def on_report(self, report):
        self.calls.append(("report", report["env_steps"]))

    def on_evaluation(self, env_steps, evaluation):
        self.calls.append(("evaluation", env_steps))
        assert len(evaluation.returns) == 3

    def on_checkpoint(self, env_steps, path):
        self.calls.append(("checkpoint", env_steps))
        assert path.is_dir()

    def on_end(self, result, error):
        self.calls.append(("end", result.env_steps))
        assert error is None and (result.path / "evaluation.json").exists()


def test_callbacks_are_called_in_order(tmp_path):
    recorder = Recorder()
    result = ppo.train(CONFIG, callbacks=[recorder], logdir=tmp_path, name="mine")
    due = ("checkpoint", "report", "evaluation", "update")
    one = [("update", 64), *((call, 128) for call in due)]
    last = [("update", 192), *((call, 256) for call in due)]
    assert recorder.calls == [("start", 0), *one, *last, ("end", 256)]
    assert [row["env_steps"] for row in reports(result.path)] == [128, 256]
    assert result.path.name.endswith("-mine") and result.path.parent == tmp_path
    assert result.env_steps == 256 and not result.interrupted and len(result.evaluation.returns) == 3


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Returns the result of a run with more evaluations than reports. It was trained outside the main thread."""
    config, logdir = dataclasses.replace(CONFIG, eval_interval=64, report_interval=256), tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ppo.train, config, logdir=logdir).result(120)


def test_training_works_outside_the_main_thread(evaluated):
    assert evaluated.env_steps == 256


def test_every_evaluation_is_written_to_the_metrics_even_between_reports(evaluated):
    assert [row["env_steps"] for row in reports(evaluated.path) if "eval_return_mean" in row] == [64, 128, 192, 256]


@pytest.mark.slow
def test_envs_may_be_an_id_a_function_a_list_of_functions_or_a_vector_env(tmp_path):
    config = dataclasses.replace(CONFIG, eval_interval=None)
    vector = vecenv.AsyncVectorEnv([make_cartpole] * 4, num_workers=1, **ppo.vector_options(config))
    serial = vecenv.SyncVectorEnv([make_cartpole] * 4, **ppo.vector_options(config))
    with vector, serial:
        found = [
            reports(ppo.train(config, envs, logdir=tmp_path / str(i)).path, times=False)
            for i, envs in enumerate([None, make_cartpole, [make_cartpole] * 4, vector, serial])
        ]
        assert len(found[0]) == 2 and all(rows == found[0] for rows in found)
        vector.reset()  # training has not closed it


def test_a_vector_env_trains_while_other_envs_are_evaluated(tmp_path):
    config = dataclasses.replace(CONFIG, total_steps=128, eval_interval=64)
    options = ppo.vector_options(config)

    def short():
        return gym.make("CartPole-v1", max_episode_steps=3)

    with (
        vecenv.SyncVectorEnv([make_cartpole] * 4, **options) as envs,
        vecenv.AsyncVectorEnv([short] * 2, num_workers=1, **options) as three,
    ):
        result = ppo.train(config, envs, eval_envs=short, logdir=tmp_path)
        assert result.evaluation.lengths.tolist() == [3] * 3
        assert [row["eval_return_mean"] for row in reports(result.path)] == [3.0, 3.0]
        result = ppo.resume(result.path, total_steps=192, envs=envs, eval_envs=three)
        assert result.evaluation.lengths.tolist() == [3] * 3
        three.reset()  # the run has not closed it
        with pytest.raises(ppo.ConfigError, match="eval_interval needs separate envs"):
            ppo.train(config, envs, eval_envs=envs, logdir=tmp_path)
    config = dataclasses.replace(CONFIG, eval_env_kwargs={"max_episode_steps": 3})
    with pytest.raises(ppo.ConfigError, match="eval_env_kwargs would have no effect on the envs that were passed"):
        ppo.train(config, eval_envs=short, logdir=tmp_path)
    with vecenv.SyncVectorEnv([make_cartpole]) as plain, pytest.raises(ppo.ConfigError, match="vector_options"):
        ppo.train(CONFIG, eval_envs=plain, logdir=tmp_path)
    restarts = dataclasses.replace(CONFIG, eval_interval=None, num_workers=1, on_worker_death="restart")
    with (
        vecenv.SyncVectorEnv([make_cartpole] * 4, **options) as envs,
        pytest.raises(ppo.ConfigError, match="'restart'"),
    ):
        ppo.train(restarts, envs, logdir=tmp_path)


def test_the_errors_for_unsuitable_envs_say_what_to_do(tmp_path):
    config = dataclasses.replace(CONFIG, eval_interval=None)
    with vecenv.AsyncVectorEnv([make_cartpole] * 4) as plain, pytest.raises(ppo.ConfigError, match="vector_options"):
        ppo.train(config, plain, logdir=tmp_path)
    with vecenv.SyncVectorEnv([make_cartpole] * 2, **ppo.vector_options(config)) as two:
        with pytest.raises(ppo.ConfigError, match=r"'num_envs': 2.* but ppo needs .*'num_envs': 4"):
            ppo.train(config, two, logdir=tmp_path)
        with pytest.raises(ppo.ConfigError, match="eval_interval needs separate envs"):
            ppo.train(CONFIG, two, logdir=tmp_path)
    with pytest.raises(ppo.ConfigError, match="3 functions that make envs, but num_envs is 4"):
        ppo.train(config, [make_cartpole] * 3, logdir=tmp_path)
    with pytest.raises(ppo.ConfigError, match="0 functions that make envs, but num_envs is 4"):
        ppo.train(config, [], logdir=tmp_path)
    with pytest.raises(ppo.ConfigError, match="got an empty list instead of functions"):
        ppo.train(config, eval_envs=[], logdir=tmp_path)
    with pytest.raises(ppo.ConfigError, match="vector envs of vecenv"):
        ppo.train(config, gym.make_vec("CartPole-v1", 4), logdir=tmp_path)
    assert not list(tmp_path.iterdir())  # no empty run folder is left behind


class StopAtStart(ppo.Callback):
    def on_start(self, config, env_steps):
        raise ppo.StopTraining


def contents(folder):
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def test_a_run_stopped_by_a_callback_can_be_resumed(tmp_path):
    class StopAt128(ppo.Callback):
        def on_update(self, report):
            if report["env_steps"] == 128:
                raise ppo.StopTraining

    result = ppo.train(CONFIG, callbacks=[StopAt128()], logdir=tmp_path)
    assert result.interrupted and result.env_steps == 128 and result.evaluation is None
    with pytest.raises(ppo.ConfigError, match="a resumed run keeps its settings, but learning_rate would change"):
        ppo.resume(result.path, learning_rate=1.0)
    before = contents(result.path / "checkpoints")
    assert ppo.resume(result.path, callbacks=StopAtStart()).env_steps == 128
    assert contents(result.path / "checkpoints") == before
    again = ppo.resume(result.path)
    assert again.path == result.path and again.env_steps == 256 and len(reports(again.path)) == 2


@pytest.mark.slow  # the test before is quick
def test_every_callback_method_can_stop_a_run_at_its_begin_in_its_middle_and_at_its_end(tmp_path):
    def stopping(name, at):
        def stop(self, *arguments):
            steps = arguments[-1] if name == "on_start" else arguments[0]
            if (steps["env_steps"] if isinstance(steps, dict) else steps) == at:
                raise ppo.StopTraining

        return [type("Stops", (ppo.Callback,), {name: stop})()]

    result = ppo.train(CONFIG, callbacks=stopping("on_start", 0), logdir=tmp_path)
    assert result.interrupted and result.env_steps == 0
    stops = (("on_update", 64), ("on_checkpoint", 128), ("on_evaluation", 256), ("on_report", 384), ("on_update", 512))
    for name, at in stops:
        total_steps = -(-at // 256) * 256
        result = ppo.resume(result.path, total_steps=total_steps, callbacks=stopping(name, at))
        assert result.interrupted and result.env_steps == at, name
    result = ppo.resume(result.path)
    assert result.env_steps == 512 and not result.interrupted


class Finishes(ppo.Callback):
    """Stops a run in one of its methods, after at least 64 env-steps."""

    def __init__(self, where):
        self.where, self.warnings, self.seen, self.result = where, [], None, None

    def _act(self, where, env_steps):
        if where == self.where and env_steps >= 64:
            self.log("custom", 7)
            states = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
            self.seen = states, self.policy(states), self.policy.value(states), self.config
            self.stop("success rate 0.95")
            self.stop("a second reason")

    def on_update(self, report):
        self._act("on_update", report["env_steps"])

    def on_report(self, report):
        self._act("on_report", report["env_steps"])

    def on_evaluation(self, env_steps, evaluation):
        self._act("on_evaluation", env_steps)

    def on_checkpoint(self, env_steps, path):
        self._act("on_checkpoint", env_steps)

    def on_warning(self, message):
        self.warnings.append(message)

    def on_end(self, result, error):
        self.result = result


SLOW_STOPS = [("on_report", 128), ("on_evaluation", 128), ("on_checkpoint", 128)]


@pytest.mark.parametrize(
    ("where", "steps"),
    [("on_update", 64), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_STOPS)],
)
def test_a_callback_that_stops_a_run_finishes_it(tmp_path, capsys, where, steps):
    callback = Finishes(where)
    result = ppo.train(CONFIG, callbacks=callback, logdir=tmp_path)
    assert callback.result == result and result.stopped == "success rate 0.95" and result.env_steps == steps
    assert not result.interrupted and len(result.evaluation.returns) == 3
    out = capsys.readouterr().out
    assert f"stopped by a callback after {steps} steps: success rate 0.95\n\nrun folder:  {result.path}\n" in out
    saved = json.loads((result.path / "evaluation.json").read_text())
    assert saved["stopped"] == "success rate 0.95" and saved["env_steps"] == steps
    rows = reports(result.path)
    assert [row["env_steps"] for row in rows] == [steps]
    if where == "on_update":
        assert rows[0]["custom"] == 7.0
    states, actions, values, config = callback.seen
    policy = ppo.load_policy(result.path)
    np.testing.assert_array_equal(policy(states), actions)
    np.testing.assert_allclose(policy.value(states), values, rtol=1e-6)
    assert config == CONFIG
    callback.where = None
    again = ppo.resume(result.path, callbacks=callback)
    assert (
        again.env_steps == 256
        and again.stopped is None
        and "stopped" not in (json.loads((result.path / "evaluation.json").read_text()))
    )
    assert not callback.warnings


def test_a_resume_without_the_envs_that_were_passed_says_so_although_their_name_is_no_env(tmp_path):
    space = gym.spaces.Box(-1, 1, (2,))
    run = untrained_run(tmp_path, space, space, given=True, env="given")
    remedy = (
        r"no command can make\. .*ppo\.resume\(run, envs=.*ppo\.evaluate_run.*ppo\.record_run.*env='module:function'"
    )
    for again in (
        lambda: ppo.resume(run),
        lambda: evaluate_run(run, 1),
        lambda: command("evaluate", [run.path]),
        lambda: command("train", ["--resume", run.path]),
        lambda: ppo.record_run(run, tmp_path / "videos", 1),
    ):
        with pytest.raises(ppo.ConfigError, match=f"was trained on envs passed to .*{remedy}"):
            again()


@pytest.mark.slow
def test_a_run_on_envs_passed_by_the_user_needs_them_again(tmp_path):
    config = dataclasses.replace(CONFIG, eval_interval=None)
    path = ppo.train(config, [make_cartpole] * 4, logdir=tmp_path).path
    for again in (lambda: ppo.resume(path, total_steps=320), lambda: evaluate_run(Run.open(path), 3)):
        with pytest.raises(ppo.ConfigError, match="was trained on envs passed to"):
            again()
    with pytest.raises(ppo.ConfigError, match="was trained on envs with the space"):
        ppo.resume(path, total_steps=320, envs=lambda: gym.make("Acrobot-v1"))
    assert len(evaluate_run(Run.open(path), 4, envs=[make_cartpole] * 2).returns) == 4
    assert ppo.resume(path, total_steps=320, envs=make_cartpole).env_steps == 320


SETTINGS = {
    "Pendulum-v1": {},
    "CartPole-v1": {"recurrent": "gru"},
    "Blackjack-v1": {},
    "MountainCarContinuous-v0": {"action_transform": "tanh"},
}


@pytest.mark.parametrize(
    "env_id", [name if name == "CartPole-v1" else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_a_loaded_policy_equals_the_evaluated_policy(tmp_path, env_id):
    config = dataclasses.replace(CONFIG, env=env_id, eval_interval=None, total_steps=320, **SETTINGS[env_id])
    result = ppo.train(config, logdir=tmp_path)
    policy = ppo.load_policy(result)
    env = gym.make(env_id)
    assert policy.action_space == env.action_space
    returns = []
    for seed in evaluation_seeds(config.seed, 3):  # as `evaluate` does
        policy.reset()
        observation, _ = env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            action = policy(observation)
            assert env.action_space.contains(action.item() if env_id in ("CartPole-v1", "Blackjack-v1") else action)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    np.testing.assert_allclose(returns, evaluate_run(result.path, 3, seed=config.seed).returns, rtol=1e-5)


class Scored(gym.Wrapper):
    """Pendulum, with episodes of one step, whose reward is the class attribute `score`."""

    score = 0.0

    def __init__(self):
        super().__init__(gym.make("Pendulum-v1"))

    def step(self, action):
        observation, *_, info = super().step(action)
        return observation, Scored.score, True, False, info


class Scores(ppo.Callback):
    """Gives the evaluations of a run these scores, and notes after each of them which checkpoint is the best one."""

    def __init__(self, logdir, scores):
        self._logdir, self._scores, self.best = logdir, iter(scores), []

    def on_start(self, config, env_steps):
        Scored.score = next(self._scores)

    def on_evaluation(self, env_steps, evaluation):
        (file,) = self._logdir.glob("*/checkpoints/best/progress.json")
        self.best.append(json.loads(file.read_text())["env_steps"])
        Scored.score = next(self._scores, None)


def test_the_policy_with_the_best_evaluation_is_kept_loaded_and_exported(tmp_path):
    config = dataclasses.replace(
        CONFIG, env="Pendulum-v1", checkpoint_interval=64, eval_interval=64, learning_rate=0.01, lr_schedule="constant"
    )
    scores = Scores(tmp_path, [1.0, 5.0, 2.0, 3.0])
    run = Run.open(ppo.train(config, eval_envs=Scored, callbacks=scores, logdir=tmp_path).path)
    assert scores.best == [64, 128, 128, 128]
    seen = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)

    def actions(which, run=run):
        return ppo.load_policy(run, checkpoint=which)(seen)

    np.testing.assert_array_equal(actions("best"), actions(128))
    assert (actions("best") != actions("latest")).any()
    one, other = (ppo.evaluate_run(run, 3, checkpoint=which, seed=0).returns for which in ("best", "latest"))
    assert (one != other).any()
    file, _ = ppo.export(run, tmp_path / "exports", "savedmodel", checkpoint="best")
    exported = tf.saved_model.load(str(file)).signatures["serving_default"](observation=tf.constant(seen))["action"]
    np.testing.assert_allclose(exported, actions("best"), rtol=1e-5)
    with pytest.raises(ppo.RunError, match="holds no checkpoint 64: choose one of latest, 128, 192, 256, best"):
        ppo.load_policy(run, checkpoint=64)
    scores = Scores(run.path.parent, [4.0, 5.0])
    ppo.resume(run, total_steps=384, eval_envs=Scored, callbacks=scores)
    assert scores.best == [320, 384]  # `best` was scored again, with 4.0, and of equal policies, the later one is kept
    np.testing.assert_array_equal(actions("best"), actions("latest"))


def test_a_run_that_was_stopped_before_its_first_periodic_checkpoint_may_have_a_best_one(tmp_path, evaluated):
    run = Path(shutil.copytree(evaluated.path, tmp_path / "run"))
    for path in run.glob("checkpoints/step_*"):
        shutil.rmtree(path)
    assert ppo.load_policy(run, checkpoint="best")(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(ppo.RunError, match="holds no checkpoint: the run ended before its first one"):
        ppo.load_policy(run)
    with pytest.raises(ppo.RunError, match="holds no checkpoint: the run ended before its first one"):
        ppo.resume(run, total_steps=512)


class Named(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))


@pytest.mark.parametrize(
    ("env", "envs", "name"),
    [
        ("HalfCheetah-v5", Named, "Named"),
        ("HalfCheetah-v5", [make_cartpole] * 4, "make_cartpole"),
        ("Ant-v5", lambda: make_cartpole(), "given"),
        ("vecenv.atari:Atari/Pong-v5", functools.partial(make_cartpole), "given"),
        ("My-Robot", Named, "My-Robot"),
        ("CartPole-v1", None, "CartPole-v1"),
    ],
)
def test_a_run_on_given_envs_does_not_claim_another_env(tmp_path, capsys, monkeypatch, env, envs, name):
    def run_training(config, run, callback, **_):
        callback.on_start(config, 0)
        return Result(run.path, 0, None)

    monkeypatch.setattr("ppo.trainer.run_training", run_training)
    result = ppo.train(dataclasses.replace(CONFIG, env=env), envs, logdir=tmp_path, progress=True)
    shown = "the given envs" if name == "given" else name
    assert f"training {shown} for 256 steps" in capsys.readouterr().out
    assert Run.open(result.path).read_config().env == name


def test_the_deviation_of_continuous_actions_is_a_metric(tmp_path):
    short = {"env": "Pendulum-v1", "env_kwargs": {"max_episode_steps": 20}, "eval_interval": None}
    config = dataclasses.replace(CONFIG, learning_rate=5e-3, **short)
    path = ppo.train(config, logdir=tmp_path).path
    found = [row["action_std"] for row in reports(path)]
    policy, state = ppo.load_policy(path), np.zeros(3, np.float32)
    highest = np.exp(
        policy.log_prob(state, policy(state))
    )  # the density of the most likely action; half the range is 2
    assert found[-1] == pytest.approx(1 / (2 * highest * np.sqrt(2 * np.pi)), rel=1e-4) and found[0] != found[-1]
    config = dataclasses.replace(config, total_steps=128, initial_log_std=0.5, min_log_std=0.5)
    floor = ppo.train(config, logdir=tmp_path / "floor").path
    assert min(row["action_std"] for row in reports(floor)) >= np.exp(0.5) * (1 - 1e-6)


def test_callbacks_log_numbers_of_their_own(tmp_path):
    class Logs(ppo.Callback):
        def __init__(self, name):
            self.name, self.seen = name, []

        def on_update(self, report):
            self.log(self.name, report["env_steps"])

        def on_report(self, report):
            self.seen.append({name: report.get(name) for name in ("one", "two")})

    loggers = [Logs("one"), Logs("two")]
    config = dataclasses.replace(CONFIG, report_interval=64, eval_interval=None)
    path = ppo.train(config, callbacks=loggers, logdir=tmp_path).path
    wanted = [{"one": value, "two": value} for value in (None, 64.0, 128.0, 192.0)]
    assert loggers[0].seen == loggers[1].seen == wanted
    assert [{name: row.get(name) for name in ("one", "two")} for row in reports(path)] == wanted
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("custom/one")] == [128, 192, 256]
    with pytest.raises(ValueError, match=r"a callback logs \['kl'\], which are metrics of ppo: choose other names"):
        ppo.train(config, callbacks=[Logs("kl")], logdir=tmp_path)


def test_a_policy_takes_one_observation_or_a_batch_and_nothing_else(tmp_path):
    env = gym.make("Pendulum-v1")
    policy = ppo.load_policy(untrained_run(tmp_path, env.observation_space, env.action_space).path)
    many = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    assert policy(many).shape == (5, 1) and policy(many[0]).shape == (1,)
    np.testing.assert_allclose([policy(one) for one in many], policy(many), rtol=1e-5)
    np.testing.assert_array_equal(policy(many.astype(np.float64)), policy(many))
    for wrong in (np.zeros((5, 4)), np.zeros((2, 5, 3)), 1.0):
        with pytest.raises(ValueError, match="space"):
            policy(wrong)


def test_a_recurrent_policy_remembers_until_it_is_reset(tmp_path):
    env = gym.make("Pendulum-v1")
    recurrent = {"recurrent": "lstm", "policy_output_gain": 1.0}
    policy = ppo.load_policy(untrained_run(tmp_path, env.observation_space, env.action_space, **recurrent).path)
    observations = np.ones((2, 3), np.float32)
    first, second = policy(observations), policy(observations)
    assert (first != second).all()
    policy.reset(np.array([True, False]))
    third = policy(observations)
    assert third[0] == first[0] and third[1] != first[1]
    with pytest.raises(ValueError, match="remembers 2 envs, but this call has 3"):
        policy(np.ones((3, 3), np.float32))
    policy.reset()
    np.testing.assert_array_equal(policy(observations), first)


@pytest.mark.parametrize("given", [None, "false"])
@pytest.mark.parametrize("variable", ["TF_ENABLE_ONEDNN_OPTS", "TF_FORCE_GPU_ALLOW_GROWTH"])
def test_importing_ppo_sets_variables_of_tensorflow_unless_they_are_set(variable, given):
    """oneDNN is used, and the memory of a GPU is allocated as needed."""
    environment = {name: value for name, value in os.environ.items() if name != variable}
    if given is not None:
        environment[variable] = given
    code = f"import os, ppo; print(os.environ['{variable}'])"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, check=True, timeout=60, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == (given or ("1" if "ONEDNN" in variable else "true"))


QUIET = """
import ppo
ppo.train(ppo.Config(
    env="CartPole-v1", total_steps=64, num_envs=2, num_workers=0, num_steps=16, minibatch_size=16, epochs=1,
    report_interval=32, eval_episodes=1,
))
"""


@pytest.mark.slow
def test_training_in_python_prints_what_the_command_prints_and_nothing_of_tensorflow(tmp_path):
    """A line per report, also where there is no terminal, and the run folder and the score at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), **QUICKLY_COMPILED}
    done = subprocess.run(
        [sys.executable, "-c", QUIET], check=True, timeout=200, env=environment, cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    assert not done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if not line.startswith("compiling")]
    begins = ["training CartPole-v1 for 64", "network: observation 4 -> policy 64 64, value 64 64 (tanh); 9,155 param"]
    begins += ["32 steps  return", "64 steps  return", "64 steps  deterministic policy: "]
    begins += ["", "run folder:  runs/", "final score: ", "best score: "]
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(begin), done.stdout


def test_importing_ppo_does_not_load_tensorflow_and_provides_every_public_name():
    code = "import sys, ppo; ppo.Config(); ppo.preset('swimmer'); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    for name in ppo.__all__:
        assert getattr(ppo, name).__doc__, name
    assert "callbacks" in inspect.signature(ppo.train).parameters
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = ppo.trane


def test_vector_options_imports_tensorflow_as_training_does_without_its_log():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    code = "import sys, ppo; ppo.vector_options(ppo.Config()); assert 'keras' not in sys.modules"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, check=True, timeout=60, env=environment, capture_output=True, text=True)
    assert not done.stdout + done.stderr


def test_tensorflow_is_imported_without_keras_which_networks_can_still_use():
    code = (
        "import sys; from ppo.runtime.startup import load_tensorflow; load_tensorflow(); import ppo.trainer\n"
        "assert 'keras' not in sys.modules\n"
        "import tensorflow as tf; tf.keras.Sequential([tf.keras.layers.Dense(3)])(tf.zeros([2, 2]))\n"
        "tf.keras.optimizers.Adam()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process to a core")
def test_an_env_in_this_process_may_ask_a_policy_on_a_single_core(tmp_path):
    env = make_cartpole()
    opponent = untrained_run(tmp_path / "opponent", env.observation_space, env.action_space).path
    code = f"""
import os
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
import gymnasium as gym, ppo

class AgainstAPolicy(gym.Wrapper):
    def __init__(self):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=20))
        self.opponent = ppo.load_policy({str(opponent)!r})

    def reset(self, **kwargs):
        self.observation, info = self.env.reset(**kwargs)
        return self.observation, info

    def step(self, action):
        self.opponent(self.observation)
        self.observation, *rest = self.env.step(action)
        return self.observation, *rest

config = ppo.Config(num_envs=2, num_steps=32, minibatch_size=32, num_workers=0, total_steps=192, eval_episodes=1)
ppo.train(config, [AgainstAPolicy] * 2, logdir={str(tmp_path / "run")!r}, progress=False)
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TF_NUM_")}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=90, env=environment)


def test_the_reference_documents_only_names_that_ppo_exports():
    page = (Path(__file__).parents[2] / "docs" / "api-ppo.md").read_text()
    assert set(re.findall(r"^::: ppo\.(.+)$", page, flags=re.MULTILINE)) == set(ppo.__all__)
