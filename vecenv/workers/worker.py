"""The worker process: owns some envs and their rows of shared memory, and serves commands in a loop.

`vecenv.rows` builds and steps the envs, in the same way as for a vector env without worker processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium as gym
import numpy as np

from vecenv.errors import NotRestorable, OtherForm, SharedMemoryFull, in_one_line
from vecenv.memory.block import Block
from vecenv.resources import tightest_limit
from vecenv.rows.batch_rows import make_rows
from vecenv.rows.copies import copiers
from vecenv.rows.messages import NO_OBJECTS
from vecenv.rows.rows import Rows
from vecenv.workers.launch import JOB_SIGNALS, ORPHAN_GRACE_S
from vecenv.workers.logs import add_handlers, configure_logging
from vecenv.workers.pipes import Channel, Waiter, WorkerPipe
from vecenv.workers.protocol import (
    APPLY,
    ATTACH,
    CLOSE,
    COMMANDS,
    READY,
    START,
    STEP,
    STEP_ROWS,
    ApplyCommand,
    AttachCommand,
    Build,
    ErrorReply,
    Kind,
    RowsCommandType,
    RowsReply,
    StartCommand,
    StepRowsCommand,
    decode,
    doing,
    dumps_reply,
    encode,
    refer_to_classes,
    short_frame,
)

MAX_TEXT = 2**20  # characters of a traceback to send: an exception's message may contain all of an env's data
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
_STEP, _CLOSE = int(STEP.kind), int(CLOSE.kind)  # ints, as received in a frame
_REPLIED = object()  # the result of a command that has sent its own replies


def run(connection: Connection, inherited: Sequence[Channel], spin: bool, build: Build | None) -> None:
    """Serves the parent's commands until the parent sends CLOSE or is gone.

    A fork inherits `build`, which START carries to workers that are not forked, and the parent's ends of pipes
    (`inherited`). These ends are closed: while one of them is open here, no worker can notice that the parent has died.
    """
    signal.set_wakeup_fd(-1)  # a fork inherits the parent's descriptor, but must not report its own signals there
    # The parent responds to these signals, for example by saving its work and the states of its envs, and then ends its
    # workers. The handler is not SIG_IGN, because programs that an env starts would inherit it.
    for number in JOB_SIGNALS:
        signal.signal(number, _ignore)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's default, which a fork of a script may not have
    _forks_end_on_sigterm()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)  # blocked since this process was started
    # Python forbids daemonic processes to start others, which would survive if SIGTERM ended their parent. Workers
    # ignore SIGTERM.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    _end_with_fork_server()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for channel in inherited:
        channel.close()
    # Otherwise a program that an env starts would keep the pipe open after this process has ended.
    os.set_inheritable(connection.fileno(), False)
    server = CommandServer(connection, build)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        server.serve(Waiter([connection], spin=spin))
    with contextlib.suppress(Exception):
        server.close()


def _ignore(number: int, frame: Any) -> None:
    """Does nothing on a signal."""


def _forks_end_on_sigterm() -> None:
    """Lets SIGTERM end the processes that envs fork: multiprocessing's `terminate` sends it."""

    def in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
    # Order: a signal that arrives before the child has its handler waits until then.
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_child)


def _end_with_fork_server() -> None:
    """Asks the kernel to kill this process when the fork server ends (Linux only).

    The server ends some time after the parent; see `launch.run_forkserver`. Then only the kernel can end a process that
    is stopped, or whose env holds Python's lock. Without a fork server, the kernel would act at once, when the thread
    that started this process ends. The signal is then SIGCONT, so that a stopped process notices what has happened.
    """
    parent = multiprocessing.parent_process()
    forked_by_server = parent is not None and parent.pid != os.getppid()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            number = signal.SIGKILL if forked_by_server else signal.SIGCONT
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _end_with_parent() -> None:
    """Ends this process when the parent is gone, even if an env hangs and nothing reads the pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None, "a worker is a child process"
    sentinel = parent.sentinel
    if hasattr(os, "pidfd_open"):
        # After a fork, the sentinel stays silent while a sibling is alive, because the sibling inherits its other end.
        with contextlib.suppress(OSError):
            sentinel = os.pidfd_open(parent.pid)
    wait([sentinel])
    time.sleep(ORPHAN_GRACE_S)
    for child in multiprocessing.active_children():  # that envs have started but not ended
        child.kill()
    os._exit(1)


class Phase(Enum):
    """The phase of a worker's envs."""

    NEW = "the rows do not exist"
    OPEN = "the envs exist, or as many of them as could be built"
    CLOSED = "the envs were closed"


class CommandServer:
    """Serves commands: those that have a method of the same name here, and those that the rows carry out."""

    rows: Rows  # exists from OPEN on

    def __init__(self, connection: Connection, build: Build | None):
        self.pipe, self._build = WorkerPipe(connection), build
        self._phase = Phase.NEW
        ours = (START, ATTACH, STEP_ROWS, APPLY, CLOSE)
        self._methods: dict[int, Callable[[int, Any], Any]] = {
            command.kind: getattr(self, command.kind.name.lower()) for command in ours
        }

    def serve(self, waiter: Waiter) -> None:
        """Answers commands until CLOSE.

        Raises:
            EOFError, OSError: If the parent is gone.
        """
        kind = 0
        while kind != _CLOSE:
            waiter.ready()
            kind, slot, payload = self.pipe.receive()
            # An env may call sys.exit() or raise its own BrokenPipeError, so every exception is reported. If the
            # parent is gone, sending the report raises.
            try:
                if kind == _STEP and payload is None:  # most steps of most envs: nothing is dispatched or pickled
                    objects = self.rows.step(slot)
                    if objects is NO_OBJECTS:
                        self.pipe.send(short_frame(READY, slot))
                    else:
                        self.pipe.send(encode(Kind.READY, slot, objects))
                else:
                    self._answer(kind, slot, payload)
            except BaseException as error:
                self._report(error, slot, doing(kind))

    def _answer(self, kind: int, slot: int, payload: bytes | bytearray | None) -> None:
        command, arguments = COMMANDS.get(kind), decode(payload)
        if kind in self._methods:
            reply = self._methods[kind](slot, arguments)
        elif isinstance(command, RowsCommandType):
            reply = command.carry_out(self.rows, slot, arguments)
        else:
            raise ValueError(f"{kind} is not the kind of a command")
        if reply is not _REPLIED:
            self.pipe.send(encode(Kind.READY, slot, None if reply is NO_OBJECTS else reply))

    def start(self, _: int, command: StartCommand) -> object:
        """Configures `logging`, calls `worker_init`, builds the envs and describes them."""
        # These are the parent's current variables. The variables of the fork server may be older.
        os.environ.clear()
        os.environ.update(command.environment)
        random.seed(command.global_seed[0])
        np.random.seed(command.global_seed)
        if command.build is not None:
            self._build = pickle.loads(command.build)
        refer_to_classes(command.classes)  # none in a fork, which may have inherited those of another worker
        assert self._build is not None, "a worker that was forked from its parent inherits what to build"
        build, self._build = self._build, None
        if build.logs is not None:
            configure_logging(build.logs)
        if build.worker_init is not None:
            try:
                build.worker_init()
            except BaseException as error:
                self._report(error, 0, "worker_init")
                return _REPLIED
        if build.specs:
            # A package that an env imports registers ids again that the parent has already registered.
            warnings.filterwarnings("ignore", r".*Overriding environment \S+ already in registry")
        for spec in build.specs:
            gym.registry.setdefault(spec.id, spec)
        self.rows = make_rows(build.env_fns, build.first_env, build.options, command.next_step)
        self._phase = Phase.OPEN  # CLOSE closes the envs that were built, even if another one cannot be built
        description = self.rows.build()
        if build.logs is not None:
            add_handlers(build.logs)
        return description

    def attach(self, _: int, command: AttachCommand) -> None:
        self.pipe.send(short_frame(READY, 0))
        # Owner: this worker, rows low:high of slot s, from recv(STEP s or RESET s) to send(READY), and row r of
        # slot s from recv(STEP_ROWS s) to send(READY r); the parent otherwise.
        block = Block.receive(self.pipe.connection, command.layout.size)
        self.rows.bind(block.views(command.layout, command.low, command.high))

    def step_rows(self, slot: int, orders: StepRowsCommand) -> object:
        # Owner: row r is the parent's again from send(READY r), while other rows are still this worker's.
        for rows, objects in self.rows.step_rows(slot, orders):
            given = None if objects is NO_OBJECTS else objects
            if len(rows) == 1:
                self.pipe.send(encode(Kind.READY, rows[0], given))
            else:
                self.pipe.send(encode(Kind.READY_ROWS, slot, RowsReply(rows, given)))
        return _REPLIED

    def apply(self, _: int, command: ApplyCommand) -> list[Any]:
        # One copy per env, so that results do not depend on which envs share this process.
        (own,) = copiers([command.function])
        return [result for row in command.rows for result in self.rows.apply(own(), [row])]

    def close(self, _: int = 0, command: None = None) -> None:
        """Closes the envs, unless they were already closed."""
        before, self._phase = self._phase, Phase.CLOSED
        if before is Phase.OPEN:
            self.rows.close()

    def _report(self, error: BaseException, slot: int, doing: str) -> None:
        env = None
        if self._phase is not Phase.NEW and self.rows.failure is not None:
            (env, doing), self.rows.failure = self.rows.failure, None
        elif isinstance(error, MemoryError):  # for example, a reply does not fit in memory
            error.add_note(tightest_limit())
        text = _shortened("".join(traceback.format_exception(error)))
        kind = type(error)
        # A fork has its parent's classes, so the parent finds them by name, even those otherwise sent by value.
        by_name = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
        try:
            exception = (pickle.dumps if by_name else dumps_reply)(kind)
        except Exception:
            exception = None
        cause = _shortened(in_one_line(error))
        refusal = _shortened(str(error) or cause) if isinstance(error, NotRestorable | SharedMemoryFull) else None
        other_form = error if isinstance(error, OtherForm) else None
        self.pipe.send(encode(Kind.ERROR, slot, ErrorReply(text, cause, exception, env, doing, refusal, other_form)))


def _shortened(text: str) -> str:
    """Returns a text, cut in the middle if it is longer than `MAX_TEXT` characters."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} of {len(text):,} characters omitted ...]\n{text[-half:]}"
