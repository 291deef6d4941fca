"""processes.py: starts worker processes, tells how one ended, and ends them for certain."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium import logger
from gymnasium.vector.utils import clear_mpi_env_vars

from vecenv import worker as worker_module
from vecenv.messages import Kind, decode, encode, receive, send, send_in_pieces

END_S = 1.0  # for the system to end a killed process and to tell how it ended
MPI_PREFIXES = ("OMPI_", "PMI_")  # a worker is no process of the MPI job that the parent may be
ONE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
}


@dataclass(frozen=True)
class Share:
    """The envs `low:high` of worker `index`, which may be this process itself."""

    index: int
    low: int
    high: int


@dataclass(frozen=True)
class Worker(Share):
    """The parent's handle on one worker process, which owns its share of the envs.

    Attributes:
        sentinel: Becomes ready when the process ends. A pidfd where there is one: multiprocessing's
            own sentinel stays silent while a child of the worker lives, and fires when the fork server dies.
    """

    process: BaseProcess
    connection: Connection
    sentinel: int

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

    def how_it_ended(self) -> str:
        """Says in words how the process ended, with the usual reason."""
        self.process.join(timeout=END_S)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe but still runs"
        if code >= 0:
            return f"exited with code {code} (os._exit or a crash; its own output may say more)"
        name = signal.Signals(-code).name
        reason = {
            "SIGKILL": "often out of memory: lower num_envs or free memory",
            "SIGSEGV": "a crash in native code of the env",
            "SIGBUS": "often a full /dev/shm",
        }.get(name, "sent from outside")
        return f"got {name} ({reason})"


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


def start_context(context: str | None) -> Any:
    """Returns multiprocessing's context for a start method, or for the best one that does not fork this process.

    Raises:
        ValueError: If the system has no such start method.
    """
    methods = multiprocessing.get_all_start_methods()
    if context is None:
        context = "forkserver" if "forkserver" in methods else "spawn"
    if context not in methods:
        raise ValueError(f"cannot find context for {context!r}: the start methods of this system are {methods}")
    ctx = multiprocessing.get_context(context)
    if context == "forkserver":
        _preload(ctx)
    return ctx


def start_fork_server() -> None:
    """Starts what workers will be forked from, where that is a server, and does not wait for its imports."""
    if start_context(None).get_start_method() == "forkserver":
        with _child_environment(hide_main=True):
            forkserver.ensure_running()


def _preload(ctx: Any) -> None:
    """Has the fork server import what every worker needs, once, before it forks the first of them."""
    # There is a public way to set this list but none to read it, and what others put there must stay.
    modules = getattr(forkserver._forkserver, "_preload_modules", None)
    if modules is not None and worker_module.__name__ not in modules:
        ctx.set_forkserver_preload([*modules, worker_module.__name__])


def start_worker(
    index: int, low: int, high: int, *, ctx: Any, daemon: bool, spin: bool, others: Sequence[Worker]
) -> Worker:
    """Starts the process of one worker, which then waits for the message START.

    Args:
        index: Of the worker.
        low: Its first env.
        high: One past its last env.
        ctx: What `start_context` gave.
        daemon: Whether the process is daemonic.
        spin: Whether it waits awake at first, see `messages.Waiter`.
        others: The workers there are already.

    Raises:
        OSError, EOFError: If the process ends before it has started.
    """
    fork = ctx.get_start_method() == "fork"
    ours, theirs = ctx.Pipe(duplex=True)
    inherited = [*(worker.connection for worker in others), ours] if fork else []
    # Little is handed over here: a process that is killed while it reads a lot would block this one for ever.
    process = ctx.Process(
        target=worker_module.run, args=(theirs, inherited, spin), name=f"vecenv-worker-{index}", daemon=daemon
    )
    try:
        with _child_environment(hide_main=not fork):
            process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Worker(index, low, high, process, ours, _sentinel(process))


def send_setup(worker: Worker, setup: bytes) -> None:
    """Tells a new worker which envs to build; its READY says what they are like.

    Raises:
        OSError: If the process is gone.
    """

    def on_reply() -> None:
        raise BrokenPipeError("the process has ended")  # nothing else could come from a worker without envs

    environ = {name: value for name, value in os.environ.items() if not name.startswith(MPI_PREFIXES)}
    message = encode(Kind.START, payload=({**ONE_THREAD, **environ}, setup))
    send_in_pieces(worker.connection, message, on_reply, worker.sentinel)


def shut_down(workers: list[Worker], grace_s: float) -> None:
    """Ends every worker: asks, waits `grace_s`, then kills. Never blocks for ever.

    Args:
        workers: All of them, dead ones included; empty afterwards.
        grace_s: Seconds for the envs to finish what they do and to close; 0 to end them at once.
    """
    for worker in workers:
        with contextlib.suppress(OSError):  # it is dead already, or its pipe is full
            if os.name == "posix":
                os.set_blocking(worker.connection.fileno(), False)  # nothing below may wait for a pipe
            if grace_s > 0:
                send(worker.connection, encode(Kind.CLOSE))
    _await(workers, time.monotonic() + grace_s)
    alive = [worker for worker in workers if worker.alive()]
    for worker in alive:
        worker.kill()
    _await(alive, time.monotonic() + END_S)
    errors = []
    while workers:
        worker = workers.pop()
        errors += _late_errors(worker)
        release(worker)
    for error in errors:
        logger.warn(error)


def release(worker: Worker) -> None:
    """Frees what this process holds of a worker whose process has ended."""
    worker.connection.close()
    worker.process.join(timeout=END_S)
    if worker.sentinel != worker.process.sentinel:
        os.close(worker.sentinel)


def _sentinel(process: BaseProcess) -> int:
    if hasattr(os, "pidfd_open") and process.pid is not None:
        with contextlib.suppress(OSError):  # forbidden here, or the process is gone already
            return os.pidfd_open(process.pid)
    return process.sentinel


def _await(workers: Sequence[Worker], deadline: float) -> None:
    waiting = {worker.sentinel for worker in workers}
    while waiting and (left := deadline - time.monotonic()) > 0:
        waiting -= set(wait(waiting, timeout=left))


def _late_errors(worker: Worker) -> list[str]:
    """Returns what to say of exceptions that nobody collected, such as one in an env's close()."""
    errors = []
    with contextlib.suppress(Exception):  # half a message of a process that was killed, or none
        while worker.connection.poll():
            kind, _, payload = receive(worker.connection)
            if kind == Kind.ERROR and (failure := decode(payload)).doing == "close":
                errors.append(f"worker {worker.index}: an env raised in close():\n{failure.traceback}")
    return errors


_child_environment_lock = threading.Lock()  # two threads that create vector envs would swap each other's __main__


@contextlib.contextmanager
def _child_environment(*, hide_main: bool) -> Iterator[None]:
    """Sets what new processes inherit: one thread for each maths library, and no `__main__`.

    A worker gets its envs by value (cloudpickle), so it need not import the user's script again, as
    multiprocessing would have it do. Without that import a script needs no `__main__` guard, its own
    imports (TensorFlow!) stay out of the workers, and they start sooner.
    """
    with _child_environment_lock, clear_mpi_env_vars(), _variables_and_main(hide_main):
        yield


@contextlib.contextmanager
def _variables_and_main(hide_main: bool) -> Iterator[None]:
    added = {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
    main = sys.modules["__main__"]
    os.environ.update(added)
    if hide_main:
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in added:
            os.environ.pop(name, None)
