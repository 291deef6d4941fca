"""The memory and the cores that this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def available_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int | None:
    """Returns how many bytes of memory this process can still allocate, or None if that is unknown.

    This is the memory that the system has available, or less if a control group (a container, a batch job) sets a
    lower limit.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        for line in _text("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _left_in_groups("/sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                found += _left_in_groups("/sys/fs/cgroup/memory", path, *names)
    return min(found, default=None)


def _left_in_groups(root: str, path: str, limit: str, usage: str, cached: str) -> Iterator[int]:
    """Yields the bytes left in a control group and its ancestors; the file cache counts as free."""
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        folder = "/".join([root, *parts[:depth]])  # inside a container, the container's own group may be the root
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no such file
            left = int(_text(f"{folder}/{limit}")) - int(_text(f"{folder}/{usage}"))
            with contextlib.suppress(OSError, ValueError):
                left += int(dict(line.split() for line in _text(f"{folder}/memory.stat").splitlines()).get(cached, 0))
            yield max(0, left)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
