"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first ends a run after the current update, a second ends the process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

HANGUP = getattr(signal, "SIGHUP", None)
"""The signal that a lost terminal sends, None on Windows. It may arrive from both the kernel and the shell, or
together with SIGTERM from a batch system, so it never counts as a second signal."""

STOPPING = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None)
"""The signals that stop a run."""

SAME_S = 0.1
"""Interval in seconds within which signals count as one. `timeout` and batch systems send each signal twice."""


class Stop(threading.Event):
    """An event that a signal sets.

    Attributes:
        number: Number of the signal, or None if the event was not set by a signal.
    """

    number: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Yields an event that SIGINT, SIGTERM or SIGHUP sets, so that a run can end between two updates.

    A second signal goes to the handler that was installed before this block. A default handler ends the process at
    once; a Python handler runs when C++ code returns. An ignored signal stays ignored. Outside the main thread, this
    function handles no signal.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    found = {number: signal.getsignal(number) for number in STOPPING}
    # None is a handler that was installed from C, which Python cannot restore.
    previous: dict[int, Any] = {number: how for number, how in found.items() if how not in (signal.SIG_IGN, None)}
    second = _Second()

    def handle(number: int, frame: Any) -> None:
        if number == HANGUP or not second.counts():
            stop.number = stop.number or number
            stop.set()
        elif callable(previous[number]):
            previous[number](number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    fatal = {number for number, how in previous.items() if how == signal.SIG_DFL}
    for number in previous:
        signal.signal(number, handle)
    try:
        with exit_on_second_signal(fatal) if fatal else nullcontext():
            yield stop
    finally:
        for number, how in previous.items():
            signal.signal(number, how)


@contextmanager
def exit_on_second_signal(numbers: Collection[int]) -> Iterator[None]:
    """Ends the process with code 128 + n on the second of these signals, even while the main thread is inside C++.

    SIGHUP does not count.

    Python runs signal handlers between bytecodes of the main thread, which XLA or a large allocation can occupy for
    minutes. A second thread therefore reads the signal numbers, which Python's C-level handler writes immediately. Call
    this in the main thread, after installing Python handlers for the signals. Nothing is cleaned up, but workers exit
    when this process is gone.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _watched.append(writer.fileno())
    thread = threading.Thread(target=_watch, args=(reader, frozenset(numbers) - {HANGUP}, previous), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        _watched.pop()
        writer.close()
        thread.join()
        reader.close()


def _unwatch() -> None:
    """Stops a forked child from reporting its signals to its parent's watcher."""
    if _watched and threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


_watched: list[int] = []  # file descriptors that receive signal numbers

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unwatch)


def _watch(reader: socket.socket, numbers: Collection[int], previous: int) -> None:
    second = _Second()
    while received := reader.recv(64):
        for number in received:
            if previous != -1:
                with suppress(OSError):  # the reader is closed
                    os.write(previous, bytes([number]))
            if number in numbers and second.counts():
                os._exit(128 + number)


class _Second:
    """Distinguishes a second signal from repetitions of the first within `SAME_S`."""

    def __init__(self) -> None:
        self._first: float | None = None

    def counts(self) -> bool:
        """Records a signal that arrives now, and returns whether it counts as the second."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first >= SAME_S
