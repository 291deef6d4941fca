"""The start methods of processes, as parameters of tests."""

import multiprocessing

import pytest

METHODS = [
    pytest.param(method, marks=pytest.mark.slow if method == "spawn" else ())
    for method in multiprocessing.get_all_start_methods()
]
"""Quick tests omit `spawn`, whose workers import everything again, except for the tests that are about it."""
