"""Tests of ppo/seeds.py and its users: a run's randomness depends only on its seed."""

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest

import ppo
from ppo import seeds
from ppo.algorithm.batch import shuffled
from ppo.model.agent import Agent
from tests.ppo.envs import Seeded
from tests.ppo.runs import reports

CONFIG = ppo.Config(
    env="CartPole-v1", num_envs=4, num_steps=8, minibatch_size=16, epochs=1, total_steps=64, num_workers=0,
    eval_episodes=4, report_interval=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def seeds_of(tmp_path_factory):
    """Returns a function that trains with a seed; it returns the env seeds of both phases and the reports."""
    folder = tmp_path_factory.mktemp("seeds")

    @functools.cache
    def seeds_of(seed, **settings):
        file = folder / f"seeds-{seed}-{settings}"
        config = dataclasses.replace(CONFIG, seed=seed, **settings)
        path = ppo.train(config, envs=lambda: Seeded(file), logdir=folder).path
        first, *found = [int(line) for line in file.read_text().splitlines()]
        training, evaluation = set(found[:4]), set(found[4:])
        assert first in evaluation  # the env that is built and reset once before training
        return training, evaluation, reports(path, times=False)

    return seeds_of


def test_runs_with_consecutive_seeds_share_no_env_seed_in_training_or_evaluation(seeds_of):
    all_four = [*seeds_of(0)[:2], *seeds_of(1)[:2]]
    assert [len(some) for some in all_four] == [4, 4, 4, 4]
    assert len(set.union(*all_four)) == 16


def test_the_same_seed_gives_the_same_env_seeds_and_metrics_bit_for_bit_with_any_number_of_workers(seeds_of):
    assert seeds_of(0) == seeds_of(0, num_workers=2)
    assert seeds_of(0)[2] != seeds_of(1)[2]


def test_training_seeds_and_evaluation_seeds_are_disjoint():
    train = {s for seed in range(20) for s in seeds.env_seeds(seed, 64, env_steps=0)}
    evaluate = {s for seed in range(20) for s in seeds.evaluation_seeds(seed, 32)}
    assert len(train) == 20 * 64 and len(evaluate) == 20 * 32
    assert max(train) < min(evaluate) and max(evaluate) < 2**31


def test_an_envs_seed_does_not_depend_on_num_envs_and_changes_when_fresh_episodes_begin():
    assert seeds.env_seeds(3, 4, env_steps=0) == seeds.env_seeds(3, 64, env_steps=0)[:4]
    assert not set(seeds.env_seeds(3, 64, env_steps=0)) & set(seeds.env_seeds(3, 64, env_steps=2048))


@pytest.mark.xla
@pytest.mark.slow
def test_the_same_seed_gives_the_same_metrics_bit_for_bit_if_the_update_is_compiled(tmp_path):
    found = []
    for _ in range(2):
        found.append(reports(ppo.train(CONFIG, logdir=tmp_path).path, times=False))
    assert found[0] == found[1]


def test_a_resumed_run_with_fresh_episodes_does_not_repeat_its_first_seeds(tmp_path):
    class Stop(ppo.Callback):
        def on_update(self, report):
            if report["env_steps"] == 32:
                raise ppo.StopTraining

    file = tmp_path / "seeds"
    part = ppo.train(CONFIG, envs=lambda: Seeded(file), logdir=tmp_path / "runs", callbacks=Stop())
    first = file.read_text().split()[1:]  # after the seed of the env that is built once before training
    for states in part.path.glob("checkpoints/*/envs.npz"):
        states.unlink()
    file.unlink()
    ppo.resume(part.path, envs=lambda: Seeded(file))
    assert len(set(first)) == 4 and not set(first) & set(file.read_text().split())


def test_weights_noise_and_order_differ_between_consecutive_seeds_and_updates():
    cartpole = gym.make("CartPole-v1")
    weights = [
        Agent(dataclasses.replace(CONFIG, seed=seed), cartpole.observation_space, cartpole.action_space).learned[0]
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[0].numpy() != weights[2].numpy()).all()
    noise = {tuple(seeds.sampling_seed(seed, rollout).tolist()) for seed in range(10) for rollout in range(10)}
    assert len(noise) == 100
    # The order of update u + 1 with seed s differs from the order of update u with seed s + 1.
    orders = {shuffled(dataclasses.replace(CONFIG, seed=s), u).tobytes() for s in range(3) for u in range(3)}
    assert len(orders) == 9
