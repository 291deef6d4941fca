"""ProcessPool: the worker processes of one vector env. Sends commands, receives replies, replaces dead workers."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from gymnasium import logger

from vecenv.errors import EnvError, NotRestorable, SharedMemoryFull, VecEnvError, WorkerDied, env_error
from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.resources import available_cores, cpu_quota
from vecenv.rows.batched import Batched
from vecenv.rows.messages import EnvDescription, RowsOptions, StepObjects, combined
from vecenv.workers import processes
from vecenv.workers.cuts import CutEpisodes
from vecenv.workers.launch import check_not_daemonic, interrupts_deferred, start_method
from vecenv.workers.logs import log_settings
from vecenv.workers.pickling import dumps
from vecenv.workers.pipes import BadFrame, Deadline, Waiter
from vecenv.workers.pool import EnvRange, Failed, NotSent, Pool, RowsLate
from vecenv.workers.processes import Worker, start_frame
from vecenv.workers.protocol import (
    BETWEEN_STEPS,
    AttachCommand,
    Build,
    Failure,
    Kind,
    RowsReply,
    StepRowsCommand,
    decode,
    doing,
    encode,
    short_frame,
)
from vecenv.workers.worker import build_rows

MAX_DEATHS = 3  # consecutive deaths of one worker, without a reply in between, after which it is not restarted

# Plain ints: they are compared with every message, and looking up enum members is slower.
_STEP, _READY, _READY_ROWS, _ERROR = map(int, (Kind.STEP, Kind.READY, Kind.READY_ROWS, Kind.ERROR))


def _end(workers: list[Worker], grace_s: float, blocks: list[Block]) -> None:
    """Ends the processes and releases the memory that was shared with them."""
    while blocks:
        blocks.pop().close()
    processes.shut_down(workers, grace_s)


class ProcessPool(Pool):
    """A pool of W processes, each with a contiguous range of envs. The arguments are those of `AsyncVectorEnv`.

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
        check_not_daemonic()
        self._method, self._daemon, self._shared_memory = start_method(context), daemon, shared_memory
        forks = self._method == "fork"  # a forked process inherits all of this
        specs, logs = ([], None) if forks else (processes.foreign_specs(), log_settings())
        # What a worker that is restarted needs again. Otherwise, only the frames hold the pickled functions, until the
        # workers have replied: the data of their closures may be large.
        self._builds: list[bytes | None] = []
        self._inherited: list[Build] = []
        self._frames: Sequence[bytes] = []  # of the command in progress, one per worker
        for run in ranges:
            how = replace(options, own_copies=run.high - run.low > 1)  # the envs of a worker share this pickle
            build = Build(logs, worker_init, partial(build_rows, specs, env_fns[run.rows], run.low, how))
            # One pickle, so that objects that both use, such as globals of a script, stay the same objects.
            pickled = None if forks else dumps(build, processes.REMEDY, _parts(env_fns, run, worker_init))
            self._frames.append(start_frame(pickled))
            if restart:
                self._builds.append(pickled)
            if forks:
                self._inherited.append(build)
        self.ranges = ranges
        self.workers: list[Worker] = []
        self._start_timeout_s = start_timeout_s
        self._options = options
        # A quota of CPU time also counts the spinning of this process; on a core of its own, spinning costs nothing.
        self._spin = len(ranges) <= available_cores() and len(ranges) < cpu_quota()
        self._waiter = Waiter([], spin=False)
        self._layout: Layout | None = None
        self._blocks: list[Block] = []  # the block that a restarted worker must attach, once there is one
        # The command in progress. Each reply echoes its slot.
        self._kind, self._slot = int(Kind.START), 0
        self._resets: set[int] = set()  # the envs that it resets
        self._replied: dict[int, Any] = {}  # the replies so far, by worker
        # Between send_rows and receive_rows: envs in flight, and results that have arrived (first env, rows, objects).
        self._in_flight: set[int] = set()
        self._done: list[tuple[int, list[int], StepObjects | None]] = []
        self._restart = restart
        self._deaths = [0] * len(ranges)
        self._cuts: CutEpisodes | None = None  # exists if dead workers are restarted, once there is memory
        # A module function and a list, not a method, because a finalizer that holds `self` would keep it alive.
        # multiprocessing's Finalize runs before multiprocessing joins all children at exit, and does nothing in a
        # process that was forked from this one.
        self._finalizer = Finalize(self, _end, args=(self.workers, 0.0, self._blocks), exitpriority=10)

    @property
    def processes(self) -> list[BaseProcess]:  # type: ignore[override]
        return [worker.process for worker in self.workers]

    def start(self) -> list[EnvDescription]:
        for run in self.ranges:
            with interrupts_deferred():
                self.workers.append(self._start_one(run))
        self._listen()
        self._send(zip(self.workers, self._frames, strict=True))
        self._frames = ()
        if not self._restart:
            self._inherited.clear()
        descriptions = self._replies(self._start_timeout_s)
        if self._restart and not all(description.steps_subsets for description in descriptions):
            raise ValueError(
                "on_worker_death='restart' needs a vector env that defines step_rows(ids, actions), see vecenv.Batched"
            )
        return descriptions

    def share(self, layout: Layout) -> Block:
        block = Block.create(layout.size, shared_memory=self._shared_memory)
        self._layout = layout
        self._blocks.append(block)
        for worker in self.workers:
            try:
                self._attach(worker)
            except EnvError:
                raise
            except (OSError, EOFError) as error:
                raise self._died(worker) from error
        if self._restart:
            options = self._options
            self._cuts = CutEpisodes(block.views(layout), options.autoreset_mode, with_infos=options.infos)
        return block

    def begin(self, kind: Kind, slot: int = 0, payloads: Sequence[Any] | None = None) -> None:
        try:
            if payloads is None:
                frames = [short_frame(kind, slot)] * len(self.workers)
            else:
                frames = [encode(kind, slot, payload) for payload in payloads]
        except Exception as error:
            raise NotSent(error) from None
        if self._cuts is not None:
            self._resets = _reset_envs(kind, self.ranges, payloads)
        self._kind, self._slot, self._frames = kind, slot, frames
        self._send(zip(self.workers, frames, strict=True))

    def finish(self, timeout: float | None = None) -> list[Any]:
        replies = self._replies(timeout)
        # Owner: from here on, the caller owns the whole slot of a step or a reset.
        return replies if self._cuts is None else self._with_cuts(replies, self._cuts)

    def _with_cuts(self, replies: list[Any], cuts: CutEpisodes) -> list[Any]:
        """Reports the episodes that deaths have cut, if the command in progress was a step; returns all replies."""
        kind, slot = self._kind, self._slot
        if kind == _STEP and cuts.unreported:
            for run in self.ranges:
                cut = cuts.report(slot, range(run.low, run.high))
                if cut is not None:
                    replies[run.index] = combined(part for part in (replies[run.index], cut) if part is not None)
        elif kind == Kind.GET_STATE and cuts.unreported:
            error = NotRestorable("a worker was just restarted: step all its envs before you save their states")
            return [Failed(error)] * len(replies)
        elif kind == Kind.SET_STATE:
            accepted = [run for run in self.ranges if type(replies[run.index]) is not Failed]
            cuts.unreported.difference_update(env for run in accepted for env in range(run.low, run.high))
            if len(accepted) == len(self.ranges):  # otherwise, the previous batch stays the newest
                cuts.complete_slot = slot if self._resets else None
        elif kind == Kind.RESET:
            cuts.unreported -= self._resets
        if kind in (_STEP, Kind.RESET):
            cuts.complete_slot = slot
        return replies

    def _replies(self, timeout: float | None) -> list[Any]:
        """Waits for one reply of each worker; see `finish`."""
        deadline = None if timeout is None else Deadline(timeout)
        replies, count = self._replied, len(self.workers)
        while len(replies) < count:
            ready = self._waiter.ready(deadline)
            if not ready:
                raise multiprocessing.TimeoutError(self._late(timeout, replies))
            for source in ready:
                worker, message = self._read(source, ready)
                if message is None:
                    if deadline is not None:
                        deadline.extend()  # a part of a large message has moved: as in Gymnasium, the rest may follow
                    continue
                kind, echoed, payload = message
                if echoed != self._slot or worker.index in replies or kind == _READY_ROWS:
                    raise self._garbled(worker, f"an unexpected {Kind(kind).name} {echoed}")
                if kind == _ERROR:
                    if self._kind not in BETWEEN_STEPS:
                        raise self._failed(worker, payload)
                    payload = Failed(self._failed(worker, payload, broken=False))
                replies[worker.index] = payload
        return [replies.pop(index) for index in range(count)]

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        frames: list[tuple[Worker, bytes]] = []
        try:
            for worker in self.workers:
                low, high = worker.low, worker.high
                ours: StepRowsCommand = [(env - low, action) for env, action in orders if low <= env < high]
                if ours:
                    frames.append((worker, encode(Kind.STEP_ROWS, slot, ours)))
        except Exception as error:
            raise NotSent(error) from None
        envs = [env for env, _ in orders]
        if self._cuts is not None:
            self._cuts.back_up(envs)
        self._kind, self._slot = int(Kind.STEP_ROWS), slot
        self._in_flight.update(envs)
        self._send(frames)

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        deadline = None if timeout is None else Deadline(timeout)
        now = Deadline(0.0)
        while self._in_flight and self._collect_rows(now):
            pass  # takes what has arrived already
        while (num_done := sum(len(rows) for _, rows, _ in self._done)) < min_envs:
            if not self._collect_rows(deadline):
                raise RowsLate(
                    f"The call to `recv` has timed out after {timeout} second(s): {num_done} of {min_envs} envs are "
                    f"done, no answer yet from envs {sorted(self._in_flight)}. You may call `recv` again."
                )
        done, self._done = self._done, []
        objects = combined(part for _, _, part in done if part is not None)
        return [low + row for low, rows, _ in done for row in rows], objects

    def _collect_rows(self, deadline: Deadline | None) -> bool:
        """Waits for replies about rows and stores them in `_done`; returns False if the deadline has passed."""
        ready = self._waiter.ready(deadline)
        for source in ready:
            worker, message = self._read(source, ready)
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
            if self._cuts is not None and (cut := self._cuts.report(self._slot, envs)) is not None:
                self._done.append((worker.low, [], cut))
        return bool(ready)

    def close(self, grace_s: float) -> None:
        _end(self.workers, grace_s, self._blocks)
        self._finalizer.cancel()  # now, because Ctrl-C may interrupt the wait

    def _start_one(self, run: EnvRange) -> Worker:
        return processes.start_worker(
            run,
            self.workers,
            method=self._method,
            daemon=self._daemon,
            spin=self._spin,
            inherited_build=self._inherited[run.index] if self._inherited else None,
        )

    def _listen(self) -> None:
        channels, sentinels = [worker.channel for worker in self.workers], [worker.sentinel for worker in self.workers]
        self._waiter = Waiter([*channels, *sentinels], spin=self._spin)
        for worker in self.workers:
            self._waiter.watch_for_room(worker.index, bool(worker.channel.unsent))

    def _send(self, frames: Iterable[tuple[Worker, bytes]]) -> None:
        """Sends frames. Data that does not fit in a pipe is sent while the pool waits for replies."""
        for worker, frame in frames:
            try:
                if not worker.channel.put(frame):
                    self._waiter.watch_for_room(worker.index, True)
            except (BrokenPipeError, ConnectionResetError) as error:
                self._replace(worker, error)

    def _read(self, source: int, ready: list[int]) -> tuple[Worker, tuple[int, int, Any] | None]:
        """Returns the worker of a source that is ready, and a decoded message; None if it is incomplete.

        The message is also None if the worker was restarted.
        """
        worker = self.workers[source % len(self.workers)]
        if source >= len(self.workers):
            if worker.index not in ready:  # a dead worker's last message is read first
                self._replace(worker)
            return worker, None
        channel = worker.channel
        try:
            if channel.unsent:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have left a last reply
                    self._waiter.watch_for_room(worker.index, not channel.flush())
            message = channel.take()
        except (EOFError, OSError) as error:
            self._replace(worker, error)
            return worker, None
        except BadFrame as error:
            raise self._garbled(worker, str(error)) from error
        if message is None:
            return worker, None
        self._deaths[worker.index] = 0
        kind, slot, payload = message
        return worker, (kind, slot, None if payload is None else self._decoded(worker, payload))

    def _decoded(self, worker: Worker, payload: bytes | bytearray | None) -> Any:
        try:
            return decode(payload)
        except Exception as error:
            raise VecEnvError(
                f"{worker} sent data that cannot be unpickled: {type(error).__name__}: {error}. Infos and results of "
                "calls must be of classes that this process can import: return plain data instead."
            ) from error

    def _replace(self, worker: Worker, cause: Exception | None = None) -> None:
        """Restarts a dead worker, or raises."""
        died = self._died(worker)
        if self._cuts is None:
            raise died from cause
        logger.warn(f"{died} It is restarted, and the episodes of its envs are truncated.")
        while True:
            self._deaths[worker.index] += 1
            if self._deaths[worker.index] >= MAX_DEATHS:
                raise WorkerDied(f"{died} It died {MAX_DEATHS} times in a row.") from cause
            try:
                self._start_again(worker.index, self._cuts)
            except EnvError:  # it may also be an OSError that the env raised
                raise
            except (OSError, EOFError) as error:
                cause = error
            else:
                return

    def _start_again(self, index: int, cuts: CutEpisodes) -> None:
        """Replaces a dead process, and sends the new one the command that the dead one did not answer."""
        dead = self.workers[index]
        with interrupts_deferred():
            self.workers[index] = self._start_one(self.ranges[index])
            dead.kill()
            processes.release(dead)
        self._listen()
        self._replied.pop(index, None)  # void, because the new process receives the command again
        worker = self.workers[index]
        envs = range(worker.low, worker.high)
        in_flight = sorted(self._in_flight.intersection(envs))
        self._reply_to(worker, start_frame(self._builds[index], cuts.cut(envs, in_flight)))
        self._attach(worker)
        undone = self._frames[index] if self._kind != Kind.STEP_ROWS else None
        if in_flight:
            undone = encode(Kind.STEP_ROWS, self._slot, [(env - worker.low, None) for env in in_flight])
        if undone is not None:
            self._waiter.watch_for_room(index, not worker.channel.put(undone))

    def _attach(self, worker: Worker) -> None:
        """Makes an idle worker attach the memory. Raises as `_reply_to` does."""
        assert self._layout is not None
        self._reply_to(worker, encode(Kind.ATTACH, payload=AttachCommand(self._layout, worker.low, worker.high)))
        self._blocks[0].send(worker.channel.connection)
        self._reply_to(worker, None)

    def _reply_to(self, worker: Worker, frame: bytes | None) -> Any:
        """Returns the reply of one worker to a frame, or to the previous message if the frame is None.

        Raises OSError or EOFError if the worker is gone, and TimeoutError after `start_timeout_s`.
        """
        channel, timeout = worker.channel, self._start_timeout_s
        deadline = None if timeout is None else Deadline(timeout)
        if frame is not None:
            channel.put(frame)
        waiter = Waiter([channel, worker.sentinel], spin=False)
        reply = None
        while reply is None:
            waiter.watch_for_room(0, bool(channel.unsent))
            ready = waiter.ready(deadline)
            if not ready:
                raise multiprocessing.TimeoutError(
                    f"{worker} needs more than start_timeout_s={timeout} to build its envs or to attach their memory: "
                    "increase this limit"
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
        return VecEnvError(
            f"{worker} sent {what} during {when or doing(self._kind)}. Something else writes to the worker's pipe, for "
            "example an env that writes to a file descriptor it has closed. Fix the env, then close this vector env "
            "and build a new one."
        )

    def _failed(self, worker: Worker, failure: Failure, *, broken: bool = True) -> VecEnvError:
        try:
            exception_type = None if failure.exception is None else pickle.loads(failure.exception)
        except Exception:  # its module cannot be imported here
            exception_type = None
        who = f"envs {worker.low}:{worker.high}" if failure.env is None else f"env {failure.env}"
        if failure.refusal is not None:  # no fault of the env, and nothing is broken
            full = exception_type is not None and issubclass(exception_type, SharedMemoryFull)
            error_type = SharedMemoryFull if full else NotRestorable
            return error_type(f"{who} in worker {worker.index}: {failure.refusal}")
        if failure.doing not in ("construction", "worker_init"):
            # Gymnasium logs these lines before it raises. It also logs the traceback, which this exception contains.
            env = worker.low if failure.env is None else failure.env
            logger.error(f"Received the following error from Worker-{env} - Shutting it down")
            logger.error("Raising the last exception back to the main process.")
        advice = f"Fix {'worker_init' if failure.doing == 'worker_init' else 'the env'} (its traceback is above)"
        lost = re.findall(r"^ModuleNotFoundError: No module named '(.+)'$", failure.traceback, re.MULTILINE)
        if lost and lost[-1] in sys.modules:
            file = getattr(sys.modules[lost[-1]], "__file__", "no file")
            advice = (
                f"This process has loaded the module {lost[-1]!r} (from {file}), but its workers cannot import it: put "
                "its folder on sys.path and give it the name of its file"
            )
        advice += ", then close this vector env and build a new one." if broken else "."
        return env_error(
            exception_type,
            f"{who} in worker {worker.index} raised during {failure.doing}:\n\n{failure.traceback}\n{advice}",
        )

    def _died(self, worker: Worker) -> WorkerDied:
        advice = "" if self._restart else " Close this vector env and build a new one."
        return WorkerDied(f"{worker} {processes.how_it_ended(worker.process)} during {doing(self._kind)}.{advice}")

    def _late(self, timeout: float | None, replies: Mapping[int, Any]) -> str:
        who = ", ".join(str(worker) for worker in self.workers if worker.index not in replies)
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


def _parts(env_fns: Sequence[Callable] | Batched, run: EnvRange, worker_init: Any) -> dict[str, Any]:
    """Returns the functions that a worker receives, by name."""
    if isinstance(env_fns, Batched):
        return {"env_fns": env_fns, "worker_init": worker_init}
    return {
        **{f"env_fns[{run.low + i}]": env_fn for i, env_fn in enumerate(env_fns[run.rows])},
        "worker_init": worker_init,
    }


def _reset_envs(kind: Kind, ranges: Sequence[EnvRange], payloads: Sequence[Any] | None) -> set[int]:
    """Returns the envs that a command resets, or restores in the middle of an episode."""
    envs: set[int] = set()
    if payloads is None or kind not in (Kind.RESET, Kind.SET_STATE):
        return envs
    for run, payload in zip(ranges, payloads, strict=True):
        if kind == Kind.RESET:
            begins = [payload.mask is None or payload.mask[row] for row in range(run.high - run.low)]
        else:
            begins = [state["row"] is not None for state in payload]
        envs.update(run.low + row for row, begun in enumerate(begins) if begun)
    return envs
