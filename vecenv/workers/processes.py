"""Handles to worker processes; functions that start them, report how one ended, and reliably shut all of them down."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import gymnasium as gym
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec

from vecenv.errors import VecEnvError, WorkerDied
from vecenv.workers import launch
from vecenv.workers import worker as worker_module
from vecenv.workers.pickling import dumps, picklable
from vecenv.workers.pipes import BadFrame, Channel, Deadline, Waiter
from vecenv.workers.pool import EnvRange
from vecenv.workers.protocol import Build, Kind, StartCommand, decode, encode

REMEDY = (
    "Create it inside the function, so that each env has its own. num_workers=0 and context='fork' do not pickle "
    "functions."
)
END_S = 1.0  # time for the system to end a killed process and to report its exit code


@dataclass(frozen=True)
class Worker(EnvRange):
    """The parent's handle to one worker process, which owns the envs `low:high`.

    `sentinel` becomes ready when the process ends. It is a pidfd where the system has one: multiprocessing's own
    sentinel stays silent while a child of the worker lives, and fires when the fork server dies.
    """

    process: BaseProcess
    channel: Channel
    sentinel: int

    def __str__(self) -> str:
        return f"worker {self.index} (envs {self.low}:{self.high})"

    def kill(self) -> None:
        """Ends the process at once."""
        if self.sentinel == self.process.sentinel:
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)


def how_it_ended(process: BaseProcess) -> str:
    """Returns a phrase that says how a process ended, and the usual cause."""
    code = _exit_code(process)
    if code is None:
        return "closed its pipe but is still running"
    if code >= 0:
        return f"exited with code {code} (os._exit or a crash; its own output may say more)"
    name = signal.Signals(-code).name
    reason = {
        "SIGKILL": "often because memory ran out: lower num_envs or free memory",
        "SIGSEGV": "a crash in native code of the env",
        "SIGABRT": "a failed check in native code of the env",
        "SIGBUS": "often a full /dev/shm",
    }.get(name, "sent from outside")
    return f"was killed by {name} ({reason})"


def _exit_code(process: BaseProcess) -> int | None:
    """Joins a process that has ended and returns its exit code; None if it is still running."""
    # This reads the code first, because join() waits for a pipe that children of the process may hold open.
    if process.exitcode is None:
        process.join(timeout=END_S)
    process.join(timeout=0)  # once the code is known, this only makes multiprocessing forget the process
    return process.exitcode


def foreign_specs() -> list[EnvSpec]:
    """Returns the registered env specs that are not from Gymnasium or vecenv. Workers may need them."""
    specs = []
    for spec in gym.registry.values():
        ours = isinstance(spec.vector_entry_point, str) and spec.vector_entry_point.startswith("vecenv.")
        if ours or (isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs")):
            continue
        specs.append(spec)
    return specs if picklable(specs) else [spec if picklable(spec) else _refusing(spec) for spec in specs]


def _refusing(spec: EnvSpec) -> EnvSpec:
    """Returns a spec to send instead of one that cannot be pickled. Making its env raises an error that says why."""
    try:
        dumps(spec, REMEDY, {f"the spec of {spec.id!r}": spec})
    except TypeError as error:
        return EnvSpec(spec.id, functools.partial(_refuse, str(error)))
    return spec


def _refuse(message: str, **_: Any) -> gym.Env:
    raise VecEnvError(message)


def start_worker(
    run: EnvRange, others: Sequence[Worker], *, method: str, daemon: bool, spin: bool, inherited_build: Build | None
) -> Worker:
    """Starts the process of one worker, which then waits for the message START; `others` are the existing workers.

    `inherited_build` is for a process that is forked from this one, and None otherwise; see `StartCommand`.

    Raises WorkerDied if the process ends before it has started.
    """
    ours, theirs = multiprocessing.Pipe(duplex=True)
    channel = Channel(ours)
    # A fork copies the parent's ends of all pipes. With forkserver and spawn, a worker receives only its own end.
    inherited = [*(worker.channel for worker in others), channel] if method == "fork" else []
    name, arguments = f"vecenv-worker-{run.index}", (theirs, inherited, spin, inherited_build)
    try:
        process = launch.start_process(method, worker_module.run, arguments, name=name, daemon=daemon)
    except BaseException as error:
        channel.close()
        if not isinstance(error, (OSError, EOFError)):
            raise
        raise WorkerDied(
            f"worker {run.index} (envs {run.low}:{run.high}) ended during startup ({type(error).__name__}: {error}). "
            "It was killed from outside, or the system cannot create another process or file, or lacks the memory: "
            "lower num_workers, or raise the limits that `ulimit -u`, `ulimit -n` and `ulimit -v` show."
        ) from error
    finally:
        theirs.close()
    return Worker(run.index, run.low, run.high, process, channel, sentinel_of(process))


def start_frame(build: bytes | None, next_step: list[int] | None = None) -> bytes:
    """Returns the frame of START; see `StartCommand` for the arguments."""
    return encode(Kind.START, payload=StartCommand(launch.environment(), build, next_step))


def shut_down(workers: list[Worker], grace_s: float) -> None:
    """Asks every worker to exit, and kills the workers that still run after `grace_s` seconds (0: at once).

    Never blocks forever. Dead workers may be in the list, which is empty afterwards.
    """
    errors: list[str] = []
    if grace_s > 0:
        _ask_to_close(workers, Deadline(grace_s), errors)
    alive = [worker for worker in workers if not wait([worker.sentinel], timeout=0)]
    for worker in alive:
        worker.kill()
    waiting, deadline = {worker.sentinel for worker in alive}, Deadline(END_S)
    while waiting and (left := deadline.slice()):
        waiting -= set(wait(waiting, timeout=left))
    while workers:
        worker = workers.pop()
        with contextlib.suppress(OSError, EOFError, BadFrame):  # the end of the pipe, or half a message
            _read_errors(worker, errors)
        release(worker)
    for error in errors:
        logger.warn(error)


def _ask_to_close(workers: Sequence[Worker], deadline: Deadline, errors: list[str]) -> None:
    """Sends CLOSE and waits for the processes to end; adds a warning for each env whose close() raised."""
    waiter = Waiter([*(worker.channel for worker in workers), *(worker.sentinel for worker in workers)], spin=False)
    running = set(range(len(workers)))
    for i, worker in enumerate(workers):
        with contextlib.suppress(OSError):  # it is already dead
            waiter.watch_for_room(i, not worker.channel.put(encode(Kind.CLOSE)))
    while running and (ready := waiter.ready(deadline)):
        for source in ready:
            i = source % len(workers)
            if source >= len(workers):
                running.discard(i)
                waiter.forget(source)
                continue
            try:
                waiter.watch_for_room(i, not workers[i].channel.flush())
                # Stale replies are read too: a worker that blocks on writing one would never read CLOSE.
                _read_errors(workers[i], errors)
            except (OSError, EOFError, BadFrame):
                waiter.forget(i)


def _read_errors(worker: Worker, errors: list[str]) -> None:
    """Reads the messages that have arrived; adds a warning for each env whose close() raised."""
    while message := worker.channel.take():
        if message[0] == Kind.ERROR:
            with contextlib.suppress(Exception):  # a failure that cannot be unpickled here
                failure = decode(message[2])
                if failure.doing == "close":
                    errors.append(f"worker {worker.index}: an env raised in close():\n{failure.traceback}")


def release(worker: Worker) -> None:
    """Frees the descriptors that this process holds for a worker that has ended."""
    worker.channel.close()
    _exit_code(worker.process)
    if worker.sentinel != worker.process.sentinel:
        os.close(worker.sentinel)
    if worker.process.exitcode is not None:
        worker.process._popen.close()  # type: ignore[attr-defined]  # otherwise, descriptors stay open until garbage collection


def sentinel_of(process: BaseProcess) -> int:
    """Returns the sentinel of a process; see `Worker.sentinel`. If it is a pidfd, the caller must close it."""
    if hasattr(os, "pidfd_open") and process.pid is not None:
        with contextlib.suppress(OSError):  # not permitted, or the process is already gone
            return os.pidfd_open(process.pid)
    return process.sentinel
