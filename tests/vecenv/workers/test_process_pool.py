"""Tests of vecenv/workers/process_pool.py: interrupts leave a pool that can be closed, and nothing piles up."""

import contextlib
import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

import vecenv
from tests.helpers import CountingEnv, FaultyEnv, before_each_message, counting_fns
from tests.start_methods import METHODS
from vecenv.memory.block import Block
from vecenv.vector import vector_env
from vecenv.workers import launch, messenger, pipes, process_pool


def open_files():
    gc.collect()
    kinds = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            kinds.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
    return sorted(kinds)


@pytest.mark.parametrize("method", METHODS)
def test_no_file_descriptor_is_left_open_however_the_envs_end(method):
    def once(fault):
        try:
            fns = [lambda i=i: FaultyEnv(i, "raise", fault) for i in range(4)]
            envs = vecenv.AsyncVectorEnv(fns, num_workers=2, context=method, on_worker_death="restart")
            envs.reset()
            if fault == "restart":
                envs.processes[0].kill()
            for _ in range(4):
                envs.step([0] * 4)
            if fault != "forgotten":
                envs.close()
        except ValueError:
            pass

    faults = ["construction", "step", "restart", "none", "forgotten"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fault in faults:
            once(fault)
        before = open_files()
        for fault in faults:
            once(fault)
        assert open_files() == before


@pytest.mark.parametrize("error", [OSError("too many processes"), EOFError(), KeyboardInterrupt()], ids=repr)
def test_a_process_that_cannot_be_started_is_a_dead_worker_and_leaves_nothing_open(error, monkeypatch):
    start, calls = launch.start_process, []

    def start_one(*arguments, **how):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return start(*arguments, **how)

    vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1).close()
    before = open_files()
    monkeypatch.setattr(launch, "start_process", start_one)
    wanted = type(error) if isinstance(error, KeyboardInterrupt) else vecenv.WorkerDied
    with pytest.raises(wanted) as raised:
        vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2)
    if wanted is vecenv.WorkerDied:
        named = f"worker 1 (envs 2:4) ended during startup ({type(error).__name__}: {error})"
        assert str(raised.value).startswith(named)
    del raised
    assert open_files() == before


def test_a_worker_that_cannot_be_sent_its_memory_is_a_dead_worker(monkeypatch):
    monkeypatch.setattr(messenger, "END_S", 0.01)
    monkeypatch.setattr(vector_env, "FAILED_GRACE_S", 0.0)
    monkeypatch.setattr(Block, "send", mock.Mock(side_effect=BrokenPipeError))
    message = r"worker 0 \(envs 0:2\) closed its pipe but is still running during construction"
    with pytest.raises(vecenv.WorkerDied, match=message):
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files in memory")
def test_without_shared_memory_the_envs_share_a_file_in_memory():
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, shared_memory=False):
        assert " /memfd:vecenv" in Path("/proc/self/maps").read_text()


def test_a_wait_does_not_spin_if_there_are_more_workers_than_cores(monkeypatch):
    monkeypatch.setattr(process_pool, "available_cores", lambda: 1)
    monkeypatch.setattr(process_pool, "cpu_quota", lambda: 9.0)
    monkeypatch.setattr(pipes, "SPIN_S", 60.0)
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2) as envs:
        envs.reset()
        monkeypatch.setattr(os, "sched_yield", mock.Mock(side_effect=AssertionError))
        envs.step([0, 0])


def test_after_an_interrupt_between_two_messages_only_close_is_legal():
    sent = []

    def interrupt(message):
        if sent:
            raise KeyboardInterrupt
        sent.append(message)

    with vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2) as envs:
        envs.reset()
        with before_each_message(interrupt), pytest.raises(KeyboardInterrupt):
            envs.step_async([0] * 4)
        with pytest.raises(vecenv.StateError):
            envs.step_wait()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_close_that_was_interrupted_is_completed_by_the_next(num_workers, tmp_path, monkeypatch):
    class Closing(CountingEnv):
        def close(self):
            if num_workers == 0 and self.index == 1 and not self.folder.joinpath("1").exists():
                self.folder.joinpath("1").touch()
                raise KeyboardInterrupt
            self.folder.joinpath(str(self.index)).touch()

        folder = tmp_path

    envs = vecenv.AsyncVectorEnv([lambda i=i: Closing(i) for i in range(4)], num_workers=num_workers)
    envs.reset()
    if num_workers:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pipes.Waiter, "ready", mock.Mock(side_effect=KeyboardInterrupt))
            envs.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            envs.close()
    envs.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


SOAK = """
import os, resource, sys
import numpy as np, gymnasium as gym, vecenv

class Free(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self):
        self.steps, self.observation = 0, np.zeros(4, np.float32)
    def reset(self, *, seed=None, options=None):
        return self.observation, {}
    def step(self, action):
        self.steps += 1
        return self.observation, 1.0, self.steps % 50 == 0, False, {"steps": self.steps}
    def memory(self):
        return rss(os.getpid()), len(os.listdir("/proc/self/fd"))

def rss(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

envs = vecenv.AsyncVectorEnv([Free] * 4, num_workers=2, autoreset_mode="SameStep")
envs.reset()
actions = np.zeros(4, np.int64)
def measure():
    return [(rss(os.getpid()), len(os.listdir("/proc/self/fd"))), *envs.call("memory")]
batches = int(sys.argv[1])
for _ in range(batches // 10):
    envs.step(actions)
first = measure()
for _ in range(batches - batches // 10):
    envs.step(actions)
last = measure()
envs.close()
for (memory, files), (memory_later, files_later) in zip(first, last):
    print(memory_later - memory, files_later - files)
"""


@pytest.mark.parametrize("batches", [2_500, pytest.param(500_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_memory_and_file_descriptors_stay_flat(batches):
    done = subprocess.run([sys.executable, "-c", SOAK, str(batches)], capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    print(done.stdout)
    changes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(changes) == 1 + 4  # of this process, and of its worker as each env sees it
    assert all(grown < 2**20 and files == 0 for grown, files in changes)
