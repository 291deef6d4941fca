"""Tests of vecenv/memory/block.py: memory blocks that cannot leak."""

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from vecenv.errors import SharedMemoryFull
from vecenv.memory import block as memory
from vecenv.memory import layout
from vecenv.memory.block import Block

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
    block.send(ours)
    assert ours.recv() == "done"
    assert block.views(PLAN)[("x",)][1, 2] == 7.0
    process.join()
    block.close()


def test_a_block_has_no_name_in_the_system():
    block = Block.create(1000)
    assert os.fstat(block._descriptor).st_nlink == 0
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


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve memory")
def test_too_much_shared_memory_is_an_error_with_advice_and_leaks_nothing(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryFull, match=r"need .* MiB, .* no room .*--shm-size.*shared_memory=False") as caught:
        Block.create(2**50)
    assert caught.value.needed_bytes == 2**50
    del caught  # its traceback holds the segment
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="shared memory has a name while it is being created")
def test_a_process_killed_while_it_creates_a_block_leaves_nothing():
    code = (
        "import os, signal\n"
        "from vecenv.memory.block import Block\n"
        "os.ftruncate = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Block.create(1000)\n"
    )
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL and done.stderr == ""
    assert not set(os.listdir("/dev/shm")) - before


def test_too_many_open_files_are_not_reported_as_a_lack_of_memory(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(memory, "_anonymous", refuse)
    monkeypatch.setattr(memory, "SharedMemory", refuse)
    with pytest.raises(OSError, match=r"^\[Errno \d+\] Too many open files") as caught:
        Block.create(100)
    assert not isinstance(caught.value, SharedMemoryFull)


@pytest.mark.parametrize("create", [Block.create, Block.private])
def test_a_block_larger_than_available_memory_is_rejected_before_a_page_is_allocated(create, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(SharedMemoryFull, match=r"0\.0 MiB are available.* num_envs") as caught:
        create(1001)
    assert "shared_memory=False" not in str(caught.value)  # that would not help
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (1001, 1000)
    create(1000).close()
