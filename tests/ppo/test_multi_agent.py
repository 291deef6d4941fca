"""Training on envs with several agents: equal to Gymnasium for one agent, and blind to rows that are not valid."""

import dataclasses
import functools
import json
import logging
import multiprocessing
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import ppo
import vecenv
from ppo import Config, ConfigError, Run, RunError, evaluate_run, export, footprint
from ppo.algorithm.batch import shuffled
from ppo.algorithm.views import GroupView
from ppo.callbacks import Callbacks
from ppo.collectors import collector_for
from ppo.envs import training_envs
from ppo.policies.evaluation import Players, play
from ppo.results import video as videos
from ppo.trainer import Trainer
from tests.helpers import CountingEnv
from tests.ppo.algorithm.test_update import parts_of_group
from tests.ppo.runs import reports, rewound

pytest.importorskip("pettingzoo")

from tests.multi_agent import BadReward, Breaks, Drawn, HangsInEvaluation, Higher, LeavingEnv, Numbered, Relay, Rings
from vecenv.adapters.pettingzoo import ParallelVectorEnv
from vecenv.ingraph import InGraphVectorEnv

CONFIG = Config(
    env="pettingzoo:tests.multi_agent:LeavingEnv",
    policies="group",
    total_steps=1_000,
    num_envs=4,
    num_workers=1,
    num_steps=16,
    epochs=2,
    minibatch_size=32,
    eval_episodes=3,
    report_interval=1,
)


@pytest.mark.parametrize(
    ("env_id", "settings"),
    [("CartPole-v1", {}), pytest.param("Pendulum-v1", {"recurrent": "gru"}, marks=pytest.mark.slow)],
)
def test_one_agent_learns_exactly_what_a_gymnasium_env_teaches(tmp_path, env_id, settings):
    common = {"total_steps": 640, "num_envs": 4, "num_workers": 1, "num_steps": 32, "epochs": 2, "eval_episodes": 2}
    common |= {"minibatch_size": 64, "report_interval": 1, **settings}
    single = ppo.train(Config(env=env_id, **common), logdir=tmp_path / "single")
    config = Config(env="pettingzoo:tests.multi_agent:OneAgent", env_kwargs={"env_id": env_id}, **common)
    several = ppo.train(config, logdir=tmp_path / "several")
    ours, theirs = (reports(result.path, times=False) for result in (several, single))
    for our, their in zip(ours, theirs, strict=True):
        # Weighted means round differently.
        known = {name: value for name, value in their.items() if value is not None}
        assert {name: our[name] for name in known} == pytest.approx(known, rel=1e-3, abs=2e-5)
    np.testing.assert_allclose(several.evaluation.returns, single.evaluation.returns, rtol=1e-6)


def test_learned_values_are_the_true_values_of_agents_that_leave():
    """Agent a_0 terminates long before its env, so most of its rows are not valid; agent a_1 is truncated."""
    gamma, places = 0.8, Rings.PLACES
    config = Config(
        num_envs=16, num_steps=32, epochs=4, minibatch_size=64, learning_rate=1e-2, gamma=gamma,
        normalize_rewards=False, policy_layers=(4,), value_layers=(32,),
    )  # fmt: skip
    vector, team, collect = parts_of_group(config, lambda: Numbered(Rings()), "a")
    whole = config.of_team(2)
    for update in range(60):
        rate = tf.constant(config.learning_rate * (1 - update / 60), tf.float32)
        order = tf.constant(shuffled(whole, update))
        team.learner.update_in_graph(collect(update)[0], rate, tf.constant(gamma), order)
    to_go = gamma ** np.arange(places - 1, -1, -1.0)
    for k, true in enumerate((to_go, to_go / (1 - gamma**places))):
        one_hot = tf.tile(tf.one_hot([k], 2), [places, 1])
        seen = {"observation": tf.range(places, dtype=tf.int64), "agent_id": one_hot}
        np.testing.assert_allclose(team.agent.step(seen, tf.zeros([places, 0])).values, true, rtol=0.08)
    vector.close()


@pytest.mark.parametrize("objective", ["clip", pytest.param("kl_penalty", marks=pytest.mark.slow)])
def test_rows_that_are_not_valid_teach_nothing(objective):
    """Whatever the slab holds in rows of agents that are gone, the update is the same."""
    config = dataclasses.replace(
        CONFIG, env="CartPole-v1", policies="shared", objective=objective, num_steps=20, minibatch_size=40
    )
    results = []
    for garbage in (None, 2.0):
        vector, team, collect = parts_of_group(config, functools.partial(LeavingEnv, 0), "a")
        collected, arrays = collect(0)
        invalid = ~arrays.valid
        assert invalid.any() and not invalid.all()
        if garbage is not None:

            def changed(values, rows, value):
                values = values.copy()
                values[rows] = value
                return tf.constant(values)

            rollout = collected.rollout._replace(
                observations=changed(arrays.observations, invalid, garbage * 50),
                # The results of step t belong to the agent that was, or was not, alive before it.
                rewards=changed(arrays.rewards, invalid[:-1], garbage * 1e3),
                final_observations=changed(arrays.final_observations, invalid[:-1], garbage),
                actions=changed(arrays.actions, invalid[:-1], int(garbage)),
            )
            collected = collected._replace(rollout=rollout)
        rate, order = tf.constant(1e-3), tf.constant(shuffled(config.of_team(3), 0))
        team.learner.observe(collected)
        metrics = team.learner.update_in_graph(collected, rate, tf.constant(0.99), order)
        state = [variable.numpy() for variable in (*team.agent.variables, *team.learner.rewards.moments.variables)]
        results.append((state, {name: float(value) for name, value in metrics.items()}))
        vector.close()
    for state, metrics in results[1:]:
        for one, other in zip(state, results[0][0], strict=True):
            np.testing.assert_array_equal(one, other)
        assert metrics == results[0][1]


@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_no_step_of_an_agent_leads_from_a_cut_episode_into_the_episode_of_a_restarted_worker():
    config = dataclasses.replace(CONFIG, num_envs=2, num_workers=2, minibatch_size=16, on_worker_death="restart")
    makes = [LeavingEnv, functools.partial(LeavingEnv, 1, "sigkill")]  # the worker of env 1 dies in its step 4
    with training_envs(config, makes) as vector:
        envs = InGraphVectorEnv(vector.joint, num_steps=config.num_steps)
        envs.reset(seed=0)
        for _ in range(config.num_steps):
            envs.step({"a": np.zeros([2, 3], np.int64), "b": np.zeros([2, 1], np.int64)})
        envs.rollout()
        for name, alive, totals in (("a", [False, True, True], [6.003, 3.002]), ("b", [True], [6.0])):
            rollout = GroupView(config.num_envs, vector.groups[name]).rows(envs.last_rollout())
            ended, own = rollout.terminated | rollout.truncated, slice(len(alive), None)
            steps = rollout.observations[..., 1]
            goes_on = rollout.valid[:-1] & ~ended & rollout.valid[1:]
            assert goes_on.any() and (np.diff(steps, axis=0)[goes_on] == 1).all()
            assert rollout.truncated[3, own].tolist() == alive and not rollout.terminated[3, own].any()
            assert rollout.rewards[3, own].tolist() == [0.0] * len(alive)
            np.testing.assert_allclose(rollout.episode_returns[3, own][alive], totals)


def test_statistics_count_only_valid_rows():
    config = dataclasses.replace(CONFIG, env="CartPole-v1", policies="shared", num_steps=20, minibatch_size=40)
    vector, team, collect = parts_of_group(config, LeavingEnv, "a")
    team.learner.observe(collect(0)[0])
    group = vector.groups["a"]
    valid = group.arrays[("valid",)][: config.num_steps]
    seen = group.arrays[("observation",)][: config.num_steps][valid].astype(np.float32)
    moments = team.agent.observations.leaves["observation"].normalizer.moments
    assert float(moments.count) == len(seen)
    np.testing.assert_allclose(moments.mean.numpy(), seen.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(moments.variance.numpy(), seen.var(axis=0), rtol=1e-5)
    assert float(team.learner.rewards.moments.count) == len(seen)
    vector.close()


FINISHED = dataclasses.replace(CONFIG, total_steps=640, eval_interval=320, checkpoint_interval=256)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the result of a finished run."""
    return ppo.train(FINISHED, logdir=tmp_path_factory.mktemp("finished"))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_results_do_not_depend_on_the_number_of_workers(tmp_path, finished, num_workers):
    result = ppo.train(dataclasses.replace(FINISHED, num_workers=num_workers), logdir=tmp_path)
    found = reports(result.path, times=False)
    assert found == reports(finished.path, times=False) and len(found) > 3


def test_returns_are_reported_per_agent_per_group_and_per_env(finished):
    report = reports(finished.path, times=False)[-1]
    agents = [report[f"return_mean/{name}"] for name in ("a_0", "a_1", "a_2")]
    assert report["return_mean/a"] == pytest.approx(np.mean(agents), rel=1e-6)
    assert report["return_mean"] == pytest.approx(sum(agents) + report["return_mean/b_0"], abs=0.5)
    assert 6 <= report["return_mean/a_0"] <= 6 + 3 * 0.75 + 0.01  # rewards of steps 1 to 3
    assert report["length_mean"] == 7
    assert {"a/kl", "b/kl", "a/entropy", "kl", "entropy"} <= report.keys()
    evaluation = finished.evaluation
    assert evaluation.lengths.tolist() == [7, 7, 7]
    total = sum(evaluation.agents[name] for name in ("a_0", "a_1", "a_2", "b_0"))
    np.testing.assert_allclose(evaluation.returns, total)
    saved = json.loads((finished.path / "evaluation.json").read_text())
    assert saved["agents"]["b_0"] == evaluation.agents["b_0"].tolist()


@pytest.mark.slow  # tests/ppo/test_long_runs.py checks this for one policy
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, finished):
    """LeavingEnv can save its state, so the checkpoint holds the envs, too."""
    resumed = ppo.resume(rewound(finished.path, tmp_path / "killed", checkpoints=2), trust_modules=True)
    ours, theirs = reports(resumed.path, times=False), reports(finished.path, times=False)
    assert ours == theirs


def test_policies_of_groups_are_evaluated_loaded_and_exported(tmp_path, finished):
    run = Run.open(finished.path, trust_modules=True)
    again = evaluate_run(run, 3, seed=CONFIG.seed)
    np.testing.assert_array_equal(again.returns, finished.evaluation.returns)
    with pytest.raises(RunError, match=r"has the policies \['a', 'b'\]: choose one"):
        ppo.load_policy(run)
    with pytest.raises(RunError, match="choose one"):
        ppo.load_policy(run, group="c")
    policy = ppo.load_policy(run, group="b")
    assert policy.observation_space.shape == (2,) and policy(np.zeros(2)) in range(4)
    path, difference = export(run, tmp_path / "exports", "savedmodel", group="a")
    assert path.name.endswith("-a.savedmodel") and difference == 0


@pytest.mark.slow
def test_a_video_shows_all_agents(tmp_path, monkeypatch):
    monkeypatch.setattr(videos, "backends", lambda: ["egl", "osmesa"])
    run = Run.open(ppo.train(dataclasses.replace(CONFIG, total_steps=64), envs=Drawn, logdir=tmp_path).path)
    files, evaluation = videos.record_run(run, tmp_path / "out", 2, envs=Drawn)
    assert evaluation.lengths.tolist() == [5, 5] and set(evaluation.agents) == {"a_0", "a_1", "a"}
    for file in files:
        rows = (imageio.imread(file, plugin="FFMPEG")[..., 0] > 128).mean(axis=2).sum(axis=1)
        np.testing.assert_allclose(rows, [0, 10, 20, 30, 40, 50], atol=2)


class AlwaysOne:
    """A policy that takes action 1."""

    frame_stack, state_size = 1, 0

    def initial_state(self, number):
        return np.zeros((number, 0), np.float32)

    def act(self, observations, state, checked):
        return np.ones(len(state), np.int64), state


class Returning(Relay):
    """The first agent takes two more steps after the second one."""

    def step(self, actions):
        (agent,), entering = self.agents, {5: ["p_1"], 10: ["p_0"], 12: []}
        self.steps += 1
        ends = self.steps in entering
        self.agents = entering.get(self.steps, self.agents)
        stepped = [agent, *(self.agents if ends else [])]
        observations = {name: np.zeros(1, np.float32) for name in stepped}
        rewards, flags = {name: float(actions.get(name, 0)) for name in stepped}, dict.fromkeys(stepped, False)
        return observations, rewards, {**flags, agent: ends}, flags, {name: {} for name in stepped}


def test_an_evaluation_adds_up_what_an_agent_earns_each_time_it_is_there():
    with ParallelVectorEnv([Returning] * 2, num_workers=0, autoreset_mode="SameStep") as envs:
        found = play(Players({"p": AlwaysOne()}, CONFIG, 99), envs, 5)
    assert found.returns.tolist() == [12.0] * 5 and found.lengths.tolist() == [12] * 5
    means = {"p_0": 7.0, "p_1": 5.0, "p": 6.0}
    assert {name: values.tolist() for name, values in found.agents.items()} == {n: [m] * 5 for n, m in means.items()}


def test_an_evaluation_counts_what_agents_have_earned_in_an_episode_that_does_not_end():
    warnings = []
    with ParallelVectorEnv([Returning] * 2, num_workers=0, autoreset_mode="SameStep") as envs:
        found = play(Players({"p": AlwaysOne()}, CONFIG, 8, warnings.append), envs, 4)
    assert found.returns.tolist() == [8.0] * 2 and found.lengths.tolist() == [8] * 2
    assert {name: values.tolist() for name, values in found.agents.items()} == {
        "p_0": [5.0] * 2, "p_1": [3.0] * 2, "p": [4.0] * 2,
    }  # fmt: skip
    assert warnings[0].startswith("4 of 4 episodes were cut off")


class Slashes(Relay):
    possible_agents = ("x/y_0", "x/y_1")


@pytest.mark.slow
def test_the_policy_of_a_group_with_a_slash_in_its_name_is_exported(tmp_path):
    result = ppo.train(dataclasses.replace(CONFIG, total_steps=64), envs=Slashes, logdir=tmp_path / "runs")
    path, difference = export(Run.open(result.path), tmp_path / "exports", "savedmodel", group="x/y")
    assert path.parent == tmp_path / "exports" and path.name.endswith("-x%2Fy.savedmodel")
    assert path.is_dir() and difference == 0


def test_too_many_policies_for_the_memory_mappings_are_an_error(tmp_path, monkeypatch):
    limit = tmp_path / "max_map_count"
    limit.write_text(str(len(Path("/proc/self/maps").read_text().splitlines()) + 2_400))  # enough for one policy
    monkeypatch.setattr(footprint, "MAX_MAP_COUNT", limit)
    footprint.check_mappings(1)
    with pytest.raises(ConfigError, match="2,800 more memory mappings"):
        ppo.train(CONFIG, logdir=tmp_path / "runs")


class SixGroups(Rings):
    possible_agents = ("a_0", "b_0", "c_0", "d_0", "e_0", "f_0")


@pytest.mark.slow
def test_many_policies_do_not_warn_of_retracing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        run = ppo.train(dataclasses.replace(CONFIG, total_steps=64), envs=SixGroups, logdir=tmp_path).path
        for group in "abcdef":
            policy = ppo.load_policy(run, group=group)
            policy(policy.observation_space.sample(), deterministic=False)
    assert "retracing" not in caplog.text


@pytest.mark.slow
def test_a_shared_policy_is_loaded_without_a_name(tmp_path):
    config = dataclasses.replace(
        CONFIG, env="pettingzoo:mpe2.simple_spread_v3", policies="shared", global_state=True, total_steps=64
    )
    pytest.importorskip("mpe2")
    result = ppo.train(config, logdir=tmp_path)
    policy = ppo.load_policy(result.path)
    assert set(policy.observation_space.spaces) == {"observation", "state"}
    # The policy acts without the state, which only the value function reads.
    assert policy({"observation": np.zeros(18, np.float32)}) in range(5)
    assert result.evaluation.agents.keys() == {"agent_0", "agent_1", "agent_2", "agent"}


class Choices(LeavingEnv):
    """Observations without the value 0, which fills the rows of agents that have left."""

    def __init__(self, wrong=None):
        super().__init__()
        self.wrong = wrong
        self._spaces = {name: (spaces.Discrete(9, start=5), spaces.Discrete(4)) for name in self.possible_agents}

    def _observe(self, agent):
        return 0 if (agent, self.steps) == self.wrong else 5 + self.steps


def test_discrete_observations_are_checked_only_for_agents_that_are_there(tmp_path):
    ppo.train(dataclasses.replace(CONFIG, total_steps=64), envs=Choices, logdir=tmp_path)
    wrong = functools.partial(Choices, ("b_0", 2))
    with pytest.raises(ppo.TrainingDiverged, match=r"agent 'b_0' of env 0 returned 0 in its observation, outside"):
        ppo.train(dataclasses.replace(CONFIG, total_steps=64), envs=wrong, logdir=tmp_path)


def test_agents_with_different_spaces_cannot_share_a_policy(tmp_path):
    with pytest.raises(ConfigError, match=r"different spaces.*--policies group.*'b': \['b_0'\]"):
        ppo.train(dataclasses.replace(CONFIG, policies="shared"), logdir=tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "CartPole-v1"}, "no effect on env='CartPole-v1': policies"),
        ({"wrappers": ("TimeLimit",)}, "do not support wrappers"),
        ({"info_metrics": ("a",)}, "do not support info_metrics"),
        ({"global_state": True, "network": "module:function"}, "use no custom network"),
    ],
)
def test_settings_that_do_not_fit_are_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **settings)


def test_a_vector_env_for_evaluations_is_an_error(tmp_path):
    with (
        vecenv.SyncVectorEnv([lambda: CountingEnv(0, 5)]) as envs,
        pytest.raises(ConfigError, match="pass functions that make Petting"),
    ):
        ppo.train(CONFIG, eval_envs=envs, logdir=tmp_path)


def test_missing_modules_and_functions_are_errors_that_name_them(tmp_path):
    for name, message in (("no_such_module", "no_such_module"), ("json", "has no function parallel_env or env")):
        with pytest.raises(vecenv.VecEnvError, match=message):
            ppo.train(dataclasses.replace(CONFIG, env=f"pettingzoo:{name}"), logdir=tmp_path)


def test_a_run_folder_does_not_import_the_module_of_its_env(finished):
    with pytest.raises(RunError, match=r"importing tests\.multi_agent runs code"):
        evaluate_run(Run.open(finished.path), 1)


def test_an_env_that_raises_ends_training_with_an_error_that_names_it(tmp_path):
    with pytest.raises(vecenv.EnvError, match=r"env \d+ in worker 0 raised during step(.|\n)*motor is on fire"):
        ppo.train(CONFIG, envs=Breaks, logdir=tmp_path)


def test_a_reward_that_is_not_finite_is_an_error_that_names_the_agent(tmp_path):
    makes = [functools.partial(BadReward, index) for index in (0, 0, 1, 0)]
    with pytest.raises(ppo.TrainingDiverged, match="agent 'b_0' of env 2 returned reward nan"):
        ppo.train(CONFIG, envs=makes, logdir=tmp_path)


def test_a_reward_that_is_not_finite_in_an_evaluation_names_the_agent():
    makes = [functools.partial(BadReward, index) for index in (0, 1)]
    agents = {"a": AlwaysOne(), "b": AlwaysOne()}
    with (
        ParallelVectorEnv(makes, groups="names", num_workers=0, autoreset_mode="SameStep") as envs,
        pytest.raises(ppo.TrainingDiverged, match="agent 'b_0' of env 1 returned reward nan in an evaluation"),
    ):
        play(Players(agents, CONFIG, 99), envs, 2)


def test_an_evaluation_that_hangs_times_out(tmp_path):
    config = dataclasses.replace(CONFIG, step_timeout_s=1.0, total_steps=64)
    with pytest.raises(multiprocessing.TimeoutError) as caught:
        ppo.train(config, envs=HangsInEvaluation, logdir=tmp_path)
    (note,) = caught.value.__notes__  # not about a rollout
    assert note.startswith("The run is saved up to env-step 64 in")


@pytest.mark.slow  # tests/ppo/test_trainer.py checks this for one policy
def test_nothing_retraces(tmp_path):
    run = Run.create(tmp_path, "run", CONFIG)
    with collector_for(CONFIG, None, None, None, pytest.fail) as collector:
        trainer = Trainer(CONFIG, run, collector, Callbacks([]))
        trainer.begin()
        for _ in range(3):
            trainer.learn(trainer.collect())
        assert trainer.collector.collect_in_graph.experimental_get_tracing_count() == 1
        assert all(team.learner.update_in_graph.experimental_get_tracing_count() == 1 for team in trainer.teams)
        trainer.close()


GAME = Config(
    env="pettingzoo:tests.multi_agent:Higher",
    total_steps=6_000,
    num_envs=8,
    num_workers=1,
    num_steps=16,
    epochs=4,
    minibatch_size=64,
    learning_rate=3e-3,
    gamma=1.0,
    eval_episodes=40,
)


def test_a_shared_policy_learns_both_sides_of_a_turn_based_game(tmp_path):
    """The mask of the player who does not move forbids every action, in training and in evaluations."""
    result = ppo.train(GAME, logdir=tmp_path)
    policy = ppo.load_policy(result.path)

    def move(turn, first):
        return policy({"observation": [turn, first], "action_mask": np.ones(Higher.MOVES)})

    assert move(0, 0) == 3  # every other first move loses against the best reply
    assert all(move(1, first) > first for first in range(3))
    assert result.evaluation.agents["p_0"].tolist() == [0.0] * 40 and move(1, 3) == 3  # a draw
