"""processes.py: starts worker processes, tells how one ended, and ends them for certain."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from gymnasium import logger
from gymnasium.vector.utils import clear_mpi_env_vars

from vecenv import worker as worker_module
from vecenv.messages import Failure, Kind, receive, send

TERMINATE_S = 1.0  # between SIGTERM and SIGKILL
ONE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
}


@dataclass(frozen=True)
class Worker:
    """The parent's handle on one worker process, which owns the envs `low:high`."""

    index: int
    low: int
    high: int
    process: BaseProcess
    connection: Connection

    def how_it_ended(self) -> str:
        """Says in words how the process ended, with the usual reason."""
        self.process.join(timeout=TERMINATE_S)
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


def start_workers(
    workers: list[Worker],
    setups: Sequence[bytes],
    bounds: Sequence[tuple[int, int]],
    *,
    context: str | None,
    daemon: bool,
    spin: bool,
) -> None:
    """Starts one process for each setup and appends it to `workers`, so that a failure leaves none unknown.

    Args:
        workers: Filled as the processes start.
        setups: What each worker unpickles to build its envs.
        bounds: The run of envs that each worker owns.
        context: Start method, or None for the best one that does not fork this process.
        daemon: Whether the processes are daemonic.
        spin: Whether they wait awake at first, see `messages.Waiter`.
    """
    methods = multiprocessing.get_all_start_methods()
    if context is None:
        context = "forkserver" if "forkserver" in methods else "spawn"
    if context not in methods:
        raise ValueError(f"context={context!r} is no start method of this system: use one of {methods}")
    ctx = multiprocessing.get_context(context)
    fork = context == "fork"
    with _child_environment(hide_main=not fork):
        for index, (setup, (low, high)) in enumerate(zip(setups, bounds, strict=True)):
            ours, theirs = ctx.Pipe(duplex=True)
            inherited = [*(w.connection for w in workers), ours] if fork else []
            process = ctx.Process(
                target=worker_module.run,
                args=(theirs, setup, inherited, spin),
                name=f"vecenv-worker-{index}",
                daemon=daemon,
            )
            try:
                process.start()
            finally:
                theirs.close()
            workers.append(Worker(index, low, high, process, ours))


def shut_down(workers: Sequence[Worker], grace_s: float, owner_pid: int) -> None:
    """Ends every worker: asks, waits `grace_s`, then SIGTERM, then SIGKILL. Never blocks for ever.

    Args:
        workers: All of them, dead ones included.
        grace_s: Seconds for the envs to finish what they do and to close; 0 to end them at once.
        owner_pid: The process that started them; in any other (a fork of it) this does nothing.
    """
    if os.getpid() != owner_pid:
        return
    for worker in workers:
        with contextlib.suppress(OSError):  # it is dead already
            if grace_s > 0:
                send(worker.connection, Kind.CLOSE)
    deadline = time.monotonic() + grace_s
    _await(workers, deadline)
    for end in ("terminate", "kill"):
        alive = [worker for worker in workers if worker.process.is_alive()]
        for worker in alive:
            getattr(worker.process, end)()
        _await(alive, time.monotonic() + TERMINATE_S)
    for worker in workers:
        _report_late_error(worker)
        worker.connection.close()
        worker.process.join(timeout=TERMINATE_S)


def _await(workers: Sequence[Worker], deadline: float) -> None:
    waiting = {worker.process.sentinel: worker for worker in workers}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(waiting), timeout=left):
            waiting.pop(sentinel).process.join(timeout=TERMINATE_S)


def _report_late_error(worker: Worker) -> None:
    """Warns of an exception that nobody collected, such as one in an env's close()."""
    with contextlib.suppress(EOFError, OSError):
        while worker.connection.poll():
            kind, _, payload = receive(worker.connection)
            if kind == Kind.ERROR and isinstance(payload, Failure) and payload.doing == "close":
                logger.warn(f"worker {worker.index}: an env raised in close():\n{payload.traceback}")


@contextlib.contextmanager
def _child_environment(*, hide_main: bool) -> Iterator[None]:
    """Sets what new processes inherit: one thread for each maths library, and no `__main__`.

    A worker gets its envs by value (cloudpickle), so it need not import the user's script again, as
    multiprocessing would have it do. Without that import a script needs no `__main__` guard, its own
    imports (TensorFlow!) stay out of the workers, and they start sooner.
    """
    added = {name: value for name, value in ONE_THREAD.items() if name not in os.environ}
    main = sys.modules["__main__"]
    os.environ.update(added)
    if hide_main:
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with clear_mpi_env_vars():
            yield
    finally:
        sys.modules["__main__"] = main
        for name in added:
            os.environ.pop(name, None)
