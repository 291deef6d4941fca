"""Starts worker processes, tells how one ended, and ends them for certain."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium import logger

from vecenv.workers import launch
from vecenv.workers import worker as worker_module
from vecenv.workers.protocol import BadFrame, Channel, Kind, Waiter, decode, encode

END_S = 1.0  # for the system to end a killed process and to tell how it ended


@dataclass(frozen=True)
class EnvRange:
    """The envs `low:high` of worker `index`, which may be this process itself."""

    index: int
    low: int
    high: int


@dataclass(frozen=True)
class Worker(EnvRange):
    """The parent's handle on one worker process, which owns its share of the envs.

    Attributes:
        sentinel: Becomes ready when the process ends. A pidfd where there is one: multiprocessing's
            own sentinel stays silent while a child of the worker lives, and fires when the fork server dies.
    """

    process: BaseProcess
    channel: Channel
    sentinel: int

    def __str__(self) -> str:
        return f"worker {self.index} (envs {self.low}:{self.high})"

    def alive(self) -> bool:
        """Returns whether the process runs."""
        return not wait([self.sentinel], timeout=0)

    def kill(self) -> None:
        """Ends the process at once."""
        if self.sentinel == self.process.sentinel:
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)


def how_it_ended(process: BaseProcess) -> str:
    """Returns a phrase that says how a process ended, with the usual cause."""
    code = _exit_code(process)
    if code is None:
        return "closed its pipe but still runs"
    if code >= 0:
        return f"exited with code {code} (os._exit or a crash; its own output may say more)"
    name = signal.Signals(-code).name
    reason = {
        "SIGKILL": "often out of memory: lower num_envs or free memory",
        "SIGSEGV": "a crash in native code of the env",
        "SIGABRT": "a failed check in native code of the env",
        "SIGBUS": "often a full /dev/shm",
    }.get(name, "sent from outside")
    return f"got {name} ({reason})"


def _exit_code(process: BaseProcess) -> int | None:
    """Collects a process that has ended and returns its exit code; None if it runs on."""
    # Asked first, because join() waits for a pipe that children of the process may hold open.
    if process.exitcode is None:
        process.join(timeout=END_S)
    process.join(timeout=0)  # with a known code it only makes multiprocessing forget the process
    return process.exitcode


def available_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def spread(num_envs: int, num_workers: int | None, at_most: int | None = None) -> list[tuple[int, int]]:
    """Returns the contiguous run `(low, high)` of envs that each worker owns, as even as can be.

    Args:
        num_envs: N.
        num_workers: W; None for one per core.
        at_most: An upper limit on W.
    """
    if num_workers is None:
        num_workers = min(available_cores(), num_envs)
    if not 1 <= num_workers <= num_envs:
        raise ValueError(
            f"num_workers={num_workers} for {num_envs} envs: a worker needs at least one env. "
            f"Use 1 to {num_envs}, None for one worker per core, or 0 to step them in this process."
        )
    if at_most is not None:
        num_workers = min(num_workers, at_most)
    return [(num_envs * w // num_workers, num_envs * (w + 1) // num_workers) for w in range(num_workers)]


def foreign_specs() -> list[Any]:
    """Returns the env specs that were registered by others than Gymnasium, as workers may need them."""
    specs = []
    for spec in gym.registry.values():
        ours = isinstance(spec.vector_entry_point, str) and spec.vector_entry_point.startswith("vecenv.")
        if ours or (isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs")):
            continue
        try:
            cloudpickle.dumps(spec)
        except Exception:  # an entry point that cannot travel: its env can only be built in this process
            continue
        specs.append(spec)
    return specs


def start_worker(
    index: int, low: int, high: int, *, method: str, daemon: bool, spin: bool, others: Sequence[Worker]
) -> Worker:
    """Starts the process of one worker, which then waits for the message START.

    Args:
        index: Of the worker.
        low: Its first env.
        high: One past its last env.
        method: "forkserver", "spawn" or "fork".
        daemon: Whether the process is daemonic.
        spin: Whether it waits awake at first, see `messages.Waiter`.
        others: The workers there are already.

    Raises:
        OSError, EOFError: If the process ends before it has started.
    """
    ours, theirs = multiprocessing.Pipe(duplex=True)
    channel = Channel(ours)
    # A fork copies the parent's ends of all pipes; under forkserver and spawn a worker gets only its own end.
    inherited = [*(worker.channel for worker in others), channel] if method == "fork" else []
    try:
        process = launch.start_process(
            method,
            worker_module.run,
            (theirs, inherited, spin),
            name=f"vecenv-worker-{index}",
            daemon=daemon,
        )
    except BaseException:
        channel.close()
        raise
    finally:
        theirs.close()
    return Worker(index, low, high, process, channel, sentinel_of(process))


def setup_message(setup: bytes) -> bytes:
    """Returns the START message for a new worker: which envs to build. Its READY holds their spaces and metadata."""
    return encode(Kind.START, payload=(launch.environment(), setup))


def shut_down(workers: list[Worker], grace_s: float) -> None:
    """Ends every worker: asks, waits `grace_s`, then kills. Never blocks for ever.

    Args:
        workers: All of them, dead ones included; empty afterwards.
        grace_s: Seconds for the envs to finish what they do and to close; 0 to end them at once.
    """
    errors = _ask_to_close(workers, time.monotonic() + grace_s) if grace_s > 0 else []
    alive = [worker for worker in workers if worker.alive()]
    for worker in alive:
        worker.kill()
    _await(alive, time.monotonic() + END_S)
    while workers:
        worker = workers.pop()
        errors += _errors_of_close(worker)
        release(worker)
    for error in errors:
        logger.warn(error)


def _ask_to_close(workers: Sequence[Worker], deadline: float) -> list[str]:
    """Sends CLOSE and waits for the processes to end; returns a warning for each env whose close() raised."""
    errors: list[str] = []
    waiter = Waiter([*(worker.channel for worker in workers), *(worker.sentinel for worker in workers)], spin=False)
    running = set(range(len(workers)))
    for i, worker in enumerate(workers):
        with contextlib.suppress(OSError):  # it is dead already
            waiter.watch_for_room(i, not worker.channel.put(encode(Kind.CLOSE)))
    while running and (ready := waiter.ready(deadline)):
        for source in ready:
            i = source % len(workers)
            channel = workers[i].channel
            if source >= len(workers):
                running.discard(i)
                waiter.forget(source)
                continue
            try:
                waiter.watch_for_room(i, not channel.flush())
                # Stale replies are read too: a worker that blocks on writing one would never read CLOSE.
                errors += _error_of_close(workers[i], channel.take())
            except (OSError, EOFError, BadFrame):
                waiter.forget(i)
    return errors


def _errors_of_close(worker: Worker) -> list[str]:
    """Returns the warnings about envs whose close() raised that an ended process left in its pipe."""
    errors: list[str] = []
    with contextlib.suppress(OSError, EOFError, BadFrame):  # the end, or half a message
        while message := worker.channel.take():
            errors += _error_of_close(worker, message)
    return errors


def _error_of_close(worker: Worker, message: Any) -> list[str]:
    if message is not None and message[0] == Kind.ERROR:
        with contextlib.suppress(Exception):  # what cannot be unpickled here
            failure = decode(message[2])
            if failure.doing == "close":
                return [f"worker {worker.index}: an env raised in close():\n{failure.traceback}"]
    return []


def release(worker: Worker) -> None:
    """Frees what this process holds of a worker whose process has ended."""
    worker.channel.close()
    _exit_code(worker.process)
    if worker.sentinel != worker.process.sentinel:
        os.close(worker.sentinel)
    if worker.process.exitcode is not None:
        worker.process._popen.close()  # type: ignore[attr-defined]  # or descriptors stay open until garbage collection


def sentinel_of(process: BaseProcess) -> int:
    """Returns what becomes ready when a process ends, see `Worker.sentinel`; a pidfd is the caller's to close."""
    if hasattr(os, "pidfd_open") and process.pid is not None:
        with contextlib.suppress(OSError):  # forbidden here, or the process is gone already
            return os.pidfd_open(process.pid)
    return process.sentinel


def _await(workers: Sequence[Worker], deadline: float) -> None:
    waiting = {worker.sentinel for worker in workers}
    while waiting and (left := deadline - time.monotonic()) > 0:
        waiting -= set(wait(waiting, timeout=left))
