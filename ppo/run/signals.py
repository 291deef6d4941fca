"""Handling of signals that stop a run: the first ends it after the current update, a second ends the process.

The first also ends the process if the run has not learned anything yet.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import vecenv
from ppo.errors import is_from_env

NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals with which batch systems announce the end of a job. Handlers of the user's script have precedence."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES)
"""The signals that stop a run."""

REPEATED = (signal.SIGHUP, *NOTICES)
"""The signals that never count as a second signal. A lost terminal sends SIGHUP from both the kernel and the shell, a
batch system may send it together with SIGTERM, and the kernel repeats SIGXCPU every second."""

SAME_S = 0.1  # seconds within which signals count as one; `timeout` and batch systems send each twice

PYTHON_S = 0.5  # seconds after which the main thread, if it has not handled a signal, is assumed to be in C++


class Stop(threading.Event):
    """An event that the first signal sets.

    Attributes:
        number: The number of that signal; None before.
        kept: Returns a clause that says which part of the run is saved. None: it has learned nothing that could be
            saved, so there is no reason to wait for the end of the update.
        discard: Removes what a run that has learned nothing leaves behind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number: int | None = None
        self.kept: Callable[[], str | None] = lambda: ""
        self.discard: Callable[[], None] = lambda: None

    def request(self, number: int) -> None:
        """Sets the event."""
        self.number = self.number or number
        self.set()

    def explains(self, error: BaseException) -> bool:
        """Returns whether the signal may explain an error.

        Ctrl-C signals the whole process group, including workers and the simulators with which envs communicate.
        """
        return self.is_set() and (isinstance(error, vecenv.WorkerDied) or is_from_env(error))


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

    def wait_again(self) -> None:
        """Counts the time from now, because repetitions of the first signal could not be read until now."""
        if self._first_s is not None:
            self._first_s = time.monotonic()


class _Handler:
    """The handlers of one block of `on_first_signal`."""

    def __init__(self, call: Callable[[int, Any], None]):
        self._call, self._second = call, _Second()
        self.previous: dict[int, Any] = {}  # the handlers that were installed before, by signal

    def __call__(self, number: int, _: Any) -> None:
        if self._second.is_(number):
            signal.signal(number, self.previous[number])
            signal.raise_signal(number)
        else:
            self._call(number, self.previous[number])


def _may_handle(number: int) -> bool:
    """Returns whether a run may replace the current handler of a signal."""
    handler = signal.getsignal(number)
    if number not in NOTICES:
        return handler not in (signal.SIG_IGN, None)  # None: installed from C, which Python cannot restore
    # Python does not know handlers that were installed from C later, for example by `faulthandler.register`.
    installed = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))(number)
    return installed is None or isinstance(handler, _Handler)


def on_first_signal(call: Callable[[int], None]) -> AbstractContextManager[object]:
    """Calls a function with the number of the first signal in `STOPPING`, and of those that count as the same.

    A second signal goes to the handler that was installed before this block, once C++ code returns. An ignored signal
    stays ignored: a script's background jobs ignore SIGINT, and `nohup` ignores SIGHUP. Outside the main thread, this
    function handles no signal.
    """
    return _handled(lambda number, _: call(number))


@contextmanager
def _handled(call: Callable[[int, Any], None]) -> Iterator[Collection[int]]:
    """Yields the signals that are handled. See `on_first_signal`; the function also gets the previous handler."""
    handler = _Handler(call)
    if threading.current_thread() is threading.main_thread():
        for number in filter(_may_handle, STOPPING):
            handler.previous[number] = signal.signal(number, handler)
    try:
        yield handler.previous
    finally:
        for handled, previous in handler.previous.items():
            signal.signal(handled, previous)


_runs: list[tuple[Stop, Collection[int]]] = []  # the runs in progress, and the signals that stop them


@contextmanager
def stop_on_signal(stop: Stop | None = None) -> Iterator[Stop]:
    """Yields an event that a signal sets, so that a run can end between two updates. None: a new event.

    If there is nothing to save (`Stop.kept`), the signal also goes to the previous handler, which may raise; if it does
    not, KeyboardInterrupt is raised.
    """
    stop = Stop() if stop is None else stop

    def note(number: int, previous: Any) -> None:
        ends = stop.kept() is None and not stop.is_set()
        stop.request(number)
        if ends:
            if callable(previous):
                previous(number, None)
            raise KeyboardInterrupt

    with _handled(note) as numbers:
        _runs.append((stop, numbers))
        try:
            yield stop
        finally:
            _runs.pop()


@contextmanager
def exit_on_second_signal() -> Iterator[None]:
    """Ends the process with code 128 + n on a second SIGINT or SIGTERM, even while the main thread is inside C++.

    Python runs signal handlers between bytecodes of the main thread, which XLA or a large allocation can occupy for
    minutes. A second thread therefore reads the signal numbers, which Python's C-level handler writes immediately. Call
    this in the main thread of a process that has no event loop, after installing Python handlers for the signals.
    Nothing is cleaned up, but workers exit when this process is gone. The thread also tells the run in progress of the
    first signal (`stop_on_signal`), and says which part of the run is saved before it ends the process.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        second = _Second()
        with reader:
            while received := reader.recv(1):
                number = received[0]
                if number not in STOPPING:
                    continue
                stop, handled = next(iter(_runs[-1:]), (None, ()))
                ends = second.is_(number)
                if not ends and stop is not None and number in handled:
                    ends = not _reached(stop, number)
                    second.wait_again()
                if ends:
                    if stop is not None:
                        kept = stop.kept()
                        if kept is None:
                            with suppress(Exception):
                                stop.discard()
                        _say("nothing had been learned yet" if kept is None else kept)
                    os._exit(128 + number)

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


def _reached(stop: Stop, number: int) -> bool:
    """Tells a run of its first signal. Returns False if it should end at once and its main thread is inside C++."""
    if stop.kept() is None:
        return stop.wait(PYTHON_S)  # set by the handler in the main thread, which ends the run
    stop.request(number)
    return True


def _say(sentence: str) -> None:
    """Writes a line to stderr, without a lock that the main thread may hold, and unless the reader is stuck."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"\nstopped at once: {sentence}\n".encode(errors="backslashreplace"))
