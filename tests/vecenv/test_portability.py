"""The engine works without features that macOS and some Linux systems lack, and says that Windows is not supported.

Each test removes features in a separate script.
"""

import subprocess
import sys

import pytest

WITHOUT = {
    "pidfd": "del os.pidfd_open",
    "files without a name": "del os.O_TMPFILE",
    "memfd": "del os.memfd_create",
    "sched_yield": "del os.sched_yield",
    "sched_getaffinity": "del os.sched_getaffinity",
    "posix_fallocate": "del os.posix_fallocate",
}
# macOS lacks all of these, and acknowledges each descriptor that it passes.
WITHOUT["all of them, as on macOS"] = "; ".join(
    [*WITHOUT.values(), "multiprocessing.reduction.ACKNOWLEDGE = True; sys.platform = 'darwin'"]
)

SCRIPT = """
import multiprocessing, multiprocessing.reduction, os, sys
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

# A spawned process has the removed features again; a forked process lacks them too.
main(context="fork")
main(context="fork", shared_memory=False)
"""


QUICK = ("pidfd", "memfd", "all of them, as on macOS")


@pytest.mark.parametrize(
    "missing", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WITHOUT]
)
def test_the_engine_works_without_a_feature(missing):
    script = SCRIPT.format(without=WITHOUT[missing])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_importing_vecenv_on_windows_is_an_error_that_names_wsl():
    script = "import os; os.name = 'nt'; import vecenv"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: vecenv runs on Linux and macOS, but not on")
    assert "Windows Subsystem for Linux (WSL)" in done.stderr
