"""Tests of vecenv/workers/launch.py: what remains after a parent forks, dies or is interrupted."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest

import vecenv
from tests.helpers import CountingEnv, counting_fns, wait_for_end
from tests.start_methods import METHODS
from vecenv.workers import launch

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def tmp_path():
    """A folder whose path is so short that sockets fit in it; those of pytest may be too long, see `_ForkServer`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def status_of(pid):
    """Returns the exit code of a child of this process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("context", "leave"),
    [
        *(("forkserver", leave) for leave in ("sys.exit", "return", "close")),
        ("fork", "return"),
        *(pytest.param("fork", leave, marks=pytest.mark.slow) for leave in ("sys.exit", "close")),
        *(pytest.param("spawn", leave, marks=pytest.mark.slow) for leave in ("sys.exit", "return", "close")),
    ],
)
def test_a_forked_child_that_exits_does_not_affect_its_parents_workers(context, leave):
    """Runs a script, because a child that calls sys.exit() under pytest would run pytest's own shutdown."""
    script = f"""
import os, sys
import vecenv
from tests.helpers import counting_fns

def main():
    with vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2, context={context!r}) as envs:
        envs.reset()
        if os.fork() == 0:
            if {leave!r} == "sys.exit":
                sys.exit(0)
            if {leave!r} == "close":
                envs.close()
            return
        assert os.waitpid(-1, 0)[1] == 0, "the child failed"
        for _ in range(3):
            envs.step([0] * 4)
        print("parent: done")

main()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent: done\n", ""), done


def test_a_forked_child_cannot_use_its_parents_workers():
    with vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2) as envs:
        envs.reset()
        calls = {
            "step": lambda: envs.step([0] * 4),
            "step_async": lambda: envs.step_async([0] * 4),
            "reset": envs.reset,
            "send": lambda: envs.send([0] * 4),
            "recv": envs.recv,
            "call": lambda: envs.call("index"),
            "set_attr": lambda: envs.set_attr("index", 0),
            "get_state": envs.get_state,
            "step_slot": lambda: envs.step_slot(1, [0] * 4),
        }
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                for call in calls.values():
                    with pytest.raises(vecenv.StateError, match="is a fork"):
                        call()
                envs.close()
                code = 0
            os._exit(code)
        assert status_of(pid) == 0
        envs.step([0] * 4)


@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, partial(vecenv.AsyncVectorEnv, num_workers=0)])
def test_a_forked_child_has_its_own_copy_of_envs_that_its_parent_steps_itself(make):
    with make(counting_fns(2, 9)) as envs:
        envs.reset()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = 0 if envs.step([0] * 2)[1].tolist() == [1.0, 1.0] else 2
                envs.close()
            os._exit(code)
        assert status_of(pid) == 0
        assert envs.step([0] * 2)[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, partial(vecenv.AsyncVectorEnv, num_workers=0)])
def test_a_forked_child_cannot_step_its_parents_mujoco_tasks(make):
    """MuJoCo's threads do not exist in the child, so a step would hang."""
    from vecenv.mujoco import Hopper

    with make(vecenv.Batched(partial(Hopper, num_threads=2), 4)) as envs:
        envs.reset(seed=0)
        pid = os.fork()
        if pid == 0:
            signal.alarm(5)
            try:
                envs.step(envs.action_space.sample())
            except vecenv.StateError as error:
                os._exit(0 if "is a fork" in str(error) else 2)
            finally:
                os._exit(1)
        assert status_of(pid) == 0
        envs.step(envs.action_space.sample())


def test_a_forked_child_can_build_its_own_envs():
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1) as envs:
        envs.reset()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException), vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1) as others:
                others.reset()
                code = 0 if others.step([0] * 2)[1].tolist() == [1.0, 1.0] else 2
            os._exit(code)
        assert status_of(pid) == 0
        envs.step([0] * 2)


def test_a_forked_child_can_build_its_own_envs_although_another_thread_was_starting_workers():
    """Otherwise, the lock that the other thread held would stay locked in the child."""
    with launch._server._lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            code = 1
            with contextlib.suppress(BaseException), vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1) as envs:
                envs.reset()
                code = 0
            os._exit(code)
        assert status_of(pid) == 0


def test_a_forked_child_does_not_keep_the_fork_server_of_its_parent_running():
    script = """
import os, sys
import vecenv
from tests.helpers import counting_fns
from vecenv.workers import launch

vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1).close()
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(launch._server._process.pid, flush=True)
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", script]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as parent:
        server = int(parent.stdout.readline())
        assert parent.wait(timeout=30) == 0
        wait_for_end([server])  # before the child ends
        parent.stdin.close()
        assert parent.stderr.read() == ""


STOPPED = """
import signal
import vecenv
from tests.helpers import counting_fns, stop_process
envs = vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2, context={context!r})
envs.reset()
{stop}
print(*[process.pid for process in envs.processes], flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can wake a stopped worker when its parent dies")
@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("forkserver", "spawn"))]
)
def test_a_stopped_worker_does_not_outlive_its_killed_parent(context, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPPED.format(context=context, stop="stop_process(envs.processes[1].pid)")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    _, errors = parent.communicate(timeout=30)
    assert len(pids) == 2 and errors == ""
    wait_for_end(pids)
    while os.listdir(tmp_path):  # the resource tracker removes them
        time.sleep(0.005)


STUCK = """
import ctypes, os, signal, sys
signal.signal(signal.SIGALRM, signal.SIG_IGN)  # programs inherit both
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
import vecenv
from tests.helpers import CountingEnv

class Env(CountingEnv):
    def step(self, action):
        open(f"{sys.argv[1]}/{self.index}-{os.getpid()}", "w").close()
        if self.index == 0:
            ctypes.PyDLL(None).sleep(600)  # does not release Python's lock
        return super().step(action)
    def close(self):
        open(f"{sys.argv[1]}/{self.index}-closed", "w").close()

envs = vecenv.AsyncVectorEnv([lambda i=i: Env(i) for i in range(2)], num_workers=2)
envs.reset()
envs.step_async([0, 0])
while len(os.listdir(sys.argv[1])) < 2:
    os.sched_yield()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends a signal when a parent dies")
def test_an_env_that_holds_pythons_lock_does_not_outlive_a_killed_parent_and_other_envs_are_closed(tmp_path):
    subprocess.run([sys.executable, "-c", STUCK, str(tmp_path)], cwd=ROOT, timeout=60)
    pids = {path.name[0]: int(path.name[2:]) for path in tmp_path.iterdir() if not path.name.endswith("closed")}
    assert len(pids) == 2
    wait_for_end(pids.values())
    assert (tmp_path / "1-closed").exists()


BUSY = """
import os, signal, sys, time
import vecenv
from tests.helpers import CountingEnv

class Env(CountingEnv):
    def step(self, action):
        open(f"{{sys.argv[1]}}/{{self.index}}-{{os.getpid()}}", "w").close()
        time.sleep(0.3 * self.index)  # the parent is killed meanwhile
        return super().step(action)
    def close(self):
        open(f"{{sys.argv[1]}}/{{self.index}}-closed", "w").close()

envs = vecenv.AsyncVectorEnv([lambda i=i: Env(i) for i in range(2)], num_workers=2, context={context!r})
envs.reset()
envs.step_async([0, 0])
while len(os.listdir(sys.argv[1])) < 2:
    os.sched_yield()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("context", METHODS)
def test_envs_finish_their_step_and_are_closed_when_their_parent_is_killed(context, tmp_path):
    subprocess.run([sys.executable, "-c", BUSY.format(context=context), str(tmp_path)], cwd=ROOT, timeout=60)
    pids = [int(path.name[2:]) for path in tmp_path.iterdir() if not path.name.endswith("closed")]
    assert len(pids) == 2
    wait_for_end(pids)
    assert (tmp_path / "0-closed").exists() and (tmp_path / "1-closed").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_process_group_leaves_no_process_and_no_temporary_files(number, tmp_path):
    script = STOPPED.format(context="forkserver", stop="")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # `nohup` ignores SIGHUP in all its descendants
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    os.killpg(parent.pid, number)
    parent.communicate(timeout=30)
    assert len(pids) == 2
    wait_for_end(pids)
    while os.listdir(tmp_path):
        time.sleep(0.005)


@pytest.mark.parametrize("context", METHODS)
def test_workers_go_on_after_signals_that_reach_all_processes_of_a_job(context):
    """Otherwise, a parent that saves its work on SIGTERM or SIGUSR1 would lose the states of its envs."""
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context=context) as envs:
        envs.reset()
        for number in launch.JOB_SIGNALS:
            os.kill(envs.processes[0].pid, number)
            envs.step([0, 0])


@pytest.mark.parametrize("context", ["spawn", "forkserver", "fork"])
def test_such_signals_do_not_end_workers_that_are_starting(context, monkeypatch):
    start = launch.start_process

    def start_and_signal(*args, **kwargs):
        process = start(*args, **kwargs)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid, number)
        return process

    monkeypatch.setattr(launch, "start_process", start_and_signal)
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context=context) as envs:
        envs.reset()


def test_such_signals_end_neither_the_fork_server_nor_the_resource_tracker():
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1) as envs:
        server = launch._server._process
        for number in launch.JOB_SIGNALS:
            server.send_signal(number)
        envs.reset()
    vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1).close()
    assert launch._server._process is server and server.poll() is None
    script = (
        "import os, signal, time, vecenv\n"
        "from multiprocessing import resource_tracker\n"
        "from tests.helpers import counting_fns\n"
        "from vecenv.workers import launch\n"
        "vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1).close()\n"
        "for number in launch.JOB_SIGNALS:\n"
        "    os.kill(resource_tracker._resource_tracker._pid, number)\n"
        "time.sleep(0.1)\n"
        "resource_tracker.ensure_running()\n"  # warns if it has to start another one
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("context", METHODS)
def test_starting_workers_does_not_change_the_signals_that_are_blocked(context):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context=context).close()
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == before


@pytest.mark.parametrize("context", METHODS)
def test_terminate_ends_a_worker(context):
    """multiprocessing terminates and joins daemonic processes at exit, so a worker that went on would block it."""
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context=context) as envs:
        envs.reset()
        envs.processes[0].terminate()
        with pytest.raises(vecenv.WorkerDied, match="SIGKILL"):
            envs.step([0, 0])


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_start_with_a_long_tmpdir_a_blocked_signal_and_a_later_set_start_method(context, tmp_path):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, signal, sys\n"
        f"sys.path.append({str(ROOT)!r})\n"
        "import vecenv\n"
        "from tests.helpers import counting_fns\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        f"vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context={context!r}).close()\n"
        "assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    environment = {**os.environ, "TMPDIR": str(long)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"") and os.listdir(long) == [], done


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_modules_in_the_current_folder_do_not_shadow_the_standard_library(context, tmp_path):
    """Such modules do break multiprocessing's own resource tracker, which writes to stderr."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("signal", "socket", "selectors", "types"):
        (here / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nimport vecenv\nfrom tests.helpers import counting_fns\n"
        f"with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context={context!r}) as envs:\n    envs.reset()\n"
    )
    done = subprocess.run([sys.executable, script], cwd=here, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "WorkerDied" not in done.stderr, done


def test_workers_import_from_the_parents_current_folder(tmp_path):
    (tmp_path / "nearby.py").write_text(
        "from tests.helpers import CountingEnv\ndef make():\n    return CountingEnv(7)\n"
    )
    script = (
        f"import sys; sys.path.append({str(ROOT)!r}); import os, multiprocessing.process, vecenv\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "def make():\n    import nearby\n    return nearby.make()\n"
        "with vecenv.AsyncVectorEnv([make], num_workers=1) as envs:\n    print(envs.get_attr('index'))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("(7,)\n", ""), done


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_start_if_sys_path_or_sys_argv_holds_objects_that_are_not_strings(context, monkeypatch, tmp_path):
    class Text(str):
        __repr__ = None

    monkeypatch.setattr(sys, "path", [tmp_path, b"/tmp", None, Text("/tmp"), *sys.path])
    monkeypatch.setattr(sys, "argv", [tmp_path, lambda: None])
    monkeypatch.setattr(launch, "_server", launch._ForkServer())
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context=context) as envs:
        envs.reset()
    server = launch._server._process
    launch._server.abandon()
    if server is not None:
        os.waitpid(server.pid, 0)  # it ends, because its pipe is closed


def test_the_import_path_has_the_folders_from_which_the_names_of_modules_lead_to_their_files(tmp_path, monkeypatch):
    files = {
        "alone": "a/alone.py",
        "package": "b/package/__init__.py",
        "compiled": "c/compiled.cpython-311-x86_64-linux-gnu.so",
        "renamed": "d/other.py",
    }
    for name, file in files.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules[name].__file__ = str(tmp_path / file)
    monkeypatch.setitem(sys.modules, "relative", types.ModuleType("relative"))
    sys.modules["relative"].__file__ = "somewhere/relative.py"
    monkeypatch.setitem(sys.modules, "odd", object())  # as lazy importers do
    monkeypatch.setattr(sys, "path", ["", Path("/ignored"), b"/ignored", "/last"])
    path = launch.import_path()
    assert path[:2] == [os.getcwd(), "/last"] and not {"/ignored", "somewhere"}.intersection(path)
    assert [entry for entry in path if str(tmp_path) in entry] == [str(tmp_path / folder) for folder in "abc"]


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_start_in_a_folder_that_was_deleted(context, tmp_path):
    deleted = f"import os, sys\nos.chdir({str(tmp_path)!r})\nos.rmdir({str(tmp_path)!r})\n"
    if subprocess.run([sys.executable, "-c", f"{deleted}import numpy"], cwd="/", capture_output=True).returncode:
        pytest.skip("this Python, such as 3.13.0, cannot import numpy in a deleted folder")
    tmp_path.mkdir()
    script = (
        f"{deleted}sys.path.append({str(ROOT)!r})\n"
        "import vecenv\n"
        "from tests.helpers import counting_fns\n"
        f"with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1, context={context!r}) as envs:\n"
        "    print([path for path in envs.apply(lambda env: sys.path)[0] if not os.path.isabs(path)])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['']\n", ""), done


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_envs_in_workers_share_the_resource_tracker_and_locks_can_be_sent_only_while_a_process_starts(context):
    def tracker(env=None):
        from multiprocessing import resource_tracker

        return os.fstat(resource_tracker.getfd()).st_ino

    with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1, context=context) as envs:
        assert envs.apply(tracker) == [tracker()]
        with pytest.raises(RuntimeError, match="through inheritance"):
            pickle.dumps(multiprocessing.get_context(context).Lock())


def test_programs_that_envs_start_do_not_read_the_standard_input_of_a_script():
    script = """
import os
import vecenv
from tests.helpers import counting_fns

with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1) as envs:
    print(*envs.apply(lambda env: os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev))
"""
    how = {"cwd": ROOT, "input": "for the script", "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", ""), done


@pytest.mark.parametrize("context", METHODS)
def test_a_dead_worker_is_an_error_for_a_script_that_sigpipe_would_end(context):
    script = f"""
import signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as scripts do whose output is piped to `head`
import vecenv
from tests.helpers import counting_fns

with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, context={context!r}) as envs:
    envs.reset()
    assert envs.apply(lambda env: signal.getsignal(signal.SIGPIPE))[0] == signal.SIG_IGN
    envs.processes[0].kill()
    envs.processes[0].join()
    try:
        envs.step([0, 0])
    except vecenv.WorkerDied:
        print("died")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "died\n", "")


def test_a_process_that_exits_leaves_no_temporary_files(tmp_path):
    script = "import vecenv; from tests.helpers import counting_fns; vecenv.AsyncVectorEnv(counting_fns(2)).close()"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"") and os.listdir(tmp_path) == []


class Interrupter(threading.Thread):
    """Sends SIGINT to this process after `delay_s` seconds."""

    def __init__(self, delay_s):
        super().__init__(daemon=True)
        self._delay_s = delay_s

    def run(self):
        until = time.monotonic() + self._delay_s
        while time.monotonic() < until:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)


def zombies():
    """Returns the children of this process that have ended but have not been reaped."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"]


@pytest.mark.parametrize(
    ("context", "count"),
    [
        ("spawn", 2),
        ("forkserver", 15),
        *(pytest.param(name, 50, marks=pytest.mark.slow) for name in ("spawn", "forkserver")),
    ],
)
def test_an_interrupted_construction_leaves_no_zombie(context, count):
    rng = random.Random(context)
    vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2, context=context).close()
    for _ in range(count):
        interrupter = Interrupter(rng.uniform(0, 0.03))
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.start()
            vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2, context=context).close()
        with contextlib.suppress(KeyboardInterrupt):
            interrupter.join()
        interrupter.join()
        assert not multiprocessing.active_children()
        assert not zombies()


def test_deferred_interrupts_are_raised_after_the_block(monkeypatch):
    done = []
    monkeypatch.setattr(launch, "REPEATED_S", 60.0)
    with pytest.raises(KeyboardInterrupt), launch.interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # `timeout` sends each signal twice
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(launch, "REPEATED_S", 0.0)
    with pytest.raises(KeyboardInterrupt), launch.interrupts_deferred():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a repeated signal is not deferred
        done.append("twice")
    assert "twice" not in done and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_deferred_signal_is_handled_even_if_the_first_handler_raises(monkeypatch):
    handled = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), launch.interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert handled == [signal.SIGTERM]


def test_every_deferred_signal_is_handled_once(monkeypatch):
    handled = []
    monkeypatch.setattr(launch, "REPEATED_S", 60.0)
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    previous = [signal.signal(number, lambda number, frame: handled.append(number)) for number in numbers]
    try:
        with launch.interrupts_deferred():
            for number in numbers * 2:
                os.kill(os.getpid(), number)
            assert not handled
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
    assert sorted(handled) == sorted(numbers)


@pytest.mark.filterwarnings("ignore:.*It is restarted")
@pytest.mark.parametrize("context", METHODS)
def test_a_restart_keeps_no_descriptor_of_the_dead_worker(context):
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2, context=context, on_worker_death="restart") as envs:
        envs.reset()
        gc.disable()
        try:
            counts, dead = [], []
            for _ in range(3):
                dead.append(envs.processes[0])
                dead[-1].kill()
                envs.step([0, 0])
                envs.step([0, 0])
                counts.append(len(os.listdir("/proc/self/fd")))
        finally:
            gc.enable()
    assert len(set(counts)) == 1, counts


class Starter(CountingEnv):
    """Starts a program that inherits every inheritable descriptor."""

    def reset(self, **kwargs):
        if not hasattr(self, "program"):
            self.program = subprocess.Popen(
                [sys.executable, "-c", "print(flush=True); input()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                close_fds=False,
                text=True,
            )
            self.program.stdout.readline()  # returns once the program is running
        return super().reset(**kwargs)

    def close(self):
        self.program.kill()
        self.program.communicate()

    def terminate(self):
        self.program.terminate()
        return self.program.wait(timeout=30)

    def pipe_is_inheritable(self):
        import stat

        fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
        sockets = []
        for fd in fds:
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    sockets.append(os.get_inheritable(fd))
        return any(sockets)


@pytest.mark.parametrize("context", METHODS)
def test_programs_that_envs_start_do_not_inherit_the_pipe_and_end_on_sigterm(context):
    with vecenv.AsyncVectorEnv([lambda: Starter(0)], num_workers=1, context=context) as envs:
        envs.reset()
        assert envs.call("pipe_is_inheritable") == (False,)
        assert envs.call("terminate") == (-signal.SIGTERM,)


@pytest.mark.parametrize("context", METHODS)
def test_workers_are_named_and_numbered_here_and_in_their_process(context):
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2, context=context) as envs:
        assert [process.name for process in envs.processes] == ["vecenv-worker-0", "vecenv-worker-1"]
        names = envs.apply(lambda env: multiprocessing.current_process().name)
    assert names == ["vecenv-worker-0", "vecenv-worker-1"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the variables with which a process has started")
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_have_their_variables_before_they_import_a_math_library(context):
    script = f"""
import vecenv
from tests.helpers import counting_fns

def variables(env):
    with open("/proc/self/environ") as file:
        return [each for each in file.read().split(chr(0)) if each.startswith(("MKL_NUM", "OMP_NUM", "PMI_"))]

with vecenv.AsyncVectorEnv(counting_fns(1), num_workers=1, context={context!r}) as envs:
    print(*sorted(envs.apply(variables)[0]))
"""
    environment = {**os.environ, "PMI_RANK": "0", "MKL_NUM_THREADS": "3"}
    environment.pop("OMP_NUM_THREADS", None)
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert (done.stdout, done.stderr) == ("MKL_NUM_THREADS=3 OMP_NUM_THREADS=1\n", "")


@pytest.mark.parametrize("daemon", [True, False])
def test_daemon_is_the_flag_of_the_processes(daemon):
    with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2, daemon=daemon) as envs:
        assert [process.daemon for process in envs.processes] == [daemon] * 2


def test_the_fork_server_is_not_multiprocessings_own():
    """Other libraries' preloads do not reach the workers, and vecenv's do not reach other libraries' processes."""
    from multiprocessing import forkserver

    before = list(forkserver._forkserver._preload_modules)
    vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1).close()
    assert forkserver._forkserver._preload_modules == before


def test_threads_that_start_envs_at_the_same_time_start_one_fork_server(monkeypatch):
    started, both = [], threading.Barrier(2, timeout=0.2)
    start = launch._ForkServer._start

    def slow_start(server):
        started.append(server)
        with contextlib.suppress(threading.BrokenBarrierError):  # only one thread arrives
            both.wait()
        start(server)

    monkeypatch.setattr(launch._ForkServer, "_start", slow_start)
    monkeypatch.setattr(launch, "_server", launch._ForkServer())
    threads = [threading.Thread(target=launch.start_fork_server) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server = launch._server._process
    launch._server.abandon()
    os.waitpid(server.pid, 0)  # it ends, because its pipe is closed
    assert len(started) == 1


def test_a_killed_fork_server_is_restarted_and_leaves_no_descriptor():
    counts = []
    for _ in range(3):
        with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1) as envs:
            envs.reset()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
        launch._server._process.kill()
        launch._server._process.wait()
    assert len(set(counts)) == 1, counts


WITHOUT = {
    "Linux": "",
    "a system without O_PATH, such as macOS": "import os; del os.O_PATH",
    "a system whose descriptors are no paths": """
import socket

class Socket(socket.socket):
    def connect(self, address):
        if str(address).startswith("/proc"):
            raise FileNotFoundError(address)
        super().connect(address)

socket.socket = Socket
""",
}
slow = {"a system whose descriptors are no paths": pytest.mark.slow}
systems = pytest.mark.parametrize(
    "without", [pytest.param(code, id=name, marks=slow.get(name, ())) for name, code in WITHOUT.items()]
)


@systems
def test_a_fork_server_that_cannot_be_started_is_an_error_and_leaves_no_files_and_no_descriptors(without, tmp_path):
    script = f"""
{without}
import os
from multiprocessing import resource_tracker, spawn
import vecenv
from tests.helpers import counting_fns

resource_tracker.ensure_running()
spawn.set_executable("/nonexistent/python")
counts = set()
for _ in range(3):
    try:
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1)
    except vecenv.WorkerDied as error:
        assert "No such file" in str(error) and "/nonexistent/python" in str(error), error
        counts.add(len(os.listdir("/proc/self/fd")))
print(len(counts))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert (done.returncode, done.stdout, done.stderr, os.listdir(tmp_path)) == (0, "1\n", "", [])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
@pytest.mark.parametrize("context", ["forkserver", "fork", "spawn"])
def test_a_closed_vector_env_leaves_no_descriptors(context):
    def open_after_closing():
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2, context=context).close()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    assert open_after_closing() == open_after_closing()  # the first one may start the fork server


@systems
def test_a_killed_fork_server_leaves_no_temporary_files_once_there_is_another(without, tmp_path):
    script = f"""
{without}
import os
import vecenv
from tests.helpers import counting_fns
from vecenv.workers import launch

for _ in range(2):
    vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1).close()
    folders = len(os.listdir({str(tmp_path)!r}))  # the folder of the server that is running, except on Linux
    launch._server._process.kill()
    launch._server._process.wait()
print(folders)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    how = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", script], **how)
    assert (done.stdout, done.stderr) == (f"{int(without != '')}\n", "") and os.listdir(tmp_path) == [], done


@systems
def test_a_killed_process_leaves_no_temporary_files(without, tmp_path):
    script = without + STOPPED.format(context="forkserver", stop="")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    assert parent.communicate(timeout=30)[1] == b"" and len(pids) == 2
    wait_for_end(pids)
    while os.listdir(tmp_path):
        time.sleep(0.005)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sockets without a name")
def test_a_job_that_is_killed_as_a_whole_leaves_no_temporary_files(tmp_path):
    job = subprocess.Popen(
        [sys.executable, "-c", STOPPED.format(context="forkserver", stop="")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    pids = [int(word) for word in job.stdout.readline().split()]
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=30)
    assert len(pids) == 2
    wait_for_end(pids)
    assert os.listdir(tmp_path) == []


@systems
def test_a_cleaner_of_temporary_folders_stops_neither_running_nor_later_envs(without, tmp_path):
    script = f"""
{without}
import os, shutil
import vecenv
from tests.helpers import counting_fns

envs = vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2)
envs.reset()
for name in os.listdir({str(tmp_path)!r}):
    shutil.rmtree(os.path.join({str(tmp_path)!r}, name))
later = vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2)
later.reset()
for each in (envs, later):
    each.step([0] * 4)
    each.close()
print("done")
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done
    assert os.listdir(tmp_path) == []


LOCK = threading.Lock()  # stands for any module's lock that the parent uses too


class LockingEnv(CountingEnv):
    def __init__(self):
        with LOCK:
            super().__init__(0)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("by_reference")
def test_threads_in_the_parent_do_not_deadlock_the_workers():
    """With fork, a lock that another thread holds stays locked in the child forever."""
    with LOCK, vecenv.AsyncVectorEnv([LockingEnv] * 2, num_workers=2) as envs:
        assert envs.reset()[0].shape == (2, 3)
