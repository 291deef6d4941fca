"""Starts the commands; sets up the handling of interrupts and crashes before any heavy import."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from typing import Any


def train() -> None:
    """Runs `python -m ppo.train`."""
    _launch("train")


def evaluate() -> None:
    """Runs `python -m ppo.evaluate`."""
    _launch("evaluate")


def visualize() -> None:
    """Runs `python -m ppo.visualize`."""
    _launch("visualize")


def plot() -> None:
    """Runs `python -m ppo.plot`."""
    _launch("plot")


def export() -> None:
    """Runs `python -m ppo.export`."""
    _launch("export")


def _launch(name: str) -> None:
    with contextlib.suppress(OSError):  # stderr is closed
        faulthandler.enable(os.dup(2))  # a duplicate, because TensorFlow is imported with stderr redirected
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Not an exception: C extensions turn a KeyboardInterrupt during their import into an ImportError.
        signal.signal(signal.SIGINT, _end)
    if not sys.flags.safe_path and sys.path[0] != os.getcwd():  # as `python -m` does, for console scripts
        sys.path.insert(0, os.getcwd())
    module = importlib.import_module(f"ppo.cli.{name}")
    importlib.import_module("ppo.cli").main(module.command)


def _end(number: int, _: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)
