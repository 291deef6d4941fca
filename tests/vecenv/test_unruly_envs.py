"""Tests of unruly envs: they print, fork, start threads, change directory, hang, and raise unpicklable exceptions."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from tests.helpers import CountingEnv, FaultyEnv, before_each_message, counting_fns, process_exists, wait_for_end
from tests.start_methods import METHODS
from vecenv.workers import pipes

ROOT = Path(__file__).parents[2]


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


@pytest.mark.usefixtures("by_reference")
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_envs_may_choose_the_start_method_of_their_processes(method):
    def squares(env):
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(abs, [-1, 2])

    with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1) as envs:
        assert envs.apply(squares) == [[1, 2]]


ORPHANS = """
import os, signal, sys
import vecenv
from tests.vecenv.test_unruly_envs import ParallelEnv

class Stuck(ParallelEnv):
    def close(self):
        pass  # so that multiprocessing waits for the process forever

envs = vecenv.AsyncVectorEnv([lambda: Stuck(0)], num_workers=1, context={context!r})
print(*envs.call("pid"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("context", METHODS)
def test_processes_of_envs_do_not_outlive_a_killed_parent(context):
    done = subprocess.run([sys.executable, "-c", ORPHANS.format(context=context)], stdout=subprocess.PIPE, timeout=60)
    wait_for_end([int(done.stdout)])


LOGGING = """
import logging, logging.handlers, sys
import vecenv
from tests.helpers import CountingEnv

{configuration}

class Logging(CountingEnv):
    def step(self, action):
        logging.getLogger("robot").info("moved")
        logging.getLogger("robot").debug("details")
        logging.getLogger("chatty").info("chatter")
        return super().step(action)

with vecenv.AsyncVectorEnv([lambda: Logging(0)], num_workers=1, context={context!r}) as envs:
    envs.reset()
    envs.step([0])
"""
CONFIGURATIONS = {
    "basicConfig": ("logging.basicConfig(level='INFO')", "INFO:robot:moved\n"),
    "stdout": ("logging.basicConfig(level='DEBUG', stream=sys.stdout, format='%(message)s')", "moved\ndetails\n"),
    "file": (
        "logging.basicConfig(level='INFO', handlers=[logging.handlers.RotatingFileHandler(sys.argv[1])])",
        "INFO:robot:moved\n",
    ),
    "file that the script overwrites": (
        "import atexit\nlogging.basicConfig(level='INFO', filename=sys.argv[1], filemode='w')\n"
        "atexit.register(logging.warning, 'over')",
        "INFO:robot:moved\nWARNING:root:over\n",
    ),
    "disabled": ("logging.basicConfig(level='DEBUG')\nlogging.disable('INFO')", ""),
    "named logger": (
        "robot = logging.getLogger('robot')\nrobot.setLevel('INFO')\nrobot.addHandler(logging.StreamHandler())",
        "moved\n",
    ),
    "own handler and format": (
        "class Own(logging.Handler):\n    emit = print\nclass Format(logging.Formatter):\n"
        "    def format(self, record):\n        return 'own ' + record.getMessage()\n"
        "handler = Own()\nhandler.setFormatter(Format())\nlogging.basicConfig(level='INFO', handlers=[handler])",
        "own moved\n",
    ),
    "level of a handler, and a filter that cannot be pickled": (
        "import threading\nhandler = logging.StreamHandler()\nhandler.setLevel('INFO')\n"
        "handler.addFilter(lambda record, lock=threading.Lock(): True)\n"
        "logging.basicConfig(level='DEBUG', handlers=[handler])",
        "INFO:robot:moved\n",
    ),
}


@pytest.mark.parametrize(
    ("configuration", "logged", "context"),
    [
        *(pytest.param(*each, "forkserver", id=name) for name, each in CONFIGURATIONS.items()),
        pytest.param(*CONFIGURATIONS["basicConfig"], "fork", id="fork"),
    ],
)
def test_messages_that_envs_log_go_where_the_script_sends_its_own(configuration, logged, context, tmp_path):
    file = tmp_path / "log"
    configuration += "\nlogging.getLogger('chatty').setLevel('WARNING')"
    script = LOGGING.format(configuration=configuration, context=context)
    done = subprocess.run([sys.executable, "-c", script, file], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr + (file.read_text() if file.exists() else "") == logged


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


def test_an_unpicklable_result_is_an_error_and_the_envs_remain_usable():
    with vecenv.AsyncVectorEnv(counting_fns(2)) as envs:
        envs.reset()
        with pytest.raises(TypeError, match="pickle"):
            envs.apply(lambda env: threading.Lock())
        envs.step([0, 0])


def test_a_hanging_constructor_times_out_and_the_error_names_the_worker_and_the_setting():
    fns = [lambda i=i: FaultyEnv(i, "hang", "construction") for i in range(4)]
    with pytest.raises(
        multiprocessing.TimeoutError,
        match=r"construction.*after 3 second.*no answer from worker 1 \(envs 2:4\).*start_timeout_s",
    ):  # the other worker must start in time, even on a busy machine
        vecenv.AsyncVectorEnv(fns, num_workers=2, start_timeout_s=3)


@pytest.mark.parametrize("key", ["shape", "dtype", "missing"])
def test_an_observation_that_does_not_fit_its_space_is_an_error_with_env_and_key(key):
    class Wrong(CountingEnv):
        observation_space = spaces.Dict({"camera": spaces.Box(0, 1, (2,), np.float32), "n": spaces.Discrete(3)})

        def _observe(self):
            good = {"camera": np.zeros(2, np.float32), "n": 1}
            bad = {
                "shape": {**good, "camera": np.zeros(3, np.float32)},
                "dtype": {**good, "n": 0.5},
                "missing": {"n": 1},
            }
            return bad[key] if self.index == 2 and self.steps == 1 else good

    fns = [lambda i=i: Wrong(i) for i in range(4)]
    named = {"shape": r"\['camera'\] of env 2 has shape \(3,\)", "dtype": r"\['n'\] of env 2 has dtype float64",
             "missing": r"env 2 returned an observation without \['camera'\]"}  # fmt: skip
    for cls in (vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv):
        with cls(fns) as envs:
            envs.reset()
            with pytest.raises((ValueError, TypeError), match=named[key]):
                envs.step([0] * 4)


def test_an_error_in_a_constructor_names_the_env_and_leaves_nothing_behind():
    fns = [lambda i=i: FaultyEnv(i, "raise", "construction") for i in range(4)]
    with pytest.raises(
        ValueError, match=r"(?s)worker 1 raised during construction.*raised by env 2 during construction"
    ):
        vecenv.AsyncVectorEnv(fns, num_workers=2)


SHARED = CountingEnv(0)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_two_rows_cannot_share_an_env(num_workers, wrapped):
    fns = [lambda: SHARED, lambda: gym.Wrapper(SHARED) if wrapped else SHARED]
    with pytest.raises(ValueError, match=r"which is also env 0.*build a new env in each call"):
        vecenv.AsyncVectorEnv(fns, num_workers=num_workers)


def test_envs_are_told_apart_even_if_their_unwrapped_objects_are_temporary():
    class Fresh(CountingEnv):
        @property
        def unwrapped(self):
            return Proxy()

    class Proxy:
        __slots__ = tuple(f"slot_{k}" for k in range(40))  # a size that is rare, so that the next one gets its id

    with vecenv.SyncVectorEnv([lambda i=i: Fresh(i) for i in range(8)]) as envs:
        assert envs.get_attr("index") == tuple(range(8))


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


class ExhaustedEnv(CountingEnv):
    """Reads past the end of its data set during the call that `when` names."""

    def __init__(self, when):
        super().__init__(0)
        self._data, self._when = iter([]), when

    def reset(self, **kwargs):
        return (next(self._data) if self._when == "reset" else None) or super().reset(**kwargs)

    def step(self, action):
        return (next(self._data) if self._when in ("step", "recv") else None) or super().step(action)

    def read(self):
        return next(self._data)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("when", ["reset", "step", "recv", "call"])
def test_the_end_of_an_envs_data_set_is_an_error_of_the_env_even_in_a_generator(when, num_workers):
    def batches(envs):
        yield envs.reset()
        if when == "recv":
            envs.send([0])
            yield envs.recv()
        yield envs.call("read") if when == "call" else envs.step([0])

    with vecenv.AsyncVectorEnv([lambda: ExhaustedEnv(when)], num_workers=num_workers) as envs:
        with pytest.raises(vecenv.EnvError, match=r"raised by env 0 during (.|\n)*StopIteration") as raised:
            list(batches(envs))
        assert not isinstance(raised.value, StopIteration)


class SimulatorEnv(CountingEnv):
    """Starts a program, which `close` ends. Writes the id of its process to a file in `folder`."""

    def __init__(self, index, folder, size=3):
        super().__init__(index)
        self.observation_space = spaces.Box(-1, 1, (size,), np.float64)
        self._program = subprocess.Popen(["sleep", "600"])
        (folder / str(self._program.pid)).touch()

    def close(self):
        self._program.kill()
        self._program.wait()


def _fails(index, folder):
    if index == 3:
        raise ValueError("no such robot")
    return SimulatorEnv(index, folder)


def _differs(index, folder):
    return SimulatorEnv(index, folder, size=3 + index // 3)


MAKERS = {
    "sync": vecenv.SyncVectorEnv,
    **{f"{number} workers": partial(vecenv.AsyncVectorEnv, num_workers=number) for number in (0, 1, 2)},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("make_env", "error"), [(_fails, ValueError), (_differs, RuntimeError)])
def test_a_failed_construction_closes_the_envs_that_were_built(make, make_env, error, tmp_path):
    with pytest.raises(error):
        make([partial(make_env, i, tmp_path) for i in range(4)])
    started = [int(path.name) for path in tmp_path.iterdir()]
    left = [pid for pid in started if process_exists(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(started) >= 2 and not left


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


@pytest.mark.parametrize(
    "batches", [10_000, pytest.param(500_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_memory_and_file_descriptors_stay_flat(batches):
    done = subprocess.run([sys.executable, "-c", SOAK, str(batches)], capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    print(done.stdout)
    changes = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(changes) == 1 + 4  # of this process, and of its worker as each env sees it
    assert all(grown < 2**20 and files == 0 for grown, files in changes)
