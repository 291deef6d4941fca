"""Messenger: sends frames to worker processes, and waits for their messages and their deaths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from vecenv.workers.handles import WorkerHandle
from vecenv.workers.pipes import BadFrame, Deadline, Waiter
from vecenv.workers.protocol import Message


class WorkerGone(Exception):
    """A worker that cannot answer any more, because its process has ended or has closed its pipe."""

    def __init__(self, worker: WorkerHandle):
        super().__init__(worker)
        self.worker = worker


class BadMessage(Exception):
    """A worker sent something that is no reply to the command in progress: `what`, a phrase for messages."""

    def __init__(self, worker: WorkerHandle, what: str):
        super().__init__(worker, what)
        self.worker, self.what = worker, what


class DeadlinePassed(Exception):
    """No worker has sent a complete message in time."""


class Messenger:
    """Exchanges messages with some workers.

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

    def send(self, frames: Iterable[tuple[WorkerHandle, bytes]]) -> Sequence[WorkerGone]:
        """Sends frames; returns one error for each worker that is gone."""
        gone: tuple[WorkerGone, ...] = ()
        for worker, frame in frames:
            try:
                if not worker.channel.put(frame):
                    self._waiter.watch_for_room(worker.channel, True)
            except (BrokenPipeError, ConnectionResetError) as error:
                found = WorkerGone(worker)
                found.__cause__ = error
                gone = (*gone, found)
        return gone

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
