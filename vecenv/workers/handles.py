"""WorkerHandle: the parent's handle to one worker process and to the pipe that leads to it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from vecenv.workers.pipes import Channel
from vecenv.workers.pool import EnvRange

END_S = 1.0  # time for the system to end a killed process and to report its exit code


@dataclass(frozen=True)
class WorkerHandle(EnvRange):
    """The handle to one worker process, which owns the envs `low:high`.

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

    def release(self) -> None:
        """Frees the descriptors that this process holds for a worker that has ended."""
        self.channel.close()
        self._exit_code()
        if self.sentinel != self.process.sentinel:
            os.close(self.sentinel)
        if self.process.exitcode is not None:
            self.process._popen.close()  # type: ignore[attr-defined]  # otherwise, descriptors stay open until garbage collection

    def how_it_ended(self) -> str:
        """Returns a phrase that says how the process ended, and the usual cause."""
        code = self._exit_code()
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

    def _exit_code(self) -> int | None:
        """Joins a process that has ended and returns its exit code; None if it is still running."""
        # This reads the code first, because join() waits for a pipe that children of the process may hold open.
        if self.process.exitcode is None:
            self.process.join(timeout=END_S)
        self.process.join(timeout=0)  # once the code is known, this only makes multiprocessing forget the process
        return self.process.exitcode


def sentinel_of(process: BaseProcess) -> int:
    """Returns the sentinel of a process; see `WorkerHandle`. If it is a pidfd, the caller must close it."""
    if hasattr(os, "pidfd_open") and process.pid is not None:
        with contextlib.suppress(OSError):  # not permitted, or the process is already gone
            return os.pidfd_open(process.pid)
    return process.sentinel
