"""The parent's view of its workers: `WorkerHandle`, one process and the pipe that leads to it, and `Messenger`."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from vecenv.workers.pipes import BadFrame, Channel, Deadline, Waiter
from vecenv.workers.pool import EnvRange
from vecenv.workers.protocol import Message

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
        # Only the first and the last real-time signal have a name.
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        reason = {
            "SIGKILL": "often because memory ran out: lower num_envs or free memory",
            "SIGSEGV": "a crash in native code of the env",
            "SIGABRT": "a failed check in native code of the env",
            "SIGBUS": "often a full /dev/shm",
            "SIGILL": "often native code built for another processor",
            "SIGFPE": "a division by zero in native code of the env",
            "SIGSYS": "a system call that a sandbox forbids",
            "SIGXCPU": "the limit on CPU time that `ulimit -t` shows",
            "SIGALRM": "a timer that the env has set",
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


class WorkerGone(Exception):
    """A worker that cannot answer any more, because its process has ended or has closed its pipe."""

    def __init__(self, worker: WorkerHandle):
        self.worker = worker


class BadMessage(Exception):
    """A worker sent something that is no reply to the command in progress: `what`, a phrase for messages."""

    def __init__(self, worker: WorkerHandle, what: str):
        self.worker, self.what = worker, what


class DeadlinePassed(Exception):
    """No worker has sent a complete message in time."""


class Messenger:
    """Sends frames to some workers, and waits for their messages and their deaths.

    No method blocks on a pipe. Data that does not fit in a pipe is sent while `messages` waits.
    """

    def __init__(self, workers: Sequence[WorkerHandle], *, spin: bool):
        self._workers, self._spin = workers, spin
        self.listen()

    def listen(self) -> None:
        """Begins to listen to the workers that are in the list now. Called whenever the list has changed."""
        self._count = len(self._workers)
        channels, sentinels = [each.channel for each in self._workers], [each.sentinel for each in self._workers]
        self._waiter = Waiter([*channels, *sentinels], spin=self._spin)
        for channel in channels:
            self._waiter.watch_for_room(channel, bool(channel.unsent))

    def send(self, frames: Iterable[tuple[WorkerHandle, bytes]]) -> None:
        """Sends frames. Workers that are gone are ignored: `messages` raises their deaths."""
        for worker, frame in frames:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if not worker.channel.put(frame):
                    self._waiter.watch_for_room(worker.channel, True)

    def messages(self, deadline: Deadline | None) -> Iterator[tuple[WorkerHandle, Message]]:
        """Waits until a worker has sent something; yields each complete message that has arrived, with its sender.

        Yields nothing if only parts of messages have arrived. A worker's death is raised only after the messages that
        it has sent were yielded. After an exception, or if the caller stops early, the next call continues.

        Raises:
            DeadlinePassed: If the deadline has passed and no message, or only a part of one, has arrived. Complete
                messages of other workers were yielded.
            WorkerGone: If a worker has ended or has closed its pipe.
            BadMessage: If the bytes in a pipe are not a message.
            SharedMemoryFull: If there is no memory for a message.
        """
        if deadline is not None:
            deadline.resume()
        ready, passed = self._waiter.ready(deadline), False
        if not ready:
            raise DeadlinePassed
        for source in ready:
            if source >= self._count:  # a process has ended
                if source - self._count in ready:
                    continue  # its pipe may hold a last message
                raise WorkerGone(self._workers[source - self._count])
            worker = self._workers[source]
            channel = worker.channel
            try:
                if channel.unsent:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have left a reply
                        self._waiter.watch_for_room(channel, not channel.flush())
                message = channel.take()
            except (EOFError, OSError) as error:
                raise WorkerGone(worker) from error
            except BadFrame as error:
                raise BadMessage(worker, str(error)) from error
            if message is not None:
                yield worker, message
            elif deadline is not None:
                deadline.extend()  # part of a message has moved, in one direction or the other
                passed = not deadline.slice()
        if passed:  # otherwise, data that keeps moving could hold the caller forever
            raise DeadlinePassed

    def forget(self, worker: WorkerHandle) -> None:
        """Ignores a worker from now on."""
        self._waiter.forget(worker.channel)
        self._waiter.forget(worker.sentinel)
