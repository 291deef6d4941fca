"""Starts worker processes with multiprocessing's start methods, without changing this process.

A worker process differs from an ordinary multiprocessing process in three ways:

- It starts with the environment variables that `environment` returns, which limit math libraries to one thread.
  multiprocessing would pass this process's `os.environ`, which cannot be changed without affecting other threads.
- It never imports this process's `__main__`. Envs are sent by value (cloudpickle), so a script needs no `__main__`
  guard, its own imports (TensorFlow!) stay out of the workers, and they start sooner.
- With "forkserver", it is forked by vecenv's own fork server, which ends when this process ends, even if this process
  was killed. On Linux, the server's socket has no name: nothing is left behind if both are killed, and no cleaner of
  temporary folders can remove it. Elsewhere, the server removes the folder of the socket.

Order: `_ForkServer.ensure_running` precedes every request for a process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import (
    context,
    forkserver,
    popen_fork,
    popen_forkserver,
    popen_spawn_posix,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from vecenv.errors import VecEnvError

MPI_PREFIXES = ("OMPI_", "PMI_")  # this process may belong to an MPI job, but its workers do not
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}

JOB_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""Signals that terminals and schedulers send to all processes of a job. Workers leave the response to their parent."""

ORPHAN_GRACE_S = 2.0  # time for envs to finish a step and close after the parent is gone
END_S = 0.5  # time for workers to end by themselves after the grace, before the fork server and the kernel end them
REPEATED_S = 0.1  # a signal that comes later counts as repeated; `timeout` sends each signal twice within this time

_close_fds: Callable[..., None] = util.close_fds  # type: ignore[attr-defined]
_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def environment() -> dict[str, str]:
    """Returns the environment variables of a worker: this process's, with one thread per math library by default."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(MPI_PREFIXES)}
    return {**ONE_THREAD, **ours}


def start_method(context: str | None) -> str:
    """Returns a start method, "forkserver" for None. Raises ValueError if there is no such method."""
    if context not in (None, *_LAUNCHERS):
        raise ValueError(f"cannot find context for {context!r}: the start methods are {[*_LAUNCHERS]}")
    return context or "forkserver"


def check_not_daemonic() -> None:
    """Raises VecEnvError if Python does not let this process start processes."""
    if process.current_process().daemon:
        raise VecEnvError(
            f"worker processes cannot be started, because this process ({process.current_process().name}) is daemonic, "
            "like a worker of multiprocessing.Pool, and Python does not let daemonic processes start processes. Pass "
            "num_workers=0 to step the envs in this process, or start this process with daemon=False."
        )


def start_process(
    method: str, target: Callable[..., None], arguments: tuple, *, name: str, daemon: bool
) -> BaseProcess:
    """Starts a process that calls `target(*arguments)`. `method` is a result of `start_method`.

    The arguments must be small: writing large data to a process that is killed meanwhile could block forever. Raises
    OSError or EOFError if the process dies during startup.
    """
    _start_resource_tracker()
    started = WorkerProcess(target=target, args=arguments, name=name, daemon=daemon)
    started.launcher = _LAUNCHERS[method]
    started.start()
    _started.add(started)
    return started


def start_fork_server() -> None:
    """Starts the fork server, without waiting for its imports."""
    _server.ensure_running()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defers `JOB_SIGNALS` to the end of the block; a repeated signal is handled at once.

    An exception between the start of a process and the assignment of its handle would leave a zombie.
    """
    if threading.current_thread() is not threading.main_thread():  # signal handlers run only in the main thread
        yield
        return
    arrived: dict[int, float] = {}  # when each signal first arrived
    handlers: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        now = time.monotonic()
        if now - arrived.setdefault(number, now) >= REPEATED_S:
            handlers[number](number, frame)

    try:
        for number in map(int, JOB_SIGNALS):
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler  # Order: the entry exists before `note` can look it up
                signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in list(arrived)[1:]:  # sent again, because the first handler may raise
            os.kill(os.getpid(), number)
        for number in list(arrived)[:1]:
            handlers[number](number, None)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks `JOB_SIGNALS` in this thread, and in the processes that it starts until they unblock them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_processes() -> None:
    """Drops the parent's workers in a forked child, where multiprocessing would otherwise end them at exit."""
    for worker in _started:
        process._children.discard(worker)  # type: ignore[attr-defined]
    _server._lock = threading.Lock()  # another thread may have held it during the fork
    _server.abandon()


os.register_at_fork(after_in_child=_forget_processes)


class _ForkServer(forkserver.ForkServer):
    """multiprocessing's fork server, started with the variables of `environment`."""

    _lock: threading.Lock
    _process: subprocess.Popen | None = None
    _descriptors: tuple[int, ...] = ()  # among them the end of a pipe; the server ends when every copy of it is closed
    _at_exit: Any = None

    def ensure_running(self) -> None:
        """Starts the server unless it is running."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.abandon()
                self._start()
            elif not os.path.exists(self._forkserver_address):  # a cleaner has removed its folder
                self._start()  # the previous server stays, because its workers are its children

    def abandon(self) -> None:
        """Forgets the server, which has died or belongs to the process that forked this one."""
        if self._process is not None:
            self._process.returncode = 0  # or subprocess would warn that it is still running
            self._process = None
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._at_exit()  # runs the finalizer now; in a forked process it does nothing

    def _start(self) -> None:
        # A socket's path is limited to 107 bytes on Linux and to 103 bytes on other systems.
        parent = tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="vecenv-", dir=parent if len(os.fsencode(parent)) < 72 else "/tmp")
        with contextlib.ExitStack() as if_it_fails, socket.socket(socket.AF_UNIX) as listener:
            if_it_fails.callback(shutil.rmtree, folder, ignore_errors=True)
            listener.settimeout(None)  # the server inherits it, but not socket.getdefaulttimeout()
            address = os.path.join(folder, "forkserver")
            listener.bind(address)
            listener.listen()
            path = _path_of(listener)
            if path is not None:
                if_it_fails.callback(os.close, path)
                shutil.rmtree(folder)
                folder, address = "", f"/proc/self/fd/{path}"
            ends, alive = os.pipe()
            if_it_fails.callback(os.close, alive)
            try:
                # sys.path is set first, because the current folder may hold modules that shadow the standard library.
                code = (
                    f"import sys; sys.path[:] = {import_path()!r}; "
                    "from vecenv.workers.launch import run_forkserver; "
                    f"run_forkserver({listener.fileno()}, {ends}, {folder!r})"
                )
                flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
                command, ours = [spawn.get_executable(), *flags, "-c", code], (listener.fileno(), ends)
                with _signals_blocked():  # for good: the server must outlive its workers
                    server = subprocess.Popen(command, env=environment(), pass_fds=ours, stdin=subprocess.DEVNULL)
            finally:
                os.close(ends)
            if_it_fails.pop_all()
        self._process, self._forkserver_address = server, address
        # Workers inherit this descriptor instead of `alive`, so the server ends with this process, not the last worker.
        self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        self._descriptors = (alive, self._forkserver_alive_fd, *(() if path is None else (path,)))
        # When this process exits, the server does, too.
        self._at_exit = util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)


class _Killed(popen_fork.Popen):
    """A process that `terminate` kills, because workers ignore SIGTERM. multiprocessing calls it at exit, too."""

    def terminate(self) -> None:
        self.kill()


class _ForkServerPopen(_Killed, popen_forkserver.Popen):
    """A process that the fork server forks."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        data = _pickled(self, process_obj)
        self.sentinel, writing = _server.connect_to_new_process(self._fds)
        # A duplicate of the write end stays open until this process ends; its closing tells the worker.
        self.finalizer = util.Finalize(self, _close_fds, (os.dup(writing), self.sentinel))
        with open(writing, "wb") as stream:
            stream.write(data)
        self.pid = forkserver.read_signed(self.sentinel)


class _SpawnPopen(_Killed, popen_spawn_posix.Popen):
    """A process in a new interpreter."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker: Any = resource_tracker.getfd()
        self._fds.append(tracker)
        data = _pickled(self, process_obj)
        self.sentinel, theirs = os.pipe()
        reading, writing = os.pipe()
        self.finalizer = util.Finalize(self, _close_fds, (self.sentinel, writing))
        try:
            command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=reading)
            if "-c" in command:  # a frozen program has no such argument
                code = command.index("-c") + 1
                command[code] = f"import sys; sys.path[:] = {import_path()!r}; {command[code]}"
            with _signals_blocked():
                self._process = subprocess.Popen(command, env=environment(), pass_fds=(*self._fds, reading, theirs))
        finally:
            os.close(reading)
            os.close(theirs)
        self.pid = self._process.pid
        with open(writing, "wb", closefd=False) as stream:
            stream.write(data)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Returns the exit code, or None if the process is running. Waits unless `flag` is WNOHANG."""
        if self.returncode is None:
            self.returncode = self._process.poll() if flag == os.WNOHANG else self._process.wait()
        return self.returncode


class _ForkPopen(_Killed):
    """A fork of this process."""

    def _launch(self, process_obj: Any) -> None:
        with _signals_blocked():
            super()._launch(process_obj)  # type: ignore[misc]  # typeshed lacks it


class WorkerProcess(BaseProcess):
    """A process that its launcher starts."""

    launcher: Callable[[Any], Any]
    _start_method = None  # the processes that an env starts use multiprocessing's default method

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return process_obj.launcher(process_obj)


_LAUNCHERS: dict[str, Callable[[Any], Any]] = {
    "forkserver": _ForkServerPopen,
    "spawn": _SpawnPopen,
    "fork": _ForkPopen,
}
_server = _ForkServer()


def run_forkserver(listener: int, alive: int, folder: str) -> None:
    """Runs the fork server on a socket until the other end of the pipe `alive` closes, then removes the folder."""
    try:
        forkserver.main(listener, alive, ["vecenv.workers.worker"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # SIGALRM ends this process if workers still run after their grace. The kernel then kills them, see worker.py.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, ORPHAN_GRACE_S + END_S)
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                os.waitpid(-1, 0)


def _path_of(listener: socket.socket) -> int | None:
    """Returns a descriptor through which a socket can be reached once its file is removed; None except on Linux."""
    if not hasattr(os, "O_PATH"):
        return None
    path = os.open(listener.getsockname(), os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"/proc/self/fd/{path}")
        listener.accept()[0].close()
    except OSError:
        os.close(path)
        return None
    return path


def import_path() -> list[str]:
    """Returns `sys.path` for another process, in which "" may be a different folder.

    The folders of modules that this process has imported with an earlier `sys.path` or current folder follow.
    """
    # Python's import system ignores entries that are not strings, such as `Path` objects.
    path = dict.fromkeys(str(entry or _current_folder() or "") for entry in sys.path if isinstance(entry, str))
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        file = vars(module).get("__file__")
        if isinstance(file, str) and (folder := _folder_of(name, file)):
            path.setdefault(folder)
    return list(path)


@functools.cache
def _folder_of(name: str, file: str) -> str | None:
    """Returns the folder in which Python finds this file under this name; None if it does not, as in packages."""
    place = os.path.dirname(file) if os.path.basename(file).startswith("__init__.") else file
    folder, base = os.path.split(place)
    return folder if base.partition(".")[0] == name and os.path.isabs(folder) else None


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # the folder was deleted
        return None


def _start_resource_tracker() -> None:
    """Starts multiprocessing's resource tracker so that it survives `JOB_SIGNALS`, not only SIGINT and SIGTERM."""
    with _signals_blocked():  # `ensure_running` unblocks SIGINT and SIGTERM; this restores the mask
        resource_tracker.ensure_running()


def _pickled(popen: Any, process_obj: Any) -> memoryview:
    """Returns the pickled start-up data of a new process, without this process's `__main__`.

    `multiprocessing.spawn.get_preparation_data` would have it imported, and would set this process's start method.
    """
    data = {
        "name": process_obj.name,
        "authkey": process.current_process().authkey,
        "sys_path": import_path(),
        "sys_argv": list(map(str, sys.argv)),
        "orig_dir": process.ORIGINAL_DIR,  # type: ignore[attr-defined]
        "dir": _current_folder(),
    }
    buffer = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        reduction.dump({key: value for key, value in data.items() if value is not None}, buffer)
        reduction.dump(process_obj, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getbuffer()
