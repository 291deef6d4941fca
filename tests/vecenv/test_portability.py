"""The engine works without features that some systems lack. Each test removes one feature in a separate script."""

import subprocess
import sys

import pytest

WITHOUT = {
    "pidfd": "del os.pidfd_open",
    "files without a name": "del os.O_TMPFILE",
    "memfd": "del os.memfd_create",
    "poll": "del select.poll",
    "sched_yield": "del os.sched_yield",
    "sched_getaffinity": "del os.sched_getaffinity",
    "posix_fallocate": "del os.posix_fallocate",
    # As on Windows, where the system counts the users of a segment and there is no resource tracker.
    "descriptor passing": (
        "from multiprocessing import resource_tracker as tracker; "
        "tracker.register = tracker.unregister = lambda *arguments: None; "
        "import vecenv.memory.block; vecenv.memory.block.PASS_DESCRIPTORS = False"
    ),
    "pipes that are file descriptors": (
        "import vecenv.workers.pipes; vecenv.workers.pipes._POSIX = False; del select.poll"
    ),
    "forkserver": "multiprocessing.get_all_start_methods = lambda: ['spawn']",
}

SCRIPT = """
import multiprocessing, os, select, sys
import gymnasium as gym, numpy as np
{without}
import vecenv

def main(**arguments):
    fns = [lambda: gym.make("CartPole-v1")] * 4
    serial = vecenv.SyncVectorEnv(fns)
    envs = vecenv.AsyncVectorEnv(fns, num_workers=2, **arguments)
    assert (envs.reset(seed=1)[0] == serial.reset(seed=1)[0]).all()
    for _ in range(20):
        actions = serial.action_space.sample()
        for one, other in zip(envs.step(actions)[:4], serial.step(actions)[:4]):
            assert (one == other).all()
    envs.send(np.zeros(2, int), [0, 3])
    assert sorted(envs.recv(2).env_ids) == [0, 3]
    envs.processes[1].kill()
    try:
        for _ in range(3):
            envs.step([0] * 4)
        raise SystemExit("the death of a worker was not noticed")
    except vecenv.WorkerDied as error:
        assert "worker 1 (envs 2:4) was killed by SIGKILL" in str(error), error
    envs.close()
    assert not multiprocessing.active_children()

# A spawned process has the removed feature again; a forked process lacks it too.
main(**({{}} if "get_all_start_methods" in {without!r} else {{"context": "fork"}}))
main(**({{}} if "get_all_start_methods" in {without!r} else {{"context": "fork", "shared_memory": False}}))
"""


@pytest.mark.parametrize("missing", WITHOUT)
def test_the_engine_works_without_a_feature(missing):
    script = SCRIPT.format(without=WITHOUT[missing])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stderr == "", done.stderr
