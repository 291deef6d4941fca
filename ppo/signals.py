"""signals.py: Ctrl-C and SIGTERM: the first ends a run between two updates, the second ends the process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

SAME_S = 0.1
"""Seconds within which signals count as one: `timeout` and batch systems send each of theirs twice."""


class Stop(threading.Event):
    """Set by a signal, whose number it keeps."""

    number: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Gives an event that SIGINT or SIGTERM sets, so that a run ends between two updates.

    A second signal does what it did before this run: at once if that is to end the process, and between two calls of
    C++ if it is a handler in Python. A signal that is ignored stays so. Outside the main thread nothing is handled.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    previous: dict[int, Any] = {number: how for number, how in found.items() if how != signal.SIG_IGN}
    second = _Second()

    def handle(number: int, frame: Any) -> None:
        if not second.counts():
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

    Python runs handlers between two steps of the main thread, which XLA or a large allocation may keep busy for
    minutes. So another thread reads the numbers of signals, which Python's C handler writes at once. It needs handlers
    in Python, and the main thread. Nothing is cleaned up; workers end by themselves when this process has.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader, frozenset(numbers), previous), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        writer.close()
        thread.join()
        reader.close()


def _watch(reader: socket.socket, numbers: Collection[int], previous: int) -> None:
    second = _Second()
    while received := reader.recv(64):
        for number in received:
            if previous != -1:
                with suppress(OSError):  # nobody reads there any more
                    os.write(previous, bytes([number]))
            if number in numbers and second.counts():
                os._exit(128 + number)


class _Second:
    """Tells the first signal, and what repeats it, from a second one."""

    def __init__(self) -> None:
        self._first: float | None = None

    def counts(self) -> bool:
        """Returns whether a signal that comes now is a second one."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            return False
        return now - self._first >= SAME_S
