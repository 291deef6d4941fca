"""Tests of vecenv/resources.py: the memory and the cores that this process may use."""

import os

import pytest

import vecenv
from tests.helpers import CountingEnv, counting_fns
from vecenv import resources
from vecenv.workers import pipes

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
QUOTA_V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
}
QUOTA_V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n3:cpuset:/\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "175000\n",
    "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "50000\n",
}


@pytest.fixture
def fake(monkeypatch):
    """Replaces the system's files by a dict, and binds this process to eight cores."""

    def use(files):
        def text(path):
            if path.lstrip("/") not in files:
                raise FileNotFoundError(path)
            return files[path.lstrip("/")]

        monkeypatch.setattr(resources, "_text", text)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return use


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
def test_available_memory_is_the_minimum_over_the_system_and_the_control_groups(fake, files, expected):
    fake(files)
    assert vecenv.available_memory() == expected


def test_available_cores_are_the_cores_that_the_process_is_bound_to(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert vecenv.available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert vecenv.available_cores() == 6


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "damaged"}, 8),
        (QUOTA_V2, 2),
        (QUOTA_V1, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/pod/c\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
        ({**QUOTA_V2, "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 8),
    ],
    ids=["no control groups", "damaged", "v2", "v1", "half a core", "more than the mask", "no quota"],
)
def test_available_cores_follow_the_cpu_quota_of_the_control_groups(fake, files, expected):
    fake(files)
    assert vecenv.available_cores() == expected


@pytest.mark.parametrize("files", [QUOTA_V2, {**QUOTA_V1, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n"}])
def test_workers_and_threads_follow_the_quota(fake, monkeypatch, files):
    from vecenv.mujoco import Hopper

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    fake(files)
    with vecenv.AsyncVectorEnv(counting_fns(4)) as envs:
        assert envs.num_workers == 2
    envs = Hopper(16)
    assert envs.physics.batch.nthread == 2
    envs.close()


class Waiting(CountingEnv):
    """Steps once a file exists."""

    def __init__(self, flag):
        super().__init__(0)
        self._flag = flag

    def step(self, action):
        while not self._flag.exists():
            os.sched_yield()
        return super().step(action)


@pytest.mark.parametrize(("quota", "spins"), [("max", True), ("200000", True), ("100000", False)])
def test_a_wait_spins_only_if_the_quota_has_room_for_the_workers_and_this_process(
    fake, monkeypatch, tmp_path, quota, spins
):
    flag, spun = tmp_path / "flag", []

    def note():
        spun.append(True)
        flag.touch()

    fake({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"})
    monkeypatch.setattr(pipes, "SPIN_S", 60.0)
    with vecenv.AsyncVectorEnv([lambda: Waiting(flag)], num_workers=1) as envs:
        envs.reset()
        if not spins:
            flag.touch()
        monkeypatch.setattr(os, "sched_yield", note)
        envs.step([0])
        monkeypatch.undo()
    assert bool(spun) == spins
