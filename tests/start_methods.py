"""The start methods of processes, as parameters of tests."""

import multiprocessing

import pytest

METHODS = [
    pytest.param(method, marks=pytest.mark.slow if method == "spawn" else ())
    for method in multiprocessing.get_all_start_methods()
]
"""Quick tests omit `spawn`, which imports everything again in each worker. A few tests of its own try it."""
