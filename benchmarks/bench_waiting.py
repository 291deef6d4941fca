"""How much faster are steps if a waiting process spins for a millisecond before it sleeps? What does a message cost?

Unit: env-steps per second of all envs together, on two workers with envs that do nothing. For `test_round_trip`, bare
round trips per second: the other process returns each frame of nine bytes.
Not measured: the work that other processes could do on the cores during the spinning.

The engine spins only if every worker has a core. This benchmark disables spinning by reporting a single core to the
pool, which is internal to the engine.
"""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest

import vecenv
from benchmarks.bench_engine import ENVS
from vecenv.workers import process_pool
from vecenv.workers.pipes import Waiter


@pytest.mark.parametrize("rival", ["spin, then sleep", "sleep at once"])
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("num_envs", [2, 64])
def test_waiting(measure, benchmark, monkeypatch, num_envs, turn, rival):
    benchmark.group = f"waiting, {num_envs} envs"
    if rival == "sleep at once":  # as on a machine with fewer cores than workers
        monkeypatch.setattr(process_pool, "available_cores", lambda: 1)
    actions = np.zeros((num_envs, 6), np.float32)
    with vecenv.AsyncVectorEnv([ENVS["free float32[17]"]] * num_envs, num_workers=2) as envs:
        envs.reset(seed=0)
        np.testing.assert_array_equal(envs.step(actions)[0], np.ones((num_envs, 17), np.float32))
        measure(lambda: envs.step(actions), rounds=15, iterations=200, env_steps=num_envs, rival=rival, turn=turn)


def _echo(connection, spin):
    waiter, number = Waiter([connection], spin=spin), connection.fileno()
    while waiter.ready() and (frame := os.read(number, 9)):
        os.write(number, frame)


@pytest.mark.parametrize("rival", ["spin", "sleep at once"])
def test_round_trip(measure, benchmark, rival):
    benchmark.group = "a bare round trip between two processes"
    spin = rival == "spin"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs, spin))
    process.start()
    theirs.close()
    waiter, number = Waiter([ours], spin=spin), ours.fileno()

    def round_trip() -> bytes:
        os.write(number, b"nine byte")
        waiter.ready()
        return os.read(number, 9)

    assert round_trip() == b"nine byte"
    measure(round_trip, rounds=15, iterations=1000, env_steps=1, rival=rival)
    ours.close()
    process.join()
