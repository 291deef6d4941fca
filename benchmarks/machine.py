"""What all benchmarks need: turns, TensorFlow, and facts about the machine. Imports no pytest."""

from __future__ import annotations

import functools
import platform
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vecenv import available_cores

PACKAGES = (
    "gymnasium",
    "numpy",
    "mujoco",
    "tensorflow",
    "stable-baselines3",
    "sbx-rl",
    "jax",
    "torch",
    "envpool",
    "tianshou",
    "pettingzoo",
    "mpe2",
    "agilerl",
    "supersuit",
)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Returns the seconds of each call in each round, in which all calls take turns. `warm_up` rounds do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[warm_up:] for name, taken in seconds.items()}


def load_tensorflow() -> None:
    """Imports TensorFlow with the threads that `ppo train` uses. The function for this is not public."""
    from ppo import cli

    cli.load_tensorflow()


@functools.cache
def machine() -> dict[str, object]:
    """Returns the commit, the cores and the package versions that a result depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "commit": commit(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "versions": versions,
    }


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
