"""Rivals in processes of their own, so that neither their threads nor what they have imported affects the others."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.machine import load_tensorflow

Iteration = tuple[Callable[[], Any], Callable[[], Any]]
"""A function that runs one iteration, and a function that ends the rival."""

SB3_SETTINGS = {
    "recompute_advantages": False,
    "normalize_advantages": True,
    "value_coef": 1.0,
    "entropy_coef": 0.0,
    "initial_log_std": 0.0,
}
"""Settings with which an update of ppo computes what one of Stable-Baselines3 computes by default."""


def in_a_process(build: Callable[..., Iteration], **settings: Any) -> Iteration:
    """Calls `build(**settings)` in a new process, and returns functions that run an iteration there and end it.

    An iteration returns when it is complete, which adds about 0.1 ms.
    """
    return _started(_iterate, build, settings)


def ppo_in_a_process(folder: Path, **settings: Any) -> Iteration:
    """Starts ppo with these settings, normalized advantages and otherwise its defaults; see `in_a_process`."""
    return _started(_train, folder, settings)


def _started(serve: Callable[..., None], *arguments: Any) -> Iteration:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments))
    process.start()
    there.close()

    def iterate() -> None:
        here.send("iterate")
        here.recv()

    def close() -> None:
        here.close()
        process.join()

    return iterate, close


def _iterate(connection: Connection, build: Callable[..., Iteration], settings: dict[str, Any]) -> None:
    """Runs one iteration for each message."""
    iterate, close = build(**settings)
    while _is_requested(connection):
        iterate()
        connection.send("done")
    close()


def _train(connection: Connection, folder: Path, settings: dict[str, Any]) -> None:
    """Trains, running one iteration for each message."""
    import ppo

    never = 10**9
    defaults = {"total_steps": never, "report_interval": never, "checkpoint_interval": never}
    defaults["normalize_advantages"] = True  # as the rivals do
    config = ppo.Config(**defaults | settings)
    load_tensorflow()

    class OnRequest(ppo.Callback):
        def on_start(self, config: ppo.Config, env_steps: int) -> None:
            self._wait()

        def on_update(self, report: dict[str, Any]) -> None:
            assert math.isfinite(report["grad_norm"])
            connection.send("done")
            self._wait()

        def _wait(self) -> None:
            if not _is_requested(connection):
                raise ppo.StopTraining

    ppo.train(config, callbacks=OnRequest(), logdir=folder, progress=False)


def _is_requested(connection: Connection) -> bool:
    """Waits for a message, and returns False if there will be none."""
    try:
        connection.recv()
    except EOFError:
        return False
    return True
