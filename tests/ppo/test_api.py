"""Tests of the Python API: ppo.train, callbacks, ppo.load_policy."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest

import ppo
import vecenv
from ppo.results.evaluation import evaluate_run
from ppo.run.folder import Run
from ppo.run.metrics import TIMES
from ppo.seeds import evaluation_seeds
from tests.ppo.envs import make_cartpole

CONFIG = ppo.Config(
    env="CartPole-v1",
    total_steps=256,
    num_envs=4,
    num_workers=2,
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


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def test_callbacks_are_called_in_order(tmp_path):
    recorder = Recorder()
    result = ppo.train(CONFIG, callbacks=[recorder], logdir=tmp_path, name="mine")
    due = ("report", "evaluation", "checkpoint", "update")
    one = [("update", 64), *((call, 128) for call in due)]
    last = [("update", 192), *((call, 256) for call in due)]
    assert recorder.calls == [("start", 0), *one, *last, ("end", 256)]
    assert [row["env_steps"] for row in metrics(result.path)] == [128, 256]
    assert result.path.name.endswith("-mine") and result.path.parent == tmp_path
    assert result.env_steps == 256 and not result.interrupted and len(result.evaluation.returns) == 3


def test_every_evaluation_is_written_to_the_metrics_even_between_reports(tmp_path):
    path = ppo.train(dataclasses.replace(CONFIG, eval_interval=64, report_interval=256), logdir=tmp_path).path
    assert [row["env_steps"] for row in metrics(path) if "eval_return_mean" in row] == [64, 128, 192, 256]


@pytest.mark.slow
def test_envs_may_be_an_id_a_function_a_list_of_functions_or_a_vector_env(tmp_path):
    config = dataclasses.replace(CONFIG, eval_interval=None)
    vector = vecenv.AsyncVectorEnv([make_cartpole] * 4, num_workers=1, **ppo.vector_options(config))
    serial = vecenv.SyncVectorEnv([make_cartpole] * 4, **ppo.vector_options(config))
    with vector, serial:
        found = [
            metrics(ppo.train(config, envs, logdir=tmp_path / str(i)).path)
            for i, envs in enumerate([None, make_cartpole, [make_cartpole] * 4, vector, serial])
        ]
        assert len(found[0]) == 2 and all(rows == found[0] for rows in found)
        vector.reset()  # training has not closed it


def test_the_errors_for_unsuitable_envs_say_what_to_do(tmp_path):
    config = dataclasses.replace(CONFIG, eval_interval=None)
    with vecenv.AsyncVectorEnv([make_cartpole] * 4) as plain, pytest.raises(ppo.ConfigError, match="vector_options"):
        ppo.train(config, plain, logdir=tmp_path)
    with vecenv.SyncVectorEnv([make_cartpole] * 2, **ppo.vector_options(config)) as two:
        with pytest.raises(ppo.ConfigError, match="has 2 envs, but num_envs is 4"):
            ppo.train(config, two, logdir=tmp_path)
        with pytest.raises(ppo.ConfigError, match="eval_interval needs separate envs"):
            ppo.train(CONFIG, two, logdir=tmp_path)
    with pytest.raises(ppo.ConfigError, match="3 functions that make envs, but num_envs is 4"):
        ppo.train(config, [make_cartpole] * 3, logdir=tmp_path)
    with pytest.raises(ppo.ConfigError, match="vector envs of vecenv"):
        ppo.train(config, gym.make_vec("CartPole-v1", 4), logdir=tmp_path)
    assert not list(tmp_path.iterdir())  # no empty run folder is left behind


def test_a_run_stopped_by_a_callback_can_be_resumed(tmp_path):
    class StopAt128(ppo.Callback):
        def on_update(self, report):
            if report["env_steps"] == 128:
                raise ppo.StopTraining

    result = ppo.train(CONFIG, callbacks=[StopAt128()], logdir=tmp_path)
    assert result.interrupted and result.env_steps == 128 and result.evaluation is None
    with pytest.raises(ppo.ConfigError, match="a resumed run keeps its settings, but learning_rate would change"):
        ppo.resume(result.path, learning_rate=1.0)
    again = ppo.resume(result.path)
    assert again.path == result.path and again.env_steps == 256 and len(metrics(again.path)) == 2


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("on_start", "first"),
        ("on_update", "last"),
        ("on_evaluation", "last"),
        ("on_checkpoint", "first"),
        pytest.param("on_update", "first", marks=pytest.mark.slow),
        pytest.param("on_report", "last", marks=pytest.mark.slow),
        pytest.param("on_evaluation", "first", marks=pytest.mark.slow),
    ],
)
def test_every_callback_method_can_stop_a_run(tmp_path, name, when):
    def stop(self, *arguments):
        steps = arguments[0]["env_steps"] if isinstance(arguments[0], dict) else arguments[0]
        if when == "first" or name == "on_start" or steps == 256:
            raise ppo.StopTraining

    result = ppo.train(CONFIG, callbacks=[type("Stops", (ppo.Callback,), {name: stop})()], logdir=tmp_path)
    assert result.interrupted
    again = ppo.resume(result.path)
    assert again.env_steps == 256 and not again.interrupted


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


def test_an_exception_in_a_callback_ends_the_run(tmp_path):
    class Broken(ppo.Callback):
        def on_update(self, report):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ppo.train(CONFIG, callbacks=[Broken()], logdir=tmp_path)


def test_training_works_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(ppo.train(CONFIG, logdir=tmp_path)))
    thread.start()
    thread.join(120)
    assert results[0].env_steps == 256


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
    config = dataclasses.replace(CONFIG, env=env_id, eval_interval=None, total_steps=1280, **SETTINGS[env_id])
    result = ppo.train(config, logdir=tmp_path)
    policy = ppo.load_policy(result.path)
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
    np.testing.assert_allclose(returns, evaluate_run(Run.open(result.path), 3).returns, rtol=1e-5)


def test_a_policy_takes_one_observation_or_a_batch_and_nothing_else(tmp_path):
    policy = ppo.load_policy(ppo.train(dataclasses.replace(CONFIG, env="Pendulum-v1"), logdir=tmp_path).path)
    many = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    assert policy(many).shape == (5, 1) and policy(many[0]).shape == (1,)
    np.testing.assert_allclose([policy(one) for one in many], policy(many), rtol=1e-5)
    np.testing.assert_array_equal(policy(many.astype(np.float64)), policy(many))
    for wrong in (np.zeros((5, 4)), np.zeros((2, 5, 3)), 1.0):
        with pytest.raises(ValueError, match="space"):
            policy(wrong)


def test_a_recurrent_policy_remembers_until_it_is_reset(tmp_path):
    config = dataclasses.replace(CONFIG, env="Pendulum-v1", recurrent="lstm", policy_output_gain=1.0)
    policy = ppo.load_policy(ppo.train(config, logdir=tmp_path).path)
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


@pytest.mark.parametrize("given", [None, "0"])
def test_importing_ppo_enables_onednn_unless_the_variable_is_set(given):
    environment = {name: value for name, value in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    if given is not None:
        environment["TF_ENABLE_ONEDNN_OPTS"] = given
    code = "import os, ppo; print(os.environ['TF_ENABLE_ONEDNN_OPTS'])"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, check=True, timeout=60, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == (given or "1")


def test_importing_ppo_does_not_load_tensorflow_and_provides_every_public_name():
    code = "import sys, ppo; ppo.Config(); ppo.preset('ant'); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    for name in ppo.__all__:
        assert getattr(ppo, name).__doc__, name
    assert "callbacks" in inspect.signature(ppo.train).parameters
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = ppo.trane
