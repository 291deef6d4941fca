"""Block: memory that several processes share, or that is private to one process.

On Linux, a shared block is a file that never has a name. It is in /dev/shm or, with `shared_memory=False` or if
/dev/shm is too small, an anonymous file in memory. Processes pass its file descriptor. No matter which process dies,
and when, nothing remains, and the kernel frees the memory when the last process closes it. Other systems use a
`multiprocessing.shared_memory` segment, whose name is removed within about 50 us; a process that is killed during this
time leaks the segment.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import secrets
import socket
from collections.abc import Iterable
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from vecenv.errors import SharedMemoryFull
from vecenv.memory.layout import ALIGNMENT, Layout
from vecenv.resources import address_space, memory_limits, tightest_limit
from vecenv.tree import Path

SHM = "the shared memory in /dev/shm"

# Tests set this to 0xFF (NaN in floats, -1 in signed integers), which makes rows that were never written stand out.
poison: int | None = None


class Block:
    """A range of bytes that several processes share, or that is private to one process (`Block.private`).

    Arrays that are created from a block keep its memory alive. Closing a block while views are in use is safe: the
    memory is freed with the last view.
    """

    def __init__(self, buffer: Any, *, descriptor: int | None = None):
        self._buffer = buffer
        self._descriptor = descriptor

    @classmethod
    def create(cls, size: int, *, shared_memory: bool = True) -> Block:
        """Creates `size` bytes of shared memory that this process owns and other processes can attach.

        It is in `/dev/shm` if there is room; containers often limit it to 64 MB. Otherwise, and with
        `shared_memory=False`, it is an anonymous file in memory, where the system supports this.

        Raises:
            SharedMemoryFull: If the system does not have enough memory. All pages are claimed here, because SIGBUS
                kills a process that touches a page for which there is no memory.
        """
        limits = memory_limits()
        _check_room(size, limits)
        # Nothing limits an anonymous file, which may use up all memory, so its size must have been checked.
        falls_back = shared_memory and bool(limits) and hasattr(os, "memfd_create")
        try:
            descriptor = _claimed(size, shared_memory, falls_back)
            try:
                return cls(_filled(mmap.mmap(descriptor, size)), descriptor=descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # "Too many open files": memory is not the problem
                raise
            raise _refused(size, error, in_shm=shared_memory and not falls_back) from error

    @classmethod
    def private(cls, size: int) -> Block:
        """Allocates aligned memory that only this process uses. Raises SharedMemoryFull if there is too little."""
        _check_room(size, memory_limits())
        try:
            memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        except MemoryError as error:
            raise _refused(size, error) from error
        start = -memory.ctypes.data % ALIGNMENT
        return cls(_filled(memory[start : start + size]))

    def send(self, connection: Connection) -> None:
        """Sends the block to the process at the other end of `connection`, which calls `Block.receive`.

        On macOS, this waits for an acknowledgement. The receiver must not send anything else until then.
        """
        assert self._descriptor is not None, "a private block cannot be shared"
        with blocking_socket(connection) as pipe:
            reduction.sendfds(pipe, [self._descriptor])  # type: ignore[attr-defined]

    @classmethod
    def receive(cls, connection: Connection, size: int) -> Block:
        """Attaches the block that the other end of `connection` sends, or raises SharedMemoryFull if it cannot."""
        with blocking_socket(connection) as pipe:
            (descriptor,) = reduction.recvfds(pipe, 1)  # type: ignore[attr-defined]
        try:
            return cls(mmap.mmap(descriptor, size))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            _check_room(size, address_space())
            raise _refused(size, error) from error
        finally:
            os.close(descriptor)

    def views(self, layout: Layout, low: int = 0, high: int | None = None) -> dict[Path, np.ndarray]:
        """Returns every field's `dtype[S, high - low, *shape]` for the rows `low:high`, without copying."""
        found = {}
        for path, slab in self.slabs(layout).items():
            shape = layout.fields[path].shape
            used = slab[:, : layout.num_envs * math.prod(shape)]  # without padding
            found[path] = used.reshape(layout.num_slots, layout.num_envs, *shape)[:, low:high]
        return found

    def slabs(self, layout: Layout) -> dict[Path, np.ndarray]:
        """Returns every field as contiguous `dtype[S, stride // itemsize]`, including the padding of slots.

        TensorFlow aliases only contiguous memory. `views` are not contiguous if slots are padded.
        """
        return {
            path: np.ndarray(
                (layout.num_slots, field.stride // field.dtype.itemsize), field.dtype, self._buffer, field.offset
            )
            for path, field in layout.fields.items()
        }

    def close(self) -> None:
        """Releases the memory. Existing views stay valid. May be called twice."""
        self._buffer = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def blocking_socket(connection: Connection) -> socket.socket:
    """Returns a socket for a connection. It has no timeout, even if `socket.setdefaulttimeout` has set one.

    A timeout makes the connection itself non-blocking, because both use the same open file.
    """
    pipe = socket.socket(fileno=os.dup(connection.fileno()))
    pipe.settimeout(None)
    return pipe


def out_of_memory(error: MemoryError) -> SharedMemoryFull:
    """Returns an error that names the limit, for an allocation that failed in the vector env itself."""
    if isinstance(error, SharedMemoryFull):
        return error
    message = f"{tightest_limit()} Lower num_envs or num_slots, or raise the limit. ({type(error).__name__}: {error})"
    left, limit = min(memory_limits(), default=(None, None))
    return SharedMemoryFull(message, available_bytes=left, limit=limit)


def _claimed(size: int, shared_memory: bool, falls_back: bool) -> int:
    """Returns the descriptor of a file without a name, all of whose pages are claimed.

    With `falls_back`, a file that /dev/shm has no room for, or cannot hold, is an anonymous one in memory.
    """
    try:
        descriptor = _anonymous(size, shared_memory)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError:
        if not falls_back:
            raise
        return _claimed(size, shared_memory=False, falls_back=False)
    return descriptor


def _anonymous(size: int, shared_memory: bool) -> int:
    """Returns the descriptor of a file in memory that has no name; if `shared_memory`, of one in /dev/shm."""
    try:
        if shared_memory:
            descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
        else:
            descriptor = os.memfd_create("vecenv", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or a file system without O_TMPFILE
        return _unlinked_segment(size)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unlinked_segment(size: int) -> int:
    """Returns the descriptor of a shared-memory segment whose name has been removed."""
    # Starting the tracker takes milliseconds, during which the segment would already have a name.
    resource_tracker.ensure_running()
    name = f"vecenv_{secrets.token_hex(8)}"
    segment = None
    try:
        segment = SharedMemory(name, create=True, size=size)
        return os.dup(segment._fd)  # type: ignore[attr-defined]  # SharedMemory does not expose it
    finally:
        if segment is not None:
            segment.unlink()
            segment.close()
        elif os.path.exists(f"/dev/shm/{name}"):  # Ctrl-C interrupted the constructor
            os.unlink(f"/dev/shm/{name}")


def _filled(buffer: Any) -> Any:
    if poison is not None:
        np.frombuffer(buffer, dtype=np.uint8)[:] = poison
    return buffer


def _check_room(size: int, limits: Iterable[tuple[int, str]]) -> None:
    """Raises before any page is claimed, because the kernel kills processes once memory runs out."""
    left, limit = min(limits, default=(size, ""))
    if size > left:
        raise _no_room(size, limit, f"of which {_readable(left)} are available", available=left)


def _refused(size: int, error: OSError | MemoryError, *, in_shm: bool = False) -> SharedMemoryFull:
    """Returns the error for memory that the system has refused although the known limits have room for it."""
    number = getattr(error, "errno", None)
    if number == errno.EFBIG:
        limit, advice = "a file of the size that `ulimit -f` allows", " Or raise the limit that `ulimit -f` shows."
    elif in_shm and number != errno.ENOMEM:
        limit = SHM
        advice = (
            " Or enlarge /dev/shm (`df -h /dev/shm` shows its size; start a container with --shm-size=2g), or pass "
            "shared_memory=False, which does not use it."
        )
    else:
        limit = "the memory that the system allows this process"
        advice = " Or raise the limits that `ulimit -v`, `ulimit -d` and `sysctl vm.overcommit_memory` show."
    return _no_room(size, limit, f"({error})", advice)


def _no_room(size: int, limit: str, why: str, advice: str = "", available: int | None = None) -> SharedMemoryFull:
    message = (
        f"the envs need {_readable(size)}, but there is no room for them in {limit} {why}. Lower num_envs or num_slots."
    )
    return SharedMemoryFull(message + advice, needed_bytes=size, available_bytes=available, limit=limit)


def _readable(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
