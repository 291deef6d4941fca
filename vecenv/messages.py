"""messages.py: what travels in the pipes between parent and workers, and how either end waits.

| message        | sender | payload                               | reply                       | worker is |
|----------------|--------|---------------------------------------|-----------------------------|-----------|
| START          | parent | environment; which envs to build, how | READY: spaces, metadata     | new       |
| ATTACH         | parent | layout; then the block itself         | READY                       | idle      |
| ATTACH_INFOS   | parent | schema, layout; then the block itself | READY                       | idle      |
| RESUME s       | parent | which episodes were over              | READY                       | idle      |
| RESET s        | parent | seeds, options, mask                  | READY: extras, if any       | idle      |
| STEP s         | parent | nothing; or actions that do not fit   | READY: extras, if any       | idle      |
| STEP_ROWS s    | parent | pairs: row, action if it does not fit | READY row: extras, for each | any       |
| CALL           | parent | name, arguments                       | READY: results              | idle      |
| APPLY          | parent | function, rows                        | READY: results              | idle      |
| SET_ATTR       | parent | name, values                          | READY                       | idle      |
| GET_STATE      | parent | nothing                               | READY: states of its envs   | idle      |
| SET_STATE s    | parent | states; rows s are as they were       | READY                       | idle      |
| CLOSE          | parent | nothing                               | READY, and it exits         | any       |
| READY          | worker | see above                             |                             | busy      |
| READY_ROWS     | worker | rows that were stepped as one, extras  |                             | busy      |
| ERROR          | worker | a `Failure`                           |                             | busy      |

A message is one byte of kind, four bytes of slot (of row, in an answer to STEP_ROWS), and a pickled payload or
nothing. Rows that a worker steps in one call it answers with one READY_ROWS. A worker is busy from the parent's
message to its own reply, so there is at most one message under way in a pipe; but for STEP_ROWS, of which there may be
as many as the worker has rows.

Order: every row write precedes send(READY); the parent reads rows only after recv().
Order: every action write precedes send(STEP or STEP_ROWS); the worker reads actions only after recv().
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from _typeshed import HasFileno

_POSIX = os.name == "posix"
_HEADER = struct.Struct("!BI")
# What Connection.send_bytes writes too: the length, then the message. To write and read it in one
# call each saves about 10 us a step, which is a fifth of a cheap env's.
_FRAME = struct.Struct("!iBI")
_SIZE = struct.Struct("!i")
_LENGTH = _SIZE.pack(_HEADER.size)


class Kind(IntEnum):
    """What a message is; the worker has a method of the same name for each command."""

    START = 1
    ATTACH = 2
    ATTACH_INFOS = 3
    RESUME = 4
    RESET = 5
    STEP = 6
    STEP_ROWS = 7
    CALL = 8
    APPLY = 9
    SET_ATTR = 10
    GET_STATE = 11
    SET_STATE = 12
    CLOSE = 13
    READY = 14
    READY_ROWS = 15
    ERROR = 16


COMMANDS = tuple(kind for kind in Kind if kind not in (Kind.READY, Kind.READY_ROWS, Kind.ERROR))


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as text: a foreign exception may not survive the way back.

    Attributes:
        traceback: As Python prints it, notes included.
        exception: Its type, pickled; None if that was impossible.
        env: Index of the env that raised, if it was one.
        doing: What the env was asked to do, such as "step".
        refusal: What `vecenv` itself had to say, where it was that which could not do what was asked.
    """

    traceback: str
    exception: bytes | None
    env: int | None
    doing: str
    refusal: str | None


def encode(kind: Kind, slot: int = 0, payload: Any = None) -> bytes:
    """Returns the bytes of one message; a payload of None costs nothing."""
    # cloudpickle, because envs, infos and arguments may hold lambdas and classes of __main__.
    body = b"" if payload is None else cloudpickle.dumps(payload)
    return _HEADER.pack(kind, slot) + body


def send(connection: Connection, message: bytes) -> None:
    """Sends what `encode` gave."""
    if len(message) == _HEADER.size and _POSIX:
        os.write(connection.fileno(), _LENGTH + message)
    else:
        connection.send_bytes(message)


def send_in_pieces(connection: Connection, message: bytes, on_reply: Callable[[], None], sentinel: int) -> None:
    """Sends a message of any length to a worker that may itself be waiting to send replies.

    If both ends wrote more than a pipe holds before either reads, they would wait for each other for ever. So
    this end writes only what fits, and in between takes the replies that have come.

    Args:
        connection: To the worker.
        message: What `encode` gave.
        on_reply: Receives one message of the worker.
        sentinel: Becomes readable when the worker's process ends.

    Raises:
        BrokenPipeError: If the worker is gone.
    """
    if not hasattr(select, "poll"):
        connection.send_bytes(message)
        return
    number = connection.fileno()
    rest = memoryview(_SIZE.pack(len(message)) + message)
    poll = select.poll()
    poll.register(number, select.POLLIN | select.POLLOUT)
    poll.register(sentinel, select.POLLIN)
    while rest:
        events = dict(poll.poll())
        if sentinel in events:
            raise BrokenPipeError("the process has ended")
        if events.get(number, 0) & select.POLLIN:
            on_reply()
        elif events.get(number, 0) & select.POLLOUT:
            os.set_blocking(number, False)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(number, rest) :]
            os.set_blocking(number, True)
        else:
            raise BrokenPipeError("the process has closed its pipe")


def receive(connection: Connection) -> tuple[int, int, bytes | None]:
    """Waits for one message and returns kind, slot, and the payload for `decode`; None if there is none.

    Raises:
        EOFError, OSError: If the other end is gone.
    """
    if not _POSIX:
        message = connection.recv_bytes()
        kind, slot = _HEADER.unpack_from(message)
        body = memoryview(message)[_HEADER.size :]
        return kind, slot, bytes(body) if body else None
    number = connection.fileno()
    length, kind, slot = _FRAME.unpack(_read(number, _FRAME.size))
    return kind, slot, _read(number, length - _HEADER.size) if length > _HEADER.size else None


def decode(payload: bytes | None) -> Any:
    """Returns what was given to `encode`; whatever unpickling raises is raised here."""
    return None if payload is None else pickle.loads(payload)


def _read(number: int, size: int) -> bytes:
    data = os.read(number, size)
    if len(data) < size:
        parts = [data]
        while (missing := size - sum(map(len, parts))) > 0:
            if not parts[-1]:
                raise EOFError("the other end of the pipe was closed")
            parts.append(os.read(number, missing))
        data = b"".join(parts)
    return data


SPIN_S = 1e-3  # to sleep and be woken costs more than a cheap env's step; benchmarks/bench_waiting.py measures it


class Waiter:
    """Waits until a pipe can be read or a process has ended, first awake, then asleep.

    To sleep and be woken costs more than a cheap env's step, so for the first millisecond a waiter asks
    again and again, giving its core to whoever wants it in between, and only then goes to sleep.

    Args:
        sources: Connections and process sentinels.
        spin: Whether to stay awake at first; pays only where every worker can have a core.
    """

    def __init__(self, sources: Sequence[Connection | int], *, spin: bool):
        self._sources = list(sources)
        self._index = {_number(source): index for index, source in enumerate(sources)}
        # One poll object for good: multiprocessing's own wait() builds a selector at each call.
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            for number in self._index:
                self._poll.register(number, select.POLLIN)
        self._spin_s = SPIN_S if spin and self._poll is not None and hasattr(os, "sched_yield") else 0.0

    def ready(self, deadline: float | None = None) -> list[int]:
        """Returns the indices of the sources that are ready; none if the deadline has passed.

        Args:
            deadline: On the clock of `time.monotonic`, in seconds; None to wait without one.
        """
        if self._poll is None:
            found = wait(self._sources, None if deadline is None else max(deadline - time.monotonic(), 0.0))
            return [self._index[_number(source)] for source in found]
        events = self._poll.poll(0)
        if not events and self._spin_s:
            awake_until = time.monotonic() + self._spin_s
            if deadline is not None:
                awake_until = min(awake_until, deadline)
            while not events and time.monotonic() < awake_until:
                os.sched_yield()
                events = self._poll.poll(0)
        if not events:
            events = self._poll.poll(None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1e3)
        return [self._index[number] for number, _ in events]


def _number(source: HasFileno | int) -> int:
    return source if isinstance(source, int) else source.fileno()
