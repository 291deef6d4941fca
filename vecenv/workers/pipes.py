"""Pipes between the parent and its workers: classes that send frames, receive them and wait for them.

The parent never blocks on a pipe. A `Channel` writes what fits, reads what has arrived, and keeps the remainder for
later, so the parent notices deadlines and dead processes between chunks. A worker has nothing else to do, so its
`WorkerPipe` blocks.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from vecenv.memory.block import blocking_socket, out_of_memory
from vecenv.workers.protocol import FRAME, HEADER_SIZE, REPLIES, Message

if TYPE_CHECKING:
    from _typeshed import HasFileno

_FRAME_SIZE, _unpack = FRAME.size, FRAME.unpack
_CHUNK = 1 << 20  # maximum number of bytes that one system call reads
# A dead worker is an error even in a process in which SIGPIPE has its default action, which is to end the process.
_AT_ONCE = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)

SLICE_S = 1.0  # longest wait before a deadline reads the clock again
LATE_S = 0.5  # if the clock is read later than this, this process was suspended
SPIN_S = 1e-3  # sleeping and waking up takes longer than a cheap env's step, see benchmarks/bench_waiting.py


class WorkerPipe:
    """A worker's end of the pipe to the parent. Its methods block."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._number = connection.fileno()  # looked up once, because each step reads and writes

    def send(self, frame: bytes) -> None:
        """Sends a frame and waits until all of it is in the pipe."""
        written = os.write(self._number, frame)
        while written < len(frame):
            written += os.write(self._number, memoryview(frame)[written:])

    def receive(self) -> Message:
        """Waits for one message.

        Raises:
            EOFError, OSError: If the parent is gone.
        """
        head = os.read(self._number, _FRAME_SIZE)  # one system call for length and header saves about 10 us a step
        if len(head) < _FRAME_SIZE:
            head = bytes(self._rest(bytearray(head), _FRAME_SIZE))
        length, kind, slot = _unpack(head)
        if length == HEADER_SIZE:
            return kind, slot, None
        return kind, slot, self._rest(bytearray(), length - HEADER_SIZE)

    def _rest(self, data: bytearray, size: int) -> bytearray:
        """Reads until there are `size` bytes of data."""
        while len(data) < size:
            more = os.read(self._number, min(size - len(data), _CHUNK))
            if not more:
                raise EOFError("the other end of the pipe was closed")
            data += more
        return data


class BadFrame(Exception):
    """Bytes in a pipe that are not a message."""


class Channel:
    """The parent's end of a pipe to one worker. No method blocks.

    All methods raise BrokenPipeError, ConnectionResetError or EOFError if the worker is gone.

    Attributes:
        connection: The connection, for passing file descriptors.
        unsent: Data that did not fit in the pipe. If there is any, call `flush` when the pipe is writable.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self._socket = blocking_socket(connection)
        self.unsent: deque[memoryview] = deque()
        self._head = b""  # the part of a frame's head that has arrived
        self._kind_and_slot = (0, 0)  # of the message whose body is arriving
        self._body: bytearray | None = None  # allocated at its full length
        self._missing = 0  # bytes of the body that have not arrived

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._socket.fileno()

    def put(self, frame: bytes) -> bool:
        """Sends a frame and returns whether all of it fit. The remainder is kept for `flush`.

        Only `flush` empties `unsent`, so that a caller that waits for room learns when all frames have been sent.
        """
        if self.unsent:
            self.unsent.append(memoryview(frame))
            return False
        try:
            sent = self._socket.send(frame, _AT_ONCE)
        except BlockingIOError:
            sent = 0
        if sent == len(frame):
            return True
        self.unsent.append(memoryview(frame)[sent:])
        return False

    def flush(self) -> bool:
        """Sends as much of `unsent` as fits, and returns whether nothing is left."""
        while self.unsent:
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
            BadFrame: If the bytes in the pipe are not a reply.
            SharedMemoryFull: If there is no memory for the message.
        """
        if self._body is None:
            try:
                head = self._socket.recv(_FRAME_SIZE - len(self._head), _AT_ONCE)
            except BlockingIOError:
                return None
            if len(head) < _FRAME_SIZE:
                if not head:
                    raise EOFError("the other end of the pipe was closed")
                self._head += head
                if len(self._head) < _FRAME_SIZE:
                    return None
                head, self._head = self._head, b""
            length, kind, slot = _unpack(head)
            if length < HEADER_SIZE or kind not in REPLIES:  # before waiting for a body that may never come
                raise BadFrame(f"bytes that are not a reply (length {length}, kind {kind})")
            if length == HEADER_SIZE:
                return kind, slot, None
            self._kind_and_slot, self._missing = (kind, slot), length - HEADER_SIZE
            try:
                self._body = bytearray(self._missing)
            except MemoryError as error:
                raise out_of_memory(error) from error
        return self._take_body(self._body)

    def _take_body(self, body: bytearray) -> Message | None:
        budget = 16 * _CHUNK  # bytes to read before the caller checks its deadline
        while self._missing and budget > 0:
            try:
                count = self._socket.recv_into(memoryview(body)[-self._missing :][:_CHUNK], 0, _AT_ONCE)
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
        self._socket.close()
        self.connection.close()


class Deadline:
    """The end of a wait of some seconds. Time during which this process was suspended does not count.

    Ctrl-Z, `docker pause` and `scontrol suspend` stop all processes of a job, but not the clock. Waits are therefore
    divided into slices. After a slice that ends late, the wait starts again.

    With `extensible`, `extend` moves the deadline. As in Gymnasium, the timeout of a step, a reset or a call limits the
    wait for the first byte of a message, so that a large message that has begun to move can arrive whole.
    """

    def __init__(self, seconds: float, *, extensible: bool = False):
        self._seconds, self._extensible = seconds, extensible
        self._due = time.monotonic()  # when the clock should be read next, at the latest
        self._end = self._due + seconds

    def resume(self) -> None:
        """Begins to wait again. The time since the last wait was this process's own work, not a suspension."""
        self._due = time.monotonic()

    def restart(self) -> None:
        """Starts the wait again with the full number of seconds, and extends the deadline."""
        self._end = time.monotonic() + self._seconds
        self.extend()

    def extend(self) -> None:
        """Moves the deadline to at least a second from now, if it is extensible."""
        if self._extensible:
            self._seconds = max(self._seconds, SLICE_S)
            self._end = max(self._end, time.monotonic() + SLICE_S)

    def slice(self) -> float:
        """Returns for how many seconds to wait before the next call; 0 if the deadline has passed."""
        now = self.awake()
        seconds = min(max(self._end - now, 0.0), SLICE_S)
        self._due = now + seconds
        return seconds

    def awake(self) -> float:
        """Ends a slice, and returns the time. If the slice ended late, the wait starts again."""
        now = time.monotonic()
        if now > self._due + LATE_S:
            self._end = now + self._seconds
        return now


class Waiter:
    """Waits until a pipe can be read or a process has ended: spins first, then sleeps.

    Sleeping and waking up takes longer than the step of a cheap env. With `spin`, a waiter therefore polls repeatedly
    for the first millisecond, yielding its core between polls. This pays off only if every worker can have a core.
    """

    def __init__(self, sources: Sequence[HasFileno | int], *, spin: bool):
        numbers = [source if isinstance(source, int) else source.fileno() for source in sources]
        self._index = {number: index for index, number in enumerate(numbers)}
        # One poll object is reused: multiprocessing's own wait() builds a selector on each call.
        self._poll = select.poll()
        for number in numbers:
            self._poll.register(number, select.POLLIN)
        self._spin_s = SPIN_S if spin and hasattr(os, "sched_yield") else 0.0

    def watch_for_room(self, source: HasFileno, wanted: bool) -> None:
        """Sets whether a source also counts as ready when it can be written to."""
        self._poll.modify(source, select.POLLIN | (select.POLLOUT if wanted else 0))

    def forget(self, source: HasFileno | int) -> None:
        """Ignores a source from now on. May be called twice."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(source)

    def ready(self, deadline: Deadline | None = None) -> list[int]:
        """Returns the indices of the sources that are ready; none if the deadline has passed."""
        events = self._poll.poll(0)
        if not events and self._spin_s and (deadline is None or deadline.slice()):
            spin_until = time.monotonic() + self._spin_s
            while not events and time.monotonic() < spin_until:
                os.sched_yield()
                events = self._poll.poll(0)
        left: float | None = None
        while not events and left != 0.0:
            left = None if deadline is None else deadline.slice()
            events = self._poll.poll(None if left is None else left * 1e3)
        if deadline is not None:
            deadline.awake()  # also if a message has ended the slice: it may be the first after a suspension
        return [self._index[number] for number, _ in events]
