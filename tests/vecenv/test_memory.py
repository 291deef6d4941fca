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
def test_too_much_memory_is_an_error_with_advice_and_leaks_nothing():
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryFull, match=r"no room for .* MiB of shared memory .*--shm-size"):
        Block.create(2**50)
    assert len(os.listdir("/proc/self/fd")) == descriptors
