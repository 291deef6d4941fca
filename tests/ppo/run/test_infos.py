"""Tests of `--info-metrics`: the infos of episodes are averaged like returns and lengths."""

import dataclasses
import io
import json
from collections import deque

import gymnasium as gym
import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
import vecenv
from ppo.envs import training_envs
from ppo.run.display import Display
from ppo.run.metrics import ENOUGH, WINDOW, Episodes
from tests.helpers import CountingEnv
from tests.ppo.envs import InfoEnv
from tests.ppo.runs import command, parsed, reports, untrained_run
from vecenv.ingraph import Rollout

CONFIG = ppo.Config(
    total_steps=512, num_envs=4, num_steps=32, minibatch_size=64, epochs=1, num_workers=0, report_interval=128,
    eval_episodes=3, eval_interval=256, policy_layers=(8,), value_layers=(8,),
    info_metrics=("steps", "nested/long", "rare", "is_sucess", "steps:sum"),
)  # fmt: skip


class Listener(ppo.Callback):
    def __init__(self):
        self.warnings, self.evaluations = [], []

    def on_warning(self, message):
        self.warnings.append(message)

    def on_evaluation(self, env_steps, evaluation):
        self.evaluations.append(evaluation)


ENVS = [lambda i=i: InfoEnv(i, 3 + i) for i in range(4)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    listener = Listener()
    result = ppo.train(CONFIG, ENVS, callbacks=[listener], logdir=tmp_path_factory.mktemp("runs"))
    return result, listener


def test_reports_average_infos_over_the_episodes_of_the_returns(finished):
    rows = reports(finished[0].path, times=False)
    assert [row["env_steps"] for row in rows] == [128, 256, 384, 512]
    for row in rows:
        assert row["info_steps"] == row["length_mean"]
        assert row["info_rare"] == 7 and row["info_is_sucess"] is None
        # The lengths of all episodes so far, without those that ended in the rollout before the first update.
        before, steps = CONFIG.num_steps, CONFIG.num_steps + row["env_steps"] // 4
        lengths = np.concatenate([[length] * (steps // length - before // length) for length in (3, 4, 5, 6)])
        assert len(lengths) == row["episodes"]
        if len(lengths) <= WINDOW:
            assert row["info_nested/long"] == pytest.approx((lengths >= 4).mean())
            assert row["info_steps:sum"] == pytest.approx((lengths * (lengths + 1) / 2).mean())
    assert rows[1]["episodes"] <= WINDOW < rows[-1]["episodes"]
    evaluated = [row for row in rows if "eval_return_mean" in row]
    assert [row["env_steps"] for row in evaluated] == [256, 512]
    for row in evaluated:
        assert row["eval_info_steps"] == np.mean([3, 4, 5, 6]) and row["eval_info_steps:sum"] == np.mean(
            [6, 10, 15, 21]
        )
        assert row["eval_info_nested/long"] == 3 / 4
        assert "eval_info_rare" not in row  # the first episode of an env lacks it


def test_a_run_warns_once_about_a_key_that_no_episode_has(finished):
    (message,) = finished[1].warnings
    assert "episodes ended without the info 'is_sucess', which --info-metrics names" in message


def test_evaluations_hold_the_info_of_each_episode(finished):
    result, listener = finished
    for evaluation in (result.evaluation, *listener.evaluations):
        assert evaluation.infos["steps"].tolist() == evaluation.lengths.tolist() == [3, 4, 5, 6]  # each function plays
        assert np.isnan(evaluation.infos["rare"]).all() and "info_rare" not in evaluation.summary()
        assert evaluation.summary()["info_steps"] == 4.5
    written = json.loads((result.path / "evaluation.json").read_text())
    assert written["info_steps"] == 4.5 and "info_rare" not in written
    assert written["infos"] == {
        "steps": [3, 4, 5, 6],
        "nested/long": [0, 1, 1, 1],
        "rare": [None] * 4,
        "is_sucess": [None] * 4,
        "steps:sum": [6, 10, 15, 21],
    }


def test_tensorboard_shows_infos_in_a_group(finished):
    events = EventAccumulator(str(finished[0].path), size_guidance={"scalars": 0})
    events.Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("infos/")}
    both = ("steps", "steps:sum", "nested/long")
    names = {"info_rare", *(f"{of}_{name}" for of in ("info", "eval_info") for name in both)}
    assert tags == {f"infos/{name}" for name in names}


@pytest.mark.slow
def test_a_resumed_run_with_a_worker_keeps_its_infos_and_may_add_a_key(finished, tmp_path):
    config = dataclasses.replace(CONFIG, num_workers=1)
    first = ppo.train(dataclasses.replace(config, total_steps=256), ENVS, logdir=tmp_path)
    more = {"total_steps": config.total_steps, "info_metrics": ("share", *CONFIG.info_metrics)}
    ppo.resume(first.path, envs=ENVS, **more)
    found, expected = (reports(one.path, times=False) for one in (first, finished[0]))
    for name in ("env_steps", "episodes", "length_mean", *(name for name in expected[0] if "info_" in name)):
        assert [row[name] for row in found] == [row[name] for row in expected], name
    assert found[-1]["info_share"] == 1 and "info_share" not in found[0]


def rollout(values, key="key"):
    """Returns a rollout of one env. Each step ends an episode, whose return, length and info are the step's value."""
    ended, values = np.ones((len(values), 1), np.bool_), np.array(values, np.float64)[:, None]
    empty = dict.fromkeys(Rollout._fields)
    arrays = {"terminated": ended, "truncated": ~ended, "episode_returns": values, "episode_lengths": values}
    return Rollout(**{**empty, **arrays, "episode_infos": {key: values}})


def test_means_ignore_episodes_without_the_info_and_state_is_restored():
    episodes = Episodes(["key"])
    assert episodes.summary()["info_key"] is None
    episodes.add(rollout([np.nan, 1.0, 4.0]), warn=print)
    assert episodes.summary()["info_key"] == 2.5
    episodes.returns.clear(), episodes.lengths.clear()  # each begins with NaN, which JSON lacks
    state = json.loads(json.dumps(episodes.state(), allow_nan=False))
    again = Episodes(["other", "key"])
    again.load(state)
    np.testing.assert_array_equal(again.infos["key"], [np.nan, 1.0, 4.0])
    assert again.infos["other"] == deque() and again.summary()["info_other"] is None


def test_a_key_that_no_episode_has_causes_one_warning_after_enough_episodes():
    episodes = Episodes(["key"])
    messages: list[str] = []
    episodes.add(rollout([np.nan] * (ENOUGH - 1)), warn=messages.append)
    assert not messages
    episodes.add(rollout([np.nan]), warn=messages.append)
    assert len(messages) == 1 and f"the last {ENOUGH} episodes ended without the info 'key'" in messages[0]
    episodes.add(rollout([np.nan]), warn=messages.append)
    Episodes(["key"]).add(rollout([1.0] + [np.nan] * (WINDOW - 1)), warn=messages.append)
    assert len(messages) == 1


def test_a_value_that_is_not_a_number_is_an_error_that_names_env_key_and_value(tmp_path):
    class LabelEnv(CountingEnv):
        def step(self, action):
            *results, _ = super().step(action)
            return *results, {"stage": "won"}

    config = dataclasses.replace(CONFIG, info_metrics=("stage",))
    with pytest.raises(TypeError, match=r"info 'stage' of env 0 at step 3 of its episode is 'won' \(str\)"):
        ppo.train(config, lambda: LabelEnv(0), logdir=tmp_path)


def test_a_vector_env_must_have_the_keys(tmp_path):
    config = dataclasses.replace(CONFIG, eval_interval=None)
    options = {**ppo.vector_options(config), "info_keys": ()}
    with vecenv.SyncVectorEnv(ENVS, **options) as envs, pytest.raises(ppo.ConfigError, match=r"info_keys.*'steps'"):
        ppo.train(config, envs, logdir=tmp_path)
    with vecenv.SyncVectorEnv(ENVS, **ppo.vector_options(config)) as envs, training_envs(config, envs) as given:
        assert given.info_keys == CONFIG.info_metrics


@pytest.mark.parametrize("keys", [("a", "a"), ("",)])
def test_keys_are_distinct_names(keys):
    with pytest.raises(ppo.ConfigError, match="info_metrics"):
        ppo.Config(info_metrics=keys)


def test_evaluate_prints_infos(tmp_path, capsys):
    env = gym.make("InvertedPendulum-v5")
    spaces = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), env.action_space
    config = parsed("--env", "InvertedPendulum-v5", "--info-metrics", "reward_survive", "other")
    assert config.info_metrics == ("reward_survive", "other")
    settings = {"env": config.env, "info_metrics": config.info_metrics}
    run = str(untrained_run(tmp_path, *spaces, given=False, **settings).path)
    assert command("evaluate", [run, "--episodes", "2"]) == 0
    # At the last step, the pendulum has fallen, so there is no reward for surviving.
    assert "2 episodes, info_reward_survive 0, seed " in capsys.readouterr().out
    assert command("evaluate", [run, "--episodes", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["info_reward_survive"] == 0 and "info_other" not in summary


def test_the_display_shows_infos(capsys):
    report = {
        "env_steps": 128, "wall_s": 1.0, "steps_per_s": 9.0, "collect_steps_per_s": 9.0, "learn_steps_per_s": 9.0,
        "return_mean": 1.0, "kl": 0.0, "entropy": 0.0, "learning_rate": 0.1,
        "info_a/b": 0.25, "info_none": None, "eval_info_a/b": 1.0,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=300)
    with Display(console) as display:
        display.on_start(CONFIG, 0)
        display.on_report(report)
        display.on_evaluation(128, ppo.Evaluation(np.array([1.0]), np.array([1]), {"a/b": np.array([2.0])}))
    _, line, scores = console.file.getvalue().splitlines()
    assert "  info_a/b 0.25  info_none ...  " in line and scores.endswith("over 1 episode, info_a/b 2")
