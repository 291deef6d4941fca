"""Tests of vecenv/resources.py: the memory and the cores that this process may use."""

import os

import pytest

import vecenv
from vecenv import resources

MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    1000 kB\n"}
V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": "500000\n",
    "sys/fs/cgroup/job/memory.current": "400000\n",
    "sys/fs/cgroup/job/memory.stat": "anon 300000\ninactive_file 50000\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "400000\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "700000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "600000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 20000\n",
}
IN_A_CONTAINER = {
    "proc/self/cgroup": "0::/kubepods/pod1/c\n",
    "sys/fs/cgroup/memory.max": "3000\n",
    "sys/fs/cgroup/memory.current": "1000\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 1000 * 1024),
        ({**MEMINFO, **V2}, 150_000),
        ({**MEMINFO, **V1}, 120_000),
        ({**MEMINFO, **IN_A_CONTAINER}, 2000),
        (V2, 150_000),
        ({"proc/self/cgroup": "0::/\n"}, None),
    ],
    ids=["nothing", "meminfo", "v2", "v1", "container", "v2 alone", "no limit"],
)
def test_available_memory_is_the_minimum_over_the_system_and_the_control_groups(monkeypatch, files, expected):
    def text(path):
        if path.lstrip("/") not in files:
            raise FileNotFoundError(path)
        return files[path.lstrip("/")]

    monkeypatch.setattr(resources, "_text", text)
    assert vecenv.available_memory() == expected


def test_available_cores_are_the_cores_that_the_process_is_bound_to(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert vecenv.available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert vecenv.available_cores() == 6
