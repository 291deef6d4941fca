"""Waits until all ranks have started, before TensorFlow connects them.

TensorFlow waits, too, but its wait cannot be interrupted, does not name the rank that is missing, and does not notice
that another process listens at the port.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress

from ppo.config import ConfigError

CALL_S = 5.0
"""Seconds that a rank may take to answer."""


def meet(addresses: Sequence[str], number: int, timeout_s: float) -> None:
    """Waits until each rank has started.

    Every rank contacts every other rank. A rank is done once it has reached, or has been reached by, each other rank.
    No other rank then waits for it.

    Args:
        addresses: "host:port" of each rank.
        number: The number of this rank.
        timeout_s: Seconds to wait. The wait starts again if this process was suspended.

    Raises:
        ConfigError: If this rank cannot listen at its port.
        ConnectionError: If other ranks have not started in time. The message names them.
    """
    met: set[int] = set()
    with closing(_listener(addresses[number], number)) as listener:
        answering = threading.Thread(target=_answer, args=(listener, number, len(addresses), met), daemon=True)
        answering.start()
        now = time.monotonic()
        deadline = now + timeout_s
        while missing := [other for other in range(len(addresses)) if other not in met and other != number]:
            last, now = now, time.monotonic()
            if now - last > len(missing) * CALL_S + 1:  # longer than the calls can take: this process was suspended
                deadline = now + timeout_s
            if now > deadline:
                named = ", ".join(f"rank {other} ({addresses[other]})" for other in missing)
                raise ConnectionError(
                    f"rank {number} has waited {timeout_s:g} s for {named}. Start all ranks within this time, and "
                    "check that they can reach each other at these addresses."
                )
            for other in missing:
                if _call(addresses[other], number, other, len(addresses)):
                    met.add(other)
            time.sleep(0.05)
        listener.shutdown(socket.SHUT_RDWR)  # ends the thread, which may be answering
        answering.join()


def _listener(address: str, number: int) -> socket.socket:
    _, port = _split(address)
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ConfigError(
            f"rank {number} cannot listen at {address}: {error.strerror}. Choose another port in the cluster's spec."
        ) from error


def _answer(listener: socket.socket, number: int, count: int, met: set[int]) -> None:
    """Answers the calls of other ranks until the listener is shut down."""
    while True:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        with caller, suppress(OSError):
            caller.settimeout(CALL_S)
            greeting = caller.recv(64)
            for other in range(count):
                if greeting == _greeting(other, count):
                    caller.sendall(_greeting(number, count))
                    met.add(other)


def _call(address: str, number: int, other: int, count: int) -> bool:
    """Calls another rank and returns whether it answered."""
    try:
        with socket.create_connection(_split(address), timeout=CALL_S) as called:
            called.sendall(_greeting(number, count))
            return called.recv(64) == _greeting(other, count)
    except OSError:
        return False


def _greeting(number: int, count: int) -> bytes:
    return f"ppo rank {number} of {count}\n".encode()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    try:
        return host.strip("[]"), int(port)
    except ValueError as error:
        raise ConfigError(f"{address!r} is not a valid rank address: use HOST:PORT") from error
