"""Tests of vecenv/workers/messenger.py: messages, deaths and deadlines of several workers, in which order."""

import contextlib
import multiprocessing
import os
from types import SimpleNamespace

import pytest

from vecenv.workers import pipes
from vecenv.workers.messenger import BadMessage, DeadlinePassed, Messenger, WorkerGone, WorkerHandle
from vecenv.workers.pipes import Channel, Deadline
from vecenv.workers.protocol import Kind, encode, short_frame

LARGE = 2**22  # bytes, more than a pipe holds

pytestmark = pytest.mark.timeout(20)


class FakeWorker:
    """The other end of a worker's pipe, and a sentinel that becomes ready when the worker "dies"."""

    def __init__(self, index):
        ours, self.connection = multiprocessing.Pipe()
        os.set_blocking(self.connection.fileno(), False)
        self._sentinel, self._life = os.pipe()
        self.handle = WorkerHandle(index, index, index + 1, None, Channel(ours), self._sentinel)

    def says(self, data):
        os.write(self.connection.fileno(), data)

    def dies(self):
        os.close(self._life)
        self._life = None

    def hears(self, size):
        """Returns what this process has sent, up to `size` bytes."""
        return os.read(self.connection.fileno(), size)

    def close(self):
        self.handle.channel.close()
        self.connection.close()
        for descriptor in (self._sentinel, self._life):
            if descriptor is not None:
                os.close(descriptor)


@pytest.fixture
def workers():
    made = [FakeWorker(0), FakeWorker(1)]
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def messenger(workers):
    return Messenger([worker.handle for worker in workers], spin=False)


def received(messenger, deadline=None):
    """Returns the index and the slot of each message that one wait yields."""
    return [(worker.index, slot) for worker, (_, slot, _) in messenger.messages(deadline)]


def test_all_messages_of_a_worker_come_before_its_death(messenger, workers):
    for slot in range(3):
        workers[1].says(short_frame(Kind.READY, slot))
    workers[1].dies()
    assert [received(messenger) for _ in range(3)] == [[(1, 0)], [(1, 1)], [(1, 2)]]
    with pytest.raises(WorkerGone) as gone:
        received(messenger)
    assert gone.value.worker is workers[1].handle


@pytest.mark.parametrize("index", [0, 1])
def test_a_death_with_a_part_of_a_message_is_a_death(messenger, workers, index):
    workers[index].says(short_frame(Kind.READY, 0)[:5])
    workers[index].dies()
    with pytest.raises(WorkerGone) as gone:
        while True:
            assert received(messenger) == []
    assert gone.value.worker is workers[index].handle


def test_a_closed_pipe_is_a_death(messenger, workers):
    workers[0].connection.close()
    with pytest.raises(WorkerGone):
        received(messenger)


def test_the_last_message_of_a_worker_that_reads_no_more_is_received(messenger, workers):
    messenger.send([(workers[0].handle, encode(Kind.CALL, 0, bytes(LARGE)))])
    workers[0].says(short_frame(Kind.READY, 3))
    workers[0].connection.close()
    assert received(messenger) == [(0, 3)]
    with pytest.raises(WorkerGone):
        received(messenger)


def test_a_worker_that_is_gone_does_not_keep_the_others_from_getting_their_frames(messenger, workers):
    workers[0].connection.close()
    frame = short_frame(Kind.STEP, 1)
    messenger.send([(worker.handle, frame) for worker in workers])
    assert workers[1].hears(100) == frame
    with pytest.raises(WorkerGone) as gone:
        received(messenger)
    assert gone.value.worker is workers[0].handle and isinstance(gone.value.__cause__, (EOFError, OSError))


def test_bytes_that_are_no_message_name_their_sender(messenger, workers):
    workers[1].says(b"hello world, this is a log line\n")
    with pytest.raises(BadMessage, match="bytes that are not a reply") as bad:
        received(messenger)
    assert bad.value.worker is workers[1].handle


def test_a_deadline_passes_if_nothing_or_only_a_part_of_a_message_has_arrived(messenger, workers):
    with pytest.raises(DeadlinePassed):
        received(messenger, Deadline(0.0))
    workers[0].says(short_frame(Kind.READY, 4)[:5])
    with pytest.raises(DeadlinePassed):
        received(messenger, Deadline(0.0))
    workers[0].says(short_frame(Kind.READY, 4)[5:])
    assert received(messenger, Deadline(0.0)) == [(0, 4)]


def test_the_messages_of_other_workers_are_yielded_before_the_deadline_passes(messenger, workers):
    workers[0].says(short_frame(Kind.READY, 4)[:5])
    workers[1].says(short_frame(Kind.READY, 5))
    found = []
    with pytest.raises(DeadlinePassed):
        for _, (_, slot, _) in messenger.messages(Deadline(0.0)):
            found.append(slot)
    assert found == [5]


def test_a_message_that_has_begun_to_arrive_extends_an_extensible_deadline(messenger, workers):
    deadline = Deadline(0.0, extensible=True)
    workers[0].says(short_frame(Kind.READY, 4)[:5])
    assert received(messenger, deadline) == []
    assert deadline.slice() > 0


def test_what_does_not_fit_in_a_pipe_is_sent_while_messages_are_awaited(messenger, workers):
    frame = encode(Kind.CALL, 0, bytes(LARGE))
    messenger.send([(workers[1].handle, frame), (workers[1].handle, short_frame(Kind.STEP, 9))])
    heard = b""
    while len(heard) < len(frame) + 9:
        heard += workers[1].hears(2**20)
        with contextlib.suppress(DeadlinePassed):
            assert received(messenger, Deadline(0.0)) == []
    assert heard == frame + short_frame(Kind.STEP, 9)
    assert not workers[1].handle.channel.unsent
    with pytest.raises(DeadlinePassed):  # room in the pipe is no longer of interest
        received(messenger, Deadline(0.0, extensible=True))


def test_a_new_list_of_workers_keeps_what_was_not_sent(messenger, workers):
    messenger.send([(workers[1].handle, encode(Kind.CALL, 0, bytes(LARGE)))])
    messenger.listen()
    unsent = sum(map(len, workers[1].handle.channel.unsent))
    workers[1].hears(2**20)
    with contextlib.suppress(DeadlinePassed):
        received(messenger, Deadline(0.0))
    assert sum(map(len, workers[1].handle.channel.unsent)) < unsent


def test_a_forgotten_worker_is_neither_heard_nor_missed(messenger, workers):
    workers[0].says(short_frame(Kind.READY, 1))
    workers[0].dies()
    messenger.forget(workers[0].handle)
    workers[1].says(short_frame(Kind.READY, 2))
    assert received(messenger) == [(1, 2)]
    with pytest.raises(DeadlinePassed):
        received(messenger, Deadline(0.0))


def test_the_time_that_the_parent_works_between_two_waits_counts_towards_its_timeout(monkeypatch):
    """Unpickling a large reply takes long. It is no suspension, after which the wait would start again."""
    now = 100.0
    monkeypatch.setattr(pipes.time, "monotonic", lambda: now)
    deadline = Deadline(1.0)
    now += 5.0
    with pytest.raises(DeadlinePassed):
        next(Messenger([], spin=False).messages(deadline))


@pytest.mark.parametrize(
    ("code", "phrase"),
    [
        (None, "closed its pipe but is still running"),
        (0, "exited with code 0 "),
        (3, "exited with code 3 "),
        (-9, "was killed by SIGKILL (often because memory ran out"),
        (-11, "was killed by SIGSEGV (a crash in native code"),
        (-15, "was killed by SIGTERM (sent from outside)"),
        (-4, "was killed by SIGILL (often native code built for another processor)"),
        (-14, "was killed by SIGALRM (a timer that the env has set)"),
        (-40, "was killed by signal 40 (sent from outside)"),
    ],
)
def test_the_phrase_for_an_end_names_the_exit_code_or_the_signal(code, phrase):
    process = SimpleNamespace(exitcode=code, join=lambda timeout: None)
    assert WorkerHandle(0, 0, 2, process, None, -1).how_it_ended().startswith(phrase)
