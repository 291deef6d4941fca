"""Loads TensorFlow once for all tests of the trainer, without its log messages, and chooses who compiles updates."""

import pytest

from ppo.cli import load_tensorflow

load_tensorflow()

from ppo.algorithm import update  # noqa: E402  # after the log messages were silenced


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Lets only slow tests and tests marked with `xla` compile updates. This includes the fixtures that they create."""
    update.compiles_updates = any(item.get_closest_marker(name) for name in ("xla", "slow"))
    try:
        return (yield)
    finally:
        update.compiles_updates = True
