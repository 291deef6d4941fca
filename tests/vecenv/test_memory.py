"""Tests of vecenv/memory.py: blocks that nothing can leak."""

import gc
import multiprocessing
import os

import numpy as np
import pytest

from vecenv import layout, memory
from vecenv.errors import SharedMemoryFull
from vecenv.memory import Block

PLAN = layout.plan({("x",): (np.dtype(np.float64), ())}, num_slots=2, num_envs=4)


def _write_seven(connection):
    view = Block.receive(connection, PLAN.size).views(PLAN)[("x",)]
    view[1, 2] = 7.0
    connection.send("done")


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_write_in_one_process_is_read_in_another(method):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_write_seven, args=(theirs,))
    process.start()
    block = Block.create(PLAN.size)
    block.send(ours, process.pid)
    assert ours.recv() == "done"
    assert block.views(PLAN)[("x",)][1, 2] == 7.0
    process.join()
    block.close()


@pytest.mark.skipif(not memory.PASS_DESCRIPTORS, reason="the name stays where descriptors cannot be passed")
def test_a_block_has_no_name_in_the_system():
    before = set(os.listdir("/dev/shm"))
    block = Block.create(1000)
    assert set(os.listdir("/dev/shm")) == before
    block.close()


def test_views_outlive_their_block():
    block = Block.create(PLAN.size)
    view = block.views(PLAN)[("x",)]
    view[...] = 3.0
    block.close()
    block.close()
    del block
    gc.collect()
    assert (view == 3.0).all()


def test_fresh_memory_is_poisoned_under_test():
    assert np.isnan(Block.private(PLAN.size).views(PLAN)[("x",)]).all()
    block = Block.create(PLAN.size)
    assert np.isnan(block.views(PLAN)[("x",)]).all()
    block.close()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room cannot be claimed here")
def test_too_much_shared_memory_is_an_error_with_advice_and_leaks_nothing(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryFull, match=r"need .* MiB, .* no room .*--shm-size.*shared_memory=False") as caught:
        Block.create(2**50)
    assert caught.value.needed_bytes == 2**50
    del caught  # its traceback holds the segment
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("create", [Block.create, Block.private])
def test_more_than_is_available_is_refused_before_a_page_is_claimed(create, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(SharedMemoryFull, match=r"0\.0 MiB are available.* num_envs") as caught:
        create(1001)
    assert "shared_memory=False" not in str(caught.value)  # which would not help
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (1001, 1000)
    create(1000).close()


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="Linux")
def test_available_memory_is_what_the_system_or_a_control_group_leaves(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 4000 kB\nMemAvailable:    3000 kB\n",
        "/proc/self/cgroup": "4:cpu,memory:/jobs/7\n0::/box\n",
        "/sys/fs/cgroup/box/memory.max": "2000000\n",
        "/sys/fs/cgroup/box/memory.current": "900000\n",
        "/sys/fs/cgroup/box/memory.stat": "anon 1\ninactive_file 400000\n",
        "/sys/fs/cgroup/memory.max": "max\n",
    }

    def text(path):
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    monkeypatch.setattr(memory, "_text", text)
    assert memory.available_memory() == 1_500_000
    files["/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes"] = "700000\n"
    files["/sys/fs/cgroup/memory/jobs/memory.usage_in_bytes"] = "100000\n"
    files["/sys/fs/cgroup/memory/jobs/memory.stat"] = "total_inactive_file 0\n"
    assert memory.available_memory() == 600_000
    del files["/proc/self/cgroup"]
    assert memory.available_memory() == 3000 * 1024
    files["/proc/meminfo"] = "MemTotal: 4000 kB\n"
    assert memory.available_memory() is None
