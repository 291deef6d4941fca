"""Tests of ppo/run/origin.py: runs that start from the networks and normalizers of another run."""

import dataclasses
import json
import re
import sys

import gymnasium as gym
import numpy as np
import pytest

import ppo
from ppo import Run
from ppo.algorithm.teams import Teams
from ppo.policies.policy import load_agent
from ppo.run.origin import start_from
from tests.ppo.runs import command, parsed, untrained_run

CONFIG = ppo.Config(
    env="CartPole-v1", total_steps=64, num_envs=2, num_workers=0, num_steps=16, minibatch_size=16, epochs=1,
    eval_episodes=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    return ppo.train(CONFIG, logdir=tmp_path_factory.mktemp("origin"), name="origin").path


def test_a_run_starts_from_the_networks_and_normalizers_of_another_but_not_from_its_steps(tmp_path, origin):
    steps = []

    class Listening(ppo.Callback):
        def on_start(self, config, env_steps):
            steps.append(env_steps)

        def on_update(self, report):
            assert report["kl"] < 1e-6

    config = dataclasses.replace(
        CONFIG,
        total_steps=96,
        num_envs=4,
        learning_rate=1e-12,
        seed=5,
        initial_log_std=0.0,
        min_log_std=-1.0,
    )
    result = ppo.train(config, callbacks=Listening(), init_from=origin.name, logdir=origin.parent, name="fine")
    assert steps == [0] and result.env_steps == 128
    before, after = (load_agent(Run.open(path), print) for path in (origin, result.path))
    weights = [agent.network.trainable_variables for agent in (before, after)]
    for old, new in zip(*weights, strict=True):
        np.testing.assert_allclose(new, old, atol=1e-6)
    (old,), (new,) = ([leaf.normalizer.moments for leaf in a.observations.leaves.values()] for a in (before, after))
    assert float(new.count) == float(old.count) + 128  # no rollout was spent on initializing the normalizer
    record = json.loads((result.path / "origin.json").read_text())
    assert record == {"run": str(origin.resolve()), "checkpoint": "step_000000000064", "env_steps": 64}
    scales = [ppo.load_policy(path)._return_scale for path in (origin, result.path)]
    assert scales[1] != 1 and scales[1] != scales[0]


class Notes(ppo.Callback):
    def __init__(self):
        self.warnings, self.reports = [], []

    def on_warning(self, message):
        self.warnings.append(message)

    def on_update(self, report):
        self.reports.append(report)


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_rewards_of_another_scale_are_normalized_from_the_first_update(tmp_path, origin, factor):
    reports = []
    for scale in (1.0, factor):
        notes = Notes()

        def make(scale=scale):
            return gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: reward * scale)

        config = dataclasses.replace(CONFIG, total_steps=32)
        ppo.train(config, make, callbacks=notes, init_from=origin, logdir=tmp_path)
        reports += notes.reports
    same, scaled = reports
    assert scaled["return_scale"] == pytest.approx(factor * same["return_scale"], rel=1e-3)
    assert scaled["value_loss"] == pytest.approx(same["value_loss"], rel=0.01)


def test_the_statistics_of_another_run_weigh_at_most_as_much_as_ten_rollouts(tmp_path, origin):
    config = dataclasses.replace(CONFIG, total_steps=4, num_steps=2, minibatch_size=4)
    path = ppo.train(config, init_from=origin, logdir=tmp_path).path
    counts = [
        float(leaf.normalizer.moments.count)
        for run in (origin, path)
        for leaf in load_agent(Run.open(run), print).observations.leaves.values()
    ]
    assert counts[0] == 96 and counts[1] == pytest.approx(96 * (10 * 4 / 64) + 4)


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [({"policy_output_gain": 1.0, "initial_log_std": 0.0}, "policy_output_gain=1.0, initial_log_std=0.0"), ({}, None)],
    ids=str,
)
def test_settings_of_new_networks_have_no_effect_and_cause_a_warning(tmp_path, origin, changes, ignored):
    notes = Notes()
    ppo.train(dataclasses.replace(CONFIG, **changes), callbacks=notes, init_from=origin, logdir=tmp_path)
    expected = [] if ignored is None else [f"no effect, because the policy starts as that of {origin}: {ignored}"]
    # CartPole has no continuous actions, of which another warning speaks.
    warnings = [message.partition(". ")[0] for message in notes.warnings if "no action is continuous" not in message]
    assert warnings == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(-10.0, -1.0, -1.0), (-2.0, -10.0, -2.0), (-10.0, -10.0, -3.0)]
)
def test_init_from_raises_the_noise_to_the_higher_minimum(tmp_path, before, after, expected):
    box = gym.spaces.Box(-1, 1, (3,), np.float32)
    settings = {name: value for name, value in dataclasses.asdict(CONFIG).items() if "log_std" not in name}
    origin = untrained_run(tmp_path, box, box, given=False, **settings, min_log_std=before, log_std=-3.0)
    config = dataclasses.replace(CONFIG, min_log_std=after)
    teams, new = Teams(config, {"": (box, box)}, {"": ()}), Run.create(tmp_path, "new", config)
    start_from(origin, teams, new, print)
    (team,) = teams
    np.testing.assert_array_equal(team.agent.log_std, [expected] * 3)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("policy_layers", (32, 64)),
        ("activation", "relu"),
        ("recurrent", "gru"),
        ("action_transform", "tanh"),
        ("normalize_observations", False),
        ("normalize_rewards", False),
    ],
)
def test_a_setting_that_differs_is_named_before_a_folder_is_made(tmp_path, origin, setting, value):
    config = dataclasses.replace(CONFIG, **{setting: value})
    there = getattr(CONFIG, setting)
    found = re.escape(f"{setting}={there!r}")
    with pytest.raises(ppo.ConfigError, match=f"was trained with {found}, .* set {found}, or omit init_from"):
        ppo.train(config, init_from=origin, logdir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_envs_with_other_spaces_are_refused(tmp_path, origin):
    config = dataclasses.replace(CONFIG, env="Acrobot-v1")
    with pytest.raises(ppo.ConfigError, match="was trained on envs with the space Box"):
        ppo.train(config, init_from=origin, logdir=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ppo.RunError, match="there is no folder nowhere"):
        ppo.train(CONFIG, init_from="nowhere", logdir=tmp_path)


NETWORK = """
import pathlib, tensorflow as tf
pathlib.Path({mark!r}).touch()

class Net(tf.Module):
    def __init__(self, features, outputs):
        self.weight = tf.Variable(tf.ones([features, outputs + 1]))

    def __call__(self, inputs):
        outputs = inputs @ self.weight
        return outputs[:, :-1], outputs[:, -1]

def network(inputs, num_outputs, seed):
    return Net(inputs.shape[1], num_outputs)
"""


def test_the_module_of_a_custom_network_is_imported_only_if_the_new_run_names_it_and_never_from_a_run_folder(
    tmp_path, monkeypatch
):
    here, logdir = tmp_path / "here", tmp_path / "runs"
    here.mkdir()
    (here / "net_of_test_origin.py").write_text(NETWORK.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(here)
    env = gym.make("CartPole-v1")
    config = dataclasses.replace(CONFIG, total_steps=32)
    named = dataclasses.replace(config, network="net_of_test_origin:network")
    spaces = (env.observation_space, env.action_space)
    run = untrained_run(logdir, *spaces, given=False, **dataclasses.asdict(config))
    values = {**dataclasses.asdict(config), "network": "net_of_test_origin:network"}
    (run.path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ppo.ConfigError, match="was trained with network='net_of_test_origin:network'"):
        ppo.train(config, init_from=run.path, logdir=tmp_path / "new")
    monkeypatch.syspath_prepend(run.path)
    (run.path / "net_of_test_origin.py").write_text(NETWORK.format(mark=str(tmp_path / "mark")))
    with pytest.raises(ppo.RunError, match="are never imported"):
        ppo.train(named, init_from=run.path, logdir=tmp_path / "new")
    assert not (tmp_path / "mark").exists() and "net_of_test_origin" not in sys.modules
    (run.path / "net_of_test_origin.py").unlink()
    run = untrained_run(tmp_path / "again", *spaces, given=False, **dataclasses.asdict(named))
    assert ppo.train(named, init_from=run.path, logdir=tmp_path / "new").env_steps == 32
    del sys.modules["net_of_test_origin"]


def test_the_command_passes_init_from_but_not_with_resume(tmp_path, origin, monkeypatch):
    calls = []
    monkeypatch.setattr(ppo, "train", lambda config, **options: calls.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("train", ["--env", "CartPole-v1", "--init-from", str(origin), "--logdir", str(tmp_path)])
    assert calls[0]["init_from"] == origin
    with pytest.raises(ppo.ConfigError, match="--init-from cannot be combined with --resume"):
        parsed("--resume", origin, "--init-from", origin)
