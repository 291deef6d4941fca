"""Marks and fixtures of all tests: poisoned memory, a check for what a test leaves behind, who compiles updates."""

from __future__ import annotations

import collections
import compileall
import contextlib
import gc
import multiprocessing
import os
import re
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
for by_value in (tests.ppo, tests.vecenv):
    cloudpickle.register_pickle_by_value(by_value)


TESTS = Path(__file__).parent

# Containers often set PYTHONDONTWRITEBYTECODE. Each of the many processes that tests start would compile the packages.
if sys.dont_write_bytecode:
    for package in ("vecenv", "ppo", "tests"):
        compileall.compile_dir(TESTS.parent / package, quiet=2)

MARKS = {"vecenv/ingraph": "train", "vecenv": "engine", "ppo": "train", "test_examples.py": "train", "": "tooling"}
"""The mark of the tests below each path. The first path that fits decides."""

PROCESSES = ("vecenv/workers", "ppo/run/test_signals.py", "ppo/cli")
"""The paths of tests of processes: of workers, signals and commands. They have the mark `process`, too."""


def pytest_configure(config):
    """Omits slow tests and builds unless `-m` names them, as without `-m`. `-m ''` selects every test."""
    chosen = config.option.markexpr
    if chosen and not re.search(r"\b(slow|build)\b", chosen):
        config.option.markexpr = f"({chosen}) and not slow and not build"


def pytest_ignore_collect(collection_path, config):
    """Lets `-m engine` import only the tests of the engine, which need no TensorFlow."""
    words = re.findall(r"\w+", config.option.markexpr)
    only_engine = words[:1] == ["engine"] and "or" not in words
    if only_engine and collection_path != TESTS and _mark_of(collection_path) != "engine":
        return True
    return None


def pytest_collection_modifyitems(items):
    """Gives each test the marks of its path.

    Raises:
        pytest.UsageError: If a test's id contains an address, which differs between the processes of pytest-xdist.
    """
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: the id of a parameter contains an address: pass `ids`")
        if item.path.is_relative_to(TESTS):  # the tests of another folder may be collected, too
            item.add_marker(_mark_of(item.path))
            if any(item.path.is_relative_to(TESTS / path) for path in PROCESSES):
                item.add_marker("process")


def _mark_of(path: Path) -> str:
    within = path.relative_to(TESTS)
    return next(mark for prefix, mark in MARKS.items() if within.is_relative_to(prefix))


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
        from tests.ppo.runs import compile_updates

        compile_updates(item.get_closest_marker("xla") is not None)
    return (yield)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fills fresh memory with NaN (or -1, or 255), so that a test that reads an unwritten row fails."""
    monkeypatch.setattr(memory, "poison", 0xFF)


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    """Fails a test that leaves a child process or shared memory behind.

    On Linux, shared memory has no name, so its descriptors and mappings in this process are compared.
    """
    before = _shared_memory()
    yield
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    assert not children, f"left running: {children}"
    if _shared_memory() - before:
        request.node.funcargs.clear()  # the values of fixtures, which pytest keeps until the end of the teardown
    deadline = time.monotonic() + 10  # another thread or, for named segments, another process may still hold one
    while (left := _shared_memory() - before) and time.monotonic() < deadline:
        if not gc.collect():  # it releases what is in a cycle
            time.sleep(0.05)
    assert not left, f"left behind: {dict(left)}"


def _shared_memory() -> collections.Counter[str]:
    """Returns the named segments of this machine, and the descriptors and mappings of nameless ones in this process."""
    found: collections.Counter[str] = collections.Counter()
    if os.path.isdir("/dev/shm"):
        found.update(name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vecenv_")))
    if sys.platform != "linux":
        return found
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(NAMELESS):
                found[f"descriptor of {target}"] += 1
    mappings = Path("/proc/self/maps").read_bytes()
    for prefix in NAMELESS:
        if count := mappings.count(b" " + prefix.encode()):
            found[f"mapping of {prefix}"] = count
    return found


NAMELESS = ("/dev/shm/#", "/memfd:vecenv")
"""The beginnings of the paths of files without a name that hold shared memory."""
