"""Tests of vecenv/workers/pending.py: which messages are replies to a command, and when it is complete."""

from types import SimpleNamespace

import pytest

from vecenv.rows.messages import StepObjects
from vecenv.workers.messenger import BadMessage, WorkerHandle
from vecenv.workers.pending import PendingCommand, PendingRows
from vecenv.workers.protocol import CALL, FRAME, STEP, ErrorReply, Kind, RowsReply, decode

WORKERS = [WorkerHandle(0, 0, 2, None, None, -1), WorkerHandle(1, 2, 5, None, None, -1)]
ERROR = ErrorReply("the motor is on fire", "", None, None, "step", None, None)


def test_a_command_is_complete_when_each_worker_has_replied_once():
    pending = PendingCommand(CALL, 7, [b"", b""])
    assert (pending.count, pending.missing(WORKERS)) == (0, WORKERS)
    pending.accept(WORKERS[1], Kind.READY, 7, "b")
    assert (pending.count, pending.missing(WORKERS)) == (1, WORKERS[:1])
    pending.accept(WORKERS[0], Kind.READY, 7, None)
    assert (pending.count, pending.missing(WORKERS), pending.replies) == (2, [], [None, "b"])


@pytest.mark.parametrize(("kind", "slot"), [(Kind.READY, 6), (Kind.ERROR, 6), (Kind.READY_ROWS, 7), (Kind.READY, 7)])
def test_a_message_that_is_no_reply_or_a_second_reply_is_refused(kind, slot):
    pending = PendingCommand(CALL, 7, [b"", b""])
    pending.accept(WORKERS[1], Kind.READY, 7, None)
    with pytest.raises(BadMessage, match=f"an unexpected {kind.name} {slot}"):
        pending.accept(WORKERS[slot == 7 and kind == Kind.READY], kind, slot, ERROR)
    assert pending.count == 1


def test_an_error_is_a_reply_between_steps_and_is_raised_at_once_during_a_step():
    call, step = (PendingCommand(command, 7, [b"", b""]) for command in (CALL, STEP))
    call.accept(WORKERS[1], Kind.ERROR, 7, ERROR)
    assert (call.count, list(call.errors)) == (1, [1])
    assert "only be closed" not in str(call.errors[1])
    with pytest.raises(Exception, match=r"(?s)on fire.*only be closed"):
        step.accept(WORKERS[1], Kind.ERROR, 7, ERROR)


@pytest.mark.parametrize("kind", [None, Kind.READY, Kind.ERROR])
def test_whatever_a_worker_has_replied_is_void_when_its_command_is_sent_again(kind):
    pending = PendingCommand(CALL, 7, [b"first", b"second"])
    pending.accept(WORKERS[0], Kind.READY, 7, None)
    if kind is not None:
        pending.accept(WORKERS[1], kind, 7, ERROR)
    assert pending.send_again(WORKERS[1]) == b"second"
    assert (pending.count, pending.missing(WORKERS), pending.errors) == (1, WORKERS[1:], {})


class Deaths:
    """Stands in for `Restarts`: the deaths of each worker, and the envs whose episode was cut."""

    def __init__(self, cut):
        self.deaths, self._cut = [2, 2], cut

    def report(self, slot, envs):
        found = [env for env in envs if env in self._cut]
        return StepObjects([], {}, found) if found else None


def rows(restarts=None):
    """Returns envs 0, 2, 3 and 4 in flight in slot 7."""
    pending = PendingRows(7, restarts)
    pending.add([0, 2, 3])
    pending.add([4])
    return pending


def test_rows_are_done_in_the_order_in_which_their_workers_report_them():
    pending = rows()
    pending.accept(WORKERS[1], Kind.READY, 1, None)
    pending.accept(WORKERS[0], Kind.READY, 0, None)
    assert (pending.count, pending.envs, pending.in_flight(WORKERS[1])) == (2, [2, 4], [2, 4])
    pending.accept(WORKERS[1], Kind.READY_ROWS, 7, RowsReply([2, 0], None))
    assert (pending.count, pending.envs) == (4, [])
    assert pending.take()[0] == [3, 0, 4, 2]
    assert pending.count == 0 and pending.take()[0] == []


@pytest.mark.parametrize(
    ("kind", "slot", "payload"),
    [
        (Kind.READY, 1, None),  # env 1 is not in flight
        (Kind.READY_ROWS, 7, RowsReply([0, 1], None)),
        (Kind.READY_ROWS, 7, RowsReply([], None)),
        (Kind.READY_ROWS, 7, SimpleNamespace(rows=[0], objects=None)),
        (Kind.ERROR, 6, ERROR),
    ],
)
def test_a_message_that_reports_no_rows_in_flight_is_refused(kind, slot, payload):
    pending = rows()
    with pytest.raises(BadMessage, match=f"an unexpected {kind.name} {slot}"):
        pending.accept(WORKERS[0], kind, slot, payload)
    assert (pending.count, pending.envs) == (0, [0, 2, 3, 4])


def test_an_error_of_a_row_is_raised_at_once():
    with pytest.raises(Exception, match="on fire"):
        rows().accept(WORKERS[1], Kind.ERROR, 7, ERROR)


def test_a_worker_that_reports_a_row_has_survived_and_the_cut_of_this_row_is_reported_with_it():
    restarts = Deaths(cut=[3, 4])
    pending = rows(restarts)
    pending.accept(WORKERS[1], Kind.READY, 1, None)
    assert restarts.deaths == [2, 0]
    envs, objects = pending.take()
    assert (envs, objects.cut) == ([3], [3])
    pending.accept(WORKERS[1], Kind.READY, 0, None)
    envs, objects = pending.take()
    assert (envs, objects.cut) == ([2], ())


def test_the_rows_in_flight_are_sent_again_without_actions():
    pending = rows()
    frame = pending.send_again(WORKERS[1])
    assert (frame[4], decode(frame[FRAME.size :])) == (Kind.STEP_ROWS, [(0, None), (1, None), (2, None)])
    pending.accept(WORKERS[0], Kind.READY, 0, None)
    assert pending.send_again(WORKERS[0]) is None
