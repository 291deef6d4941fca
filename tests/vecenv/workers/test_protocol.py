"""Tests of vecenv/workers/protocol.py: what a frame looks like, and how its payload is pickled."""

import struct
import sys
import threading

import numpy as np
import pytest

import vecenv
from vecenv.workers import protocol as messages
from vecenv.workers.protocol import FRAME, Kind


class Local:
    """Is sent by value, because workers do not import the modules of the tests."""


@pytest.mark.parametrize("payload", [None, {"a": 1}, np.arange(3)], ids=repr)
def test_a_frame_begins_with_the_number_of_bytes_that_follow_its_kind_and_its_slot(payload):
    frame = messages.encode(Kind.READY, 258, payload)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert frame[4:9] == bytes([Kind.READY, 0, 0, 1, 2])
    assert (len(frame) == 9) == (payload is None)


def test_the_longest_message_is_the_longest_whose_length_fits_in_a_frame(monkeypatch):
    FRAME.pack(messages.MAX_BYTES, Kind.READY, 0)
    with pytest.raises(struct.error):
        FRAME.pack(messages.MAX_BYTES + 1, Kind.READY, 0)
    frame = messages.encode(Kind.READY, 0, b"a payload")
    monkeypatch.setattr(messages, "MAX_BYTES", len(frame) - 4)
    assert messages.encode(Kind.READY, 0, b"a payload") == frame
    with pytest.raises(vecenv.MessageTooLarge):
        messages.encode(Kind.READY, 0, b"a payload!")


def test_a_batch_of_numbers_is_pickled_without_cloudpickle(monkeypatch):
    monkeypatch.setattr(messages, "dumps", None)
    actions = np.arange(6.0).reshape(3, 2)
    frame = messages.encode(Kind.STEP, 1, actions)
    np.testing.assert_array_equal(messages.decode(frame[FRAME.size :]), actions)


@pytest.mark.parametrize("payload", [[Local()], np.array([Local()])], ids=["list", "array"])
def test_objects_of_modules_that_workers_do_not_import_are_sent_by_value(payload, monkeypatch):
    frame = messages.encode(Kind.STEP, 1, payload)
    monkeypatch.setitem(sys.modules, __name__, None)
    (found,) = messages.decode(frame[FRAME.size :])
    assert type(found).__name__ == "Local"


def test_only_the_error_for_a_command_that_cannot_be_pickled_says_that_it_was_meant_for_workers():
    for kind, matches in ((Kind.CALL, True), (Kind.READY, False)):
        with pytest.raises(TypeError, match="pickle") as raised:
            messages.encode(kind, 0, threading.Lock())
        assert ("for the workers" in str(raised.value)) == matches


def test_every_kind_is_a_reply_or_has_a_record_of_its_command():
    assert len(set(Kind)) == len(Kind.__members__), "two kinds have the same number"
    assert messages.COMMANDS.keys() == set(Kind) - messages.REPLIES
    assert all(command.kind == kind for kind, command in messages.COMMANDS.items())
