"""Tests of vecenv/memory/block.py: memory blocks that cannot leak."""

import errno
import gc
import mmap
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from tests.helpers import CountingEnv, counting_fns
from tests.start_methods import METHODS
from vecenv import SharedMemoryFull
from vecenv.memory import block as memory
from vecenv.memory import layout
from vecenv.memory.block import Block
from vecenv.vector.results import ResultAssembler

PLAN = layout.plan({("x",): (np.dtype(np.float64), ())}, num_slots=2, num_envs=4)


def _write_seven(connection):
    view = Block.receive(connection, PLAN.size).views(PLAN)[("x",)]
    view[1, 2] = 7.0
    connection.send("done")


@pytest.mark.parametrize("method", METHODS)
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
    monkeypatch.setattr(memory, "memory_limits", list)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryFull, match=r"need .* MiB, .* no room .*--shm-size.*shared_memory=False") as caught:
        Block.create(2**50)
    assert caught.value.needed_bytes == 2**50
    del caught  # its traceback holds the segment
    assert len(os.listdir("/proc/self/fd")) == descriptors


IN_A_SMALL_SHM = """
import os
from vecenv.memory.block import Block

assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 2**20
block = Block.create(2**22)
with open("/proc/self/maps") as maps:
    assert any("memfd:vecenv" in line for line in maps)
assert os.statvfs("/dev/shm").f_bfree == os.statvfs("/dev/shm").f_blocks  # nothing is left there
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has anonymous files in memory")
def test_a_block_that_dev_shm_has_no_room_for_is_an_anonymous_file():
    """Kubernetes limits /dev/shm to 64 MB."""
    mount = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1M none /dev/shm && exec "$0" "$@"',
    ]
    if subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("this process may not mount another /dev/shm")
    done = subprocess.run([*mount, sys.executable, "-c", IN_A_SMALL_SHM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("size", [2**40, 2**50])
def test_a_block_of_unknown_limits_does_not_fall_back_to_an_anonymous_file(size, monkeypatch):
    """Nothing would stop it from using up all memory."""
    monkeypatch.setattr(memory, "memory_limits", list)
    monkeypatch.setattr(os, "memfd_create", None)
    with pytest.raises(SharedMemoryFull, match="in the shared memory in /dev/shm"):
        Block.create(size)


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
    monkeypatch.setattr(memory, "memory_limits", lambda: [(1000, "the RAM"), (2000, "the job")])
    with pytest.raises(SharedMemoryFull, match=r"in the RAM of which 1\.0 KiB are available.* num_envs") as caught:
        create(1001)
    assert "shared_memory=False" not in str(caught.value)  # that would not help
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (1001, 1000)
    create(1000).close()


LIMITED = """
import resource
from vecenv.errors import SharedMemoryFull
from vecenv.memory.block import Block

size = 2**29
used = [int(number) * resource.getpagesize() for number in open("/proc/self/statm").read().split()]
name, value = {limit}
resource.setrlimit(name, (value, resource.getrlimit(name)[1]))
try:
    {create}(size)
except SharedMemoryFull as error:
    print(error.needed_bytes, error)
"""
ADDRESSES = "resource.RLIMIT_AS, used[0] + 2**28"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce these limits")
@pytest.mark.parametrize(
    ("create", "limit", "message"),
    [
        ("Block.create", ADDRESSES, r"in the address space of a process \(`ulimit -v` is \d+\) of which 25\d\.\d MiB"),
        ("Block.private", ADDRESSES, r"in the address space of a process \(`ulimit -v` is \d+\) of which 25\d\.\d MiB"),
        ("Block.create", "resource.RLIMIT_FSIZE, 2**20", r"in a file of the size that `ulimit -f` allows"),
        ("Block.private", "resource.RLIMIT_DATA, used[5] + 2**28", r"\(Unable to allocate .*`ulimit -d`"),
    ],
)
def test_the_limit_of_a_process_that_leaves_no_room_is_named(create, limit, message):
    code = LIMITED.format(create=create, limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert re.search(rf"^{2**29} the envs need 512\.0 MiB, but there is no room for them .*{message}", done.stdout)
    assert "/dev/shm" not in done.stdout


@pytest.mark.parametrize("create", [Block.create, lambda size: Block.create(size, shared_memory=False)])
def test_memory_that_the_kernel_refuses_is_not_blamed_on_dev_shm(create, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(SharedMemoryFull, match=r"need 0\.1 KiB.*Cannot allocate memory.*`ulimit -v`") as caught:
        create(100)
    assert "/dev/shm" not in str(caught.value)


class Hungry(CountingEnv):
    """Allocates 512 MiB in the given call, in a process that may not have them."""

    def __init__(self, when):
        super().__init__(0)
        self._when = when
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.getrlimit(resource.RLIMIT_AS)[1]))
        self._allocate("construction")

    def step(self, action):
        self._allocate("step")
        return super().step(action)

    def answer(self):
        return bytes(2**27)  # of which pickling makes a copy

    def _allocate(self, now):
        if now == self._when:
            bytes(2**29)


LIMIT = (
    r"(?s)MemoryError.*ran out of memory: [\d,.]+ MiB are left of the address space of a process \(`ulimit -v` is \d+\)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce this limit")
@pytest.mark.parametrize("when", ["construction", "step", "answer"])
def test_a_memory_error_in_a_worker_names_the_limit(when):
    with (
        pytest.raises(MemoryError, match=LIMIT),
        vecenv.AsyncVectorEnv([lambda: Hungry(when)], num_workers=1, context="spawn") as envs,
    ):
        envs.reset()
        envs.step([0])
        envs.call("answer")


@pytest.mark.parametrize("when", ["after_reset", "__init__"])
def test_a_memory_error_in_the_parent_names_the_limit(when, monkeypatch):
    def refuse(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(memory, "memory_limits", lambda: [(2**40, "the RAM")])
    monkeypatch.setattr("vecenv.resources.memory_limits", lambda: [(2**40, "the RAM")])
    monkeypatch.setattr(ResultAssembler, when, refuse)
    with (
        pytest.raises(SharedMemoryFull, match=r"1,048,576\.0 MiB are left of the RAM\. Lower num_envs") as caught,
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1) as envs,
    ):
        envs.reset()
    assert caught.value.limit == "the RAM"


MESSAGES = """
import resource
import vecenv
from tests.helpers import CountingEnv

class Env(CountingEnv):
    def close(self):
        print("closed", flush=True)

envs = vecenv.AsyncVectorEnv([lambda: Env(0)], num_workers=1)
envs.reset()
data = bytes(2**27)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.getrlimit(resource.RLIMIT_AS)[1]))
for call in (
    lambda: vecenv.AsyncVectorEnv([lambda data=data: CountingEnv(0)], num_workers=1),
    lambda: envs.apply(lambda env: bytes(2**27)),
):
    try:
        call()
    except vecenv.SharedMemoryFull as error:
        print("ulimit -v" in str(error), flush=True)
envs.close(timeout=600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce this limit")
def test_a_message_that_the_parent_has_no_memory_for_is_an_error_that_names_the_limit_and_close_does_not_wait_for_it():
    done = subprocess.run([sys.executable, "-c", MESSAGES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\nclosed\n"), done.stderr


class Narrow(gym.Env):
    """Leaves its process little more memory than it uses."""

    observation_space = gym.spaces.Box(0, 1, (2**17,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce this limit")
def test_a_worker_that_cannot_map_the_memory_names_its_envs_and_the_limit():
    with pytest.raises(SharedMemoryFull, match=r"^envs 0:64 in worker 0: .*\d\d\.\d MiB.*`ulimit -v` is") as caught:
        vecenv.AsyncVectorEnv([Narrow] * 64, num_workers=1)
    assert "Fix the env" not in str(caught.value)


def test_nothing_is_left_in_shared_memory_and_the_resource_tracker_is_silent():
    code = (
        "import gymnasium as gym, vecenv\n"
        "envs = vecenv.make('CartPole-v1', num_envs=4)\n"
        "envs.reset(); envs.step([0] * 4)\n"
        "with open('/proc/self/maps') as maps:\n"
        "    shared = [line for line in maps if '/dev/shm/' in line]\n"
        "assert shared and all(line.endswith('(deleted)\\n') for line in shared)\n"  # even while the envs are open
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
