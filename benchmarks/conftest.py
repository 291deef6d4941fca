"""Fixtures and helpers of the benchmarks: a quick mode, skips that say what to install, and facts about the machine."""

from __future__ import annotations

import functools
import importlib.util
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from vecenv import available_cores

PACKAGES = (
    "gymnasium",
    "numpy",
    "mujoco",
    "tensorflow",
    "stable-baselines3",
    "torch",
    "envpool",
    "tianshou",
    "pettingzoo",
    "mpe2",
    "agilerl",
    "supersuit",
)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="run few repetitions, to test that the benchmarks work")


@pytest.fixture
def measure(benchmark, request):
    """Returns a function that times `rounds` rounds of `iterations` calls and records their median."""
    quick = request.config.getoption("--quick")

    def run(call, *, rounds: int, iterations: int, env_steps: int, after_each=None, **extra) -> None:
        """Times `call`, which takes `env_steps` env-steps, and records everything that the result depends on.

        `after_each` is called after each round and is not timed.
        """
        benchmark.extra_info.update(extra | {"env_steps": env_steps} | machine())
        benchmark.pedantic(
            call,
            rounds=1 if quick else rounds,
            iterations=1 if quick else iterations,
            warmup_rounds=0 if quick or after_each else 1,
            teardown=after_each,
        )
        if benchmark.stats is not None:  # it is None with --benchmark-disable
            benchmark.extra_info["env_steps_per_s"] = round(env_steps / benchmark.stats.stats.median)

    return run


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Returns the seconds of each call in each round, in which all calls take turns. `warm_up` rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[warm_up:] for name, taken in seconds.items()}


def need(module: str, install: str) -> None:
    """Skips a benchmark whose rival is not installed, with a message that says how to install it."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: {install}")


def load_tensorflow() -> None:
    """Imports TensorFlow with the threads that `ppo train` uses. The function for this is not public."""
    from ppo import cli

    cli.load_tensorflow()


@functools.cache
def machine() -> dict[str, object]:
    """Returns the cores and the package versions that a result depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"cores": available_cores(), "python": platform.python_version(), "versions": versions}


def commit() -> str | None:
    """Returns the commit, with "-dirty" if a tracked file other than the results has changed; None without git."""

    def git(*words: str) -> str:
        root = Path(__file__).parents[1]
        return subprocess.run(["git", *words], cwd=root, text=True, capture_output=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ".", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
