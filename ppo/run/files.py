"""Files that are complete whenever another process sees them, and paths that TensorFlow can read."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def part_of(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder inside `folder`, from which complete files can be moved to `folder`.

    Creates `folder` if it does not exist, and removes it if it is still empty at the end.
    """
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
            yield Path(part)
    finally:
        if created:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def is_pattern(path: Path) -> bool:
    """Returns whether TensorFlow cannot read from a path, because it takes brackets and backslashes for a pattern.

    It can write there. `*`, `?` and all other characters are harmless, because such a pattern matches its own text.
    """
    return any(character in str(path) for character in "[\\")


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """Yields a path from which TensorFlow can read a folder: the folder itself, or a temporary link to it."""
    if not is_pattern(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / "link"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link


def write_atomically(file: Path, text: str) -> None:
    """Writes a file atomically: it always holds either the complete old or the complete new content.

    Replaces a link instead of following it.
    """
    part = file.with_name(f".part-{secrets.token_hex(8)}")  # a name that nobody can guess, so it is not a link
    try:
        with part.open("x") as stream:
            stream.write(text)
        sync(part)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file or a folder is on disk, if its file system can do so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network and shared file systems cannot sync, most often folders
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
