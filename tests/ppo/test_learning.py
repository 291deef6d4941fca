"""Tests that the presets cartpole, pendulum and cheetah reach their target scores, with the commands that a user types.

`pytest -m slow -rP tests/ppo/test_learning.py` prints every score.
"""

import json

import pytest

from ppo.cli import evaluate, train


def score(tmp_path, capsys, *words):
    """Trains and evaluates as a user would; returns the mean return of 20 episodes and the env-steps of training."""
    assert train.command([*words, "--logdir", str(tmp_path)]) == 0
    (run,) = tmp_path.iterdir()
    env_steps = json.loads((run / "evaluation.json").read_text())["env_steps"]
    capsys.readouterr()
    evaluate.command([str(run), "--episodes", "20", "--json", "--seed", "123"])
    scores = json.loads(capsys.readouterr().out)
    print(f"{' '.join(words)}: {scores['return_mean']:.1f} +- {scores['return_std']:.1f} after {env_steps:,} env-steps")
    return scores["return_mean"], env_steps


@pytest.mark.xla
def test_cartpole_is_solved_within_200_000_env_steps(tmp_path, capsys):
    mean, env_steps = score(tmp_path, capsys, "--config", "cartpole", "--seed", "1")
    assert mean == 500 and env_steps < 200_000 + 64 * 32  # the last rollout is completed


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "2", "3"])
def test_cartpole_is_solved_with_other_seeds(tmp_path, capsys, seed):
    mean, env_steps = score(tmp_path, capsys, "--config", "cartpole", "--seed", seed)
    assert mean == 500 and env_steps < 200_000 + 64 * 32


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_pendulum_reaches_minus_200_within_600_000_env_steps(tmp_path, capsys, seed):
    mean, env_steps = score(tmp_path, capsys, "--config", "pendulum", "--seed", seed)
    assert mean >= -200 and env_steps < 600_000 + 64 * 64


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_cheetah_reaches_2000_in_a_million_steps(tmp_path, capsys, seed):
    mean, _ = score(tmp_path, capsys, "--config", "cheetah", "--total-steps", "1000000", "--seed", seed)
    assert mean >= 2000
