"""The process that owns some envs: their rows over shared memory, and the loop that serves them.

No environment logic stands here; that is `rows.py` and `batch_rows.py`, the same as for the serial vector env.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from vecenv.errors import MessageTooLarge, NotRestorable
from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows.batch_rows import make_rows
from vecenv.rows.protocol import NO_OBJECTS, Rows, StepObjects
from vecenv.spaces import Path, name_of
from vecenv.workers.protocol import COMMANDS, Channel, Failure, Kind, Waiter, decode, encode, receive, send

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
MAX_TEXT = 2**20  # characters of a traceback to send: an exception's message may contain all of an env's data
ORPHAN_GRACE_S = 2.0  # for the envs of a worker without parent to finish a step and close
_REPLIED = object()  # what a command returns that has sent its replies itself


def run(connection: Connection, inherited: Sequence[Channel], spin: bool) -> None:
    """Serves one worker until the parent says CLOSE or is gone.

    Args:
        connection: To the parent.
        inherited: The parent's ends of pipes, which a fork copied into this process. While one of these is open
            here, no worker can notice that the parent has died.
        spin: Whether to wait awake at first, see `messages.Waiter`.
    """
    signal.set_wakeup_fd(-1)  # of the parent, which a fork copied, and which its own signals alone must reach
    # Ctrl-C reaches every process of a terminal; the parent alone answers, and ends its workers.
    # Not SIG_IGN, which the processes that an env starts would inherit.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the fork server ignores it, and SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handler
    _wake_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for channel in inherited:
        channel.close()
    # Otherwise a program that an env starts would keep the pipe open after this process has ended.
    os.set_inheritable(connection.fileno(), False)
    # A process that was forked, by the parent or by a fork server, has the same state of numpy's global
    # generator as its siblings.
    np.random.seed()
    worker = _Worker(connection)
    waiter = Waiter([connection], spin=spin)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone: so are we
        serving = True
        while serving:
            waiter.ready()
            serving = worker.serve()
    with contextlib.suppress(Exception):
        if worker.started and not worker.closed:
            worker.rows.close()


def _wake_with_parent() -> None:
    """Asks the kernel to resume this process if it is stopped when its parent ends (Linux only).

    A process stopped by SIGSTOP or a debugger cannot notice that its parent ended. SIGCONT rather than SIGKILL: envs
    should be closed, and the kernel sends the signal even if only the thread that started this process has ended.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _end_with_parent() -> None:
    """Ends this process when the parent is gone, even if an env hangs and the pipe is not looked at."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "a worker is a child process"
    sentinel = parent.sentinel
    if hasattr(os, "pidfd_open"):
        # After a fork the sentinel stays silent while a sibling lives, which has inherited its other end.
        with contextlib.suppress(OSError):
            sentinel = os.pidfd_open(parent.pid)
    wait([sentinel])
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


class _Worker:
    """One method for each command, of the same name; each returns the payload of its READY."""

    rows: Rows  # once `started`, by the first command

    def __init__(self, connection: Connection):
        self.connection = connection
        self.started = self.closed = False
        self._commands: dict[int, Callable[[int, Any], Any]] = {
            kind: getattr(self, kind.name.lower()) for kind in COMMANDS
        }

    def serve(self) -> bool:
        """Answers one command; returns whether there may be another."""
        kind, slot, payload = receive(self.connection)
        try:
            reply = self._commands[kind](slot, None if payload is None else decode(payload))
            if reply is None:
                send(self.connection, encode(Kind.READY, slot))
            elif reply is not _REPLIED:
                self._send(Kind.READY, slot, reply)
        except BaseException as error:  # sys.exit() in an env's step() included
            # A parent that is gone shows when this is sent; an env may raise a BrokenPipeError of its own.
            self._report(error, slot, _doing(kind))
        return kind != Kind.CLOSE

    def _send(self, kind: Kind, slot: int, reply: Any, objects: StepObjects | None = None) -> None:
        """Sends a reply. If it is too large, raises an error that names the env with the largest part."""
        try:
            message = encode(kind, slot, reply)
        except MessageTooLarge as refused:
            error = refused
            parts = list(_parts(objects or reply))
            if parts:
                size, row, what = max(parts, key=lambda part: part[0])
                whose = "" if row is None else f" of env {self.rows.first_env + row}"
                error = MessageTooLarge(f"{what}{whose} pickles to {size:,} bytes: {error}")
                error.env = None if row is None else self.rows.first_env + row
            raise error from None
        send(self.connection, message)

    def start(self, _: int, payload: tuple[Mapping[str, str], bytes]) -> Any:
        """Builds the envs and tells the parent about them."""
        # The parent's environment variables of now; a fork server would give those of its own start.
        environ, setup = payload
        os.environ.clear()
        os.environ.update(environ)
        arguments, specs = pickle.loads(setup)
        for spec in specs:
            gym.registry.setdefault(spec.id, spec)
        self.rows = make_rows(**arguments)
        self.started = True
        return self.rows.describe()

    def attach(self, _: int, plan: Any) -> None:
        # Owner: this worker, rows low:high of slot s, from recv(STEP s or RESET s) to send(READY), and row r of
        # slot s from recv(STEP_ROWS s) to send(READY r); else the parent. What is carried over from the slot
        # before is only read, while the parent waits.
        self.rows.bind(self._views(*plan))

    def attach_infos(self, _: int, payload: Any) -> None:
        schema, *plan = payload
        self.rows.bind_infos(schema, self._views(*plan))

    def _views(self, layout: Layout, low: int, high: int) -> dict[Path, np.ndarray]:
        return Block.receive(self.connection, layout.size).views(layout, low, high)

    def reset(self, slot: int, payload: Any) -> Any:
        seeds, options, mask = payload
        return _or_none(self.rows.reset(slot, seeds=seeds, options=options, mask=mask))

    def step(self, slot: int, actions: Any) -> Any:
        return _or_none(self.rows.step(slot, actions))

    def step_rows(self, slot: int, payload: Any) -> Any:
        # Owner: row r is the parent's again from send(READY r), while the other rows are still this worker's.
        for rows, objects in self.rows.step_rows(slot, payload):
            given = _or_none(objects)
            if len(rows) == 1:
                self._send(Kind.READY, rows[0], given)
            else:
                self._send(Kind.READY_ROWS, slot, (rows, given), given)
        return _REPLIED

    def resume(self, slot: int, over: Any) -> None:
        self.rows.resume(slot, over)

    def call(self, _: int, payload: Any) -> Any:
        return self.rows.call(*payload)

    def apply(self, _: int, payload: Any) -> Any:
        return self.rows.apply(*payload)

    def set_attr(self, _: int, payload: Any) -> None:
        self.rows.set_attr(*payload)

    def get_state(self, _: int, payload: Any) -> Any:
        return self.rows.get_state()

    def set_state(self, slot: int, states: Any) -> None:
        self.rows.set_state(slot, states)

    def close(self, _: int, payload: Any) -> None:
        self.closed = True
        if self.started:
            self.rows.close()

    def _report(self, error: BaseException, slot: int, doing: str) -> None:
        env = error.env if isinstance(error, MessageTooLarge) else None
        if self.started and self.rows.failure is not None:
            (env, doing), self.rows.failure = self.rows.failure, None
        text = _shortened("".join(traceback.format_exception(error)))
        try:
            exception = cloudpickle.dumps(type(error))
        except Exception:
            exception = None
        refusal = _shortened(str(error)) if isinstance(error, NotRestorable) else None
        send(self.connection, encode(Kind.ERROR, slot, Failure(text, exception, env, doing, refusal)))


def _doing(kind: int) -> str:
    return "construction" if kind == Kind.START else Kind(kind).name.lower() if kind in COMMANDS else f"command {kind}"


def _or_none(objects: StepObjects) -> StepObjects | None:
    """Returns the objects, or None if there are none, so that nothing is pickled."""
    return None if objects is NO_OBJECTS else objects


def _shortened(text: str) -> str:
    """Returns a text, cut in the middle if it is longer than `MAX_TEXT` characters."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} of {len(text):,} characters omitted ...]\n{text[-half:]}"


def _parts(reply: Any) -> Iterator[tuple[int, int | None, str]]:
    """Yields for each part of an oversized reply: its size in bytes, its row (None for all rows) and its name."""

    def size(value: Any) -> int:
        return len(cloudpickle.dumps(value))

    if isinstance(reply, StepObjects):
        for row, info in reply.infos:
            for key, value in info.items():
                yield size(value), row, f"info {key!r}"
        for path, values in reply.leaves.items():
            for row, value in values.items():
                yield size(value), row, name_of(str(path[0]), path[1:])
        for _, infos in reply.batched_infos:
            for key, value in infos.items():
                yield size(value), None, f"info {key!r} of all envs"
    elif isinstance(reply, list):  # of a call: one result for each env
        for row, result in enumerate(reply):
            yield size(result), row, "the result"
