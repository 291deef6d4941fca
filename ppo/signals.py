"""signals.py: stop_on_signal: Ctrl-C and SIGTERM end a run between two updates."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stop(threading.Event):
    """Set by a signal, whose number it keeps."""

    number: int | None = None


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Gives an event that SIGINT or SIGTERM sets, so that a run ends between two updates.

    A second signal does what it did before this run. One that is ignored stays so.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous: dict[int, Callable | int | None] = {}

    def handle(number: int, _: Any) -> None:
        stop.number = number
        stop.set()
        signal.signal(number, previous[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.getsignal(number)  # Order: before `handle` may look for it
            signal.signal(number, handle)
    try:
        yield stop
    finally:
        for changed, handler in previous.items():
            signal.signal(changed, handler)
