"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first ends a run after the current update, a second ends the process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a run. A lost terminal sends SIGHUP from both the kernel and the shell, and a batch system may
send it together with SIGTERM, so SIGHUP never counts as a second signal."""

SAME_S = 0.1  # seconds within which signals count as one; `timeout` and batch systems send each twice


class Stop(threading.Event):
    """An event that the first signal sets. `number` is the number of that signal, or None before."""

    number: int | None = None


class _Second:
    """Distinguishes a second signal from SIGHUP and from repetitions of the first within `SAME_S`."""

    _first_s: float | None = None

    def is_(self, number: int) -> bool:
        """Records a signal that arrives now, and returns whether it counts as the second."""
        if number == signal.SIGHUP:
            return False
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            return False
        return now - self._first_s >= SAME_S


@contextmanager
def on_first_signal(call: Callable[[int], None]) -> Iterator[None]:
    """Calls a function with the number of the first SIGINT, SIGTERM or SIGHUP, and of those that count as the same.

    A second signal goes to the handler that was installed before this block, once C++ code returns. An ignored signal
    stays ignored: a script's background jobs ignore SIGINT, and `nohup` ignores SIGHUP. Outside the main thread, this
    function handles no signal.
    """
    second = _Second()
    previous: dict[int, Any] = {}

    def handle(number: int, _: Any) -> None:
        if second.is_(number):
            signal.signal(number, previous[number])
            signal.raise_signal(number)
        else:
            call(number)

    if threading.current_thread() is threading.main_thread():
        for one in STOPPING:
            # None is a handler that was installed from C, which Python cannot restore.
            if signal.getsignal(one) not in (signal.SIG_IGN, None):
                previous[one] = signal.signal(one, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Yields an event that SIGINT, SIGTERM or SIGHUP sets, so that a run can end between two updates."""
    stop = Stop()

    def note(number: int) -> None:
        stop.number = stop.number or number
        stop.set()

    with on_first_signal(note):
        yield stop


@contextmanager
def exit_on_second_signal() -> Iterator[None]:
    """Ends the process with code 128 + n on a second SIGINT or SIGTERM, even while the main thread is inside C++.

    Python runs signal handlers between bytecodes of the main thread, which XLA or a large allocation can occupy for
    minutes. A second thread therefore reads the signal numbers, which Python's C-level handler writes immediately. Call
    this in the main thread of a process that has no event loop, after installing Python handlers for the signals.
    Nothing is cleaned up, but workers exit when this process is gone.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        second = _Second()
        with reader:
            while received := reader.recv(1):
                if received[0] in STOPPING and second.is_(received[0]):
                    os._exit(128 + received[0])

    def unwatch() -> None:
        with suppress(ValueError):  # not in the main thread
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=unwatch)  # a child's signals must not count as those of this process
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        unwatch()
        writer.close()
        thread.join()
