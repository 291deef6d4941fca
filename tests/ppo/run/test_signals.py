"""Tests of ppo/run/signals.py: the first signal stops a run between two updates, and the second ends the process."""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from ppo.run import signals
from ppo.run.signals import stop_on_signal

BLOCKED = """
import ctypes, sys, threading
from ppo import cli as commands
from ppo.run import signals
signals.SAME_S = 0.0
def block():
    library, lock, due = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event()
    library.pthread_mutex_lock(lock)
    threading.Thread(target=lambda: due.wait() and print("blocked", flush=True), daemon=True).start()
    sys.setswitchinterval(1000.0)  # the thread cannot print until the main thread is inside C
    due.set()
    library.pthread_mutex_lock(lock)  # blocks forever, with the GIL released
"""
IN_A_COMMAND = BLOCKED + "commands.main(block)"
IN_A_RUN_OF_A_COMMAND = BLOCKED + "def run():\n  with signals.stop_on_signal():\n    block()\ncommands.main(run)"


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (IN_A_COMMAND, signal.SIGINT),
        (IN_A_COMMAND, signal.SIGTERM),
        (IN_A_RUN_OF_A_COMMAND, signal.SIGINT),
    ],
    ids=["command-SIGINT", "command-SIGTERM", "run-SIGINT"],
)
def test_a_second_signal_ends_a_process_that_is_blocked_in_a_c_call(code, number):
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(number)
        try:
            assert process.wait(20) == 128 + number
        finally:
            process.kill()


IN_A_RUN = (
    BLOCKED
    + """
stop = signals.Stop()
stop.kept = lambda: KEPT
def run():
  threading.Thread(target=lambda: stop.wait() and print("told", flush=True), daemon=True).start()
  with signals.stop_on_signal(stop):
    block()
commands.main(run)
"""
)


def test_a_run_learns_of_its_first_signal_inside_c_and_the_second_prints_what_is_saved():
    code = IN_A_RUN.replace("KEPT", "'env-step 64 is saved'")
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **how) as process:
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "told\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors.splitlines() == ["", "stopped at once: env-step 64 is saved"]


def test_the_first_signal_ends_a_run_inside_c_that_has_learned_nothing():
    code = IN_A_RUN.replace("KEPT", "None")
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **how) as process:
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 143 and errors.splitlines() == ["", "stopped at once: nothing had been learned yet"]


def test_a_run_that_has_learned_nothing_leaves_no_folder_even_if_its_first_signal_arrives_inside_c(tmp_path):
    code = IN_A_RUN.replace("KEPT", "None").replace(
        "def run", f"stop.discard = lambda: os.rmdir({str(tmp_path)!r})\ndef run"
    )
    with subprocess.Popen([sys.executable, "-c", "import os\n" + code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "blocked\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143 and not tmp_path.exists()


OWN_HANDLER = """
import os, signal, time
from ppo.run import signals
signal.signal(signal.SIGUSR1, lambda number, frame: print("own"))
stop = signals.Stop()
stop.kept = lambda: KEPT
with signals.stop_on_signal(stop), signals.exit_on_second_signal():
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(signals.PYTHON_S + 0.3)
    print(stop.is_set())
"""


@pytest.mark.parametrize("kept", [None, "env-step 64 is saved"])
def test_a_signal_that_the_script_handles_itself_stops_no_run(kept):
    code = OWN_HANDLER.replace("KEPT", repr(kept))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "own\nFalse\n"), done


@pytest.fixture
def handler():
    """Counts SIGINTs, and restores the previous handler after the test."""
    calls, before = [], signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    yield calls
    signal.signal(signal.SIGINT, before)


def test_an_immediate_repeat_does_not_count_and_a_later_signal_reaches_the_previous_handler(handler, monkeypatch):
    """`timeout` sends SIGTERM to its child and then to the process group, which includes the child."""
    with stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set() and stop.number == signal.SIGINT and not handler
        monkeypatch.setattr(signals, "SAME_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert len(handler) == 1
    os.kill(os.getpid(), signal.SIGINT)
    assert len(handler) == 2  # the previous handler is restored


def test_the_first_signal_reaches_the_previous_handler_and_interrupts_a_run_that_has_learned_nothing(handler):
    with pytest.raises(KeyboardInterrupt), stop_on_signal() as stop:
        stop.kept = lambda: None
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.is_set() and stop.number == signal.SIGINT and len(handler) == 1


def test_a_hangup_stops_a_run_but_is_never_the_second_signal(handler, monkeypatch):
    """A lost terminal sends SIGHUP more than once, and systemd sends it after SIGTERM."""
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with stop_on_signal() as stop:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert stop.is_set() and stop.number == signal.SIGHUP and not handler
        os.kill(os.getpid(), signal.SIGINT)
        assert len(handler) == 1
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_DFL


@pytest.mark.parametrize("number", signals.NOTICES)
def test_a_notice_of_a_batch_system_stops_a_run_and_the_signal_that_follows_is_the_first(handler, monkeypatch, number):
    """Slurm sends the signal of `--signal=USR1@60` 60 s before SIGTERM, which still leaves time to save."""
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    before = signal.getsignal(number)
    with signals.on_first_signal(lambda _: pytest.fail("the inner block handles signals")), stop_on_signal() as stop:
        for one in (number, number, signal.SIGINT, number):
            os.kill(os.getpid(), one)
        assert stop.is_set() and stop.number == number and not handler
    assert signal.getsignal(number) == before


def test_a_script_keeps_its_own_handlers_of_notices():
    """`faulthandler` installs its handler from C, which Python reports as the default action."""
    calls = []
    before = signal.signal(signal.SIGUSR2, lambda *_: calls.append(1))
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.register(signal.SIGUSR1, file)
            try:
                with stop_on_signal() as stop:
                    os.kill(os.getpid(), signal.SIGUSR1)
                    os.kill(os.getpid(), signal.SIGUSR2)
            finally:
                faulthandler.unregister(signal.SIGUSR1)
            assert not stop.is_set() and calls and file.tell()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_no_signal_is_handled_outside_the_main_thread():
    found = []

    def run():
        with stop_on_signal() as stop:
            found.append((stop.is_set(), signal.getsignal(signal.SIGINT)))

    before, threads = signal.getsignal(signal.SIGINT), threading.active_count()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [(False, before)] and threading.active_count() == threads


FORKING = """
import os, signal, sys, time
from ppo.run import signals
signals.SAME_S = 0.0
with signals.stop_on_signal() as stop, signals.exit_on_second_signal():
    os.kill(os.getpid(), signal.SIGTERM)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    os.waitpid(child, 0)
    time.sleep(0.2)  # time for the watching thread to end this process if it wrongly counts the child's signal
    assert stop.is_set()
    print("still here")
"""


def test_a_signal_to_a_forked_child_does_not_count_as_its_parents_second_signal():
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done
