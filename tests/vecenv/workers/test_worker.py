"""Tests of vecenv/workers/worker.py: what envs may do in a worker, and objects that cannot be pickled."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import vecenv
from tests.helpers import CountingEnv, counting_fns, process_exists, wait_for_end
from tests.start_methods import METHODS
from vecenv.workers import worker

ROOT = Path(__file__).parents[3]


class UnrulyEnv(CountingEnv):
    """Prints, forks, starts a thread and a subprocess, and changes the working directory."""

    def __init__(self, index, folder):
        super().__init__(index)
        os.chdir(folder)
        self._busy = threading.Event()
        threading.Thread(target=self._busy.wait, daemon=True).start()
        print("constructed", index, flush=True)

    def step(self, action):
        print("stepped", self.index, flush=True)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert subprocess.run(["true"]).returncode == 0
        return super().step(action)

    def where(self):
        return os.getcwd()


@pytest.mark.parametrize("method", METHODS)
def test_unruly_envs_step_like_any_other_env(method, tmp_path, capfd):
    here = os.getcwd()
    fns = [lambda i=i: UnrulyEnv(i, tmp_path) for i in range(3)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, context=method, daemon=False) as envs:
        envs.reset()
        for _ in range(5):
            observations, *_ = envs.step([0] * 3)
        np.testing.assert_array_equal(observations[:, 0], range(3))
        assert set(envs.call("where")) == {str(tmp_path)} and os.getcwd() == here
    if method != "forkserver":  # its workers write to the output that the fork server had at its start
        assert "stepped 2" in capfd.readouterr().out


def answer(pipe):
    while True:
        pipe.send(pipe.recv() + 1)


class ParallelEnv(CountingEnv):
    """Asks a process of its own for its rewards, and ends it with SIGTERM."""

    def __init__(self, index):
        super().__init__(index)
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=answer, args=(theirs,))
        self.process.start()

    def step(self, action):
        observation, _, *others = super().step(action)
        self.pipe.send(self.steps)
        return observation, self.pipe.recv(), *others

    def pid(self):
        return self.process.pid

    def close(self):
        self.process.terminate()
        self.process.join()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("daemon", [True, False])
def test_envs_may_start_processes_of_multiprocessing_and_terminate_them(method, daemon):
    """Even if these were forked: they do not ignore SIGTERM as workers do."""
    fns = [lambda i=i: ParallelEnv(i) for i in range(2)]
    with vecenv.AsyncVectorEnv(fns, num_workers=1, context=method, daemon=daemon) as envs:
        envs.reset()
        assert envs.step([0, 0])[1].tolist() == [2.0, 2.0]
        pids = envs.call("pid")
    assert not any(process_exists(pid) for pid in pids)


def test_a_process_that_an_env_has_just_forked_ends_on_sigterm():
    """Before it has set its handlers, the signal waits: with the worker's handler, it would be lost."""

    def end_forks(env):
        codes = []
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                signal.alarm(3)
                signal.pause()
            os.kill(pid, signal.SIGTERM)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return codes

    with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1) as envs:
        assert envs.apply(end_forks) == [[-signal.SIGTERM] * 3]


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_envs_may_choose_the_start_method_of_their_processes(method):
    def squares(env):
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(abs, [-1, 2])

    with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1) as envs:
        assert envs.apply(squares) == [[1, 2]]


class Closing(CountingEnv):
    """Env 1 is closed later than env 0."""

    def close(self):
        time.sleep(0.1 * self.index)


@pytest.mark.parametrize("method", METHODS)
def test_workers_outlive_the_thread_that_started_them_and_exit_by_themselves_when_they_are_closed(method):
    made, fns = [], [lambda i=i: Closing(i) for i in range(2)]
    thread = threading.Thread(target=lambda: made.append(vecenv.AsyncVectorEnv(fns, num_workers=2, context=method)))
    thread.start()
    thread.join()
    (envs,) = made
    envs.reset()
    assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]
    processes, began = list(envs.processes), time.monotonic()
    envs.close(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert time.monotonic() - began < 50, "the timeout has passed"


def test_workers_do_not_end_before_their_parent(monkeypatch):
    monkeypatch.setattr(worker, "ORPHAN_GRACE_S", 0.0)  # inherited by forks
    with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1, context="fork") as envs:
        envs.reset()
        time.sleep(0.2)
        assert envs.step([0])[1].tolist() == [1.0]


def test_a_signal_that_reaches_a_forked_worker_does_not_wake_up_its_parent():
    reading, writing = os.pipe()
    os.set_blocking(reading, False), os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context="fork") as envs:
            os.kill(envs.processes[0].pid, signal.SIGTERM)
            envs.reset()
            with pytest.raises(BlockingIOError):
                os.read(reading, 1)
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading), os.close(writing)


REGISTERING = """
import sys
sys.path.append({folder!r})
import gymnasium as gym
import registering
import vecenv
from tests.helpers import CountingEnv

def make():
    import registering
    return CountingEnv(registering.INDEX)

with vecenv.AsyncVectorEnv([make], num_workers=1) as envs:
    print(envs.get_attr("index"))
"""


def test_a_package_that_registers_its_ids_again_in_a_worker_causes_no_warning(tmp_path):
    (tmp_path / "registering.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', 'tests.helpers:CountingEnv')\nINDEX = 7\n"
    )
    script = REGISTERING.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("(7,)\n", "")


ORPHANS = """
import os, signal, sys
import vecenv
from tests.vecenv.workers.test_worker import ParallelEnv

class Stuck(ParallelEnv):
    def hang(self):
        print(os.getpid(), self.pid(), file=open({file!r}, "w"), flush=True)
        while True:
            signal.pause()

envs = vecenv.AsyncVectorEnv([lambda: Stuck(0)], num_workers=1, context={context!r})
envs.call_async("hang")
while not os.path.getsize({file!r}):
    os.sched_yield()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "spawn"))]
)
def test_an_env_that_hangs_and_its_processes_do_not_outlive_a_killed_parent(context, tmp_path):
    file = tmp_path / "pids"
    file.touch()
    subprocess.run([sys.executable, "-c", ORPHANS.format(context=context, file=str(file))], timeout=60)
    wait_for_end(list(map(int, file.read_text().split())))


@pytest.mark.parametrize("kind", [EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_env_that_loses_its_connection_to_a_simulator_raises_its_own_error(kind, when):
    """The worker does not mistake the env's exception for the loss of its own parent."""

    class Remote(CountingEnv):
        def reset(self, **kwargs):
            if when == "reset" and self.index == 1:
                raise kind("the simulator is gone")
            return super().reset(**kwargs)

        def step(self, action):
            if self.index == 1:
                raise kind("the simulator is gone")
            return super().step(action)

    error = vecenv.EnvError if kind is KeyboardInterrupt else kind
    text = r"env 1 in worker 1 raised during .*(?s:.)*the simulator is gone"
    fns = [lambda i=i: Remote(i) for i in range(2)]
    with pytest.raises(error, match=text), vecenv.AsyncVectorEnv(fns, num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])


class Unpicklable(Exception):
    """Cannot be pickled, and cannot be rebuilt from its message alone."""

    def __init__(self, reason, code):
        super().__init__(reason, threading.Lock())
        self.code = code

    def __reduce__(self):
        raise RuntimeError("cannot be pickled")

    def __str__(self):
        return f"code {self.code}"


class Raising(CountingEnv):
    """Env 1 raises `Unpicklable` at its second step."""

    def step(self, action):
        if self.steps == 1 and self.index == 1:
            raise Unpicklable("because", code=7)
        return super().step(action)


@pytest.mark.parametrize("method", METHODS)
def test_an_unpicklable_exception_keeps_its_class_and_message(method):
    fns = [lambda i=i: Raising(i) for i in range(2)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, context=method) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(Unpicklable, match=r"(?s)env 1 in worker 1 raised during step.*code 7"):
            envs.step([0, 0])


def test_an_exception_whose_class_cannot_be_pickled_is_an_env_error_and_the_envs_remain_usable():
    def fail(env):
        lock = threading.Lock()

        class Locked(Exception):
            held = lock

        raise Locked("the motor is locked")

    with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1) as envs:
        with pytest.raises(vecenv.EnvError, match="the motor is locked"):
            envs.apply(fail)
        envs.reset()


def test_an_unpicklable_result_is_an_error_and_the_envs_remain_usable():
    with vecenv.AsyncVectorEnv(counting_fns(2)) as envs:
        envs.reset()
        with pytest.raises(TypeError, match="pickle"):
            envs.apply(lambda env: threading.Lock())
        envs.step([0, 0])


def test_an_error_in_set_attr_leaves_the_envs_usable():
    class Fixed(CountingEnv):
        length = property(lambda self: 3, lambda self, value: None)
        mass = property(lambda self: 1.0)

    with vecenv.AsyncVectorEnv([lambda: Fixed(0)], num_workers=1) as envs:
        envs.reset()
        with pytest.raises(AttributeError, match="mass"):
            envs.set_attr("mass", 2.0)
        envs.step([0])


class Vast:
    """An object for whose pickle there is no memory."""

    def __reduce__(self):
        raise MemoryError


def test_the_error_for_a_reply_that_does_not_fit_in_memory_names_the_limit():
    with (
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1) as envs,
        pytest.raises(MemoryError, match=r"This process (ran out of memory|has no memory left)"),
    ):
        envs.apply(lambda env: Vast())


def unknown():
    """Returns an object that can be pickled but not unpickled."""

    class Unknown:
        def __reduce__(self):
            return (eval, ("__import__('no_such_module')",))

    return Unknown()


def test_an_object_that_cannot_be_unpickled_is_an_error_and_kills_no_worker():
    with vecenv.AsyncVectorEnv(counting_fns(2)) as envs:
        envs.reset()
        with pytest.raises(ModuleNotFoundError, match=r"(?s)raised during apply.*no_such_module"):
            envs.apply(unknown())
        envs.step([0, 0])
        with pytest.raises(vecenv.VecEnvError, match=r"worker [01].*cannot be unpickled: ModuleNotFoundError"):
            envs.apply(lambda env: unknown())


class Careless(CountingEnv):
    """Draws from the global generators of Python and NumPy instead of its own."""

    def reset(self, **kwargs):
        observation, _ = super().reset(**kwargs)
        return observation, {"python": random.random(), "numpy": np.random.random()}


@pytest.mark.parametrize("method", METHODS)
def test_global_generators_of_workers_are_seeded_from_those_of_the_parent(method):
    def draws(seed):
        random.seed(seed)
        np.random.seed(seed)
        with vecenv.AsyncVectorEnv([partial(Careless, 0)] * 2, num_workers=2, context=method) as envs:
            _, infos = envs.reset()
        assert random.random() == random.Random(seed).random()  # the parent's own numbers stay the same
        assert np.random.random() == np.random.RandomState(seed).random_sample()
        return infos["python"].tolist(), infos["numpy"].tolist()

    before = random.getstate(), np.random.get_state()
    try:
        _, first, second, other, again = (draws(seed) for seed in (5, 3, 3, 4, 3))
    finally:
        random.setstate(before[0]), np.random.set_state(before[1])
    assert first == again != other
    numbers = [number for draw in (*first, *second, *other) for number in draw]
    assert len({*numbers}) == 12  # also of two vector envs that were built with the parent's generators in one state


@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_a_restarted_worker_does_not_repeat_its_global_random_numbers():
    with vecenv.AsyncVectorEnv([partial(Careless, 0)], num_workers=1, on_worker_death="restart") as envs:
        _, before = envs.reset()
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        _, after = envs.reset()
        assert envs.worker_restarts == 1
        assert before["numpy"] != after["numpy"] and before["python"] != after["python"]
