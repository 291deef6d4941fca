"""Tests of what commands print: lines, a live bar in a terminal, and --help. Output never ends a run."""

import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from ppo import Config, Evaluation
from ppo import cli as commands
from ppo.callbacks import Callbacks
from ppo.cli.train import grouped, settings_of
from ppo.config import SETTINGS
from ppo.run import display as displays
from ppo.run.display import Display, Output, display_for
from ppo.run.scores import rounded
from ppo.run.signals import Stop
from ppo.run.status import Status, Tally

CONFIG = Config(env="CartPole-v1", total_steps=8192)
REPORT = {
    "env_steps": 4096, "wall_s": 12.0, "steps_per_s": 1024.0, "collect_steps_per_s": 3000.0,
    "learn_steps_per_s": 1500.0, "return_mean": 123.45, "info_success": 0.25, "kl": 0.0123, "entropy": 1.5,
    "learning_rate": 3e-4,
}  # fmt: skip
SCORES = Evaluation(np.array([1.0, 3.0]), np.array([1, 3]))


class Written(io.StringIO):
    """A stream that sets an event when something is written."""

    def __init__(self):
        super().__init__()
        self.event = threading.Event()

    def write(self, text):
        count = super().write(text)
        self.event.set()
        return count


def tell(display):
    Callbacks([display]).attach_policies(lambda: {"": SimpleNamespace(description="observation 4 -> layers")})
    display.on_start(CONFIG, 0)
    display.on_report({**REPORT, "return_mean": None, "entropy": float("nan")})
    display.on_report(REPORT)
    display.on_update(REPORT)
    display.on_evaluation(4096, SCORES)
    display.on_warning("[odd] :cat: things")


def test_a_run_prints_one_line_per_report_evaluation_and_warning():
    console = Console(file=io.StringIO())
    with Display(console) as display:
        tell(display)
    first, network, unknown, line, scores, warning = console.file.getvalue().splitlines()
    assert first == "training CartPole-v1 for 8,192 steps" and network == "network: observation 4 -> layers"
    assert "return       ..." in unknown
    assert line.strip() == (
        "4,096 steps  return     123.5  info_success 0.25  KL 0.0123  entropy 1.50  rate 3.0e-04  "
        "1,024 steps/s (collect 3,000, learn 1,500)  0:00:12, 0:00:04 left"
    )
    assert scores.strip() == "4,096 steps  deterministic policy: return 2.0 +- 1.0 over 2 episodes"
    assert warning == "warning: [odd] :cat: things"


def test_a_resumed_run_prints_how_far_it_has_come():
    console = Console(file=io.StringIO())
    with Display(console) as display:
        display.on_start(CONFIG, 4096)
    assert console.file.getvalue() == "resuming CartPole-v1 at 4,096 of 8,192 steps\n"


def test_a_terminal_shows_the_same_lines_above_a_bar_with_the_progress_and_the_activity():
    console = Console(file=Written(), force_terminal=True, width=140)
    status = Status("building the environments")
    with Display(console) as display:
        display.on_status(status)
        shown_until(console, "building the environments")
        tell(display)
        with status.doing(Tally(20, episodes=3, steps=1200)):
            shown_until(console, "50%", "evaluating: 3 of 20 episodes, 1,200 steps")
    for line in ("123.5  info_success 0.25  KL 0.0123", "return 2.0 +- 1.0", "warning: [odd] :cat: things"):
        assert line in console.file.getvalue()


def shown_until(console, *words):
    """Waits until a console shows all words."""
    while not all(word in console.file.getvalue() for word in words):
        console.file.event.clear()
        assert console.file.event.wait(10), console.file.getvalue()


def test_a_terminal_keeps_its_cursor():
    """A process that is killed could not show it again."""
    console = Console(file=io.StringIO(), force_terminal=True)
    with Display(console):
        shown = console.file.getvalue()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_silence_is_broken_by_a_line_that_says_what_is_being_done(monkeypatch):
    monkeypatch.setattr(displays, "SILENCE_S", 0.01)
    console = Console(file=Written())
    with Display(console) as display:
        display.on_status(Status("compiling the update"))
        assert console.file.event.wait(10)
        shown_until(console, "compiling the update, 0:00:0")
    assert not [thread for thread in threading.enumerate() if thread.name == "display"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_is_told_to_stop_says_so_at_once_and_only_once(terminal):
    stop, console = Stop(), Console(file=Written(), force_terminal=terminal, width=140)
    with Display(console) as display:
        display.on_status(Status("collecting", stop))
        stop.request(signal.SIGINT)
        shown_until(console, "stopping. A second Ctrl-C or SIGTERM stops at once;")
        display.on_warning("later")
        display.on_end(None, KeyboardInterrupt())
    assert console.file.getvalue().count("stopping") == 1


def test_commands_show_what_they_are_doing_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(displays, "SILENCE_S", 0.01)
    errors = Written()
    monkeypatch.setattr(sys, "stderr", errors)
    with commands.showing("recording", 2) as tally:
        tally.episodes, tally.steps = 1, 30
        shown_until(Console(file=errors), "recording: 1 of 2 episodes, 30 steps, 0:00:0")
    assert capsys.readouterr().out == ""


# Output never ends a run.

TELL = """
import sys
from ppo import cli as commands
from ppo.config import Config
from ppo.run.display import display_for

def command():
    with display_for(True) as display:
        display.on_start(Config(env="CartPole-v1"), 0)
        for _ in range(3):
            display.on_warning("Größe π")
    return 7

commands.main(command)
"""


def tell_elsewhere(**options):
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run([sys.executable, "-c", TELL], env=environment, timeout=60, **options)


def test_a_path_is_short_below_the_current_folder_and_whole_elsewhere(tmp_path, monkeypatch):
    below = tmp_path / "here"
    below.mkdir()
    monkeypatch.chdir(below)
    assert [displays.short(path) for path in (below / "a", below / "-a", tmp_path)] == ["a", "./-a", str(tmp_path)]
    below.rmdir()
    assert displays.short(below / "a") == str(below / "a")


def test_an_output_that_cannot_encode_a_character_gets_it_escaped():
    done = tell_elsewhere(env={"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 7 and done.stdout.count("warning: Gr\\xf6\\xdfe \\u03c0\n") == 3, done.stderr


def test_a_closed_pipe_or_a_full_disk_behind_stdout_does_not_change_the_exit_code():
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as pipe:
        for stdout, reason in ((full, "No space left"), (pipe, "Broken pipe")):
            done = tell_elsewhere(stdout=stdout, stderr=subprocess.PIPE, text=True)
            assert done.returncode == 7 and "Traceback" not in done.stderr, done.stderr
            assert done.stderr.count("output stops here") == 1 and reason in done.stderr


def test_streams_that_are_closed_do_not_change_the_exit_code():
    for number in (1, 2):
        done = tell_elsewhere(capture_output=True, text=True, preexec_fn=lambda number=number: os.close(number))
        assert done.returncode == 7, done


def test_an_stderr_on_a_full_disk_does_not_change_the_exit_code():
    with open("/dev/full", "w") as full:
        code = "from ppo import ConfigError, cli\ndef fail():\n  raise ConfigError('odd')\ncli.main(fail)"
        assert subprocess.run([sys.executable, "-c", code], stderr=full, timeout=60).returncode == 2


def test_a_stream_that_was_closed_from_python_is_no_error(capsys):
    stream = io.StringIO()
    output = Output(stream)
    print("seen", file=output)
    assert stream.getvalue() == "seen\n"
    stream.close()
    print("lost", file=output)
    output.flush()
    assert capsys.readouterr().err.count("output stops here") == 1


# --help


@pytest.fixture(scope="module")
def help_text():
    """Returns the output of `ppo train --help` with the settings of a preset, in a terminal of 80 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "ppo", "train", "--config", "swimmer", "--help"],
        capture_output=True, text=True, timeout=60, env={"COLUMNS": "80"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_help_lists_every_setting_with_its_text_and_its_range(help_text):
    shown = " ".join(help_text.replace("│", "").split())
    for name, setting in SETTINGS.items():
        assert setting.help in shown, name
        assert f"--{name.replace('_', '-')}" in help_text
        assert f"{setting.group} options" in help_text
    assert "[above 0] (default: 0.08)" in shown and "[0 to 2147483647]" in shown
    assert "(default: Swimmer-v5)" in shown  # the preset's


def test_the_help_fits_in_three_screens(help_text):
    assert sum(max(1, -(-len(line) // 80)) for line in help_text.splitlines()) <= 150


def test_grouping_the_settings_does_not_change_them():
    config = Config(env="A", policy_layers=(3,), seed=7, num_workers=2, normalize_rewards=False)
    assert settings_of(grouped(vars(config))) == config
    names = {name for group in grouped(vars(config)) for name in vars(group)}
    assert names == {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.56, "1,234.6"),
        (-99.96, "-100.0"),
        (2.0, "2.0"),
        (0.0, "0.0"),
        (1.4e-14, "0.0"),
        (9.996, "10.0"),
        (np.nan, "nan"),
        (-0.00012345, "-0.000123"),
    ],
)
def test_small_scores_are_not_shown_as_zero(value, text):
    assert rounded(value) == text


def test_without_progress_only_warnings_are_shown_on_stderr(capsys):
    with display_for(False) as display:
        callbacks = Callbacks([display])
        callbacks.on_report(REPORT)
        callbacks.on_evaluation(4096, SCORES)
        callbacks.on_warning("the envs begin fresh episodes")
    assert capsys.readouterr() == ("", "warning: the envs begin fresh episodes\n")
