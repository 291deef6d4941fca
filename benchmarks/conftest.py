"""Fixtures of the benchmarks: a quick mode, measurements, and skips that say what to install."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.machine import machine


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


def need(module: str, install: str) -> None:
    """Skips a benchmark whose rival is not installed, with a message that says how to install it."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: {install}")
