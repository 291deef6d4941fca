"""Fixtures for all tests: poisoned memory, a check for leaked processes and memory, and who compiles updates."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import pytest

import tests.ppo
import tests.vecenv
from vecenv.memory import block as memory

# The background jobs of a shell script ignore SIGINT, and so would every script that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The commands that tests start compile the same few updates again and again, so they share what XLA has compiled. The
# workers of pytest-xdist inherit the variable, and the process that made the folder removes it at its end.
if "TF_XLA_FLAGS" not in os.environ:
    compiled = tempfile.TemporaryDirectory(prefix="xla-")
    os.environ["TF_XLA_FLAGS"] = f"--tf_xla_persistent_cache_directory={compiled.name}"

# Workers get the envs of test modules by value, as those of a script, and import no test module: pytest, Hypothesis and
# TensorFlow take longer to import than most tests run.
for package in (tests.ppo, tests.vecenv):
    cloudpickle.register_pickle_by_value(package)


# By default, the garbage collector would scan the thousands of objects of each graph again and again.
gc.set_threshold(200_000, 5, 5)


def pytest_collection_finish():
    """Excludes the imported modules and the collected tests from later collections."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Lets only tests marked with `xla` optimize graphs and compile updates, as users do, in this process.

    This includes the fixtures that they create. Optimization takes a third of the time of a short run, and TensorFlow
    keeps what XLA has compiled. If all slow tests compiled, their process would run out of memory mappings.
    """
    if "tensorflow" in sys.modules:  # the engine's tests need not import it
        import tensorflow as tf

        from ppo.algorithm import update

        update.compiles_updates = item.get_closest_marker("xla") is not None
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not update.compiles_updates})
    return (yield)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fills fresh memory with NaN (or -1, or 255), so that a test that reads an unwritten row fails."""
    monkeypatch.setattr(memory, "poison", 0xFF)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fails a test that leaves a child process or a shared-memory segment behind."""
    segments = _segments()
    yield
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    assert not children, f"left running: {children}"
    deadline = time.monotonic() + 10  # a test in another process may be using a segment
    while (left := _segments() - segments) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left in /dev/shm: {left}"


def _segments() -> set[str]:
    shm = Path("/dev/shm")
    return {entry for entry in os.listdir(shm) if entry.startswith(("psm_", "vecenv_"))} if shm.is_dir() else set()
