"""Tests of ppo/policies/evaluation.py: episodes that never end, and envs that different functions make."""

import dataclasses
import functools
import json

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import pytest

import ppo
import vecenv
from ppo.envs import time_limit_of
from ppo.policies import evaluation as evaluations
from ppo.policies.evaluation import MIN_LIMIT, Players, limit_of, play
from tests.drawing import Striped
from tests.helpers import CountingEnv
from tests.ppo.runs import command, reports, untrained_run

CONFIG = ppo.Config(
    env="given", total_steps=64, num_envs=2, num_steps=16, minibatch_size=16, epochs=1, num_workers=0,
    eval_episodes=3, report_interval=32, policy_layers=(8,), value_layers=(8,),
)  # fmt: skip
NEVER = 10**9


class Agent:
    def initial_state(self, number):
        return np.zeros((number, 0))

    def act(self, observations, state, checked):
        return np.zeros(len(observations), np.int64), state


class Warnings(ppo.Callback):
    def __init__(self):
        self.messages = []

    def on_warning(self, message):
        self.messages.append(message)


def test_an_episode_that_does_not_end_counts_with_its_return_so_far():
    warnings, makes = [], [functools.partial(CountingEnv, i, length) for i, length in enumerate((NEVER, 5))]
    with vecenv.SyncVectorEnv(makes, autoreset_mode="SameStep", info_keys=["steps"]) as envs:
        found = play(Players({"": Agent()}, CONFIG, 12, warnings.append), envs, 6)
    assert found.lengths.tolist() == [12, 5, 5, 5]
    assert found.returns.tolist() == [78.0, 15.0, 15.0, 15.0]  # 1 + 2 + ... + 12
    assert found.infos["steps"].tolist() == [12, 5, 5, 5]
    (message,) = warnings
    assert message.startswith("3 of 6 episodes were cut off or never began: an env whose episode reaches 12 steps")


class Wanderer(CountingEnv):
    """Reports success in each step or, if `late`, only at the end of an episode. Env 1 never ends."""

    def __init__(self, index, late):
        super().__init__(index, NEVER if index == 1 else 3)
        self.late = late

    def step(self, action):
        *results, _ = super().step(action)
        over = self.steps >= self.length
        flags = {"is_success": over, "crashed": False, "constant": 7.0} if over or not self.late else {}
        return *results, {**flags, "distance": 2.0 + self.index}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("engine", ["serial", "workers", "batched"])
def test_an_episode_that_does_not_end_is_no_success(late, engine):
    keys = ["is_success", "is_success:mean", "crashed", "constant", "distance:sum", "nothing"]
    how = {"autoreset_mode": "SameStep", "info_keys": keys, "infos": False}
    makes = [functools.partial(Wanderer, i, late) for i in range(2)]
    batch = vecenv.Batched(
        lambda num_envs, autoreset_mode: gym.vector.SyncVectorEnv(makes, autoreset_mode=autoreset_mode), 2
    )
    with {
        "serial": lambda: vecenv.SyncVectorEnv(makes, **how),
        "workers": lambda: vecenv.AsyncVectorEnv(makes, num_workers=1, **how),
        "batched": lambda: vecenv.SyncVectorEnv(batch, **how),
    }[engine]() as envs:
        found = play(Players({"": Agent()}, CONFIG, 12, lambda message: None), envs, 2)
    summary = found.summary()
    assert summary["info_is_success"] == 0.5 and summary["info_crashed"] == 0
    assert summary["info_is_success:mean"] == (0.5 if late else 1 / 6)
    np.testing.assert_array_equal(found.infos["constant"], [7, np.nan if late else 7])  # it is not a flag
    assert found.infos["distance:sum"].tolist() == [6, 36] and "info_nothing" not in summary


def test_a_limit_does_not_concern_the_episodes_that_end_there():
    warnings = []
    with vecenv.SyncVectorEnv([functools.partial(CountingEnv, 0, 5)], autoreset_mode="SameStep") as envs:
        found = play(Players({"": Agent()}, CONFIG, 5, warnings.append), envs, 2)
    assert found.lengths.tolist() == [5, 5] and not warnings


def test_an_evaluation_needs_an_episode():
    with pytest.raises(ppo.ConfigError, match="episodes 0 is out of range: it must be 1 or more"):
        ppo.evaluate_run("nowhere", 0)


def test_the_limit_is_ten_times_the_longest_training_episode():
    assert limit_of(None) == limit_of(0) == limit_of(1000) == MIN_LIMIT == 10_000
    assert limit_of(1001) == 10_010
    assert limit_of(None, 0) == limit_of(50, 1000) == limit_of(None, 10**6) == 10_000  # 0: training has not begun
    assert limit_of(None, 32) == limit_of(31, 32) == 320 and limit_of(40, 32) == 400


def test_a_short_run_on_an_env_that_never_ends_has_a_short_evaluation(tmp_path):
    warnings, make = Warnings(), functools.partial(CountingEnv, 0, NEVER)
    result = ppo.train(CONFIG, make, callbacks=[warnings], logdir=tmp_path)
    assert result.evaluation.lengths.tolist() == [320, 320]  # ten times the 32 steps of training in each env
    (message,) = warnings.messages
    assert message.startswith(
        "3 of 3 episodes were cut off or never began: an env whose episode reaches 320 steps, far"
    )
    assert ppo.evaluate_run(result.path, 1, envs=make).lengths.tolist() == [320]
    # A time limit of the env itself, here 400 steps, is not cut short.
    limited = functools.partial(gym.wrappers.TimeLimit, CountingEnv(0, NEVER), 400)
    assert ppo.evaluate_run(result.path, 1, envs=lambda: gym.Wrapper(limited())).lengths.tolist() == [400]


def test_the_time_limit_of_envs_is_known_wherever_they_are_stepped():
    short = {"max_episode_steps": 7}
    for expected, made in (
        (7, vecenv.make("CartPole-v1", 2, num_workers=1, **short)),
        (7, vecenv.make("Hopper-v5", 2, **short)),
        (0, vecenv.SyncVectorEnv([functools.partial(CountingEnv, 0)])),
    ):
        with made as envs:
            assert time_limit_of(envs) == expected


def test_a_run_on_an_env_that_never_ends_has_a_score_and_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluations, "MIN_LIMIT", 40)
    warnings, make = Warnings(), functools.partial(CountingEnv, 0, NEVER)
    result = ppo.train(CONFIG, make, callbacks=[warnings], logdir=tmp_path)
    assert result.evaluation.lengths.tolist() == [40, 40]
    assert [message for message in warnings.messages if "3 of 3 episodes were cut off" in message]
    warnings = Warnings()
    assert ppo.evaluate_run(result.path, 1, envs=make, warn=warnings.on_warning).lengths.tolist() == [40]
    assert len(warnings.messages) == 1


@pytest.fixture(scope="module")
def of_functions(tmp_path_factory):
    """Returns a run on 6 functions, whose episodes take 2 to 7 steps. Its evaluations have at most 4 envs."""
    makes = [functools.partial(CountingEnv, 0, length) for length in range(2, 8)]
    config = dataclasses.replace(CONFIG, num_envs=6, eval_interval=96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ppo.envs.MAX_EVALUATION_ENVS", 4)
        return ppo.train(config, makes, logdir=tmp_path_factory.mktemp("runs"))


def test_an_evaluation_of_a_loaded_policy_has_the_limit_of_training(of_functions, monkeypatch):
    monkeypatch.setattr(evaluations, "MIN_LIMIT", 1)
    result = of_functions
    found = ppo.evaluate_run(result.path, 1, envs=functools.partial(CountingEnv, 0, NEVER), warn=lambda message: None)
    assert found.lengths.tolist() == [70]


@pytest.mark.parametrize("by", ["function", pytest.param("eval_env_kwargs", marks=pytest.mark.slow)])
def test_a_resumed_run_scores_the_best_checkpoint_again_if_its_evaluation_envs_may_differ(tmp_path, by):
    """Episodes of 9 steps are worth 45, and those of 5 steps 15: the first score must not keep its place."""
    config = dataclasses.replace(CONFIG, eval_interval=32)
    envs = functools.partial(CountingEnv, 0, 5)

    def how(length):
        if by == "function":
            return config, {"envs": envs, "eval_envs": functools.partial(CountingEnv, 0, length)}
        return dataclasses.replace(config, env=f"{__name__}:Counting", eval_env_kwargs={"length": length}), {}

    def best(result):
        return json.loads((result.path / "checkpoints" / "best" / "progress.json").read_text())

    settings, sources = how(9)
    result = ppo.train(settings, **sources, logdir=tmp_path)
    assert best(result)["return_mean"] == 45 and best(result)["env_steps"] == 64
    warnings = Warnings()
    settings, sources = how(5)
    changed = {"total_steps": 128, "eval_env_kwargs": settings.eval_env_kwargs, "trust_modules": True}
    ppo.resume(result.path, **changed, **sources, callbacks=warnings)
    assert best(result)["return_mean"] == 15 and best(result)["env_steps"] == 128
    assert warnings.messages[1:] == ["the checkpoint best, whose mean return was 45.0, has 15.0 in the evaluation envs"]
    # The best policy keeps its place if it is better in the new envs, too.
    file = result.path / "checkpoints" / "best" / "progress.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "env_steps": 7}))
    with pytest.MonkeyPatch.context() as patch:
        scores = iter([46.0, 45.0, 45.0])
        real = evaluations.play
        patch.setattr(
            evaluations,
            "play",
            lambda *a, **k: dataclasses.replace(real(*a, **k), returns=np.full(3, next(scores))),
        )
        settings, sources = how(9)
        ppo.resume(
            result.path, **{**changed, "total_steps": 192, "eval_env_kwargs": settings.eval_env_kwargs}, **sources
        )
    assert best(result)["env_steps"] == 7


class Counting(CountingEnv):
    def __init__(self, length=5):
        super().__init__(0, length)


def test_a_video_of_an_episode_that_never_ends_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluations, "MIN_LIMIT", 4)
    warnings, run = [], untrained_run(tmp_path / "runs", Striped.observation_space, Striped.action_space)
    make = functools.partial(Striped, NEVER)
    files, evaluation = ppo.record_run(run.path, tmp_path / "out", 2, envs=make, warn=warnings.append)
    assert evaluation.lengths.tolist() == [4] and len(warnings) == 1
    (file,) = files
    assert len(imageio.imread(file, plugin="FFMPEG")) in (4, 5)  # the encoder may drop the last frame


def test_every_function_of_a_list_plays_in_an_evaluation(of_functions):
    """Training uses 6 functions, but an evaluation has 3 episodes, and at most 4 envs fit."""
    result = of_functions
    evaluation = result.evaluation
    assert evaluation.lengths.tolist() == [2, 3, 4, 5, 6, 7] and evaluation.functions.tolist() == [0, 1, 2, 3, 4, 5]
    means = {f"return_mean/function_{k}": (k + 2) * (k + 3) / 2 for k in range(6)}
    assert evaluation.summary() == {**evaluation.summary(), **means}
    report = reports(result.path)[-1]
    assert report == {**report, **{f"eval_{name}": value for name, value in means.items()}}
    saved = json.loads((result.path / "evaluation.json").read_text())
    assert saved == {**saved, **evaluation.to_json()}


@pytest.mark.parametrize(
    ("copies", "episodes", "lengths"),
    [
        ((3, 1), 4, [2, 2, 3, 3]),  # the order of the list does not matter
        ((2, 2), 5, [2, 2, 2, 3, 3]),
        ((4,), 3, [2, 2, 2]),
    ],
)
def test_functions_play_equally_many_episodes_however_often_a_list_repeats_them(tmp_path, copies, episodes, lengths):
    run = untrained_run(tmp_path, CountingEnv.observation_space, CountingEnv.action_space, num_envs=4, num_workers=0)
    makes = [functools.partial(CountingEnv, 0, 2 + i) for i in range(len(copies))]
    envs = [make for make, count in zip(makes, copies, strict=True) for _ in range(count)]
    found = ppo.evaluate_run(run, episodes, envs=envs)
    assert sorted(found.lengths.tolist()) == lengths
    assert ("return_mean/function_0" in found.summary()) == (len(copies) > 1)


def test_evaluations_of_a_run_use_fresh_seeds_and_its_own_seed_repeats_the_final_evaluation(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, env="CartPole-v1", eval_episodes=8)
    result = ppo.train(config, logdir=tmp_path)
    fresh = [ppo.evaluate_run(result.path, 8).lengths.tolist() for _ in range(2)]
    final = result.evaluation.lengths.tolist()
    assert final not in fresh and fresh[0] != fresh[1]
    assert ppo.evaluate_run(result.path, 8, seed=config.seed).lengths.tolist() == final
    capsys.readouterr()
    command("evaluate", [str(result.path), "--episodes", "8", "--seed", str(config.seed)])
    out = capsys.readouterr().out
    assert out.startswith("deterministic policy: return ") and out.endswith(f"8 episodes, seed {config.seed}\n")


def test_an_evaluation_with_sampled_actions_says_so_and_is_reproducible(tmp_path, capsys):
    """A policy that has just begun to learn acts at random, so episodes of CartPole differ."""
    config = dataclasses.replace(CONFIG, env="CartPole-v1", eval_episodes=8, sample=True, eval_interval=32)
    result = ppo.train(config, logdir=tmp_path)
    out = capsys.readouterr().out
    assert "64 steps  sampled policy: return" in out and "(mean return of the sampled policy over 8 episodes)" in out
    assert not result.evaluation.deterministic and result.evaluation.summary()["deterministic"] is False
    assert json.loads((result.path / "evaluation.json").read_text())["deterministic"] is False
    kinds = {}
    for deterministic in (True, False):
        found = [ppo.evaluate_run(result.path, 8, seed=0, deterministic=deterministic) for _ in range(2)]
        assert [one.deterministic for one in found] == [deterministic] * 2
        kinds[deterministic], again = (one.lengths.tolist() for one in found)
        assert kinds[deterministic] == again
    assert kinds[False] == result.evaluation.lengths.tolist() != kinds[True]
    command("evaluate", [str(result.path), "--episodes", "8", "--seed", "0", "--sample"])
    out = capsys.readouterr().out
    assert out.startswith(f"sampled policy: return {np.mean(kinds[False]):,.1f} +-")
    command("evaluate", [str(result.path), "--episodes", "2", "--json", "--sample"])
    assert json.loads(capsys.readouterr().out)["deterministic"] is False
