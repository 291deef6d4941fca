"""Tests that the presets cartpole, pendulum and cheetah reach their target scores, with the commands that a user types.

`pytest -m slow -rP tests/ppo/test_learning.py` prints every score.
"""

import json
import time

import pytest

from ppo.cli import evaluate, train


def score(tmp_path, capsys, *words):
    """Trains and evaluates as a user would; returns the mean return of 20 episodes and the training time in seconds."""
    started = time.monotonic()
    assert train.command([*words, "--logdir", str(tmp_path)]) == 0
    seconds = time.monotonic() - started
    (run,) = tmp_path.iterdir()
    capsys.readouterr()
    evaluate.command([str(run), "--episodes", "20", "--json", "--seed", "123"])
    scores = json.loads(capsys.readouterr().out)
    print(f"{' '.join(words)}: {scores['return_mean']:.1f} +- {scores['return_std']:.1f} after {seconds:.0f} s")
    return scores["return_mean"], seconds


def test_cartpole_is_solved_within_a_minute(tmp_path, capsys):
    mean, seconds = score(tmp_path, capsys, "--config", "cartpole", "--seed", "1")
    assert mean == 500 and seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "2", "3"])
def test_cartpole_is_solved_with_other_seeds(tmp_path, capsys, seed):
    mean, seconds = score(tmp_path, capsys, "--config", "cartpole", "--seed", seed)
    assert mean == 500 and seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_pendulum_reaches_minus_200_within_three_minutes(tmp_path, capsys, seed):
    mean, seconds = score(tmp_path, capsys, "--config", "pendulum", "--seed", seed)
    assert mean >= -200 and seconds < 180


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_cheetah_reaches_2000_in_a_million_steps(tmp_path, capsys, seed):
    mean, _ = score(tmp_path, capsys, "--config", "cheetah", "--seed", seed)
    assert mean >= 2000
