"""ProcessPool: the worker processes of one vector env. Sends commands, receives replies, replaces dead workers.

One step passes through three modules: `begin` sends STEP through the `Messenger` and remembers a `PendingCommand`;
`finish` passes the messages that the `Messenger` yields to the `PendingCommand`, until it has all replies.

A dead worker is replaced while replies are received: `_replace` starts another process, `cut` says what the
next step of each of its rows does, and the new process gets the command that the dead one has not answered. When the
next step of these rows is complete, `report` turns it into the last step of the episodes that were cut.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from gymnasium import logger

from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.resources import available_cores, cpu_quota
from vecenv.rows.batched import Batched
from vecenv.rows.messages import EnvDescription, RowsOptions, StepObjects
from vecenv.workers import faults
from vecenv.workers.faults import decoded
from vecenv.workers.launch import interrupts_deferred
from vecenv.workers.messenger import BadMessage, DeadlinePassed, Messenger, WorkerGone, WorkerHandle
from vecenv.workers.pending import PendingCommand, PendingRows
from vecenv.workers.pipes import Deadline
from vecenv.workers.pool import CommandFailed, EnvRange, NotSent, Pool, RowsLate
from vecenv.workers.processes import WorkerStarter, shut_down
from vecenv.workers.protocol import (
    ATTACH,
    ERROR,
    START,
    AttachCommand,
    CommandType,
    Kind,
    P,
    R,
    RowsCommandType,
    StepRowsCommand,
    encode,
    short_frame,
)
from vecenv.workers.restarts import Restarts


def _end(workers: list[WorkerHandle], grace_s: float, blocks: list[Block]) -> None:
    """Ends the processes and releases the memory that was shared with them."""
    while blocks:
        blocks.pop().close()
    shut_down(workers, grace_s)


class ProcessPool(Pool):
    """A pool of W processes, each with a contiguous range of envs. See `AsyncVectorEnv` for the arguments.

    With `restart`, a worker that died is restarted. Otherwise its death raises `WorkerDied`.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable] | Batched,
        ranges: list[EnvRange],
        options: RowsOptions,
        *,
        context: str | None,
        daemon: bool,
        shared_memory: bool,
        restart: bool,
        start_timeout_s: float | None,
        worker_init: Callable[[], object] | None = None,
    ):
        # A quota of CPU time also counts the spinning of this process; on a core of its own, spinning costs nothing.
        spin = len(ranges) <= available_cores() and len(ranges) < cpu_quota()
        self._starter = WorkerStarter(env_fns, ranges, options, worker_init, context=context, daemon=daemon, spin=spin)
        self.ranges = ranges
        self.workers: list[WorkerHandle] = []
        self._messenger = Messenger(self.workers, spin=spin)
        self._options = options
        self._shared_memory = shared_memory
        self._start_timeout_s = start_timeout_s
        self._restart = restart
        self._restarts: Restarts | None = None  # exists if dead workers are restarted, once there is memory
        self._layout: Layout | None = None
        self._blocks: list[Block] = []  # the block of memory, once there is one
        # In progress: a command from `begin` to `finish`, or rows from the first `send_rows` to the `receive_rows` that
        # returns the last of them. Never both.
        self._pending_command: PendingCommand | None = None
        self._pending_rows: PendingRows | None = None
        # A module function and a list, not a method, because a finalizer that holds `self` would keep it alive.
        # multiprocessing's Finalize runs before multiprocessing joins all children at exit, and does nothing in a
        # process that was forked from this one.
        self._finalizer = Finalize(self, _end, args=(self.workers, 0.0, self._blocks), exitpriority=10)

    @property
    def processes(self) -> list[BaseProcess]:  # type: ignore[override]
        return [worker.process for worker in self.workers]

    def start(self) -> list[EnvDescription]:
        frames = [self._starter.start_frame(run.index, again=self._restart) for run in self.ranges]
        for run in self.ranges:
            with interrupts_deferred():
                self.workers.append(self._starter.start(run, self.workers))
        self._messenger.listen()
        self._pending_command = PendingCommand(START, 0, frames)
        self._messenger.send(zip(self.workers, frames, strict=True))
        frames.clear()  # they may be large, and START is not sent again to a worker that dies
        descriptions = self.finish(START, self._start_timeout_s)
        if self._restart and not all(description.steps_subsets for description in descriptions):
            raise ValueError(
                "on_worker_death='restart' needs a vector env that defines step_rows(ids, actions), see vecenv.Batched"
            )
        return descriptions

    def share(self, layout: Layout) -> Block:
        block = Block.create(layout.size, shared_memory=self._shared_memory)
        self._blocks.append(block)
        self._layout = layout
        for worker in self.workers:
            try:
                self._attach(worker)
            except WorkerGone as gone:
                raise faults.worker_died(worker, ATTACH.doing, restarts=self._restart) from gone.__cause__
        if self._restart:
            self._restarts = Restarts(self.ranges, block.views(layout), self._options)
        return block

    def begin(self, command: RowsCommandType[P, R], slot: int = 0, payloads: Sequence[P] | None = None) -> None:
        try:
            if payloads is None:
                frames = [short_frame(command.kind, slot)] * len(self.workers)
            else:
                frames = [encode(command.kind, slot, payload) for payload in payloads]
        except Exception as error:
            raise NotSent(error) from None
        self._pending_command = pending = PendingCommand(command, slot, frames)
        if payloads is not None:
            pending.payloads = payloads
        self._messenger.send(zip(self.workers, frames, strict=True))

    def finish(self, command: CommandType[P, R], timeout: float | None = None) -> list[R]:
        deadline = None if timeout is None else Deadline(timeout, extensible=True)
        pending = self._pending_command
        assert pending is not None
        if not self._receive(pending, len(self.workers), deadline):
            raise faults.timed_out(pending.missing(self.workers), command.doing, timeout)
        self._pending_command = None
        # Owner: from here on, the caller owns the whole slot of a step or a reset.
        if self._restarts is not None:
            self._restarts.finish(pending)
        if pending.errors:
            raise CommandFailed(pending.errors[min(pending.errors)])
        return pending.replies

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        frames: list[tuple[WorkerHandle, bytes]] = []
        try:
            for worker in self.workers:
                low, high = worker.low, worker.high
                ours: StepRowsCommand = [(env - low, action) for env, action in orders if low <= env < high]
                if ours:
                    frames.append((worker, encode(Kind.STEP_ROWS, slot, ours)))
        except Exception as error:
            raise NotSent(error) from None
        envs = [env for env, _ in orders]
        if self._restarts is not None:
            self._restarts.back_up(envs)
        self._pending_rows = pending = self._pending_rows or PendingRows(slot, self._restarts)
        assert pending.slot == slot
        pending.add(envs)
        self._messenger.send(frames)

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        deadline = None if timeout is None else Deadline(timeout)
        pending = self._pending_rows
        assert pending is not None
        everything = pending.count + len(pending.envs)
        self._receive(pending, everything, Deadline(0.0))  # takes what has arrived already
        if not self._receive(pending, min_envs, deadline):
            raise RowsLate(
                f"The call to `recv` has timed out after {timeout} second(s): {pending.count} of {min_envs} envs are "
                f"done, no answer yet from envs {pending.envs}. You may call `recv` again."
            )
        if not pending.envs:
            self._pending_rows = None
        return pending.take()

    def close(self, grace_s: float) -> None:
        _end(self.workers, grace_s, self._blocks)
        self._finalizer.cancel()  # only now: Ctrl-C may interrupt the wait for the workers, and they must still end

    def _receive(self, pending: PendingCommand | PendingRows, wanted: int, deadline: Deadline | None) -> bool:
        """Passes messages to `pending` until its count is `wanted`; returns whether that happens in time."""
        while pending.count < wanted:
            try:
                for worker, (kind, slot, payload) in self._messenger.messages(deadline):
                    pending.accept(worker, kind, slot, None if payload is None else decoded(worker, payload))
            except DeadlinePassed:
                break
            except WorkerGone as gone:
                self._replace(gone, pending)
                if deadline is not None:
                    deadline.restart()  # the new process has received the command just now
            except BadMessage as message:
                raise faults.pipe_garbled(message, pending.command.doing) from message.__cause__
        return pending.count >= wanted

    def _replace(self, gone: WorkerGone, pending: PendingCommand | PendingRows) -> None:
        """Restarts a worker that is gone, or raises WorkerDied if it should not be restarted."""
        worker, restarts = gone.worker, self._restarts
        died = faults.worker_died(worker, pending.command.doing, restarts=self._restart)
        if restarts is None:
            raise died from gone.__cause__
        while True:
            restarts.count_death(worker.index, died)
            self.restarts += 1
            # With the count, no two messages are equal: Python's filter would drop a repeated one.
            logger.warn(
                f"{died} It is restarted, and the episodes of its envs are truncated. Restarts so far: {self.restarts}"
            )
            try:
                self._start_again(worker.index, pending, restarts)
            except WorkerGone:
                continue
            return

    def _start_again(self, index: int, pending: PendingCommand | PendingRows, restarts: Restarts) -> None:
        """Replaces a dead process, and sends the new one the command that the dead one did not answer.

        Raises WorkerGone if the new process dies before it has attached the memory.
        """
        dead = self.workers[index]
        with interrupts_deferred():
            worker = self.workers[index] = self._starter.start(self.ranges[index], self.workers)
            dead.kill()
            dead.release()
        self._messenger.listen()
        next_step = restarts.cut(range(worker.low, worker.high), pending.in_flight(worker))
        self._ask(worker, self._starter.start_frame(index, next_step, again=True))
        self._attach(worker)
        frame = pending.send_again(worker)
        if frame is not None:
            self._messenger.send([(worker, frame)])

    def _attach(self, worker: WorkerHandle) -> None:
        """Makes an idle worker attach the memory. Raises as `_ask` does."""
        assert self._layout is not None
        self._ask(worker, encode(Kind.ATTACH, payload=AttachCommand(self._layout, worker.low, worker.high)))
        try:
            self._blocks[0].send(worker.channel.connection)
        except (OSError, EOFError) as error:
            raise WorkerGone(worker) from error
        self._ask(worker, None)

    def _ask(self, worker: WorkerHandle, frame: bytes | None) -> None:
        """Sends a frame, if there is one, to a worker and waits for its next reply.

        Raises WorkerGone, and TimeoutError after `start_timeout_s`.
        """
        timeout = self._start_timeout_s
        deadline = None if timeout is None else Deadline(timeout, extensible=True)
        messenger = Messenger([worker], spin=False)
        if frame is not None:
            messenger.send([(worker, frame)])
        while True:
            try:
                for _, (kind, _, payload) in messenger.messages(deadline):
                    if kind == ERROR:
                        raise faults.worker_failed(worker, decoded(worker, payload))
                    return
            except BadMessage as message:
                raise faults.pipe_garbled(message, START.doing) from message.__cause__
            except DeadlinePassed:
                raise multiprocessing.TimeoutError(
                    f"{worker} needs more than start_timeout_s={timeout} to build its envs or to attach their memory: "
                    "increase this limit"
                ) from None
