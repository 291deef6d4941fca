"""Tests of what `ppo train` prints: a live display in a terminal, plain lines elsewhere, and its --help."""

import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from ppo.cli.train import grouped, settings_of
from ppo.config import SETTINGS, Config
from ppo.results.evaluation import Evaluation
from ppo.run.display import PlainDisplay, TerminalDisplay, display_for
from ppo.trainer import Result

CONFIG = Config(env="CartPole-v1", total_steps=8192)
REPORT = {
    "env_steps": 4096, "wall_s": 12.0, "steps_per_s": 1024.0, "collect_steps_per_s": 3000.0,
    "learn_steps_per_s": 1500.0,
    "return_mean": 123.45, "kl": 0.0123, "entropy": 1.5,
}  # fmt: skip
SCORES = Evaluation(np.array([1.0, 3.0]), np.array([1, 3]))


def tell(display):
    display.on_start(CONFIG, 0)
    display.on_report({**REPORT, "return_mean": None, "entropy": float("nan")})
    display.on_report(REPORT)
    display.on_update(REPORT)
    display.on_evaluation(4096, SCORES)
    display.on_warning("[odd] things")
    display.on_end(Result(Path("run"), 4096, SCORES), None)


def test_a_terminal_shows_progress_speeds_return_kl_and_entropy():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert isinstance(display_for(console), TerminalDisplay)
    tell(display_for(console))
    shown = console.file.getvalue()
    for word in ("CartPole-v1", "50%", "return 123.5", "1,024 steps/s", "0:00:04 left", "KL 0.0123", "entropy 1.50",
                 "collect 3,000/s, learn 1,500/s", "return 2.0 +- 1.0 over 2 episodes",
                 "warning: [odd] things"):  # fmt: skip
        assert word in shown, word


def test_output_that_is_not_a_terminal_gets_one_line_per_report(capsys):
    display = display_for(Console(file=io.StringIO()))
    assert isinstance(display, PlainDisplay)
    tell(display)
    first, unknown, line, scores, warning = capsys.readouterr().out.splitlines()
    assert first == "training CartPole-v1 for 8,192 steps" and "return       ..." in unknown
    for word in (
        "4,096 steps",
        "1,024 steps/s",
        "return     123.5",
        "KL 0.0123",
        "entropy 1.50",
        "0:00:12, 0:00:04 left",
    ):
        assert word in line, word
    assert "return 2.0 +- 1.0 over 2 episodes" in scores and warning == "warning: [odd] things"


def test_the_help_lists_every_setting_with_its_text_and_its_range():
    done = subprocess.run(
        [sys.executable, "-m", "ppo", "train", "--config", "ant", "--help"], capture_output=True, text=True, timeout=60,
        env={"COLUMNS": "100"},  # too narrow for two columns of boxes
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.replace("│", "").split())
    for name, setting in SETTINGS.items():
        assert setting.help in shown, name
        assert f"--{name.replace('_', '-')}" in done.stdout
        assert f"{setting.group} options" in done.stdout
    assert "[above 0, or None] (default: None)" in shown and "[0 to 2147483647]" in shown
    assert "(default: Ant-v5)" in shown  # the preset's


def test_grouping_the_settings_does_not_change_them():
    config = Config(env="A", policy_layers=(3,), seed=7, num_workers=2, normalize_rewards=False)
    assert settings_of(grouped(config)) == config
    names = [name for group in grouped(config) for name in vars(group)]
    assert names == [field.name for field in dataclasses.fields(Config)]
