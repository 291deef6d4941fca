"""Tests that training, evaluations and recordings always say what they are doing, however slow the env is."""

import signal
from types import SimpleNamespace

import numpy as np
import pytest

import ppo
import vecenv
from ppo.policies.evaluation import Players, play
from ppo.run.metrics import Clock
from ppo.run.signals import Stop
from ppo.run.status import Collecting, Status, Tally
from tests.helpers import CountingEnv

CONFIG = ppo.Config(
    env="given", total_steps=64, num_envs=2, num_steps=16, minibatch_size=16, epochs=1, num_workers=0,
    eval_episodes=3, eval_interval=64, report_interval=32, policy_layers=(8,), value_layers=(8,),
)  # fmt: skip


class Watching(ppo.Callback):
    """Receives the status, and collects its text whenever `look` is called."""

    def __init__(self):
        self.status, self.seen = None, []

    def on_status(self, status):
        self.status = status
        self.look()

    def look(self):
        if str(self.status) not in self.seen[-1:]:
            self.seen.append(str(self.status))


def test_the_status_of_a_run_follows_its_phases_and_every_step(tmp_path, monkeypatch):
    watching = Watching()

    class Env(CountingEnv):
        def __init__(self):
            watching.look()
            super().__init__(0, length=10)

        def reset(self, **arguments):
            watching.look()
            return super().reset(**arguments)

        def step(self, action):
            watching.look()
            return super().step(action)

        def close(self):
            watching.look()

    spent_on = Clock.spent_on
    monkeypatch.setattr(Clock, "spent_on", lambda clock, part: (watching.look(), spent_on(clock, part))[1])
    ppo.train(CONFIG, Env, callbacks=[watching], logdir=tmp_path)
    seen = watching.seen
    first = "initializing the normalizers"
    assert seen[:2] == ["building the environments", "resetting the environments"]
    assert seen[2:4] == [f"{first}: 0 of 32 steps", f"{first}: 2 of 32 steps"]
    assert [text for text in seen if "updat" in text] == ["compiling the update", "updating"]
    for steps in range(0, 32, 2):
        assert seen.count(f"collecting: {steps} of 32 steps") == 2  # rollouts
    # Two envs play three episodes of ten steps.
    assert seen[-3:] == ["evaluating: 2 of 3 episodes, 38 steps", "evaluating: 3 of 3 episodes, 40 steps", "training"]


def test_a_status_returns_to_what_it_said_before():
    status = Status("training")
    with status.doing("collecting"), pytest.raises(OSError, match="full"), status.doing("saving"):
        assert str(status) == "saving"
        raise OSError("full")
    with status.doing(tally := Tally(3)):
        assert str(status) == "evaluating: 0 of 3 episodes, 0 steps"
        tally.episodes, tally.steps = 1, 2000
        assert str(status) == "evaluating: 1 of 3 episodes, 2,000 steps"
    assert str(status) == "training"


def test_a_status_says_how_a_run_ends_that_was_told_to_stop():
    stop = Stop()
    status, collector = Status("training", stop), SimpleNamespace(steps=1500)
    assert status.stopping is None
    stop.kept = lambda: "env-step 64 is saved"
    stop.request(signal.SIGTERM)
    assert status.stopping == "stopping. A second Ctrl-C or SIGTERM stops at once; env-step 64 is saved"
    with status.doing(Collecting(collector, 4096)):
        assert status.stopping.startswith("stopping after this update (2,596 more env-steps). A second Ctrl-C")
    stop.kept = lambda: None
    assert status.stopping == "stopping at once, because nothing has been learned yet"


def test_an_evaluation_counts_episodes_and_steps_as_they_happen(monkeypatch):
    tally, seen = Tally(3), []

    class Agent:
        def initial_state(self, n):
            return np.zeros((n, 0))

        def act(self, observations, state, checked):
            seen.append((tally.episodes, tally.steps))
            return np.zeros(len(observations), np.int64), state

    with vecenv.SyncVectorEnv(
        [lambda: CountingEnv(0, 2), lambda: CountingEnv(1, 5)], autoreset_mode="SameStep"
    ) as envs:
        play(Players({"": Agent()}, CONFIG, 99, tally=tally), envs, 3)
    assert seen == [(0, 0), (0, 2), (1, 4), (1, 6), (2, 8)]
    assert (tally.episodes, tally.steps) == (3, 10) and str(tally) == "evaluating: 3 of 3 episodes, 10 steps"
