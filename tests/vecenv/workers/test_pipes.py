"""Tests of the pipes: messages arrive whole or not at all, and no stopped or dead worker blocks the parent."""

import array
import contextlib
import fcntl
import multiprocessing
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import vecenv
from tests.helpers import CountingEnv, process_exists, stop_process
from tests.start_methods import METHODS
from vecenv.workers import messenger, pipes, processes
from vecenv.workers import protocol as messages
from vecenv.workers import worker as worker_module
from vecenv.workers.protocol import Kind

ROOT = Path(__file__).parents[3]
LARGE = 20 * 2**20  # bytes, far more than a pipe holds

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Makes every wait for a process that cannot be joined last longer than the tests may take."""
    for module in (messenger, processes):
        monkeypatch.setattr(module, "END_S", 3600.0)


class HeavyEnv(CountingEnv):
    """Returns or takes large data, and may start a child process that inherits every inheritable descriptor."""

    def __init__(self, index, heir=None):
        super().__init__(index, length=1000)
        self.heir = None
        if heir == "fork":
            self.heir = os.fork()
            if self.heir == 0:
                signal.pause()
        elif heir == "program":
            self.heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False).pid

    def large(self):
        return bytes(LARGE)

    def size_of(self, data):
        return len(data)


@pytest.fixture
def heavy():
    """Returns a function that makes vector envs of two HeavyEnvs in two workers; kills their children at the end."""
    made, heirs = [], []

    def make(heir=None, **arguments):
        fns = [lambda i=i: HeavyEnv(i, heir) for i in range(2)]
        envs = vecenv.AsyncVectorEnv(fns, num_workers=2, **arguments)
        made.append(envs)
        envs.reset()
        heirs.extend(pid for pid in envs.get_attr("heir") if pid)
        return envs

    yield make
    while made:  # pytest keeps `make`, and with it this list, until the memory has been compared
        made.pop().close(timeout=0.2)
    for pid in heirs:
        if process_exists(pid):
            os.kill(pid, signal.SIGKILL)


def stop_in_the_middle_of_a_reply(envs):
    """Makes the workers begin large replies, and stops worker 1 once its pipe is full."""
    envs.call_async("large")
    pipe = envs._pool.workers[1].channel.fileno()
    arrived = array.array("i", [0])
    while arrived[0] < 2**16:
        fcntl.ioctl(pipe, termios.FIONREAD, arrived)
    process = envs.processes[1]
    stop_process(process.pid)
    return process


def test_a_worker_stopped_in_the_middle_of_a_reply_causes_a_timeout(heavy):
    envs = heavy()
    stop_in_the_middle_of_a_reply(envs)
    with pytest.raises(multiprocessing.TimeoutError, match=r"no answer from .*worker 1"):
        envs.call_wait(timeout=0.3)


@pytest.mark.parametrize("heir", ["fork", "program"])
def test_a_worker_killed_in_the_middle_of_a_reply_is_an_error_even_if_its_child_holds_the_pipe(heavy, heir):
    envs = heavy(heir)
    process = stop_in_the_middle_of_a_reply(envs)
    process.kill()
    with pytest.raises(vecenv.WorkerDied, match=r"worker 1 .*SIGKILL"):
        envs.call_wait()


def test_a_large_argument_for_a_stopped_worker_causes_a_timeout(heavy):
    envs = heavy()
    stop_process(envs.processes[1].pid)
    envs.call_async("size_of", bytes(LARGE))
    with pytest.raises(multiprocessing.TimeoutError, match=r"no answer from .*worker 1"):
        envs.call_wait(timeout=0.3)


@pytest.mark.parametrize("heir", ["fork", "program"])
def test_a_large_argument_for_a_dead_worker_is_an_error_even_if_its_child_holds_the_pipe(heavy, heir):
    envs = heavy(heir)
    envs.processes[1].kill()
    with pytest.raises(vecenv.WorkerDied, match=r"worker 1 .*SIGKILL"):
        envs.call("size_of", bytes(LARGE))


@pytest.mark.parametrize("context", METHODS)
def test_neither_an_error_nor_close_waits_for_the_children_of_envs(context):
    """The children hold the pipes by which multiprocessing itself detects that a worker has ended."""
    envs = vecenv.AsyncVectorEnv([lambda i=i: HeavyEnv(i, "fork") for i in range(4)], num_workers=4, context=context)
    heirs = envs.get_attr("heir")
    try:
        envs.processes[3].kill()
        with pytest.raises(vecenv.WorkerDied, match="SIGKILL"):
            envs.call("size_of", b"")
        envs.close(timeout=0.2)
    finally:
        for pid in heirs:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_a_restart_recovers_from_a_partial_reply_and_a_partial_argument(heavy):
    envs = heavy("fork", on_worker_death="restart")
    stop_in_the_middle_of_a_reply(envs).kill()
    assert envs.call_wait() == (bytes(LARGE),) * 2
    envs.processes[0].kill()
    assert envs.call("size_of", bytes(LARGE)) == (LARGE,) * 2
    envs.step([0, 0])
    for pid in (pid for pid in envs.get_attr("heir") if pid):
        os.kill(pid, signal.SIGKILL)


def test_large_arguments_and_results_arrive_whole(heavy):
    envs = heavy()
    assert envs.call("size_of", bytes(LARGE)) == (LARGE,) * 2
    assert envs.call("large") == (bytes(LARGE),) * 2


def test_a_large_message_that_has_begun_to_move_is_waited_for_even_if_the_timeout_is_zero(heavy, monkeypatch):
    """As in Gymnasium, whose timeout only covers the wait for the first byte."""
    monkeypatch.setattr(pipes, "SLICE_S", 3600.0)
    envs = heavy()
    envs.call_async("large")
    for worker in envs._pool.workers:
        select.select([worker.channel], [], [])  # its reply has begun to arrive
    assert envs.call_wait(timeout=0) == (bytes(LARGE),) * 2
    envs.call_async("size_of", bytes(LARGE))
    for worker in envs._pool.workers:
        select.select([], [worker.channel], [])  # it has begun to read its command
    assert envs.call_wait(timeout=0) == (LARGE,) * 2


class ImpatientEnv(HeavyEnv):
    """Sets a default timeout for all sockets of its process, as clients of simulators do."""

    def __init__(self, index):
        super().__init__(index)
        socket.setdefaulttimeout(1e-3)


@pytest.mark.parametrize("context", METHODS)
@pytest.mark.parametrize("where", ["parent", "env"])
def test_a_default_timeout_of_sockets_has_no_effect_on_workers(context, where):
    before = socket.getdefaulttimeout()
    fns = [lambda i=i: (ImpatientEnv if where == "env" else HeavyEnv)(i) for i in range(2)]
    try:
        socket.setdefaulttimeout(1e-3 if where == "parent" else before)
        with vecenv.AsyncVectorEnv(fns, num_workers=2, context=context) as envs:
            envs.reset()
            assert envs.call("size_of", bytes(LARGE)) == (LARGE,) * 2
            assert envs.call("large") == (bytes(LARGE),) * 2
    finally:
        socket.setdefaulttimeout(before)


def test_recv_continues_a_partial_reply_after_a_timeout():
    class Slow(HeavyEnv):
        def step(self, action):
            *others, _ = super().step(action)
            return *others, {"large": bytes(LARGE)}

    with vecenv.AsyncVectorEnv([lambda: Slow(0)], num_workers=1) as envs:
        envs.reset()
        envs.send([0])
        arrived = array.array("i", [0])
        while arrived[0] < 2**16:
            fcntl.ioctl(envs._pool.workers[0].channel.fileno(), termios.FIONREAD, arrived)
        stop_process(envs.processes[0].pid)
        with pytest.raises(multiprocessing.TimeoutError, match="call `recv` again"):
            envs.recv(timeout=0.2)
        os.kill(envs.processes[0].pid, signal.SIGCONT)
        assert len(envs.recv().infos["large"][0]) == LARGE


@pytest.fixture
def low_limit(monkeypatch):
    """Limits messages to 100 kB, in this process and in workers forked from it."""
    monkeypatch.setattr(messages, "MAX_BYTES", 100_000)
    return {"num_workers": 2, "context": "fork"}


class Talkative(CountingEnv):
    def step(self, action):
        observation, *outcome, info = super().step(action)
        if self.steps == 2 and self.index == 1:
            if action:
                raise ValueError("x" * self.size)
            info["trace"] = bytes(self.size)
        return observation, *outcome, info

    def state_of(self, data):
        return bytes(self.size if self.index == 1 else 1)

    size = 200_000


@pytest.mark.parametrize("call", ["step", "send"])
def test_an_info_that_is_too_large_is_an_error_that_names_the_worker_and_its_envs(low_limit, call):
    with vecenv.AsyncVectorEnv([lambda i=i: Talkative(i, 100) for i in range(4)], **low_limit) as envs:
        envs.reset()
        envs.step([0] * 4)
        with pytest.raises(vecenv.MessageTooLarge, match=r"a READY message of 200,\d+ bytes") as caught:
            envs.step([0] * 4) if call == "step" else (envs.send([0] * 4), envs.recv())
        assert isinstance(caught.value, vecenv.EnvError) and "envs 0:2 in worker 0" in str(caught.value)
        with pytest.raises(vecenv.StateError):
            envs.step([0] * 4)


def test_a_result_that_is_too_large_is_an_error_and_the_envs_remain_usable(low_limit):
    with vecenv.AsyncVectorEnv([lambda i=i: Talkative(i, 100) for i in range(4)], **low_limit) as envs:
        envs.reset()
        with pytest.raises(vecenv.MessageTooLarge, match=r"a READY message of 200,\d+ bytes"):
            envs.call("state_of", None)
        assert envs.get_attr("index") == (0, 1, 2, 3)


def test_an_argument_that_is_too_large_is_rejected_before_anything_is_sent(low_limit):
    with vecenv.AsyncVectorEnv([lambda i=i: Talkative(i, 100) for i in range(4)], **low_limit) as envs:
        envs.reset()
        with pytest.raises(vecenv.MessageTooLarge, match=r"a CALL message of 200,\d+ bytes"):
            envs.call("state_of", bytes(200_000))
        assert envs.get_attr("index") == (0, 1, 2, 3)


def test_the_text_of_an_error_is_shortened(low_limit, monkeypatch):
    monkeypatch.setattr(worker_module, "MAX_TEXT", 10_000)
    with vecenv.AsyncVectorEnv([lambda i=i: Talkative(i, 100) for i in range(4)], **low_limit) as envs:
        envs.reset()
        envs.step([1] * 4)
        with pytest.raises(ValueError, match="characters omitted") as caught:
            envs.step([1] * 4)
        assert isinstance(caught.value, vecenv.EnvError)
        traceback = str(caught.value).partition(":\n\n")[2].rpartition("\nFix the env")[0]
        head, omitted, total, tail = re.split(r"\n\[\.\.\. ([\d,]+) of ([\d,]+) characters omitted ...\]\n", traceback)
        assert len(head) == len(tail) == 5000
        assert int(total.replace(",", "")) - int(omitted.replace(",", "")) == 10_000 < 200_000


@pytest.mark.slow
@pytest.mark.timeout(240)  # formatting a traceback with such a message takes 46 s
@pytest.mark.parametrize("what", ["info", "error", "result", "argument"])
def test_data_over_two_gibibytes_is_an_error(what):
    class Huge(Talkative):
        size = 2**31 + 100

    with vecenv.AsyncVectorEnv([lambda i=i: Huge(i, 100) for i in range(2)], num_workers=2) as envs:
        envs.reset()
        if what == "result":
            with pytest.raises(vecenv.MessageTooLarge, match="envs 1:2 in worker 1"):
                envs.call("state_of", None)
        elif what == "argument":
            with pytest.raises(vecenv.MessageTooLarge):
                envs.call("state_of", bytes(2**31 + 100))
        else:
            envs.step([what == "error"] * 2)
            wanted = vecenv.MessageTooLarge if what == "info" else ValueError
            with pytest.raises(wanted, match="worker 1"):
                envs.step([what == "error"] * 2)


class Scribbler(CountingEnv):
    """Writes into every socket of its process."""

    def step(self, action):
        if self.steps == 1 and self.index == 1:
            for number in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(number).st_mode):
                        os.write(number, self.scribble)
        return super().step(action)


@pytest.mark.parametrize(
    "scribble",
    [
        b"hello world, this is a log line\n",
        b"\xff\xff\xff\xff" + bytes(9),  # multiprocessing's header for a message above 2 GiB
        messages.short_frame(Kind.READY, 77),
        messages.short_frame(Kind.READY_ROWS, 0),
        messages.short_frame(Kind.STEP, 0),
    ],
)
def test_an_unexpected_reply_breaks_the_vector_env(scribble):
    class Env(Scribbler):
        pass

    Env.scribble = scribble
    with vecenv.AsyncVectorEnv([lambda i=i: Env(i, 100) for i in range(2)], num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(vecenv.VecEnvError, match=r"worker 1 \(envs 1:2\) sent .* during step"):
            envs.step([0, 0])
        with pytest.raises(vecenv.StateError):
            envs.step([0, 0])


def test_a_reply_about_rows_that_are_not_in_flight_breaks_the_vector_env():
    class Env(Scribbler):
        scribble = messages.short_frame(Kind.READY, 0)

    with vecenv.AsyncVectorEnv([lambda i=i: Env(i, 100) for i in range(2)], num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(vecenv.VecEnvError, match=r"worker 1 \(envs 1:2\) sent an unexpected READY 0"):
            envs.send([0, 0])
            envs.recv()
            envs.send([0], [0])
            envs.recv()


def test_a_channel_reassembles_messages_from_pieces_of_any_size():
    ours, theirs = multiprocessing.Pipe()
    channel = pipes.Channel(ours)
    with theirs:
        payloads = [None, {"a": 1}, b"x" * 300_000, *range(200), None]
        stream = b""
        for slot, payload in enumerate(payloads):
            stream += messages.encode(Kind.READY, slot, payload)
        taken = []
        rng = np.random.default_rng(0)
        while stream:
            piece = int(rng.choice([1, 2, 3, 9, 10_000]))
            os.write(theirs.fileno(), stream[:piece])
            stream = stream[piece:]
            while (message := channel.take()) is not None:
                taken.append(message)
        assert [(slot, messages.decode(body)) for _, slot, body in taken] == list(enumerate(payloads))
        theirs.close()
        with pytest.raises(EOFError):
            channel.take()
    channel.close()


def test_a_worker_receives_messages_in_pieces_of_any_size():
    ours, theirs = multiprocessing.Pipe()
    payloads = [None, {"a": 1}, b"x" * 300_000, *range(200), None]
    stream = b"".join(messages.encode(Kind.CALL, slot, payload) for slot, payload in enumerate(payloads))

    def write():
        rng = np.random.default_rng(0)
        at = 0
        while at < len(stream):
            at += os.write(ours.fileno(), stream[at : at + int(rng.choice([1, 2, 3, 9, 10_000]))])
        os.write(ours.fileno(), stream[:5])
        ours.close()

    with theirs:
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        pipe = pipes.WorkerPipe(theirs)
        received = [pipe.receive() for _ in payloads]
        assert [(slot, messages.decode(body)) for _, slot, body in received] == list(enumerate(payloads))
        with pytest.raises(EOFError):  # a part of a message
            pipe.receive()
        with pytest.raises(EOFError):
            pipe.receive()
        writer.join()


def test_a_signal_that_interrupts_a_large_message_of_a_worker_does_not_cut_it():
    """Workers have handlers for signals, which interrupt a system call. It has then sent a part of its data."""
    ours, theirs = multiprocessing.Pipe()
    frame, found = messages.encode(Kind.READY, 0, bytes(LARGE)), bytearray()
    handled = threading.Event()

    def read():
        arrived = array.array("i", [0])
        while arrived[0] < 2**16:
            fcntl.ioctl(ours.fileno(), termios.FIONREAD, arrived)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        handled.wait(20)
        while data := os.read(ours.fileno(), LARGE):
            found.extend(data)

    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    reader = threading.Thread(target=read, daemon=True)
    try:
        with ours:
            reader.start()
            with theirs:
                pipes.WorkerPipe(theirs).send(frame)
            reader.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == frame


@pytest.mark.parametrize(
    ("length", "kind"),
    [(-1, Kind.READY), (0, Kind.READY), (4, Kind.ERROR), (5, Kind.STEP), (9, 0), (2**31 - 1, 99)],
)
def test_a_channel_refuses_a_head_that_is_not_a_replys_without_waiting_for_the_body(length, kind):
    ours, theirs = multiprocessing.Pipe()
    channel = pipes.Channel(ours)
    with theirs, contextlib.closing(channel):
        os.write(theirs.fileno(), messages.FRAME.pack(length, kind, 0))
        with pytest.raises(pipes.BadFrame, match=f"length {length}, kind {int(kind)}"):
            channel.take()


@pytest.mark.parametrize("full", [False, True])
def test_a_channel_sends_what_does_not_fit_later_and_in_order(full):
    ours, theirs = multiprocessing.Pipe()
    channel = pipes.Channel(ours)
    frames = [messages.encode(Kind.CALL, slot, bytes([slot]) * size) for slot, size in enumerate([9, LARGE, 7, 8])]
    wanted, found = bytearray(), bytearray()
    with theirs, contextlib.closing(channel):
        with socket.socket(fileno=os.dup(ours.fileno())) as other, contextlib.suppress(BlockingIOError):
            while full:
                wanted += b"x" * other.send(b"x", socket.MSG_DONTWAIT)
        assert [channel.put(frame) for frame in frames] == [not full, False, False, False]
        wanted += b"".join(frames)
        assert not channel.flush()
        with socket.socket(fileno=os.dup(theirs.fileno())) as other:
            found += other.recv(2**20, socket.MSG_DONTWAIT)
            assert not channel.put(frames[0])  # there is room again, but not for what comes last
            wanted += frames[0]
            while len(found) < len(wanted):
                assert channel.flush() == (not channel.unsent)
                found += other.recv(len(wanted), socket.MSG_DONTWAIT)
        assert found == wanted and channel.flush()
        assert channel.put(frames[0])


@pytest.fixture
def clock(monkeypatch):
    """Stands still unless a test moves it; deadlines read it."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(pipes, "time", clock)
    return clock


def slices(deadline, clock):
    """Returns the lengths of all slices until the deadline passes, if each wait ends in time."""
    found = []
    while (seconds := deadline.slice()) and len(found) < 20:
        found.append(seconds)
        clock.now += seconds
    return found


@pytest.mark.parametrize("extensible", [False, True])
def test_a_wait_consists_of_slices_of_at_most_a_second(extensible, clock):
    assert slices(pipes.Deadline(2.5, extensible=extensible), clock) == [1.0, 1.0, 0.5]
    assert slices(pipes.Deadline(0.0, extensible=extensible), clock) == []


def test_a_slice_that_ends_late_starts_the_wait_again_but_a_busy_machine_does_not(clock):
    deadline = pipes.Deadline(1.5)
    assert deadline.slice() == 1.0
    clock.now += 1.25  # a busy machine
    assert deadline.slice() == 0.25
    clock.now += 0.25 + 60  # a suspension
    assert slices(deadline, clock) == [1.0, 0.5]


def test_a_message_that_moves_leaves_a_second_if_the_deadline_is_extensible(clock):
    deadline = pipes.Deadline(0.25, extensible=True)
    deadline.slice()
    clock.now += 0.25
    deadline.extend()
    assert slices(deadline, clock) == [1.0]
    deadline.slice()
    clock.now += 60  # a suspension
    assert slices(deadline, clock) == [1.0]
    deadline = pipes.Deadline(3.0, extensible=True)
    deadline.extend()
    assert slices(deadline, clock) == [1.0, 1.0, 1.0]


def test_a_deadline_that_restarts_leaves_all_of_its_time(clock):
    for extensible, left in ((False, [0.25]), (True, [1.0])):
        deadline = pipes.Deadline(0.25, extensible=extensible)
        clock.now += 0.25
        deadline.restart()
        assert slices(deadline, clock) == left
    deadline = pipes.Deadline(1.5)
    clock.now += 1.5
    deadline.restart()
    assert slices(deadline, clock) == [1.0, 0.5]


def test_the_callers_own_work_between_two_waits_is_no_suspension(clock):
    deadline = pipes.Deadline(5.0)
    deadline.slice()
    clock.now += 4.5  # the caller handles a message
    deadline.resume()
    assert slices(deadline, clock) == [0.5]


def test_a_message_that_moves_leaves_no_more_time_unless_the_deadline_is_extensible(clock):
    deadline = pipes.Deadline(0.25)
    clock.now += 0.25
    deadline.extend()
    assert slices(deadline, clock) == []


@pytest.mark.parametrize("spin", [False, True])
def test_a_waiter_returns_the_indices_of_the_sources_that_are_ready(spin):
    ends = [multiprocessing.Pipe() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        ours, theirs = zip(*((stack.enter_context(a), stack.enter_context(b)) for a, b in ends), strict=True)
        waiter = pipes.Waiter([ours[0], ours[1].fileno(), ours[2]], spin=spin)
        assert waiter.ready(pipes.Deadline(0.0)) == waiter.ready(pipes.Deadline(0.01)) == []
        threading.Timer(0.01, theirs[2].send, [None]).start()
        assert waiter.ready() == [2]
        theirs[1].send(None)
        assert sorted(waiter.ready()) == sorted(waiter.ready(pipes.Deadline(0.0))) == [1, 2]
        waiter.forget(ours[2])
        waiter.forget(ours[2])
        assert waiter.ready() == [1]
        waiter.watch_for_room(ours[0], True)
        assert sorted(waiter.ready()) == [0, 1]
        waiter.watch_for_room(ours[0], False)
        assert waiter.ready() == [1]
        theirs[0].close()
        assert sorted(waiter.ready()) == [0, 1]


def test_a_message_that_arrives_after_a_suspension_starts_the_wait_again(clock):
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        deadline = pipes.Deadline(1.5)
        deadline.slice()
        clock.now += 60
        theirs.send(None)
        assert pipes.Waiter([ours], spin=False).ready(deadline) == [0]
        deadline.resume()
        assert slices(deadline, clock) == [1.0, 0.5]


def test_a_worker_answers_an_unknown_command_with_an_error():
    ours, theirs = multiprocessing.Pipe()
    channel = pipes.Channel(ours)
    with theirs:
        channel.put(messages.FRAME.pack(messages.HEADER_SIZE, 99, 7))
        channel.put(messages.short_frame(Kind.CLOSE, 0))
        worker_module.CommandServer(theirs, None).serve(pipes.Waiter([theirs], spin=False))
        kind, slot, payload = channel.take()
        reply = messages.decode(payload)
        assert (kind, slot, reply.doing) == (Kind.ERROR, 7, "command 99")
        assert "99 is not the kind of a command" in reply.traceback
        assert channel.take() == (Kind.READY, 0, None)
    channel.close()


MAIN = """
import vecenv
from tests.helpers import counting_fns

class Label:
    pass

def number(env):
    return env.index, type(env.label).__name__

with vecenv.AsyncVectorEnv(counting_fns(2), num_workers=2) as envs:
    envs.set_attr("label", Label())
    print(envs.apply(number), type(envs.get_attr("label")[1]).__name__)
"""


def test_functions_and_classes_of_a_script_reach_workers_which_never_import_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MAIN)
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[(0, 'Label'), (1, 'Label')] Label\n", done.stderr


SUSPENDED = """
import os, signal
import vecenv
from tests.helpers import CountingEnv

class SuspendingEnv(CountingEnv):
    def _suspend(self, now):
        if now == {when!r} and self.index == 1:
            os.killpg(os.getpgrp(), signal.SIGSTOP)
            print(now, "was suspended", flush=True)

    def __init__(self, index):
        super().__init__(index)
        self._suspend("construction")

    def step(self, action):
        self._suspend("step")
        return super().step(action)

    def close(self):
        self._suspend("close")

fns = [lambda i=i: SuspendingEnv(i) for i in range(2)]
envs = vecenv.AsyncVectorEnv(fns, num_workers=2, start_timeout_s={start_timeout_s})
envs.reset()
{call}
print("done", flush=True)
envs.close(timeout={timeout_s})
"""


@pytest.mark.parametrize(
    ("when", "call", "timeout_s"),
    [
        ("step", "envs.step_async([0, 0]); envs.step_wait(timeout={timeout_s})", 2.0),
        ("step", "envs.send([0, 0]); envs.recv(timeout={timeout_s})", 2.0),
        ("close", "", 2.0),
        ("construction", "", 5.0),
    ],
)
@pytest.mark.slow
def test_time_during_which_the_whole_job_is_suspended_does_not_count_as_a_timeout(when, call, timeout_s):
    start_timeout_s = timeout_s if when == "construction" else 60
    script = SUSPENDED.format(
        when=when, call=call.format(timeout_s=timeout_s), timeout_s=timeout_s, start_timeout_s=start_timeout_s
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        _, status = os.waitpid(job.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), job.communicate()
        time.sleep(timeout_s + 0.8)  # the job is suspended for longer than its timeout
        os.killpg(job.pid, signal.SIGCONT)
        output, errors = job.communicate(timeout=30)
    assert (job.returncode, sorted(output.splitlines())) == (0, sorted(["done", f"{when} was suspended"])), errors
