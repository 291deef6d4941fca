"""How much memory do 64 envs use? `python -m benchmarks.memory --env HalfCheetah-v5` prints a table.

Unit: MiB of proportional set size (PSS, from /proc/PID/smaps_rollup) of a process and all its children. In the sum,
memory and library code that several processes share count only once. A separate process builds each rival and steps it
ten times; `nothing` is a process that has imported gymnasium, mujoco and numpy but built no env.
Not measured: the peak during creation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import tyro


def vecenv_make(env: str, num_envs: int) -> Any:
    """Returns the vector env of `vecenv.make`, which steps a MuJoCo task in this process."""
    import vecenv

    return vecenv.make(env, num_envs)


def vecenv_workers(env: str, num_envs: int) -> Any:
    """Returns Python envs with one worker per core."""
    import vecenv

    return vecenv.make(env, num_envs, backend="python")


def gymnasium_async(env: str, num_envs: int) -> Any:
    """Returns Gymnasium's AsyncVectorEnv, with one process per env."""
    return gym.vector.AsyncVectorEnv([lambda: gym.make(env)] * num_envs)


def sb3_subproc(env: str, num_envs: int) -> Any:
    """Returns Stable-Baselines3's SubprocVecEnv, with one process per env."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return SubprocVecEnv([lambda: gym.make(env)] * num_envs, start_method="fork")  # as its speed is measured


RIVALS: dict[str, Callable[[str, int], Any] | None] = {
    "nothing": None,
    "vecenv.make": vecenv_make,
    "vecenv, Python envs": vecenv_workers,
    "gymnasium Async": gymnasium_async,
    "SB3 Subproc": sb3_subproc,
}


def pss_mib(pid: int) -> tuple[float, list[float]]:
    """Returns the PSS of a process, and of each of its descendants, in MiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024
    children = [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]
    below = [size for child in children for part in [pss_mib(child)] for size in (part[0], *part[1])]
    return own, below


def measure(rival: str, env: str, num_envs: int) -> dict[str, float]:
    """Builds a rival in this process and returns the memory of this process and its children."""
    import mujoco  # noqa: F401

    build = RIVALS[rival]
    envs = None
    if build is not None:
        envs = build(env, num_envs)
        envs.reset()
        space = gym.make(env).action_space
        for _ in range(10):
            envs.step(gym.vector.utils.batch_space(space, num_envs).sample())
    own, below = pss_mib(os.getpid())
    if envs is not None:
        envs.close()
    return {"parent": own, "children": sum(below), "processes": 1 + len(below)}


def table(env: str = "HalfCheetah-v5", num_envs: int = 64) -> None:
    """Prints the memory of each rival.

    Args:
        env: Env id.
        num_envs: Number of envs.
    """
    print(f"{num_envs} x {env}\n\n| | processes | parent, MiB | children, MiB | together | per env, MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for rival in RIVALS:
        call = f"measure({rival!r}, {env!r}, {num_envs})"
        code = f"import json; from benchmarks.memory import measure; print(json.dumps({call}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        if done.returncode:
            print(f"| {rival} | {(done.stderr.strip().splitlines() or ['failed'])[-1]} | | | | |")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        total = found["parent"] + found["children"]
        parts = f"{found['processes']:.0f} | {found['parent']:,.0f} | {found['children']:,.0f}"
        print(f"| {rival} | {parts} | {total:,.0f} | {total / num_envs:,.1f} |")


if __name__ == "__main__":
    tyro.cli(table)
