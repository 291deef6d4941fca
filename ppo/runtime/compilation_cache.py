"""Keeps what XLA compiles for later runs, in verified files, so that they start without the compilation.

XLA's persistent cache trusts its files, and a file that it cannot read or write ends the run. Here, XLA therefore uses
TensorFlow's file system in memory, which no other process can change and no full disk can break. `load` fills it with
verified entries, and `publish` copies new entries to the user's cache folder. Whatever is wrong with that folder costs
only the compilation.

Entries hold machine code, so the folder must belong to this user, and nobody else may enter it. Each entry is one file:
a digest, and the bytes that XLA wrote. Its name begins with a key for TensorFlow, the processor and the number of
threads. XLA itself compares the program, the only other thing on which compiled code depends.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import vecenv

OFF = "PPO_XLA_CACHE"
"""The environment variable that turns the cache off if it is "0"."""

MAX_BYTES = 32 * 2**20  # of all entries; those of a run take about 1 MB
DIGEST_BYTES = 32

_IN_MEMORY = "ram://ppo-xla"
_FLAGS = ("TF_XLA_FLAGS", "XLA_FLAGS")
_SETTINGS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_ENABLE_ONEDNN_OPTS")
_OF_PROCESSOR = {
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
}  # fmt: skip

_key: str | None = None  # begins the names of this process's entries; None if XLA's cache is not in memory
_stored: set[str] = set()  # the entries in memory that need not be published


@contextmanager
def in_memory() -> Iterator[None]:
    """Makes XLA keep compiled programs in memory, if TensorFlow is imported and first used in the block.

    Does nothing if the user turned the cache off or set flags of XLA, which may name another cache or change the
    compiled code. The flags apply only to this process. Programs for accelerators are not kept.
    """
    global _key
    processor = _processor()
    if os.environ.get(OFF) == "0" or any(name in os.environ for name in _FLAGS) or processor is None:
        yield
        return
    os.environ["TF_XLA_FLAGS"] = (
        f"--tf_xla_persistent_cache_directory={_IN_MEMORY} --tf_xla_persistent_cache_device_types=CPU"
    )
    try:
        yield
    finally:
        del os.environ["TF_XLA_FLAGS"]
    _key = _key_for(processor)


def load() -> None:
    """Gives XLA the entries of earlier runs that are intact."""
    if _key is None:
        return
    from tensorflow.io import gfile

    with suppress(OSError), _opened() as folder:
        gfile.makedirs(_IN_MEMORY)
        for file in os.listdir(folder):
            key, _, name = file.partition("-")
            if key != _key:
                continue
            with suppress(OSError):  # another process has removed it, or the disk has a fault
                entry = _read(folder, file)
                if entry[:DIGEST_BYTES] == _digest(name, entry[DIGEST_BYTES:]):
                    with gfile.GFile(f"{_IN_MEMORY}/{name}", "wb") as stream:
                        stream.write(entry[DIGEST_BYTES:])
                    _stored.add(name)


def publish() -> None:
    """Stores what XLA has compiled since `load` or the last call, and removes the oldest entries above `MAX_BYTES`."""
    if _key is None:
        return
    from tensorflow.io import gfile

    names = set(gfile.listdir(_IN_MEMORY)) - _stored if gfile.isdir(_IN_MEMORY) else set()
    if not names:
        return
    _stored.update(names)  # also if the disk refuses them: a long run does not try again
    with suppress(OSError), _opened() as folder:
        for name in sorted(names):
            with gfile.GFile(f"{_IN_MEMORY}/{name}", "rb") as stream:
                content = stream.read()
            if len(content) < MAX_BYTES:
                _write(folder, f"{_key}-{name}", _digest(name, content) + content)
        _remove_oldest(folder)


@contextmanager
def _opened() -> Iterator[int]:
    """Creates the folder if necessary; yields its descriptor. Raises OSError if this fails or others may enter it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not base.is_absolute():  # there is no home
        raise FileNotFoundError(base)
    path = base / "vecenv-ppo"
    base.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(0o700)
    # Order: the folder is checked and used through one descriptor, so that nobody can swap it in between.
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(path)
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str) -> bytes:
    # The flags refuse links, and do not wait for the writer of a pipe.
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder), "rb") as stream:
        return stream.read(MAX_BYTES + DIGEST_BYTES) or b""


def _write(folder: int, name: str, content: bytes) -> None:
    """Writes a file that other processes see complete or not at all. After a crash, its digest may be wrong."""
    part = f".part-{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(part, flags, 0o600, dir_fd=folder), "wb") as stream:
            stream.write(content)
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def _remove_oldest(folder: int) -> None:
    """Removes the oldest files until `MAX_BYTES` are left, including parts that killed processes left behind."""
    files = []
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            files.append((found.st_mtime_ns, name, found.st_size))
    total = 0
    for _, name, size in sorted(files, reverse=True):
        total += size
        if total > MAX_BYTES:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def _key_for(processor: str) -> str:
    """Returns a name for everything that compiled code depends on, apart from the program."""
    import tensorflow as tf

    facts = [
        tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION, processor, os.cpu_count(),
        vecenv.available_cores(), *(os.environ.get(name) for name in _SETTINGS),
    ]  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


def _processor() -> str | None:
    """Returns the model and the instructions of the processor; None if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except (OSError, UnicodeError):
        return None
    facts: dict[str, Any] = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    known = {key: facts[key] for key in sorted(_OF_PROCESSOR & facts.keys())}
    return repr(known) if known.keys() & {"flags", "Features"} else None
