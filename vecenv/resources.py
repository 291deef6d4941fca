"""The memory and the cores that this process may use, and what limits them."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator

CORES = "VECENV_CORES"


def available_cores() -> int:
    """Returns how many cores this process may use: those it is bound to, or fewer if it has a quota of CPU time.

    The variable VECENV_CORES can reduce this number, for processes that share a machine and have no such quota.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get(CORES, "")
    return max(1, int(min(cores, cpu_quota(), int(given) if given.isdecimal() else math.inf)))


def cpu_quota() -> float:
    """Returns how many cores' time the control group of this process (a container, a batch job) allows, or infinity."""
    quotas = [math.inf]
    for folder, version in _control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no quota ("max"), or no such file
            if version == 2:
                time, period = map(int, _text(f"{folder}/cpu.max").split())
            else:
                time, period = (int(_text(f"{folder}/cpu.cfs_{name}_us")) for name in ("quota", "period"))
            if time > 0 and period > 0:  # -1: no quota
                quotas.append(time / period)
    return min(quotas)


def available_memory() -> int | None:
    """Returns how many bytes of memory this process can still allocate, or None if that is unknown.

    This is the memory that the system has available, or less if a control group (a container, a batch job) or `ulimit
    -v` sets a lower limit.
    """
    return min((left for left, _ in memory_limits()), default=None)


def memory_limits() -> list[tuple[int, str]]:
    """Returns how many bytes each limit leaves to this process, and the name of the limit."""
    found = []
    with contextlib.suppress(OSError, ValueError, LookupError):
        lines = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
        found.append((int(lines["MemAvailable"].split()[0]) * 1024, "the memory of this machine"))
    found += address_space()
    for folder, version in _control_groups("memory"):
        limit, usage, cached = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no such file
            left = int(_text(f"{folder}/{limit}")) - int(_text(f"{folder}/{usage}"))
            with contextlib.suppress(OSError, ValueError):  # the file cache counts as free
                left += int(dict(line.split() for line in _text(f"{folder}/memory.stat").splitlines()).get(cached, 0))
            found.append((max(0, left), f"the memory of the container or job ({folder}/{limit})"))
    return found


def tightest_limit() -> str:
    """Returns a sentence that names the limit that leaves the least memory to this process, for errors."""
    left, limit = min(memory_limits(), default=(0, ""))
    if not limit:
        return "This process has no memory left."
    return f"This process ran out of memory: {left / 2**20:,.1f} MiB are left of {limit}."


def address_space() -> list[tuple[int, str]]:
    """Returns the limit of this process's address space, as `memory_limits` does, if there is one and it is known."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    with contextlib.suppress(OSError, ValueError, LookupError):
        if limit != resource.RLIM_INFINITY:
            used = int(_text("/proc/self/statm").split()[0]) * resource.getpagesize()
            return [(max(0, limit - used), f"the address space of a process (`ulimit -v` is {limit // 1024})")]
    return []


def _control_groups(controller: str) -> Iterator[tuple[str, int]]:
    """Yields the folders of this process's control groups and of their ancestors, each with its version, 1 or 2."""
    try:
        lines = [line.split(":", 2) for line in _text("/proc/self/cgroup").splitlines()]
        for _, controllers, path in lines:
            if controllers and controller not in controllers.split(","):
                continue
            root = f"/sys/fs/cgroup/{controller}" if controllers else "/sys/fs/cgroup"
            parts = [part for part in path.split("/") if part]
            for depth in range(len(parts), -1, -1):
                # Inside a container, the container's own group may be the root.
                yield "/".join([root, *parts[:depth]]), 1 if controllers else 2
    except (OSError, ValueError):  # the system has no control groups
        return


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
