"""Tests of the running average of the policy's weights (`weight_averaging`)."""

import dataclasses
import json
from contextlib import closing, contextmanager

import numpy as np
import pytest

import ppo
import vecenv
from ppo.algorithm.schedules import averaging_coefficient
from ppo.callbacks import Callback
from ppo.envs import training_envs
from ppo.results.evaluation import evaluate_run
from ppo.results.policy import load_agent
from ppo.run.folder import Run
from ppo.trainer import Trainer
from tests.ppo.runs import rewound
from tests.ppo.test_multi_agent import GAME

CONFIG = ppo.Config(
    env="Pendulum-v1", total_steps=640, num_envs=2, num_workers=0, num_steps=16, minibatch_size=16, epochs=2,
    learning_rate=1e-2, checkpoint_interval=320, eval_interval=320, eval_episodes=2, weight_averaging=0.3,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return ppo.train(CONFIG, logdir=tmp_path_factory.mktemp("averaging"), name="run")


def values_of(agent):
    return [variable.numpy() for variable in agent.variables]


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, [0, 0, 0, 1]), (1.0, [0.25, 0.25, 0.25, 0.25]), (0.5, [0.1, 0.2, 0.3, 0.4])],
)
def test_the_weight_of_an_update_is_polynomial_in_its_number(fraction, expected):
    config, weights = ppo.Config(weight_averaging=fraction), np.zeros(0)
    for updates in range(1, 5):
        newest = averaging_coefficient(config, updates)
        weights = np.append((1 - newest) * weights, newest)
    np.testing.assert_allclose(weights, expected, atol=1e-12)


TEAMS = {"env": "pettingzoo:mpe2.simple_adversary_v3", "policies": "group"}


@contextmanager
def trainer_of(folder, config):
    with training_envs(config, None) as envs:
        trainer = Trainer(config, Run.create(folder, "run", config), envs, Callback())
        with closing(trainer):
            trainer.begin()
            yield trainer


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": True}, TEAMS, pytest.param({"recurrent": "gru"}, marks=pytest.mark.slow)], ids=str
)
def test_learned_variables_are_averaged_and_statistics_are_copied(tmp_path, settings):
    config = dataclasses.replace(CONFIG, **settings)
    with trainer_of(tmp_path, config) as trainer:
        expected = {}
        for updates in range(1, 6):
            trainer.iterate()
            for team in trainer.teams:
                learned = {id(variable) for variable in team.agent.learned}
                assert learned and len(learned) < len(team.agent.variables)
                for number, (mine, average) in enumerate(
                    zip(team.agent.variables, team.average.variables, strict=True)
                ):
                    newest = averaging_coefficient(config, updates) if id(mine) in learned else 1.0
                    before = expected.get((team.name, number), 0.0)
                    mean = expected[team.name, number] = newest * mine.numpy() + (1 - newest) * before
                    np.testing.assert_allclose(average.numpy(), mean, rtol=1e-5, atol=1e-6)
        assert trainer.evaluated_agents() == {team.name: team.average for team in trainer.teams}
        assert all(team.average.soft_update.experimental_get_tracing_count() == 1 for team in trainer.teams)


def test_evaluations_and_loaded_policies_use_the_average_but_rollouts_do_not(tmp_path, run):
    average = load_agent(Run.open(run.path), print)
    plain = ppo.train(dataclasses.replace(CONFIG, weight_averaging=0.0), logdir=tmp_path)
    newest = load_agent(Run.open(plain.path), print)
    learned = {id(variable) for variable in average.learned}
    for variable, mine, other in zip(average.variables, values_of(average), values_of(newest), strict=True):
        if id(variable) in learned:
            assert (mine != other).any()
        else:  # equal statistics of observations show that the same policy collected the rollouts
            np.testing.assert_array_equal(mine, other)
    assert run.evaluation.returns.tolist() != plain.evaluation.returns.tolist()
    assert evaluate_run(Run.open(run.path), 2).returns.tolist() == run.evaluation.returns.tolist()
    halfway = evaluate_run(Run.open(rewound(run.path, tmp_path / "half")), 2).returns.mean()
    reports = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    assert [r["eval_return_mean"] for r in reports if r["env_steps"] == 320] == [pytest.approx(halfway)]
    policy, observations = ppo.load_policy(run.path), np.ones([3, 3], np.float32)
    actions, _ = average.act(observations, average.initial_state(3))
    np.testing.assert_array_equal(policy(observations), np.clip(actions, -2, 2))


def test_a_resumed_run_continues_the_average(tmp_path, run):
    resumed = ppo.resume(rewound(run.path, tmp_path / "copy"))
    assert resumed.evaluation.returns.tolist() == run.evaluation.returns.tolist()
    for mine, theirs in zip(*(values_of(load_agent(Run.open(r.path), print)) for r in (run, resumed)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_run_stopped_before_its_first_update_saves_its_initial_networks_as_the_average(tmp_path, run):
    class Stopping(ppo.Callback):
        def on_start(self, config, env_steps):
            raise ppo.StopTraining

    stopped = ppo.train(CONFIG, callbacks=Stopping(), init_from=run.path, logdir=tmp_path)
    assert stopped.env_steps == 0
    before, after = (load_agent(Run.open(result.path), print) for result in (run, stopped))
    for old, new in zip(values_of(before), values_of(after), strict=True):
        np.testing.assert_array_equal(new, old)


def test_snapshots_for_self_play_hold_the_average_that_evaluations_rate(tmp_path):
    config = dataclasses.replace(GAME, self_play_interval=128, total_steps=640, weight_averaging=0.5)
    with trainer_of(tmp_path, config) as trainer:
        (team,) = trainer.teams
        opponent = team.agent.untrained_copy()
        for _ in range(2):  # after the first update, the average still equals the newest weights
            trainer.iterate()
        trainer.rollouts.snapshots.load(2, opponent)
        for mine, theirs in zip(values_of(team.average), values_of(opponent), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert any((a != b).any() for a, b in zip(values_of(team.agent), values_of(opponent), strict=True))


def test_a_worker_that_dies_in_the_first_rollout_leaves_an_average_with_the_statistics(tmp_path):
    with trainer_of(tmp_path, CONFIG) as trainer:
        (team,) = trainer.teams
        trainer.rollouts.take = failing_after(trainer.rollouts.take, 1)
        with pytest.raises(vecenv.WorkerDied):
            trainer.iterate()
        for mine, theirs in zip(values_of(team.agent), values_of(team.average), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def failing_after(function, calls):
    """Returns a function that raises WorkerDied after a number of calls."""
    left = iter([True] * calls)

    def call(*arguments):
        if next(left, False):
            return function(*arguments)
        raise vecenv.WorkerDied("killed")

    return call


def test_videos_in_training_show_the_average(tmp_path, monkeypatch):
    with trainer_of(tmp_path, CONFIG) as trainer:
        seen = []
        monkeypatch.setattr("ppo.trainer.record", lambda agents, *_, **__: (seen.append(agents), [[None]])[1])
        trainer.record()
        assert seen == [{"": trainer.teams[0].average}]
