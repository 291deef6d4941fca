"""Tests of AsyncVectorEnv: it equals SyncVectorEnv bit for bit, and its errors say what went wrong."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
import weakref

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from tests.helpers import (
    CountingEnv,
    FaultyEnv,
    SampledEnv,
    assert_same,
    counting_fns,
    process_exists,
    wait_for_end,
)
from tests.start_methods import METHODS
from tests.vecenv.vector.test_sync_vector_env import MODES, run_both

QUICK = [("CartPole-v1", MODES[0]), ("Pendulum-v1", MODES[1])]


@pytest.mark.parametrize(
    ("env_id", "mode"),
    [
        pytest.param(env_id, mode, marks=() if (env_id, mode) in QUICK else pytest.mark.slow)
        for env_id in ("CartPole-v1", "Pendulum-v1", "HalfCheetah-v5")
        for mode in MODES
    ],
)
def test_parallel_equals_gymnasium_over_1000_steps_with_episode_ends(env_id, mode):
    fns = [lambda: gym.make(env_id, **({"max_episode_steps": 300} if env_id == "HalfCheetah-v5" else {}))] * 5
    run_both(
        vecenv.AsyncVectorEnv(fns, num_workers=2, autoreset_mode=mode),
        gym.vector.SyncVectorEnv(fns, autoreset_mode=mode),
        steps=1000,
    )


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_every_start_method_gives_the_same_results(method):
    with vecenv.AsyncVectorEnv(counting_fns(3), num_workers=2, context=method) as envs:
        assert_same(envs.reset(seed=1), vecenv.SyncVectorEnv(counting_fns(3)).reset(seed=1))
        assert_same(envs.get_attr("index"), (0, 1, 2))


class Starting(CountingEnv):
    """Knows whether its process is a copy of the process with this id."""

    def is_copy_of(self, pid):
        return pid == PID


PID = os.getpid()  # a copy keeps the value of its parent


@pytest.mark.parametrize("how", [{}, {"context": "fork"}])
@pytest.mark.usefixtures("by_reference")
def test_the_default_start_method_is_not_fork(how):
    with vecenv.AsyncVectorEnv([lambda: Starting(0)] * 2, **how) as envs:
        assert set(envs.call("is_copy_of", os.getpid())) == {how != {}}


class Counted:
    """A socket that records how many bytes each call moves."""

    def __init__(self, socket):
        self._socket, self.sent, self.received = socket, [], []

    def send(self, data, flags):
        self.sent.append(self._socket.send(data, flags))
        return self.sent[-1]

    def recv(self, size, flags):
        data = self._socket.recv(size, flags)
        self.received.append(len(data))
        return data

    def recv_into(self, buffer, size, flags):
        self.received.append(self._socket.recv_into(buffer, size, flags))
        return self.received[-1]

    def __getattr__(self, name):
        return getattr(self._socket, name)


@pytest.mark.parametrize("num_envs", [2, 32])
@pytest.mark.parametrize("infos", [False, True])
def test_a_step_exchanges_nine_bytes_with_each_worker_besides_infos(monkeypatch, num_envs, infos):
    """Arrays travel through memory. A command, a slot and a length use the pipe, and so do pickled infos."""
    with vecenv.AsyncVectorEnv(counting_fns(num_envs, length=10_000), num_workers=2, infos=infos) as envs:
        envs.reset()
        pipes = [worker.channel for worker in envs._pool.workers]
        counted = [Counted(pipe._socket) for pipe in pipes]
        for pipe, counter in zip(pipes, counted, strict=True):
            monkeypatch.setattr(pipe, "_socket", counter)
        *_, found = envs.step(np.zeros(num_envs, np.int64))
        monkeypatch.undo()
        for counter in counted:
            head, *body = counter.received
            assert (counter.sent, head) == ([9], 9) and bool(body) == infos
        assert bool(found) == infos


def test_workers_own_contiguous_runs_of_nearly_equal_length():
    with vecenv.AsyncVectorEnv(counting_fns(7), num_workers=3) as envs:
        pids = [process.pid for process in envs.processes]
        assert list(envs.apply(lambda env: os.getpid())) == [pids[0]] * 2 + [pids[1]] * 2 + [pids[2]] * 3
        assert envs.get_attr("index") == tuple(range(7))
        assert len(set(envs.call("__getattribute__", "index"))) == 7


@pytest.mark.parametrize("num_workers", [4, -1])
def test_the_error_for_an_invalid_number_of_workers_names_the_valid_ones(num_workers):
    with pytest.raises(ValueError, match=rf"num_workers={num_workers} for 3 envs.*Use 1 to 3, None for"):
        vecenv.AsyncVectorEnv(counting_fns(3), num_workers=num_workers)


def test_bad_arguments_fail_before_a_process_starts():
    with pytest.raises(ValueError, match="num_envs must be 1 or more"):
        vecenv.AsyncVectorEnv([])
    with pytest.raises(TypeError, match=r"env_fns\[0\] is .* not a function: write `lambda: CountingEnv"):
        vecenv.AsyncVectorEnv([CountingEnv(0)])
    with pytest.raises(ValueError, match="num_slots=1"):
        vecenv.AsyncVectorEnv(counting_fns(1), num_slots=1)
    with pytest.raises(ValueError, match="cannot find context for 'thread'"):
        vecenv.AsyncVectorEnv(counting_fns(1), context="thread")


@pytest.mark.parametrize(
    ("actions", "error", "message"),
    [
        (np.zeros((2, 2), np.float32), ValueError, r"actions has shape \(2, 2\), but 3 envs .* need \(3, 2\)"),
        (np.zeros((3, 2), complex), TypeError, "dtype complex128, but the action space needs float32"),
        (
            np.array([[0, 0], [0, np.nan], [0, 0]], np.float32),
            ValueError,
            "NaN in actions for env 1: .*No env was stepped",
        ),
    ],
)
def test_bad_actions_are_rejected_and_the_envs_stay_usable(actions, error, message):
    space = spaces.Box(-1, 1, (2,), np.float32)
    with vecenv.AsyncVectorEnv([lambda: SampledEnv(spaces.Discrete(2), space)] * 3) as envs:
        envs.reset(seed=0)
        with pytest.raises(error, match=message):
            envs.step(actions)
        envs.step(np.zeros((3, 2), np.float32))


@pytest.mark.parametrize(
    "space", [spaces.Discrete(2), spaces.MultiDiscrete([2, 2]), spaces.MultiBinary(2), spaces.Box(0, 9, (2,), np.int64)]
)
def test_floats_for_a_space_of_integers_are_an_error_and_the_envs_stay_usable(space):
    with vecenv.AsyncVectorEnv([lambda: SampledEnv(spaces.Discrete(2), space)] * 2) as envs:
        envs.reset()
        with pytest.raises(
            TypeError, match=r"actions has dtype float64, but the action space needs int\d+: convert it"
        ):
            envs.step(np.zeros((2, *space.shape)))
        envs.step(np.zeros((2, *space.shape), space.dtype))


def test_calls_out_of_order_raise_gymnasiums_errors():
    with vecenv.AsyncVectorEnv(counting_fns(2)) as envs:
        with pytest.raises(gym.error.NoAsyncCallError):
            envs.step_wait()
        envs.reset_async()
        with pytest.raises(gym.error.AlreadyPendingCallError):
            envs.step_async([0, 0])
        envs.reset_wait()
        envs.step_async([0, 0])
        with pytest.raises(gym.error.AlreadyPendingCallError):
            envs.reset_async()
        envs.step_wait()
    with pytest.raises(gym.error.ClosedEnvironmentError, match="after a call to `close"):
        envs.step([0, 0])


def test_attributes_are_read_set_and_called_in_every_env():
    with vecenv.AsyncVectorEnv(counting_fns(3), num_workers=2) as envs:
        envs.set_attr("length", [5, 6, 7])
        assert envs.get_attr("length") == (5, 6, 7)
        envs.set_attr("length", 9)
        assert envs.get_attr("length") == (9, 9, 9)
        with pytest.raises(AttributeError, match="nonsense"):
            envs.get_attr("nonsense")
        with pytest.raises(AttributeError, match="np_random_seed"):
            envs.set_attr("np_random_seed", 1)
        envs.reset()  # an AttributeError leaves the envs usable
        with pytest.raises(ValueError, match=r"2.*values for 3"):
            envs.set_attr("length", [1, 2])


def test_a_script_needs_no_main_guard_and_its_imports_stay_out_of_the_workers(tmp_path):
    """Workers do not import the user's script."""
    (tmp_path / "large.py").touch()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, large, gymnasium as gym, numpy as np, vecenv\n"
        "class Mine(gym.Env):\n"
        "    observation_space = gym.spaces.Box(-1, 1, (2,)); action_space = gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}\n"
        "    def step(self, action): return np.ones(2, np.float32), 1.0, False, False, {}\n"
        "    def loaded(self): return 'large' in sys.modules\n"
        "gym.register('Mine-v0', entry_point=Mine)\n"
        "envs = vecenv.AsyncVectorEnv([lambda: gym.make('Mine-v0')] * 2)\n"
        "envs.reset(); print(envs.step([0, 1])[1], envs.call('loaded')); envs.close()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert "[1. 1.] (False, False)" in done.stdout, done.stderr


def test_a_vector_env_that_is_garbage_collected_ends_its_workers():
    envs = vecenv.AsyncVectorEnv(counting_fns(2))
    processes = list(envs.processes)
    reference = weakref.ref(envs)
    del envs
    gc.collect()
    assert reference() is None
    assert processes and not any(process.is_alive() for process in processes)


# Faults: each one is an immediate error that says what happened, and nothing is left behind.


def faulty(fault, when="step", **kwargs):
    return vecenv.AsyncVectorEnv([lambda i=i: FaultyEnv(i, fault, when) for i in range(4)], num_workers=2, **kwargs)


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_of_an_env_keeps_its_class_and_carries_the_workers_traceback(method):
    with faulty("raise", context=method) as envs:
        envs.reset()
        envs.step([0] * 4)
        with pytest.raises(ValueError, match="the motor is on fire") as caught:
            envs.step([0] * 4)
        assert isinstance(caught.value, vecenv.EnvError)
        text = str(caught.value)
        assert "env 2 in worker 1 raised during step" in text and "helpers.py" in text
        with pytest.raises(vecenv.StateError, match="broken by an earlier fault"):
            envs.step([0] * 4)


@pytest.mark.parametrize("when", ["construction", "reset", "step"])
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("raise", ValueError, "envs? 2.* in worker 1 raised during .*the motor is on fire.*raised by env 2 during "),
        ("sys.exit", vecenv.EnvError, "envs? 2.* in worker 1 raised during .*SystemExit: 4"),
        (
            "sigkill",
            vecenv.WorkerDied,
            r"worker 1 \(envs 2:4\) was killed by SIGKILL \(often because memory ran out.*during ",
        ),
        ("os._exit", vecenv.WorkerDied, r"worker 1 \(envs 2:4\) exited with code 3"),
    ],
)
def test_errors_name_the_worker_its_envs_and_the_reason(fault, error, message, when):
    with pytest.raises(error, match=f"(?s){message}"), faulty(fault, when) as envs:
        envs.reset()
        for _ in range(2):
            envs.step([0] * 4)


def test_a_worker_killed_while_idle_is_an_error_at_the_next_call():
    with vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2) as envs:
        envs.reset()
        envs.processes[0].kill()
        envs.processes[0].join()
        with pytest.raises(vecenv.WorkerDied, match=r"worker 0 \(envs 0:2\) was killed by SIGKILL.*only be closed"):
            envs.step([0] * 4)


def test_a_hanging_env_causes_a_timeout_that_names_the_worker_and_close_ends_it():
    with faulty("hang") as envs:
        envs.reset()
        envs.step([0] * 4)
        envs.step_async([0] * 4)
        with pytest.raises(
            multiprocessing.TimeoutError, match=r"after 0.2 second.*no answer from worker 1 \(envs 2:4\)"
        ):
            envs.step_wait(timeout=0.2)
        with pytest.raises(vecenv.StateError):  # a stale reply cannot reach a later call
            envs.step([0] * 4)
        envs.close(timeout=0.2)


@pytest.mark.parametrize("fault", ["raise", "sigkill", "os._exit", "hang"])
@pytest.mark.timeout(60)
def test_close_ends_all_workers_whatever_the_envs_do_in_their_own_close(fault):
    envs = faulty(fault, when="close")
    envs.reset()
    pids = [process.pid for process in envs.processes]
    envs.close(timeout=0.5)
    assert envs.closed and len(pids) == 2 and not any(map(process_exists, pids))
    envs.close()


def test_a_child_of_an_env_does_not_hide_the_death_of_its_worker():
    """The child inherits the worker's pipe and multiprocessing's sentinel, and keeps both open."""
    with vecenv.AsyncVectorEnv([lambda: ForkingEnv(0, 100)] * 2, num_workers=2, context="fork") as envs:
        envs.reset()
        children = envs.get_attr("child")
        envs.processes[1].kill()
        with pytest.raises(vecenv.WorkerDied, match="worker 1"):
            envs.step([0, 0])
        for child in children:
            os.kill(child, 9)


class ForkingEnv(CountingEnv):
    """Starts a child process that outlives the env."""

    def reset(self, **kwargs):
        self.child = os.fork()
        if self.child == 0:
            signal.pause()
        return super().reset(**kwargs)


def test_a_killed_parent_leaves_no_process_and_no_output(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, gymnasium as gym, vecenv\n"
        "envs = vecenv.make('CartPole-v1', num_envs=4, num_workers=2)\n"
        "envs.reset(); print(*[process.pid for process in envs.processes], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    wait_for_end(pids)
    assert done.stderr == ""


@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_ends_a_script_at_once_with_one_traceback(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium as gym, vecenv\n"
        f"envs = vecenv.make('CartPole-v1', num_envs=4, num_workers=2, vector_kwargs={{'context': {method!r}}})\n"
        "envs.reset(); print('ready', flush=True)\n"
        "while True: envs.step([0] * 4)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, 2)  # a terminal signals every process in the group
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt"), errors


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('boom')", "import sys; sys.exit(3)"])
def test_a_script_that_forgets_close_still_exits(tmp_path, ending):
    """The script makes multiprocessing's exit handler run before all other exit handlers."""
    script = tmp_path / "script.py"
    script.write_text(
        "import tempfile; folder = tempfile.TemporaryDirectory()\n"
        "import vecenv\n"
        "envs = vecenv.make('CartPole-v1', num_envs=2)\n"
        f"envs.reset(); envs.step([0, 0]); print(*[process.pid for process in envs.processes], flush=True)\n{ending}\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30)
    assert not any(process_exists(int(pid)) for pid in done.stdout.split())
    code, last = {
        "": (0, ""),
        "raise RuntimeError('boom')": (1, "RuntimeError: boom"),
        "import sys; sys.exit(3)": (3, ""),
    }[ending]
    assert (len(done.stdout.split()), done.returncode) == (2, code)
    assert "".join(done.stderr.splitlines()[-1:]) == last


@pytest.mark.slow
def test_an_env_that_hangs_does_not_outlive_a_killed_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time, gymnasium as gym, vecenv\n"
        "class Slow(gym.Wrapper):\n"
        "    def step(self, action): time.sleep(1000)\n"
        "envs = vecenv.AsyncVectorEnv([lambda: Slow(gym.make('CartPole-v1'))] * 2)\n"
        "envs.reset(); print(*[process.pid for process in envs.processes], flush=True)\n"
        "envs.step_async([0, 0]); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    wait_for_end(pids)


def test_an_argument_that_cannot_be_pickled_is_rejected_before_anything_is_sent():
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2) as envs:
        for call in (
            lambda: envs.set_attr("length", [1, threading.Lock()]),
            lambda: envs.call("reset_later", threading.Lock()),
            lambda: envs.reset(options={"lock": threading.Lock()}),
        ):
            with pytest.raises(TypeError, match="pickle"):
                call()
        envs.reset()
        envs.step([0, 0])
        assert envs.get_attr("length") == (3, 4)


def test_workers_see_current_environment_variables(monkeypatch):
    for value in ("one", "two", None):
        monkeypatch.delenv("VECENV_TEST", raising=False)
        if value is not None:
            monkeypatch.setenv("VECENV_TEST", value)
        with vecenv.AsyncVectorEnv([VariableEnv] * 2, num_workers=1) as envs:
            assert envs.call("variable", "VECENV_TEST") == (value, value)


class VariableEnv(CountingEnv):
    def __init__(self):
        super().__init__(0)

    def variable(self, name):
        return os.environ.get(name)


@pytest.mark.parametrize("context", multiprocessing.get_all_start_methods())
def test_construction_changes_neither_main_nor_the_environment_variables(context, monkeypatch):
    """A thread that polls continuously always sees the same `__main__` and environment variables."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    main, variables = sys.modules["__main__"], dict(os.environ)
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            try:
                if sys.modules["__main__"] is not main or dict(os.environ) != variables:
                    seen.append((sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")))
            except Exception as error:  # the dictionary changed during the read
                seen.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with vecenv.AsyncVectorEnv([VariableEnv] * 2, num_workers=2, context=context) as envs:
            assert envs.call("variable", "OMP_NUM_THREADS") == ("1", "1")
            assert envs.call("variable", "PMI_RANK") == (None, None)
    finally:
        done.set()
        thread.join()
    assert not seen


def test_the_parent_keeps_no_copy_of_the_data_of_closures():
    data = np.zeros(2**23, np.uint8)
    tracemalloc.start()
    try:
        with vecenv.AsyncVectorEnv([lambda: CountingEnv(len(data) // 2**22)] * 2, num_workers=2) as envs:
            kept, _ = tracemalloc.get_traced_memory()
            assert envs.get_attr("index") == (2, 2)
    finally:
        tracemalloc.stop()
    assert kept < 2**22, "the pickled functions are kept"


def build_in_pool(num_workers):
    try:
        with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=num_workers) as envs:
            envs.reset()
            return envs.step([0, 0])[1].tolist()
    except vecenv.VecEnvError as error:
        return str(error)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_in_a_worker_of_a_multiprocessing_pool_the_error_names_the_cause_and_the_remedy(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        messages = [pool.apply(build_in_pool, (num_workers,)) for num_workers in (1, None)]
        name = {"spawn": "(SpawnPoolWorker", "fork": "(ForkPoolWorker"}[method]
        assert pool.apply(build_in_pool, (0,)) == [1.0, 1.0]
        pool.close()
        pool.join()
    for message in messages:
        assert name in message and "is daemonic" in message and "num_workers=0" in message


def test_threads_may_create_vector_envs_at_the_same_time():
    main = sys.modules["__main__"]
    errors = []

    def create():
        try:
            for _ in range(5):
                vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and sys.modules["__main__"] is main


GAIN = 1.0  # of the rewards of ConfiguredEnv


def set_gain(value):
    global GAIN
    GAIN = value


class ConfiguredEnv(CountingEnv):
    """Multiplies its rewards by the gain that its constructor finds."""

    def __init__(self, index=0):
        super().__init__(index, length=50)
        self._gain = GAIN

    def step(self, action):
        observation, reward, *others = super().step(action)
        return observation, self._gain * reward, *others


@pytest.mark.filterwarnings("ignore:.*It is restarted")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("by_reference")
def test_worker_init_configures_each_worker_before_its_envs_are_built_also_after_a_restart(method, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "GAIN", 2.0)  # the parent is configured, but only a fork copies that
    how = {"context": method, "num_workers": 2, "on_worker_death": "restart"}
    with vecenv.AsyncVectorEnv([ConfiguredEnv] * 2, **how) as envs:
        envs.reset()
        assert envs.step([0, 0])[1].tolist() == ([2.0, 2.0] if method == "fork" else [1.0, 1.0])
    with vecenv.AsyncVectorEnv([ConfiguredEnv] * 2, worker_init=lambda: set_gain(3.0), **how) as envs:
        envs.reset()
        assert envs.step([0, 0])[1].tolist() == [3.0, 3.0]
        envs.processes[0].kill()
        rewards = [envs.step([0, 0])[1].tolist() for _ in range(3)]
        assert rewards == [[0.0, 6.0], [0.0, 9.0], [3.0, 12.0]]  # the first env is truncated, reset and stepped
    with vecenv.AsyncVectorEnv([ConfiguredEnv], num_workers=0, worker_init=lambda: set_gain(3.0)) as envs:
        envs.reset()
        assert envs.step([0])[1].tolist() == [2.0]  # this process is already configured
    arguments = {"num_workers": 1, "vector_kwargs": {"worker_init": lambda: set_gain(4.0)}}
    with vecenv.make(f"{__name__}:ConfiguredEnv", 2, **arguments) as envs:
        envs.reset()
        assert envs.step([0, 0])[1].tolist() == [4.0, 4.0]


def test_worker_init_and_the_envs_of_a_script_share_its_globals():
    script = (
        "import gymnasium as gym, vecenv\n"
        "settings, length = {}, 500\n"
        "def configure():\n"
        "    global length\n"
        "    length, settings['x_threshold'] = 3, 1.5\n"
        "def make():\n"
        "    env = gym.make('CartPole-v1', max_episode_steps=length)\n"
        "    env.unwrapped.x_threshold = settings['x_threshold']\n"
        "    return env\n"
        "with vecenv.AsyncVectorEnv([make] * 2, num_workers=1, worker_init=configure) as envs:\n"
        "    envs.reset(seed=0)\n"
        "    print([envs.step([0, 1])[3].tolist() for _ in range(3)][-1], envs.get_attr('x_threshold'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, True] (1.5, 1.5)\n", done.stderr


@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_an_error_in_worker_init_names_it_and_stops_a_restart(tmp_path):
    there = tmp_path / "there"

    def configure():
        if not there.exists():
            raise KeyError("no learning rate")

    def leave():
        raise SystemExit

    message = r"envs 0:2 in worker 0 raised during worker_init:(?s:.*)no learning rate(?s:.*)Fix worker_init"
    with pytest.raises(KeyError, match=message):
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, worker_init=configure)
    with pytest.raises(vecenv.EnvError, match="SystemExit"):
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, worker_init=leave)
    there.touch()
    how = {"num_workers": 1, "on_worker_death": "restart"}
    with vecenv.AsyncVectorEnv(counting_fns(2), worker_init=configure, **how) as envs:
        envs.reset()
        there.unlink()
        envs.processes[0].kill()
        with pytest.raises(KeyError, match=message):
            envs.step([0, 0])
    with pytest.raises(TypeError, match="worker_init=3 is not a function"):
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=0, worker_init=3)


def test_there_is_one_process_per_core_and_one_numerical_thread_per_process(monkeypatch):
    class Threads(CountingEnv):
        def threads(self):
            return os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with vecenv.AsyncVectorEnv([lambda: Threads(0)] * 100) as envs:
        assert len(envs.processes) == min(vecenv.available_cores(), 100)
        assert set(envs.call("threads")) == {("1", "1", "1")}


def test_a_hanging_constructor_times_out_and_the_error_names_the_worker_and_the_setting():
    with pytest.raises(
        multiprocessing.TimeoutError,
        match=r"construction.*after 0.3 second.*no answer from worker 0 \(envs 0:1\).*start_timeout_s",
    ):
        vecenv.AsyncVectorEnv([lambda: FaultyEnv(2, "hang", "construction")], start_timeout_s=0.3)


class Wandering(SampledEnv):
    """Has episodes of 1 to 500 steps, and infos with new keys, arrays and text."""

    def __init__(self):
        super().__init__(spaces.Dict(a=spaces.Box(-1, 1, (50,)), b=spaces.Text(8)), spaces.Discrete(3))

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        self._left = int(self.np_random.integers(1, 501))
        return observation, info

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        self._left -= 1
        if self._left % 50 == 0:
            info |= {f"key {self._left}": np.arange(5), "text": "x" * self._left}
        return observation, reward, self._left == 0, False, info


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_million_steps_with_episodes_of_all_lengths_leave_memory_descriptors_and_mappings_as_they_are():
    with vecenv.AsyncVectorEnv([Wandering] * 64, num_workers=2) as envs:
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        assert len(pids) == 3

        def sizes():
            """Returns the resident MiB, the descriptors and the mappings of each process."""
            gc.collect()
            found = []
            for pid in pids:
                with open(f"/proc/{pid}/statm") as statm, open(f"/proc/{pid}/maps") as maps:
                    pages, mappings = int(statm.read().split()[1]), len(maps.readlines())
                found.append((pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd")), mappings))
            return np.array(found)

        envs.reset(seed=0)
        envs.action_space.seed(0)
        samples = []
        for step in range(16_000):
            envs.step(envs.action_space.sample())
            if step % 4000 == 3999:
                samples.append(sizes())
        growth = samples[-1] - samples[0]  # over 768,000 env-steps, after 256,000
        print(growth)
        assert (growth[:, 0] < 2).all() and (growth[:, 1] == 0).all() and (growth[:, 2] <= 4).all(), growth
