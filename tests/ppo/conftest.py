"""Loads TensorFlow once for all tests of the trainer, without its log messages, and chooses who compiles updates."""

import pytest

from ppo.cli import load_tensorflow

load_tensorflow()

from ppo.algorithm import update  # noqa: E402  # after the log messages were silenced


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Lets only slow tests and tests marked with `xla` compile updates, before any fixture of the test trains."""
    update.compiles_updates = any(item.get_closest_marker(name) for name in ("xla", "slow"))
