"""What README and docs say is true: their code runs, their commands are the gate's, their files exist."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ppo.commands import train
from ppo.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("code", [code for page in PAGES for code in blocks(page, "python")])
def test_every_python_block_runs(code, tmp_path):
    if "adapters.sb3" in code:
        pytest.importorskip("stable_baselines3")
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_gate_calls_exactly_the_readmes_test_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert any(block.strip() == command for block in blocks(ROOT / "README.md", "sh"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "name", ["serial", "parallel", "make", "ingraph", "testing", "wrappers", "adapters.dm_env", "adapters.sb3"]
)
def test_the_examples_in_docstrings_are_true(name):
    if name == "adapters.sb3":
        pytest.importorskip("stable_baselines3")
    name = f"vecenv.{name}"
    assert doctest.testmod(importlib.import_module(name)).failed == 0


QUICK = ["pendulum", "cartpole", "cheetah", "swimmer", "paper/pendulum"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in PRESETS if name not in QUICK]


@pytest.mark.parametrize("preset", [*QUICK, *SLOW])
def test_every_preset_starts(preset, tmp_path):
    words = ["--config", preset, "--total-steps", "1", "--eval-episodes", "1", "--logdir", str(tmp_path)]
    assert train.command(words) == 0


def test_every_file_says_first_what_its_line_in_the_layout_says():
    for package in ("vecenv", "ppo"):
        for file in (ROOT / package).rglob("*.py"):
            first = file.read_text().split("\n", 1)[0]
            assert first.startswith(f'"""{file.parent.name if file.stem == "__init__" else file.name}: '), file


def test_the_benchmarks_run():
    """One small case of each file; a peer that is not installed is skipped with a line that says how to install it."""
    words = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", "-q", "-rs"]
    choice = (
        "CartPole and 0- or (test_ppo and 0-ppo) or 16-0-SB3 or (test_creation and 0-) or (test_partial and 0-) "
        "or (test_infos and 0-infos) or (test_parent and 64-2-0) or (test_mujoco and Hopper and v5-8-0)"
    )
    done = subprocess.run([*words, "-k", choice], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("pip install torch==2.13.0 stable-baselines3" in line or "pip install envpool" in line for line in skips)
