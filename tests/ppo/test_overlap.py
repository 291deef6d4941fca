"""Tests of --overlap: each rollout comes from the policy before the last update, and nothing else changes."""

import dataclasses
import json
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import ppo
import vecenv
from ppo.algorithm.rollout import Rollouts
from ppo.callbacks import Callback
from ppo.config import Config, ConfigError
from ppo.envs import training_envs
from ppo.model.agent import Agent
from ppo.run.folder import Run
from ppo.run.metrics import TIMES
from ppo.trainer import Trainer
from vecenv.ingraph import InGraphVectorEnv, slots_for

SMALL = Config(
    env="CartPole-v1", num_envs=4, num_steps=8, minibatch_size=16, epochs=2, total_steps=320, overlap=True,
    report_interval=32, checkpoint_interval=128, eval_episodes=2, num_workers=2,
)  # fmt: skip


def lines(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


@pytest.fixture
def trainer(tmp_path):
    config = dataclasses.replace(SMALL, num_workers=1, checkpoint_interval=10**6, total_steps=10**6)
    with training_envs(config, None) as envs:
        trainer = Trainer(config, Run.create(tmp_path, "run", config), envs, Callback())
        yield trainer
        trainer.close()


def test_ratios_are_relative_to_the_policy_that_collected_the_rollout(trainer):
    """The weights that were current when a rollout began reproduce its policy outputs."""
    trainer.begin()
    weights, seen = [], []
    update = trainer.learner.update

    def spy(collected, *arguments):
        weights.append([variable.numpy() for variable in trainer.agent.variables])
        seen.append((trainer.envs.shaped(collected.rollout).observations.numpy(), collected.outputs.numpy()))
        return update(collected, *arguments)

    trainer.learner.update = spy
    for _ in range(4):
        trainer.iterate()
    agent = Agent(trainer.config, gym.make("CartPole-v1").observation_space, gym.spaces.Discrete(2))
    for k, (observations, outputs) in enumerate(seen):
        # The initial policy collects the first two rollouts, because the second begins before the first update.
        for variable, value in zip(agent.variables, weights[max(k - 1, 0)], strict=True):
            variable.assign(value)
        encoded = agent.network.encode(agent.observations.inputs(tf.constant(observations[:-1].reshape(-1, 4))))
        wanted, _ = agent.heads(agent.network.features(encoded), encoded)
        np.testing.assert_allclose(outputs, wanted, atol=1e-5)
    assert any(not np.allclose(then, now, atol=1e-4) for then, now in zip(weights[0], weights[1], strict=True))


def test_kl_stop_measures_from_the_policy_at_the_start_of_the_update(trainer):
    """Every update therefore takes a gradient step, however far it is from the policy that collected the rollout."""
    trainer.config = trainer.learner._config = trainer.learner._whole = dataclasses.replace(
        trainer.config, kl_stop=1e-3, learning_rate=1e-2, lr_schedule="constant"
    )
    trainer.begin()
    reports = [trainer.iterate() for _ in range(20)]
    assert all(report["gradient_steps"] > 0 and np.isfinite(report["entropy"]) for report in reports)
    assert any(report["gradient_steps"] < 4 for report in reports)  # kl_stop took effect


def test_a_rollout_is_collected_while_the_update_runs(trainer):
    trainer.begin()
    trainer.iterate()
    collected, update = threading.Event(), trainer.learner.update

    def slow(*arguments):
        deadline = time.monotonic() + 120
        while not trainer.rollouts._next.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        if trainer.rollouts._next.done():
            collected.set()
        return update(*arguments)

    trainer.learner.update = slow
    trainer.iterate()
    assert collected.is_set()


def test_the_slab_does_not_change_while_the_update_reads_it(trainer):
    """Neither its rows nor its first observations change, even if the next rollout ends before the update begins."""
    trainer.begin()
    update = trainer.learner.update

    def checked(collected, *arguments):
        rollout = collected.rollout
        before = [np.array(leaf) for leaf in tf.nest.flatten(trainer.envs.shaped(rollout))]
        if trainer.rollouts.pending:
            trainer.rollouts._next.result()
        for then, now in zip(before, tf.nest.flatten(trainer.envs.shaped(rollout)), strict=True):
            np.testing.assert_array_equal(then, now)
        return update(collected, *arguments)

    trainer.learner.update = checked
    for _ in range(5):
        trainer.iterate()


def test_the_same_seed_gives_the_same_run_whatever_the_timing(tmp_path):
    class Slow(Callback):
        def on_update(self, report):
            time.sleep(0.05)

    runs = [ppo.train(SMALL, logdir=tmp_path, callbacks=[callback]).path for callback in (Callback(), Slow())]
    assert lines(runs[0]) == lines(runs[1])


def test_no_rollout_is_pending_at_a_checkpoint_so_a_killed_run_resumes_exactly(tmp_path):
    config = dataclasses.replace(SMALL, env="Hopper-v5")

    class Killed(Callback):
        def on_checkpoint(self, env_steps, path):
            if env_steps == 256:
                raise KeyboardInterrupt

    whole = ppo.train(config, logdir=tmp_path).path
    with pytest.raises(KeyboardInterrupt):
        ppo.train(config, logdir=tmp_path, name="killed", callbacks=[Killed()])
    (killed,) = [path for path in tmp_path.iterdir() if path.name.endswith("killed")]
    assert ppo.resume(killed).env_steps == 320
    assert lines(killed) == lines(whole)


def test_the_pending_rollout_is_dropped_when_a_callback_stops_the_run(tmp_path):
    class Stop(Callback):
        def on_update(self, report):
            raise ppo.StopTraining

    warnings = []

    class Listening(Callback):
        def on_warning(self, message):
            warnings.append(message)

    stopped = ppo.train(SMALL, logdir=tmp_path, callbacks=[Stop()])
    assert stopped.interrupted and stopped.env_steps == 32
    resumed = ppo.resume(stopped.path, callbacks=[Listening()])
    assert resumed.env_steps == 320 and "a rollout that was not trained on was in progress" in warnings[0]


def test_an_env_that_raises_during_the_update_ends_the_run_with_its_error(tmp_path):
    class Raising(gym.Wrapper):
        steps = 0

        def step(self, action):
            self.steps += 1
            if self.steps == 21:
                raise ValueError("the motor is on fire")
            return self.env.step(action)

    config = dataclasses.replace(SMALL, num_workers=1)
    with pytest.raises(ValueError, match="the motor is on fire") as caught:
        ppo.train(config, envs=lambda: Raising(gym.make("CartPole-v1")), logdir=tmp_path)
    assert any("of the rollout that began after 32 env-steps" in note for note in caught.value.__notes__)


def test_envs_without_memory_for_a_third_rollout_are_rejected(tmp_path):
    options = ppo.vector_options(dataclasses.replace(SMALL, overlap=False))
    envs = vecenv.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4, **options)
    with envs, pytest.raises(ConfigError, match="num_slots"):
        ppo.train(SMALL, envs=envs, logdir=tmp_path)


def test_close_waits_for_the_collecting_thread():
    config = dataclasses.replace(SMALL, num_workers=1)
    with vecenv.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4, **ppo.vector_options(config)) as vector:
        assert vector.num_slots == slots_for(8, 3)
        envs = InGraphVectorEnv(vector, num_steps=8)
        agents = [Agent(config, vector.single_observation_space, vector.env_action_space) for _ in range(2)]
        rollouts = Rollouts(*agents, envs, overlap=True, seed=0)
        envs.reset(seed=0)
        rollouts.begin(0)
        rollouts.close()
        assert rollouts._next.done() and envs.steps == 0
