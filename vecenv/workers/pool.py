"""WorkerPool, the worker processes of one vector env: sends messages, receives replies, handles deaths.

It knows processes, pipes and blocks; what the messages ask for, parallel.py and rows.py know.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
from gymnasium import logger

from vecenv.errors import EnvError, NotRestorable, VecEnvError, WorkerDied, env_error
from vecenv.memory.block import Block
from vecenv.rows.protocol import RowsOptions
from vecenv.workers.launch import interrupts_deferred, start_method
from vecenv.workers.processes import (
    EnvRange,
    Worker,
    available_cores,
    foreign_specs,
    how_it_ended,
    release,
    setup_message,
    shut_down,
    start_worker,
)
from vecenv.workers.protocol import BadFrame, Failure, Kind, Waiter, decode, encode, slot_of

CALLS = (
    "call",
    "apply",
    "set_attr",
    "get_state",
    "set_state",
)  # after these no env is between two states, so the first error can wait
# Plain ints: they are compared with every message, and looking up enum members is slower.
_READY, _READY_ROWS, _ERROR = map(int, (Kind.READY, Kind.READY_ROWS, Kind.ERROR))
MAX_DEATHS = 3  # of one worker in a row, without an answer in between, after which a restart is given up

Revive = Callable[[EnvRange], tuple[Any, Any]]
"""Returns what a restarted worker must be sent, in the form of the pool's `message`, or None for nothing: RESUME, if
there is anything to resume, and what it left undone."""

OnAnswer = Callable[[EnvRange, list[int], Any], bool]
"""Takes a worker's reply about some of its rows; returns whether all of these rows were in flight."""


def pickled_setups(env_fns: Any, bounds: Sequence[tuple[int, int]], options: RowsOptions) -> list[bytes]:
    """Returns what each worker needs to build its envs: arguments of `make_rows`, and registered specs."""
    specs = foreign_specs()
    return [
        cloudpickle.dumps(({"env_fns": env_fns[low:high], "first_env": low, "options": options}, specs))
        for low, high in bounds
    ]


def _end(workers: list[Worker], grace_s: float, shared: list[tuple[Block, Kind, tuple]]) -> None:
    """Ends the processes and lets go of the memory that was shared with them."""
    while shared:
        shared.pop()[0].close()
    shut_down(workers, grace_s)


class WorkerPool:
    """W processes, each with a contiguous run of envs.

    Args:
        setups: For each worker, the pickled arguments of its rows.
        bounds: For each worker, its run of envs `(low, high)`.
        context: Start method, or None for the best one that does not fork.
        daemon: Whether the processes are daemonic.
        restart: Whether to start a worker that died again, or to raise.
        start_timeout_s: Seconds for envs to be constructed; None to wait without end.

    Attributes:
        workers: Handles of the processes.
        broken: Whether answers may be under way that nobody will take: then only `close` is legal.
    """

    def __init__(
        self,
        setups: Sequence[bytes],
        bounds: Sequence[tuple[int, int]],
        *,
        context: str | None,
        daemon: bool,
        restart: bool,
        start_timeout_s: float | None,
    ):
        self.workers: list[Worker] = []
        self._waiter = Waiter([], spin=False)
        self.broken = False
        self._shared: list[tuple[Block, Kind, tuple]] = []  # what a restarted worker must attach
        self._setups = setups
        self._bounds = bounds
        self._restart = restart
        self._start_timeout_s = start_timeout_s
        self._spin = len(bounds) <= available_cores()
        self._method, self._daemon = start_method(context), daemon
        self._told_slot = 0  # of the command that is being answered; every answer echoes it
        self._deaths = [0] * len(bounds)
        # A module function and a list, not a method: a finalizer that held `self` would keep it alive.
        # multiprocessing's own kind, because at exit it runs before multiprocessing joins all children,
        # and because it does nothing in a process that was forked from this one.
        self._finalizer = Finalize(self, _end, args=(self.workers, 0.0, self._shared), exitpriority=10)

    message = staticmethod(encode)
    block = staticmethod(Block.create)

    def start(self) -> list[Any]:
        """Starts all workers and returns what each says of its envs.

        Raises:
            EnvError: If an env cannot be constructed.
            WorkerDied: If a process ends.
            multiprocessing.TimeoutError: If the constructors take too long.
        """
        for index in range(len(self._bounds)):
            with interrupts_deferred():
                self.workers.append(self._start_one(index))
        self._listen()
        self.tell([setup_message(setup) for setup in self._setups], "construction", None)
        return self.answers("construction", self._start_timeout_s, None)

    def attach(
        self, block: Block, kind: Kind, *payload: Any, doing: str, timeout: float | None, revive: Revive | None
    ) -> None:
        """Has every worker attach the block, which from then on belongs to the pool.

        Raises:
            multiprocessing.TimeoutError: If a worker has not done so after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self.broken = True  # an interrupt may leave a block that one worker has attached and another has not
        self._shared.append((block, kind, payload))  # before it is offered: a restarted worker attaches what is here
        for worker in list(self.workers):
            try:
                self._offer(worker, block, kind, payload, deadline)
            except OSError as error:
                self._mend(worker, doing, revive, error)
        self._told_slot = 0
        self.answers(doing, None if deadline is None else max(0.0, deadline - time.monotonic()), revive)
        if not self._restart:
            block.close()
            self._shared.pop()

    def tell(self, messages: Sequence[bytes], doing: str, revive: Revive | None) -> None:
        """Sends each worker its message. If one does not fit into the pipe, `answers` sends the remainder."""
        self.broken = True  # if an interrupt comes in between, some have theirs and some do not
        self._told_slot = slot_of(messages[0])
        for worker, message in zip(list(self.workers), messages, strict=True):
            try:
                if not worker.channel.put(message):
                    self._waiter.watch_for_room(worker.index, True)
            except (BrokenPipeError, ConnectionResetError) as error:
                self._mend(worker, doing, revive, error)
        self.broken = False

    def tell_rows(self, worker: Worker, message: bytes, revive: Revive, on_answer: OnAnswer) -> None:
        """Sends a worker, which may be busy, a message about some of its rows; `some_answers` sends any remainder."""
        self.broken = True  # an interrupt may leave half a message in the pipe
        self._told_slot = slot_of(message)
        try:
            if not worker.channel.put(message):
                self._waiter.watch_for_room(worker.index, True)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._mend(worker, "step", revive, error)
        self.broken = False

    def answers(self, doing: str, timeout: float | None, revive: Revive | None) -> list[Any]:
        """Waits for one answer of each worker and returns the payloads, in the order of the workers.

        Raises:
            EnvError: If an answer is an error; at once, but for calls, which leave no env in between.
            WorkerDied: If a process ends, at once.
            multiprocessing.TimeoutError: If an answer is missing after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: dict[int, Any] = {}
        failure: tuple[Worker, Failure] | None = None
        self.broken = True  # whatever interrupts the wait, Ctrl-C included
        while len(replies) < len(self.workers):
            ready = self._waiter.ready(deadline)
            if not ready:
                raise multiprocessing.TimeoutError(self._late(doing, timeout, replies))
            for source in self._in_order(ready):
                worker = self.workers[source % len(self.workers)]
                message = self._read(worker, source, doing, revive)
                if message is None:
                    if self.workers[worker.index] is not worker:
                        # The worker was restarted and given its command again: its earlier reply no longer counts.
                        replies.pop(worker.index, None)
                        failure = None if failure and failure[0].index == worker.index else failure
                    if deadline is not None and time.monotonic() >= deadline:  # though data keeps arriving
                        raise multiprocessing.TimeoutError(self._late(doing, timeout, replies))
                    continue
                kind, slot, payload = message
                if slot != self._told_slot or worker.index in replies or kind == _READY_ROWS:
                    raise self._garbled(worker, doing, f"an unexpected {Kind(kind).name} {slot}")
                replies[worker.index] = payload
                if kind == _ERROR:
                    failure = worker, payload
                    if doing not in CALLS:
                        raise self._failed(*failure)
        self.broken = False  # every worker has answered, and no env was left between two states
        if failure is not None:
            raise self._failed(*failure)
        return [replies[index] for index in range(len(self.workers))]

    def some_answers(self, deadline: float | None, revive: Revive, on_answer: OnAnswer) -> bool:
        """Waits for answers about rows and hands each to `on_answer`; returns False if the deadline has passed.

        Args:
            deadline: On the clock of `time.monotonic`, in seconds; None to wait without one.
            revive: What to tell a restarted worker.
            on_answer: Takes worker, rows and objects.
        """
        self.broken = True
        ready = self._waiter.ready(deadline)
        for source in self._in_order(ready):
            worker = self.workers[source % len(self.workers)]
            message = self._read(worker, source, "step", revive)
            if message is None:
                continue
            kind, slot, payload = message
            if kind == _ERROR and slot == self._told_slot:
                raise self._failed(worker, payload)
            rows, objects = ([slot], payload) if kind == _READY else (kind == _READY_ROWS and payload) or ([], None)
            if not rows or not on_answer(worker, rows, objects):
                raise self._garbled(worker, "step", f"an unexpected {Kind(kind).name} {slot}")
        self.broken = False
        return bool(ready)

    def close(self, grace_s: float) -> None:
        """Ends the workers: asks them, waits `grace_s`, then ends them by force."""
        self._finalizer.cancel()
        _end(self.workers, grace_s, self._shared)

    def _start_one(self, index: int) -> Worker:
        low, high = self._bounds[index]
        try:
            return start_worker(
                index, low, high, others=self.workers, method=self._method, daemon=self._daemon, spin=self._spin
            )
        except (OSError, EOFError) as error:
            self.broken = True
            raise WorkerDied(
                f"worker {index} (envs {low}:{high}) ended while it was started ({type(error).__name__}: {error}). "
                "Killed from outside, or the system has no room for another process or file."
            ) from error

    def _listen(self) -> None:
        sources: list[Any] = [
            *(worker.channel for worker in self.workers),
            *(worker.sentinel for worker in self.workers),
        ]
        self._waiter = Waiter(sources, spin=self._spin)
        for worker in self.workers:
            self._waiter.watch_for_room(worker.index, bool(worker.channel.unsent))

    def _offer(self, worker: Worker, block: Block, kind: Kind, payload: tuple, deadline: float | None) -> None:
        """Has an idle worker attach a block: sends it the message, and then the block itself.

        Raises:
            OSError: If the worker is gone.
            multiprocessing.TimeoutError: If it has not read the message by the deadline.
        """
        channel = worker.channel
        if not channel.put(encode(kind, payload=(*payload, worker.low, worker.high))):
            waiter = Waiter([channel, worker.sentinel], spin=False)
            waiter.watch_for_room(0, True)
            sent = False
            while not sent:  # and there is room for the descriptor, which cannot be sent in pieces
                sent = channel.flush()
                ready = waiter.ready(deadline)
                if not ready:
                    raise multiprocessing.TimeoutError(f"{worker} has not read where to attach memory in time")
                if 1 in ready:  # its end of the pipe may live on in a child of an env
                    raise BrokenPipeError("the process has ended")
        block.send(channel.connection, worker.process.pid)

    def _start_deadline(self) -> float | None:
        return None if self._start_timeout_s is None else time.monotonic() + self._start_timeout_s

    def _in_order(self, ready: list[int]) -> list[int]:
        """Returns the sources that are to be looked at now: of a dead worker its last words come first."""
        count = len(self.workers)
        if not ready or max(ready) < count:
            return ready
        return [source for source in ready if source < count or source - count not in ready]

    def _read(self, worker: Worker, source: int, doing: str, revive: Revive | None) -> tuple[int, int, Any] | None:
        """Returns a complete message; None if none has arrived, or if the worker was restarted."""
        cause: Exception | None = None
        if source < len(self.workers):
            channel = worker.channel
            try:
                if channel.unsent:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have left a last reply
                        self._waiter.watch_for_room(source, not channel.flush())
                message = channel.take()
            except (EOFError, OSError) as error:
                cause = error
            except BadFrame as error:
                raise self._garbled(worker, doing, str(error)) from error
            else:
                if message is None:
                    return None
                self._deaths[worker.index] = 0
                kind, slot, payload = message
                return kind, slot, None if payload is None else self._decoded(worker, payload)
        self._mend(worker, doing, revive, cause)
        return None

    def _decoded(self, worker: Worker, payload: bytes | bytearray | None) -> Any:
        try:
            return decode(payload)
        except Exception as error:
            self.broken = True
            raise VecEnvError(
                f"{worker} sent data that cannot be unpickled: {type(error).__name__}: {error}. Infos and results of "
                "calls must be of classes that this process can import: return plain data instead."
            ) from error

    def _garbled(self, worker: Worker, doing: str, what: str) -> VecEnvError:
        self.broken = True
        return VecEnvError(
            f"{worker} sent {what} during {doing}. Something else writes to the worker's pipe, for example an env that "
            "writes to a file descriptor it has closed. Fix the env, then close this vector env and build a new one."
        )

    def _mend(self, worker: Worker, doing: str, revive: Revive | None, cause: Exception | None) -> None:
        """Starts a dead worker again, or raises."""
        was_broken = self.broken
        died = self._died(worker, doing)
        if not self._restart or revive is None:
            raise died from cause
        logger.warn(f"{died} It is started again, and the episodes of its envs are cut.")
        while True:
            self._deaths[worker.index] += 1
            if self._deaths[worker.index] >= MAX_DEATHS:
                raise WorkerDied(f"{died} It died {MAX_DEATHS} times in a row.") from cause
            try:
                self._start_again(worker.index, revive)
            except EnvError:  # which may be an OSError of the env's own as well
                raise
            except (OSError, EOFError) as error:
                cause = error
            else:
                self.broken = was_broken
                return

    def _start_again(self, index: int, revive: Revive) -> None:
        dead = self.workers[index]
        with interrupts_deferred():
            self.workers[index] = self._start_one(index)
            dead.kill()
            release(dead)
        self._listen()
        worker = self.workers[index]
        self._answer_to(worker, setup_message(self._setups[index]))
        for block, kind, payload in self._shared:
            self._offer(worker, block, kind, payload, self._start_deadline())
            self._answer_to(worker, None)
        resume, undone = revive(worker)
        if resume is not None:
            self._answer_to(worker, resume)
        if undone is not None:
            self._waiter.watch_for_room(index, not worker.channel.put(undone))

    def _answer_to(self, worker: Worker, message: bytes | None) -> Any:
        """Returns a restarted worker's reply to a message, or, if that is None, to what was sent before."""
        timeout, channel, deadline = self._start_timeout_s, worker.channel, self._start_deadline()
        if message is not None:
            channel.put(message)
        waiter = Waiter([channel, worker.sentinel], spin=False)
        answer = None
        while answer is None:
            waiter.watch_for_room(0, bool(channel.unsent))
            ready = waiter.ready(deadline)
            if not ready:
                raise multiprocessing.TimeoutError(f"{worker} was started again, but was not ready after {timeout} s")
            if 0 not in ready:  # a process that an env started may still hold the pipe open
                raise EOFError("the process has ended")
            channel.flush()
            try:
                answer = channel.take()
            except BadFrame as error:
                raise self._garbled(worker, "construction", str(error)) from error
        kind, _, payload = answer
        if kind == Kind.ERROR:
            raise self._failed(worker, self._decoded(worker, payload))
        return self._decoded(worker, payload)

    def _failed(self, worker: Worker, failure: Failure) -> VecEnvError:
        try:
            exception_type = None if failure.exception is None else pickle.loads(failure.exception)
        except Exception:  # its module cannot be imported here
            exception_type = None
        who = f"envs {worker.low}:{worker.high}" if failure.env is None else f"env {failure.env}"
        if failure.refusal is not None:  # nobody's fault, and nothing is broken
            return NotRestorable(f"{who} in worker {worker.index}: {failure.refusal}")
        if failure.doing != "construction":
            # What Gymnasium says before it raises, but for the traceback, which is in the exception here.
            env = worker.low if failure.env is None else failure.env
            logger.error(f"Received the following error from Worker-{env} - Shutting it down")
            logger.error("Raising the last exception back to the main process.")
        advice = "Fix the env (its traceback is above)" + (
            ", then close this vector env and build a new one." if self.broken else "."
        )
        return env_error(
            exception_type,
            f"{who} in worker {worker.index} raised during {failure.doing}:\n\n{failure.traceback}\n{advice}",
        )

    def _died(self, worker: Worker, doing: str) -> WorkerDied:
        self.broken = True
        advice = "" if self._restart else " Close this vector env and build a new one."
        return WorkerDied(f"{worker} {how_it_ended(worker.process)} during {doing}.{advice}")

    def _late(self, doing: str, timeout: float | None, replies: dict[int, Any]) -> str:
        late = [worker for worker in self.workers if worker.index not in replies]
        who = ", ".join(f"worker {w.index} (envs {w.low}:{w.high})" for w in late)
        if doing == "construction":
            return (
                f"The construction of the envs has timed out after {timeout} second(s): no answer from {who}. "
                "If they need longer, raise start_timeout_s."
            )
        return (
            f"The call to `{doing}_wait` has timed out after {timeout} second(s): no answer from {who}. "
            "Close this vector env and build a new one."
        )
