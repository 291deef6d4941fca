"""What the benchmarks share: a quick mode, skips that say what to install, and what a figure depends on."""

from __future__ import annotations

import functools
import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version

import pytest

from vecenv.workers.processes import available_cores

PACKAGES = ("gymnasium", "numpy", "mujoco", "tensorflow", "stable-baselines3", "torch", "envpool", "tianshou")


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="few repetitions, only to see that the benchmarks work")


@pytest.fixture
def measure(benchmark, request):
    """Returns a function that times a call: `rounds` times `iterations` calls, of which the median counts."""
    quick = request.config.getoption("--quick")

    def run(call, *, rounds: int, iterations: int, env_steps: int, after_each=None, **extra) -> None:
        """Times `call`, which makes `env_steps` env-steps, and records everything the figure depends on.

        `after_each` is called after each round, and not timed.
        """
        benchmark.extra_info.update(extra | {"env_steps": env_steps} | machine())
        benchmark.pedantic(
            call,
            rounds=1 if quick else rounds,
            iterations=1 if quick else iterations,
            warmup_rounds=0 if quick or after_each else 1,
            teardown=after_each,
        )
        if benchmark.stats is not None:  # with --benchmark-disable there are none
            benchmark.extra_info["env_steps_per_s"] = round(env_steps / benchmark.stats.stats.median)

    return run


def need(module: str, install: str) -> None:
    """Skips a benchmark whose peer is not installed, saying how to install it."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: {install}")


@functools.cache
def machine() -> dict[str, object]:
    """Returns what a figure depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"cores": available_cores(), "python": platform.python_version(), "versions": versions}
