"""Handling of signals that stop a run: the first ends it after the current update, a second ends the process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import vecenv

NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals with which batch systems announce the end of a job. Handlers of the user's script have precedence."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)
"""The signals that stop a run."""

REPEATED = (signal.SIGHUP, *NOTICES)
"""The signals that never count as a second signal. A lost terminal sends SIGHUP from both the kernel and the shell, a
batch system may send it together with SIGTERM, and the kernel repeats SIGXCPU every second."""

SAME_S = 0.1  # seconds within which signals count as one; `timeout` and batch systems send each twice


class Stop(threading.Event):
    """An event that the first signal sets. `number` is the number of that signal, or None before."""

    number: int | None = None

    def explains(self, error: BaseException) -> bool:
        """Returns whether the signal explains an error: sent to the process group, it kills the workers as well."""
        return self.is_set() and isinstance(error, vecenv.WorkerDied)


class _Second:
    """Distinguishes a second signal from those in `REPEATED` and from repetitions of the first within `SAME_S`."""

    _first_s: float | None = None

    def is_(self, number: int) -> bool:
        """Records a signal that arrives now, and returns whether it counts as the second."""
        if number in REPEATED:
            return False
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
            return False
        return now - self._first_s >= SAME_S


class _Handler:
    """The handlers of one block of `on_first_signal`."""

    def __init__(self, call: Callable[[int], None]):
        self._call, self._second = call, _Second()
        self.previous: dict[int, Any] = {}  # the handlers that were installed before, by signal

    def __call__(self, number: int, _: Any) -> None:
        if self._second.is_(number):
            signal.signal(number, self.previous[number])
            signal.raise_signal(number)
        else:
            self._call(number)


def _may_handle(number: int) -> bool:
    """Returns whether a run may replace the current handler of a signal."""
    handler = signal.getsignal(number)
    if number not in NOTICES:
        return handler not in (signal.SIG_IGN, None)  # None: installed from C, which Python cannot restore
    # Python does not know handlers that were installed from C later, for example by `faulthandler.register`.
    installed = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))(number)
    return installed is None or isinstance(handler, _Handler)


@contextmanager
def on_first_signal(call: Callable[[int], None]) -> Iterator[None]:
    """Calls a function with the number of the first signal in `STOPPING`, and of those that count as the same.

    A second signal goes to the handler that was installed before this block, once C++ code returns. An ignored signal
    stays ignored: a script's background jobs ignore SIGINT, and `nohup` ignores SIGHUP. Outside the main thread, this
    function handles no signal.
    """
    handler = _Handler(call)
    if threading.current_thread() is threading.main_thread():
        for number in filter(_may_handle, STOPPING):
            handler.previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for handled, previous in handler.previous.items():
            signal.signal(handled, previous)


@contextmanager
def stop_on_signal(stop: Stop | None = None) -> Iterator[Stop]:
    """Yields an event that a signal sets, so that a run can end between two updates. None: a new event."""
    stop = Stop() if stop is None else stop

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

    os.register_at_fork(after_in_child=unwatch)  # a child's signals must not stop this process
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        unwatch()
        writer.close()
        thread.join()
