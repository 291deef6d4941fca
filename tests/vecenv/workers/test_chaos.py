"""Tests that kill workers and parents at random moments: the result is a prompt error or a restart, never a hang."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import vecenv
from tests.helpers import CountingEnv, process_exists, wait_for_end

METHODS = multiprocessing.get_all_start_methods()
SLOW = pytest.mark.slow
MOMENTS = ["construction", "idle", "reset", "step", "recv", "call"]


def kills(default, many):
    """Returns pytest parameters (start method, number of kills): few kills by default, many with `-m slow`."""
    few = [pytest.param(method, count, id=method) for method, count in default.items() if method in METHODS]
    return few + [pytest.param(m, n, id=f"{m}-{n}", marks=SLOW) for m, n in many.items() if m in METHODS]


class BusyEnv(CountingEnv):
    """Spends 0.2 ms in every method, so that a kill can interrupt it."""

    def _work(self, seconds=2e-4):
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    def __init__(self, index, length=20):
        super().__init__(index, length)
        self._work()

    def reset(self, **kwargs):
        self._work()
        return super().reset(**kwargs)

    def step(self, action):
        self._work()
        return super().step(action)

    def close(self):
        self._work()


def busy_fns(num_envs=4):
    return [lambda i=i: BusyEnv(i) for i in range(num_envs)]


class Killer(threading.Thread):
    """Kills one of the processes after a random delay."""

    def __init__(self, processes, rng, longest_s=0.004):
        super().__init__(daemon=True)
        self._processes, self._delay_s, self._rng = processes, rng.uniform(0, longest_s), rng
        self.victim = None

    def run(self):
        until = time.monotonic() + self._delay_s
        while time.monotonic() < until:
            os.sched_yield()
        while self.victim is None:
            os.sched_yield()
            for process in self._rng.sample(processes := self._processes(), min(1, len(processes))):
                with contextlib.suppress(ProcessLookupError):  # the process has just ended: kill another
                    os.kill(process.pid, signal.SIGKILL)
                    self.victim = process.pid


def workers_of_this_process():
    # Not active_children(), which also reaps ended processes that another thread waits for.
    return [child for child in list(multiprocessing.process._children) if child.name.startswith("vecenv-worker")]


def use(envs, moment):
    """Repeats the call that `moment` names."""
    zeros = np.zeros(envs.num_envs, np.int64)
    for _ in range(10_000):
        if moment == "reset":
            envs.reset()
        elif moment == "call":
            envs.call("_work", 2e-4)
        elif moment == "recv":
            envs.send(zeros)
            left = len(zeros)
            while left:
                left -= len(envs.recv(min(2, left)).env_ids)
        else:
            envs.step(zeros)


@pytest.mark.parametrize(("method", "count"), kills({"forkserver": 6}, {"fork": 100, "forkserver": 100, "spawn": 24}))
def test_a_worker_killed_at_any_moment_is_an_error(method, count):
    rng = random.Random(f"{method} {count}")
    for kill in range(count):
        moment = MOMENTS[kill % len(MOMENTS)]
        if moment == "construction":
            killer = Killer(workers_of_this_process, rng, longest_s=0.05)
            killer.start()
        try:
            envs = vecenv.AsyncVectorEnv(busy_fns(), num_workers=2, context=method)
            try:
                envs.reset()
                if moment != "construction":
                    killer = Killer(lambda envs=envs: envs.processes, rng)
                    killer.start()
                if moment == "idle":
                    killer.join()
                use(envs, moment)
            finally:
                envs.close()
            raise AssertionError(f"no error after a kill during {moment}")
        except vecenv.WorkerDied as error:
            named = ("worker 0 (envs 0:2)", "worker 1 (envs 2:4)")
            assert str(error).startswith(named) and "was killed by SIGKILL" in str(error), (moment, error)
        killer.join()
        assert not workers_of_this_process(), moment


class Closing(BusyEnv):
    """Writes down when its `close` begins and when it has ended. In a worker's first env, it takes until the kill."""

    def __init__(self, index, folder, waits):
        super().__init__(index)
        self._folder, self._waits = folder, waits

    def close(self):
        (self._folder / f"begun {self.index}").touch()
        while self._waits:
            signal.pause()
        super().close()
        (self._folder / f"ended {self.index}").touch()


@pytest.mark.parametrize(("method", "count"), kills({"forkserver": 2}, {"fork": 40, "forkserver": 40, "spawn": 12}))
def test_after_a_kill_during_close_all_other_envs_are_closed_and_nothing_waits_or_is_left(method, count, tmp_path):
    rng = random.Random(f"{method} {count}")
    for kill in range(count):
        folder = tmp_path / str(kill)
        folder.mkdir()
        kill_during_close(method, kill % 2, rng.uniform(0, 0.001), folder)


def kill_during_close(method, victim, delay_s, folder):
    fns = [lambda i=i: Closing(i, folder, waits=i == 2 * victim) for i in range(4)]
    envs = vecenv.AsyncVectorEnv(fns, num_workers=2, context=method)
    envs.reset()
    pids = [process.pid for process in envs.processes]
    begun, closed = folder / f"begun {2 * victim}", threading.Event()

    def kill():
        while not begun.exists() and not closed.is_set():
            os.sched_yield()
        until = time.monotonic() + delay_s  # the envs of the other worker may be open, closing or closed
        while time.monotonic() < until:
            os.sched_yield()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.close(timeout=120)
    closed.set()
    killer.join()
    assert time.monotonic() - started < 60  # `close` does not wait for a dead worker
    assert begun.exists()
    assert (
        sorted(path.name for path in folder.glob("ended *")) == (["ended 2", "ended 3"], ["ended 0", "ended 1"])[victim]
    )
    assert not any(map(process_exists, pids)) and not workers_of_this_process()
    with pytest.raises(vecenv.StateError, match="after a call to `close"):
        envs.step([0] * 4)


@pytest.mark.parametrize(
    ("method", "count"), kills({"fork": 4, "forkserver": 4}, {"fork": 40, "forkserver": 40, "spawn": 12})
)
@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_a_run_with_restarts_survives_kills_at_any_moment(method, count):
    rng = random.Random(f"{method} {count}")
    with vecenv.AsyncVectorEnv(busy_fns(), num_workers=2, context=method, on_worker_death="restart") as envs:
        envs.reset()
        step = np.zeros(4)
        restarts = 0
        for _ in range(count):
            killer = Killer(lambda envs=envs: envs.processes, rng)
            killer.start()
            while not killer.victim or killer.victim in [process.pid for process in envs.processes]:
                observations, rewards, terminated, truncated, infos = envs.step([0] * 4)
                cut = infos.get("worker_restarted", np.zeros(4)).astype(bool)
                np.testing.assert_array_equal(observations[:, 0], range(4))
                begun = observations[:, 2] == 0
                # An env has advanced one step, has begun an episode, or was cut where it stood.
                expected = np.where(cut, step, np.where(begun, 0, step + 1))
                np.testing.assert_array_equal(observations[:, 2], expected)
                np.testing.assert_array_equal(rewards, np.where(cut | begun, 0, observations[:, 2]))
                assert (truncated >= cut).all() and not (cut & terminated).any()
                step = observations[:, 2]
            killer.join()
            restarts += 1
            envs.call("_work", 0)
    assert restarts == count


SCRIPT = """
import os, sys, threading
sys.path.insert(0, {root!r})
from tests.vecenv.workers.test_chaos import busy_fns, use, workers_of_this_process
import vecenv
def tell():
    while len(workers_of_this_process()) < 2:
        os.sched_yield()
    print(*[worker.pid for worker in workers_of_this_process()], flush=True)
if {moment!r} == "construction":
    threading.Thread(target=tell).start()
envs = vecenv.AsyncVectorEnv(busy_fns(), num_workers=2, context={method!r})
envs.reset()
if {moment!r} != "construction":
    tell()
use(envs, {moment!r})
"""


@pytest.mark.parametrize(
    ("moment", "method"),
    [
        pytest.param(moment, method, marks=() if method == "forkserver" or moment == "step" else SLOW)
        for moment in ("construction", "step", "recv")
        for method in METHODS
    ],
)
def test_a_killed_parent_leaves_no_process_no_memory_and_no_output(method, moment):
    delay_s = random.Random(method + moment).uniform(0, 0.02)
    root = str(Path(__file__).parents[3])
    script = SCRIPT.format(method=method, moment=moment, root=root)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    until = time.monotonic() + delay_s
    while time.monotonic() < until:
        os.sched_yield()
    process.kill()
    _, errors = process.communicate(timeout=60)
    assert len(pids) == 2 and errors == ""
    wait_for_end(pids)
