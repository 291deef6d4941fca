"""Tests that training, evaluations and recordings always say what they are doing, however slow the env is."""

import dataclasses
import io
import threading

import numpy as np
import pytest
from rich.console import Console

import ppo
import vecenv
from ppo.cli import progress
from ppo.results import evaluation as evaluations
from ppo.run import display as displays
from ppo.run.display import PlainDisplay, TerminalDisplay
from ppo.run.metrics import Clock
from ppo.run.status import Status, Tally, ticking
from tests.helpers import CountingEnv

CONFIG = ppo.Config(
    env="given", total_steps=64, num_envs=2, num_steps=16, minibatch_size=16, epochs=1, num_workers=0,
    eval_episodes=3, eval_interval=64, report_interval=32, policy_layers=(8,), value_layers=(8,),
)  # fmt: skip


class Watching(ppo.Callback):
    """Receives the status, and collects its text whenever `look` is called."""

    def __init__(self):
        self.status, self.seen, self.steps = None, [], []

    def on_status(self, status):
        self.status = status
        self.look()

    def look(self):
        if str(self.status) not in self.seen[-1:]:
            self.seen.append(str(self.status))
            self.steps.append(self.status.env_steps)


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
    # Only rollouts that are trained on count towards the run's steps.
    for text, steps in zip(seen, watching.steps, strict=True):
        assert steps == (int(text.split()[1]) if text.startswith("collecting") else 0)
    assert watching.status.ended.is_set()


def test_the_status_ends_with_an_error(tmp_path):
    def broken():
        raise ValueError("no env")

    watching = Watching()
    with pytest.raises(ValueError, match="no env"):
        ppo.train(CONFIG, broken, callbacks=[watching], logdir=tmp_path)
    assert watching.seen == ["building the environments"] and watching.status.ended.is_set()


def test_a_status_returns_to_what_it_said_before():
    status = Status("training")
    with status.doing("collecting", lambda: "half", lambda: 7):
        assert (str(status), status.env_steps) == ("collecting: half", 7)
        with pytest.raises(OSError, match="full"), status.doing("saving"):
            assert (str(status), status.env_steps) == ("saving", 0)
            raise OSError("full")
        assert str(status) == "collecting: half"
    assert str(status) == "training"


def test_an_evaluation_counts_episodes_and_steps_as_they_happen(monkeypatch):
    tally, seen = Tally(3), []

    class Agent:
        def initial_state(self, n):
            return np.zeros((n, 0))

        def act(self, observations, state):
            seen.append((tally.episodes, tally.steps, tally.longest))
            return np.zeros(len(observations), np.int64), state

    with vecenv.SyncVectorEnv(
        [lambda: CountingEnv(0, 2), lambda: CountingEnv(1, 5)], autoreset_mode="SameStep"
    ) as envs:
        evaluations.evaluate(Agent(), envs, 3, seed=0, timeout_s=None, tally=tally)
    assert seen == [(0, 0, 0), (0, 2, 1), (1, 4, 0), (1, 6, 3), (2, 8, 0)]
    assert (tally.episodes, tally.steps) == (3, 10) and str(tally) == "3 of 3 episodes, 10 steps"


def test_the_fraction_counts_an_unfinished_episode_if_its_limit_is_known():
    assert Tally(4, episodes=1, longest=30).fraction == 0.25
    assert Tally(4, limit=60, episodes=1, longest=30).fraction == 0.375
    assert Tally(4, limit=60, episodes=4, longest=90).fraction == 1.0


def test_ticking_calls_until_the_end():
    called, ended = threading.Event(), threading.Event()
    thread = ticking(called.set, ended, every_s=0.001)
    assert called.wait(10)
    ended.set()
    thread.join(10)
    assert not thread.is_alive()


REPORT = {
    "env_steps": 32, "wall_s": 12.0, "steps_per_s": 1.0, "collect_steps_per_s": 3.0, "learn_steps_per_s": 1.0,
    "return_mean": 1.0, "kl": 0.01, "entropy": 1.5,
}  # fmt: skip


def test_plain_lines_break_a_silence_and_count_the_steps_of_the_rollout(capsys, monkeypatch):
    monkeypatch.setattr(displays, "ticking", lambda *arguments, **options: None)  # called here instead
    status = Status("building the environments")
    display = PlainDisplay()
    display.on_status(status)
    display._break_silence()  # too early
    monkeypatch.setattr(displays, "SILENCE_S", 0.0)
    display._break_silence()
    display.on_start(CONFIG, 0)
    with status.doing("collecting", lambda: "18 of 32 steps", lambda: 18):
        display._break_silence()
    with status.doing("compiling the update"):
        display._break_silence()
    display.on_update(REPORT)
    with status.doing("collecting", lambda: "2 of 32 steps", lambda: 2):
        display._break_silence()
    status.ended.set()
    display._break_silence()
    building, _, collecting, compiling, again = capsys.readouterr().out.splitlines()
    assert building == "           0 steps  building the environments, 0:00:00"
    assert collecting == "          18 steps  collecting: 18 of 32 steps, 0:00:00"
    assert compiling == "          18 steps  compiling the update, 0:00:00"
    assert again == "          34 steps  collecting: 2 of 32 steps, 0:00:00"


def test_a_display_ticks_by_itself(monkeypatch):
    printed = threading.Event()
    monkeypatch.setattr(displays, "SILENCE_S", 0.01)
    monkeypatch.setattr(PlainDisplay, "_print", lambda display, line: printed.set())
    status = Status("building the environments")
    PlainDisplay().on_status(status)
    assert printed.wait(10)
    status.ended.set()


def test_a_terminal_shows_the_activity_and_the_steps_of_the_rollout(monkeypatch):
    monkeypatch.setattr(displays, "ticking", lambda *arguments, **options: None)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    status, config = Status("building the environments"), dataclasses.replace(CONFIG, total_steps=128)
    display = TerminalDisplay(console)
    display.on_status(status)
    display._break_silence()
    assert "building the environments, 0:00:00" in console.file.getvalue()
    display.on_start(config, 0)
    display.on_report(REPORT)
    with status.doing("collecting", lambda: "16 of 32 steps", lambda: 32):
        display._live.refresh()
    shown = console.file.getvalue()
    assert "50%" in shown and "KL 0.0100" in shown and "collecting: 16 of 32 steps" in shown
    with status.doing("compiling the update"):
        display._live.refresh()
    display._break_silence()  # the live lines are enough
    console.file.truncate(0)
    status.ended.set()
    display._live.refresh()
    shown = console.file.getvalue()
    assert "50%" in shown and "compiling" not in shown and "building" not in shown
    display.on_end(None, None)
    assert not display._live.is_started


class Signalling(io.StringIO):
    """Sets an event when a line is written."""

    def __init__(self):
        super().__init__()
        self.written = threading.Event()

    def write(self, text):
        count = super().write(text)
        if "\n" in text:
            self.written.set()
        return count


def test_commands_print_progress_lines_on_stderr(capsys, monkeypatch):
    errors = Signalling()
    monkeypatch.setattr(progress.sys, "stderr", errors)
    monkeypatch.setattr(progress, "INTERVAL_S", 0.01)
    with progress.shown("evaluating", Tally(20, episodes=3, steps=1200)):
        assert errors.written.wait(10)
    line = errors.getvalue().splitlines()[0]
    assert line.startswith("evaluating: 3 of 20 episodes, 1,200 steps, ") and line.endswith(" steps/s, 0:00:00")
    assert capsys.readouterr().out == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "ticking"]


def test_commands_show_a_bar_in_a_terminal(capsys, monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **options: console)
    with progress.shown("recording", Tally(2, limit=10, episodes=1, longest=5)):
        pass
    assert "recording: 1 of 2 episodes, 0 steps, 0:00:00" in console.file.getvalue() and "━" in console.file.getvalue()
    assert capsys.readouterr() == ("", "")
