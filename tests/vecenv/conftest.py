"""Fixtures for the tests of the engine."""

import logging
import sys

import cloudpickle
import pytest

import tests.vecenv


@pytest.fixture
def by_reference():
    """Lets workers import the test modules of the engine, for tests about their classes and module-level names."""
    cloudpickle.unregister_pickle_by_value(tests.vecenv)
    yield
    cloudpickle.register_pickle_by_value(tests.vecenv)


@pytest.fixture
def logged(caplog, monkeypatch):
    """Returns a function that lists the levels and the messages logged since the test began."""
    # Messages that are logged once per process are logged again.
    monkeypatch.setattr(sys.modules["vecenv.make"], "_logged", set())
    caplog.set_level(logging.INFO, logger="vecenv")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]
