"""ProcessPool: the worker processes of one vector env. Sends commands, receives replies, replaces dead workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import logger
from gymnasium.vector import AutoresetMode

from vecenv.errors import EnvError, NotRestorable, VecEnvError, WorkerDied, env_error
from vecenv.memory import layout as fields
from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows.batch_rows import Batched
from vecenv.rows.info_memory import Schema
from vecenv.rows.protocol import EnvDescription, RowsOptions, StepObjects, combined
from vecenv.spaces import Path
from vecenv.workers.launch import interrupts_deferred, start_method
from vecenv.workers.pipes import BadFrame, Deadline, Waiter
from vecenv.workers.pool import EnvRange, join, late_rows
from vecenv.workers.processes import (
    Worker,
    available_cores,
    foreign_specs,
    how_it_ended,
    release,
    shut_down,
    start_frame,
    start_worker,
)
from vecenv.workers.protocol import (
    BETWEEN_STEPS,
    ApplyCommand,
    AttachCommand,
    AttachInfosCommand,
    Failure,
    Kind,
    ResetCommand,
    ResumeCommand,
    RowsReply,
    StepRowsCommand,
    WorkerSetup,
    decode,
    doing,
    encode,
    short_frame,
)

MAX_DEATHS = 3  # consecutive deaths of one worker, without a reply in between, after which it is not restarted

# Plain ints: they are compared with every message, and looking up enum members is slower.
_STEP, _READY, _READY_ROWS, _ERROR = map(int, (Kind.STEP, Kind.READY, Kind.READY_ROWS, Kind.ERROR))

_Offer = tuple[Block, Callable[[EnvRange], bytes]]
"""A block, and a function that returns the frame that makes a worker attach it."""


def _end(workers: list[Worker], grace_s: float, shared: list[_Offer]) -> None:
    """Ends the processes and releases the memory that was shared with them."""
    while shared:
        shared.pop()[0].close()
    shut_down(workers, grace_s)


class ProcessPool:
    """A `Pool` of W processes, each with a contiguous range of envs.

    Args:
        env_fns: The functions of all envs, or a `Batched`.
        ranges: The envs of each worker.
        options: See `RowsOptions`.
        context: Start method, or None for the best one that does not fork.
        daemon: Whether the processes are daemonic.
        shared_memory: Whether memory comes from the system's shared memory, see `Block.create`.
        restart: Whether to restart a worker that died. Otherwise its death raises `WorkerDied`.
        start_timeout_s: Seconds to wait for the envs to be constructed; None to wait forever.

    Attributes:
        workers: Handles to the processes.
        broken: Whether replies may be pending that nobody will read. If so, only `close` is legal.
    """

    pickles_infos = True

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
    ):
        specs = foreign_specs()
        # Pickled once, because a worker that is restarted needs its setup again.
        self._setups = [
            cloudpickle.dumps(WorkerSetup(env_fns[run.low : run.high], run.low, options, specs)) for run in ranges
        ]
        self.ranges = ranges
        self.workers: list[Worker] = []
        self.broken = False
        self._method, self._daemon, self._shared_memory = start_method(context), daemon, shared_memory
        self._start_timeout_s = start_timeout_s
        self._autoreset_mode = options.autoreset_mode
        self._spin = len(ranges) <= available_cores()
        self._waiter = Waiter([], spin=False)
        self._shared: list[_Offer] = []  # the blocks that a restarted worker must attach
        # The command in progress. Each reply echoes its slot.
        self._kind, self._slot = int(Kind.START), 0
        self._frames: Sequence[bytes] = ()  # one per worker
        self._deadline: Deadline | None = None
        # Between send_rows and receive_rows: envs in flight, and results that have arrived (first env, rows, objects).
        self._in_flight: set[int] = set()
        self._done: list[tuple[int, list[int], StepObjects | None]] = []
        # Restarting dead workers: whether to restart them, and what a restarted worker needs.
        self._restart, self._may_restart = restart, False
        self._deaths = [0] * len(ranges)
        self._arrays: Mapping[Path, np.ndarray] = {}
        self._complete_slot: int | None = None  # with the newest complete batch; None before the first reset
        self._backup: dict[Path, np.ndarray] = {}  # rows in flight, as they were before they were sent
        # A module function and a list, not a method, because a finalizer that holds `self` would keep it alive.
        # multiprocessing's Finalize runs before multiprocessing joins all children at exit, and does nothing in a
        # process that was forked from this one.
        self._finalizer = Finalize(self, _end, args=(self.workers, 0.0, self._shared), exitpriority=10)

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes."""
        return [worker.process for worker in self.workers]

    @property
    def groups(self) -> list[range]:
        """One group of all envs."""
        return [range(self.ranges[-1].high)]

    def start(self) -> list[EnvDescription]:
        """Starts all workers and returns one description per worker.

        Raises:
            EnvError: If an env cannot be constructed.
            WorkerDied: If a process dies.
            multiprocessing.TimeoutError: If the constructors take too long.
        """
        for run in self.ranges:
            with interrupts_deferred():
                self.workers.append(self._start_one(run))
        self._listen()
        self._tell(Kind.START, [start_frame(setup) for setup in self._setups])
        descriptions = self.finish(self._start_timeout_s)
        if self._restart and not all(description.steps_subsets for description in descriptions):
            raise ValueError(
                "on_worker_death='restart' needs a vector env that defines step_rows(ids, actions), see vecenv.Batched"
            )
        return descriptions

    def allocate(self, size: int) -> Block:
        """Allocates `size` bytes that the workers can attach."""
        return Block.create(size, shared_memory=self._shared_memory)

    def attach(self, block: Block, layout: Layout) -> None:
        """Makes every worker attach the memory of its rows.

        Raises:
            multiprocessing.TimeoutError: If a worker does not attach it in time.
        """
        self._arrays = block.views(layout)
        if self._restart:
            self._backup = {
                path: np.empty_like(array[0]) for path, array in self._arrays.items() if path[0] != fields.ACTION
            }
        self._deadline = self._start_deadline()
        self._share(
            Kind.ATTACH, block, lambda run: encode(Kind.ATTACH, payload=AttachCommand(layout, run.low, run.high))
        )
        self._may_restart = self._restart

    def attach_infos(self, block: Block, layout: Layout, schema: Schema) -> None:
        """Makes every worker attach memory for infos, by the deadline of the last `finish`.

        Raises:
            multiprocessing.TimeoutError: If a worker does not attach it in time.
        """
        # A worker that restarts during this call attaches all blocks anyway. It needs a command to reply to.
        self._frames = [encode(Kind.APPLY, payload=ApplyCommand(type, []))] * len(self.ranges)
        self._share(
            Kind.ATTACH_INFOS,
            block,
            lambda run: encode(Kind.ATTACH_INFOS, payload=AttachInfosCommand(layout, run.low, run.high, schema)),
        )

    def run(self, kind: Kind, payloads: Sequence[Any], slot: int = 0, timeout: float | None = None) -> list[Any]:
        """Sends each worker a command and returns the replies, see `finish`."""
        self._tell(kind, [encode(kind, slot, payload) for payload in payloads], slot)
        return self.finish(timeout)

    def reset(self, slot: int, commands: Sequence[ResetCommand], timeout: float | None = None) -> StepObjects:
        """Resets envs and waits until every worker has written its rows of the slot."""
        self._tell(Kind.RESET, [encode(Kind.RESET, slot, command) for command in commands], slot)
        return self.finish_batch(timeout)

    def step(self, slot: int, actions: Sequence[Any] | None, timeout: float | None = None) -> StepObjects:
        """Steps all envs and waits until every worker has written its rows of the slot."""
        self._tell(_STEP, self._step_frames(slot, actions), slot)
        return self.finish_batch(timeout)

    def begin(self, kind: Kind, payloads: Sequence[Any], slot: int = 0) -> None:
        """Sends each worker a command. All commands are encoded before any is sent, so an error sends none of them."""
        self._tell(kind, [encode(kind, slot, payload) for payload in payloads], slot)
        self.broken = False

    def begin_step(self, slot: int, actions: Sequence[Any] | None) -> None:
        """Sends STEP to each worker."""
        self._tell(_STEP, self._step_frames(slot, actions), slot)
        self.broken = False

    def finish_batch(self, timeout: float | None = None) -> StepObjects:
        """Waits until every worker has written its rows of the slot."""
        replies = self.finish(timeout)
        # Owner: from here on, the caller owns the whole slot.
        self._complete_slot = self._slot
        return join(self.ranges, replies)

    def finish(self, timeout: float | None = None) -> list[Any]:
        """Waits for one reply of each worker and returns the payloads, in the order of the workers.

        Raises:
            EnvError: If a reply is an error. After a step or a reset it is raised at once; after other commands, which
                leave no env in the middle of a step, it is raised when all workers have replied.
            WorkerDied: If a process dies; raised at once.
            multiprocessing.TimeoutError: If a reply is missing after `timeout` seconds.
        """
        self._deadline = deadline = None if timeout is None else Deadline(timeout)
        workers, count, slot = self.workers, len(self.workers), self._slot
        replies: dict[int, Any] = {}
        failure: tuple[Worker, Failure] | None = None
        self.broken = True  # in case anything interrupts the wait, including Ctrl-C
        while len(replies) < count:
            ready = self._waiter.ready(deadline)
            if not ready:
                raise multiprocessing.TimeoutError(self._late(timeout, replies))
            for source in ready:
                worker = workers[source % count]
                if source >= count:
                    if worker.index in ready:
                        continue  # a dead worker's last message is read first
                    self._replace(worker)
                    message = None
                else:
                    message = self._read(worker)
                if message is None:
                    if workers[worker.index] is not worker:
                        # The worker was restarted and received its command again, so its earlier reply is void.
                        replies.pop(worker.index, None)
                        failure = None if failure and failure[0].index == worker.index else failure
                    if deadline is not None and not deadline.slice():  # even if data keeps arriving
                        raise multiprocessing.TimeoutError(self._late(timeout, replies))
                    continue
                kind, echoed, payload = message
                if echoed != slot or worker.index in replies or kind == _READY_ROWS:
                    raise self._garbled(worker, f"an unexpected {Kind(kind).name} {echoed}")
                replies[worker.index] = payload
                if kind == _ERROR:
                    failure = worker, payload
                    if self._kind not in BETWEEN_STEPS:
                        raise self._failed(*failure)
        self.broken = False  # every worker has replied, and no env was left in the middle of a step
        if failure is not None:
            raise self._failed(*failure)
        return [replies[index] for index in range(count)]

    def step_group(self, group: int, slot: int, actions: Any) -> StepObjects:
        """Not supported, because threads of the caller cannot step the envs of worker processes."""
        raise NotImplementedError

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        """Sends workers the rows to step next. The workers may be busy."""
        frames: list[tuple[int, set[int], bytes]] = []
        for run in self.ranges:
            ours: StepRowsCommand = [(env - run.low, action) for env, action in orders if run.low <= env < run.high]
            if ours:
                envs = {run.low + row for row, _ in ours}
                frames.append((run.index, envs, encode(Kind.STEP_ROWS, slot, ours)))
        # All messages are encoded, so from here on either all of them are sent or the pool is broken.
        ids = [env for env, _ in orders]
        for path, backup in self._backup.items():
            backup[ids] = self._arrays[path][slot, ids]
        self._kind, self._slot = int(Kind.STEP_ROWS), slot
        self.broken = True  # an interrupt may leave half a message in the pipe
        for index, envs, frame in frames:
            self._in_flight |= envs
            self._put(self.workers[index], frame)
        self.broken = False

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        """Waits for `min_envs` of the envs sent, and returns all that are done, in the order in which they finished.

        Raises:
            multiprocessing.TimeoutError: If fewer than `min_envs` envs are done before the timeout. The next call
                returns the envs that are done.
        """
        deadline = None if timeout is None else Deadline(timeout)
        now = Deadline(0.0)
        while self._in_flight and self._collect_rows(now):
            pass  # takes what has arrived already
        while (num_done := sum(len(rows) for _, rows, _ in self._done)) < min_envs:
            if not self._collect_rows(deadline):
                raise multiprocessing.TimeoutError(late_rows(timeout, num_done, min_envs, sorted(self._in_flight)))
        done, self._done = self._done, []
        objects = combined((low, part) for low, _, part in done if part is not None)
        return [low + row for low, rows, _ in done for row in rows], objects

    def _collect_rows(self, deadline: Deadline | None) -> bool:
        """Waits for replies about rows and stores them in `_done`; returns False if the deadline has passed."""
        self.broken = True
        count = len(self.workers)
        ready = self._waiter.ready(deadline)
        for source in ready:
            worker = self.workers[source % count]
            if source >= count:
                if worker.index not in ready:  # a dead worker's last message is read first
                    self._replace(worker)
                continue
            message = self._read(worker)
            if message is None:
                continue
            kind, slot, payload = message
            if kind == _ERROR and slot == self._slot:
                raise self._failed(worker, payload)
            reply = None
            if kind == _READY:
                reply = RowsReply([slot], payload)
            elif kind == _READY_ROWS and isinstance(payload, RowsReply):
                reply = payload
            envs = {worker.low + row for row in reply.rows} if reply is not None else set()
            if reply is None or not envs or not envs <= self._in_flight:
                raise self._garbled(worker, f"an unexpected {Kind(kind).name} {slot}")
            self._in_flight -= envs
            self._done.append((worker.low, reply.rows, reply.objects))
        self.broken = False
        return bool(ready)

    def set_state(self, slot: int, states: Sequence[dict[str, Any]], *, begun: bool) -> None:
        """Restores one state per env."""
        self._complete_slot = slot if begun else None
        self.run(Kind.SET_STATE, [states[run.rows] for run in self.ranges], slot)

    def close(self, grace_s: float) -> None:
        """Asks the workers to exit, waits up to `grace_s` seconds, then kills them."""
        self._finalizer.cancel()
        _end(self.workers, grace_s, self._shared)

    def _start_one(self, run: EnvRange) -> Worker:
        try:
            return start_worker(run, others=self.workers, method=self._method, daemon=self._daemon, spin=self._spin)
        except (OSError, EOFError) as error:
            self.broken = True
            raise WorkerDied(
                f"worker {run.index} (envs {run.low}:{run.high}) ended during startup "
                f"({type(error).__name__}: {error}). It was killed from outside, or the system cannot create another "
                "process or file: lower num_workers, or raise the limits that `ulimit -u` and `ulimit -n` show."
            ) from error

    def _listen(self) -> None:
        sources: list[Any] = [
            *(worker.channel for worker in self.workers),
            *(worker.sentinel for worker in self.workers),
        ]
        self._waiter = Waiter(sources, spin=self._spin)
        for worker in self.workers:
            self._waiter.watch_for_room(worker.index, bool(worker.channel.unsent))

    def _step_frames(self, slot: int, actions: Sequence[Any] | None) -> list[bytes]:
        if actions is None:
            return [short_frame(_STEP, slot)] * len(self.workers)
        return [encode(Kind.STEP, slot, some) for some in actions]

    def _tell(self, kind: int, frames: Sequence[bytes], slot: int = 0) -> None:
        """Sends each worker its frame. Data that does not fit in the pipe is sent while the pool waits for replies.

        The pool stays `broken` until `begin` or `finish` is done, because an interrupt before that leaves replies that
        nobody would read.
        """
        self.broken = True
        self._kind, self._slot, self._frames = kind, slot, frames
        for worker, frame in zip(self.workers, frames, strict=True):
            # This does not use `_put`, which would add a call per worker and step.
            try:
                if worker.channel.put(frame):
                    continue
            except (BrokenPipeError, ConnectionResetError) as error:
                self._replace(worker, error)
            else:
                self._waiter.watch_for_room(worker.index, True)

    def _put(self, worker: Worker, frame: bytes) -> None:
        try:
            if not worker.channel.put(frame):
                self._waiter.watch_for_room(worker.index, True)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._replace(worker, error)

    def _share(self, kind: Kind, block: Block, frame_for: Callable[[EnvRange], bytes]) -> None:
        """Makes every worker attach a block, which belongs to the pool from here on."""
        self.broken = True  # an interrupt may leave a block that one worker has attached and another has not
        self._kind, self._slot = int(kind), 0
        self._shared.append((block, frame_for))  # before it is offered: a restarted worker attaches all shared blocks
        for worker in list(self.workers):
            try:
                self._offer(worker, block, frame_for, self._deadline)
            except OSError as error:
                self._replace(worker, error)
        self.finish(None if self._deadline is None else self._deadline.left())
        if not self._restart:
            block.close()
            self._shared.pop()

    def _offer(
        self, worker: Worker, block: Block, frame_for: Callable[[EnvRange], bytes], deadline: Deadline | None
    ) -> None:
        """Makes an idle worker attach a block: sends it the message, then the block.

        Raises:
            OSError: If the worker is gone.
            multiprocessing.TimeoutError: If it has not read the message by the deadline.
        """
        channel = worker.channel
        if not channel.put(frame_for(worker)):
            waiter = Waiter([channel, worker.sentinel], spin=False)
            waiter.watch_for_room(0, True)
            sent = False
            while not sent:  # the pipe must also have room for the descriptor, which cannot be sent in pieces
                sent = channel.flush()
                ready = waiter.ready(deadline)
                if not ready:
                    raise multiprocessing.TimeoutError(
                        f"{worker} did not attach its memory in time. Close this vector env and build a new one."
                    )
                if 1 in ready:  # its end of the pipe may be kept open by a child of an env
                    raise BrokenPipeError("the process has ended")
        block.send(channel.connection, worker.process.pid)

    def _start_deadline(self) -> Deadline | None:
        return None if self._start_timeout_s is None else Deadline(self._start_timeout_s)

    def _read(self, worker: Worker) -> tuple[int, int, Any] | None:
        """Returns a complete, decoded message; None if none has arrived, or if the worker was restarted."""
        channel = worker.channel
        try:
            if channel.unsent:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have left a last reply
                    self._waiter.watch_for_room(worker.index, not channel.flush())
            message = channel.take()
        except (EOFError, OSError) as error:
            self._replace(worker, error)
            return None
        except BadFrame as error:
            raise self._garbled(worker, str(error)) from error
        if message is None:
            return None
        self._deaths[worker.index] = 0
        if message[2] is None:
            return message
        return message[0], message[1], self._decoded(worker, message[2])

    def _decoded(self, worker: Worker, payload: bytes | bytearray | None) -> Any:
        try:
            return decode(payload)
        except Exception as error:
            self.broken = True
            raise VecEnvError(
                f"{worker} sent data that cannot be unpickled: {type(error).__name__}: {error}. Infos and results of "
                "calls must be of classes that this process can import: return plain data instead."
            ) from error

    def _replace(self, worker: Worker, cause: Exception | None = None) -> None:
        """Restarts a dead worker, or raises."""
        was_broken = self.broken
        died = self._died(worker)
        if not self._may_restart:
            raise died from cause
        logger.warn(f"{died} It is restarted, and the episodes of its envs are truncated.")
        while True:
            self._deaths[worker.index] += 1
            if self._deaths[worker.index] >= MAX_DEATHS:
                raise WorkerDied(f"{died} It died {MAX_DEATHS} times in a row.") from cause
            try:
                self._start_again(worker.index)
            except EnvError:  # it may also be an OSError that the env raised
                raise
            except (OSError, EOFError) as error:
                cause = error
            else:
                self.broken = was_broken
                return

    def _start_again(self, index: int) -> None:
        """Replaces a dead process, and sends the new one the command that the dead one did not answer."""
        dead = self.workers[index]
        with interrupts_deferred():
            self.workers[index] = self._start_one(self.ranges[index])
            dead.kill()
            release(dead)
        self._listen()
        worker = self.workers[index]
        self._reply_to(worker, start_frame(self._setups[index]))
        for block, frame_for in self._shared:
            self._offer(worker, block, frame_for, self._start_deadline())
            self._reply_to(worker, None)
        undone = None
        if self._kind == Kind.STEP_ROWS:
            rows = [env - worker.low for env in range(worker.low, worker.high) if env in self._in_flight]
            self._restore([worker.low + row for row in rows])
            if rows:
                undone = encode(Kind.STEP_ROWS, self._slot, [(row, None) for row in rows])
        else:
            undone = self._frames[index]
        if self._complete_slot is not None:
            self._reply_to(worker, self._resume_frame(worker, self._complete_slot))
        if undone is not None:
            self._waiter.watch_for_room(index, not worker.channel.put(undone))

    def _restore(self, envs: list[int]) -> None:
        """Restores rows in flight to their contents before they were sent."""
        for path, backup in self._backup.items():
            # Owner: the parent, because the worker is dead. It may have left these rows half written.
            self._arrays[path][self._slot, envs] = backup[envs]

    def _resume_frame(self, worker: Worker, slot: int) -> bytes:
        """Returns the frame that tells a restarted worker which episodes to truncate: all that were not over."""
        terminated, truncated = (
            self._arrays[path][slot, worker.rows] for path in (fields.TERMINATED, fields.TRUNCATED)
        )
        over = (terminated | truncated) & (self._autoreset_mode != AutoresetMode.SAME_STEP)
        return encode(Kind.RESUME, slot, ResumeCommand(over.tolist()))

    def _reply_to(self, worker: Worker, frame: bytes | None) -> Any:
        """Returns a restarted worker's reply to a frame, or to the previous message if the frame is None."""
        timeout, channel, deadline = self._start_timeout_s, worker.channel, self._start_deadline()
        if frame is not None:
            channel.put(frame)
        waiter = Waiter([channel, worker.sentinel], spin=False)
        reply = None
        while reply is None:
            waiter.watch_for_room(0, bool(channel.unsent))
            ready = waiter.ready(deadline)
            if not ready:
                raise multiprocessing.TimeoutError(
                    f"{worker} was restarted, but needs more than start_timeout_s={timeout}: increase this limit"
                )
            if 0 not in ready:  # a process that an env started may keep the pipe open
                raise EOFError("the process has ended")
            channel.flush()
            try:
                reply = channel.take()
            except BadFrame as error:
                raise self._garbled(worker, str(error), "construction") from error
        kind, _, payload = reply
        if kind == Kind.ERROR:
            raise self._failed(worker, self._decoded(worker, payload))
        return self._decoded(worker, payload)

    def _garbled(self, worker: Worker, what: str, when: str | None = None) -> VecEnvError:
        self.broken = True
        return VecEnvError(
            f"{worker} sent {what} during {when or doing(self._kind)}. Something else writes to the worker's pipe, for "
            "example an env that writes to a file descriptor it has closed. Fix the env, then close this vector env "
            "and build a new one."
        )

    def _failed(self, worker: Worker, failure: Failure) -> VecEnvError:
        try:
            exception_type = None if failure.exception is None else pickle.loads(failure.exception)
        except Exception:  # its module cannot be imported here
            exception_type = None
        who = f"envs {worker.low}:{worker.high}" if failure.env is None else f"env {failure.env}"
        if failure.refusal is not None:  # no fault of the env, and nothing is broken
            return NotRestorable(f"{who} in worker {worker.index}: {failure.refusal}")
        if failure.doing != "construction":
            # Gymnasium logs these lines before it raises. It also logs the traceback, which this exception contains.
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

    def _died(self, worker: Worker) -> WorkerDied:
        self.broken = True
        advice = "" if self._restart else " Close this vector env and build a new one."
        return WorkerDied(f"{worker} {how_it_ended(worker.process)} during {doing(self._kind)}.{advice}")

    def _late(self, timeout: float | None, replies: Mapping[int, Any]) -> str:
        late = [worker for worker in self.workers if worker.index not in replies]
        who = ", ".join(f"worker {w.index} (envs {w.low}:{w.high})" for w in late)
        what = doing(self._kind)
        if what == "construction":
            return (
                f"The construction of the envs has timed out after {timeout} second(s): no answer from {who}. "
                "If they need longer, increase start_timeout_s."
            )
        return (
            f"The call to `{what}_wait` has timed out after {timeout} second(s): no answer from {who}. "
            "Close this vector env and build a new one."
        )
