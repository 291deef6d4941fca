"""What travels in the pipes between parent and workers, and how either end waits.

| message        | sender | payload                               | reply                       | worker is |
|----------------|--------|---------------------------------------|-----------------------------|-----------|
| START          | parent | environment; which envs to build, how | READY: spaces, metadata     | new       |
| ATTACH         | parent | layout; then the block itself         | READY                       | idle      |
| ATTACH_INFOS   | parent | schema, layout; then the block itself | READY                       | idle      |
| RESUME s       | parent | which episodes were over              | READY                       | idle      |
| RESET s        | parent | seeds, options, mask                  | READY: objects, if any       | idle      |
| STEP s         | parent | nothing; or actions that do not fit   | READY: objects, if any       | idle      |
| STEP_ROWS s    | parent | pairs: row, action if it does not fit | READY row: objects, for each | any       |
| CALL           | parent | name, arguments                       | READY: results              | idle      |
| APPLY          | parent | function, rows                        | READY: results              | idle      |
| SET_ATTR       | parent | name, values                          | READY                       | idle      |
| GET_STATE      | parent | nothing                               | READY: states of its envs   | idle      |
| SET_STATE s    | parent | states; rows s are as they were       | READY                       | idle      |
| CLOSE          | parent | nothing                               | READY, and it exits         | any       |
| READY          | worker | see above                             |                             | busy      |
| READY_ROWS     | worker | rows that were stepped as one, objects  |                             | busy      |
| ERROR          | worker | a `Failure`                           |                             | busy      |

A message is a length (4 bytes), a kind (1 byte), a slot (4 bytes; a row in replies to STEP_ROWS) and a pickled payload
or nothing. Every reply echoes its command's slot. Rows that a worker steps in one call are answered by one
READY_ROWS. A worker is busy from the parent's message to its own reply, so at most one message is in flight in a pipe,
except for STEP_ROWS, of which there may be as many as the worker has rows.

The parent never blocks on a pipe: a `Channel` writes what fits, reads what has arrived, and keeps the remainder for
later, so it notices deadlines and dead processes between chunks. A worker has nothing else to do, so it blocks.

Order: every row write precedes send(READY); the parent reads rows only after receiving it.
Order: every action write precedes send(STEP or STEP_ROWS); the worker reads actions only after receiving it.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import cloudpickle

from vecenv.errors import MessageTooLarge

if TYPE_CHECKING:
    from _typeshed import HasFileno

_POSIX = os.name == "posix"
_HEADER = struct.Struct("!BI")
# The length precedes the header, as in multiprocessing. One system call for both saves about 10 us a step.
_FRAME = struct.Struct("!iBI")
_FRAME_SIZE, _unpack = _FRAME.size, _FRAME.unpack
_SIZE = struct.Struct("!i")
_SHORT = _HEADER.size  # bytes of a message without a payload; most have none
_LENGTH = _SIZE.pack(_SHORT)
_CHUNK = 1 << 20  # bytes that one system call reads at most
_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)

MAX_BYTES = 2**31 - 1
"""Size limit of a message in bytes: its length is a signed 32-bit integer."""


Message = tuple[int, int, bytes | bytearray | None]
"""Kind, slot, and the payload for `decode`; None if there is none."""


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


_REPLIES = frozenset(map(int, (Kind.READY, Kind.READY_ROWS, Kind.ERROR)))
COMMANDS = tuple(kind for kind in Kind if kind not in _REPLIES)


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
    """Returns the bytes of one message; a payload of None costs nothing.

    Raises:
        MessageTooLarge: If the message is longer than `MAX_BYTES`.
    """
    if payload is None:
        return _HEADER.pack(kind, slot)
    # cloudpickle, because envs, infos and arguments may hold lambdas and classes of __main__.
    body = cloudpickle.dumps(payload)
    size = _HEADER.size + len(body)
    if size > MAX_BYTES:
        raise MessageTooLarge(
            f"a {kind.name} message of {size:,} bytes was not sent: the limit is {MAX_BYTES:,}. Pass less data, "
            "or have the envs load it themselves."
        )
    return _HEADER.pack(kind, slot) + body


def decode(payload: bytes | bytearray | None) -> Any:
    """Returns what was given to `encode`; whatever unpickling raises is raised here."""
    return None if payload is None else pickle.loads(payload)


def slot_of(message: bytes) -> int:
    """Returns the slot of what `encode` returned."""
    return int.from_bytes(message[1:_SHORT], "big")


def send(connection: Connection, message: bytes) -> None:
    """Sends what `encode` returned, from a worker, and waits until the pipe has taken all of it."""
    if not _POSIX:
        connection.send_bytes(message)
        return
    number = connection.fileno()
    if len(message) == _SHORT:
        os.write(number, _LENGTH + message)
    elif len(message) <= _CHUNK:
        _write(number, _SIZE.pack(len(message)) + message)
    else:  # copying a long message costs more than a second system call
        _write(number, _SIZE.pack(len(message)))
        _write(number, message)


def receive(connection: Connection) -> Message:
    """Waits, in a worker, for one message.

    Raises:
        EOFError, OSError: If the parent has ended.
    """
    if not _POSIX:
        return _split(connection.recv_bytes())
    number = connection.fileno()
    length, kind, slot = _FRAME.unpack(_read(number, _FRAME.size))
    return kind, slot, _read(number, length - _HEADER.size) if length > _HEADER.size else None


def _write(number: int, data: bytes) -> None:
    written = os.write(number, data)
    while written < len(data):
        written += os.write(number, memoryview(data)[written:])


def _read(number: int, size: int) -> bytes | bytearray:
    data: bytes | bytearray = os.read(number, size if size < _CHUNK else _CHUNK)
    if len(data) < size:
        data = bytearray(data)
        while len(data) < size:
            more = os.read(number, min(size - len(data), _CHUNK))
            if not more:
                raise EOFError("the other end of the pipe was closed")
            data += more
    return data


def _split(message: bytes) -> Message:
    kind, slot = _HEADER.unpack_from(message)
    return kind, slot, message[_HEADER.size :] or None


class BadFrame(Exception):
    """Bytes in a pipe that are not a message."""


class Channel:
    """The parent's end of a pipe to one worker. No method blocks, except where the system has no `poll`.

    Args:
        connection: To the worker.

    Attributes:
        connection: As given, for handing over file descriptors.
        unsent: Data that did not fit into the pipe. If there is any, call `flush` when the pipe is writable.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        whole = not _POSIX or not hasattr(select, "poll")
        self._socket = None if whole else socket.socket(fileno=os.dup(connection.fileno()))
        self.unsent: deque[memoryview] = deque()
        self._head = b""  # the part of a frame's head that has arrived
        self._kind_and_slot = (0, 0)  # of the message whose body is arriving,
        self._body: bytearray | None = None  # which is as long as the whole body from the start,
        self._missing = 0  # but lacks this many bytes at its end

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self.connection.fileno() if self._socket is None else self._socket.fileno()

    def put(self, message: bytes) -> bool:
        """Sends what `encode` returned, and returns whether all of it fit; the remainder is kept for `flush`.

        Raises:
            BrokenPipeError, ConnectionResetError: If the worker is gone.
        """
        if self._socket is None:
            self.connection.send_bytes(message)
            return True
        if len(message) == _SHORT and not self.unsent:
            framed = _LENGTH + message
            try:
                sent = self._socket.send(framed, _AT_ONCE)
            except BlockingIOError:
                sent = 0
            if sent == len(framed):
                return True
            self.unsent.append(memoryview(framed)[sent:])
            return False
        self.unsent += [memoryview(_SIZE.pack(len(message))), memoryview(message)]
        return self.flush()

    def flush(self) -> bool:
        """Sends as much of `unsent` as fits, and returns whether nothing is left.

        Raises:
            BrokenPipeError, ConnectionResetError: If the worker is gone.
        """
        while self.unsent and self._socket is not None:
            try:
                sent = self._socket.send(self.unsent[0], _AT_ONCE)
            except BlockingIOError:
                return False
            self.unsent[0] = self.unsent[0][sent:]
            if not self.unsent[0]:
                self.unsent.popleft()
        return True

    def take(self) -> Message | None:
        """Returns the next message, or None if it has not arrived completely.

        Raises:
            EOFError, ConnectionResetError: If the worker is gone.
            BadFrame: If the bytes in the pipe are not a reply.
        """
        if self._socket is None:
            return _split(self.connection.recv_bytes()) if self.connection.poll() else None
        if self._body is None:
            try:
                head = self._socket.recv(_FRAME_SIZE - len(self._head), _AT_ONCE)
            except BlockingIOError:
                return None
            if not head:
                raise EOFError("the other end of the pipe was closed")
            if self._head:
                head, self._head = self._head + head, b""
            if len(head) < _FRAME_SIZE:
                self._head = head
                return None
            length, kind, slot = _unpack(head)
            if length < _SHORT or kind not in _REPLIES:  # before waiting for a body that may never come
                raise BadFrame(f"bytes that are not a reply (length {length}, kind {kind})")
            if length == _SHORT:
                return kind, slot, None
            self._kind_and_slot, self._missing = (kind, slot), length - _SHORT
            self._body = bytearray(self._missing)
        return self._taken_with_body(self._body)

    def _taken_with_body(self, body: bytearray) -> Message | None:
        budget = 16 * _CHUNK  # bytes to read before the caller checks its deadline
        while self._missing and budget > 0:
            try:
                count = self._socket.recv_into(memoryview(body)[-self._missing :][:_CHUNK], 0, _AT_ONCE)  # type: ignore[union-attr]
            except BlockingIOError:
                return None
            if not count:
                raise EOFError("the other end of the pipe was closed")
            self._missing -= count
            budget -= count
        if self._missing:
            return None
        self._body = None
        return *self._kind_and_slot, body

    def close(self) -> None:
        """Closes the pipe."""
        if self._socket is not None:
            self._socket.close()
        self.connection.close()


SPIN_S = 1e-3  # to sleep and be woken costs more than a cheap env's step; benchmarks/bench_waiting.py measures it


class Waiter:
    """Waits until a pipe can be read or a process has ended, first awake, then asleep.

    To sleep and be woken costs more than a cheap env's step, so for the first millisecond a waiter asks
    again and again, giving its core to whoever wants it in between, and only then goes to sleep.

    Args:
        sources: Channels, connections and process sentinels.
        spin: Whether to stay awake at first; pays only where every worker can have a core.
    """

    def __init__(self, sources: Sequence[HasFileno | int], *, spin: bool):
        self._sources: dict[int, Any] = dict(enumerate(sources))
        self._numbers = [_number(source) for source in sources]
        self._index = {number: index for index, number in enumerate(self._numbers)}
        # One poll object for good: multiprocessing's own wait() builds a selector at each call.
        self._poll = select.poll() if hasattr(select, "poll") else None
        if self._poll is not None:
            for number in self._numbers:
                self._poll.register(number, select.POLLIN)
        self._spin_s = SPIN_S if spin and self._poll is not None and hasattr(os, "sched_yield") else 0.0

    def watch_for_room(self, index: int, wanted: bool) -> None:
        """Sets whether source `index` also counts as ready when it can be written to."""
        if self._poll is not None:
            self._poll.modify(self._numbers[index], select.POLLIN | (select.POLLOUT if wanted else 0))

    def forget(self, index: int) -> None:
        """Ignores source `index` from now on; may be called twice."""
        if self._sources.pop(index, None) is not None and self._poll is not None:
            self._poll.unregister(self._numbers[index])

    def ready(self, deadline: float | None = None) -> list[int]:
        """Returns the indices of the sources that are ready; none if the deadline has passed.

        Args:
            deadline: On the clock of `time.monotonic`, in seconds; None to wait without one.
        """
        if self._poll is None:
            found = wait(
                list(self._sources.values()), None if deadline is None else max(deadline - time.monotonic(), 0.0)
            )
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
