"""How does stepping scale with cores? `taskset -c 0-7 python -m benchmarks.cores` measures with eight of them.

Unit: env-steps per second of all envs, as the median of the rounds, and the share of the cores' time in which any
process ran, including those that wait in a loop. Each rival uses one thread or worker process per core, except
Gymnasium, which uses one process per env, and the envs that are stepped in a plain loop.
Not measured: creation and the policy.

The rivals of a task take turns. "EnvPool async" receives half of the envs at a time; the other half is stepped also
while the other rivals take their turn, which flatters it by up to 6%. The bare physics of the quadruped repeats
vecenv's states and controls and computes nothing else; mjbatch requires a MuJoCo of its own (see `benchmarks.robot`).
The other benchmarks check that the rivals return the same values.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np

import vecenv
from benchmarks import robot
from benchmarks.noise import Noise

Task = Literal["no-op", "HalfCheetah in Python", "HalfCheetah", "Ant", "Humanoid", "quadruped"]
Steps = Callable[[], Any]

STEPS = 8  # of a call
ROUND_S = 0.3  # at least


def main(
    tasks: tuple[Task, ...] = get_args(Task),
    num_envs: tuple[int, ...] = (64, 512, 4096),
    mjbatch: str | None = None,
    rounds: int = 5,
) -> None:
    """Prints the median env-steps per second of each rival and the share of the cores' time that was used.

    Args:
        tasks: What is stepped.
        num_envs: Numbers of envs.
        mjbatch: Python interpreter of an environment that has mjbatch.
        rounds: Number of rounds that count.
    """
    print("| task | envs | cores | rival | env-steps/s | cores busy |\n|---|---:|---:|---|---:|---:|")
    for task in tasks:
        for count in num_envs:
            with ExitStack() as stack:
                steps, rivals = _rivals(task, count, mjbatch, stack)
                for name, (seconds, busy) in _in_turns(rivals, rounds).items():
                    where = f"| {task} | {count} | {vecenv.available_cores()} | {name}"
                    print(f"{where} | {steps * count / seconds:,.0f} | {busy:.0%} |", flush=True)


def _in_turns(rivals: dict[str, Steps], rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the medians of each rival's seconds of a call and share of the cores' time. Round 0 warms up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for _ in range(1 + rounds):
        for name, call in rivals.items():
            calls, start, used = 0, time.perf_counter(), _cpu_seconds()
            while (seconds := time.perf_counter() - start) < ROUND_S:
                call()
                calls += 1
            taken[name].append((seconds / calls, (_cpu_seconds() - used) / seconds / vecenv.available_cores()))
    return {
        name: (statistics.median(s for s, _ in found[1:]), statistics.median(share for _, share in found[1:]))
        for name, found in taken.items()
    }


def _cpu_seconds() -> float:
    """Returns for how long this process's cores have run any process, with a resolution of 10 ms. Linux only."""
    lines = dict(line.split(maxsplit=1) for line in Path("/proc/stat").read_text().splitlines())
    ticks = (lines[f"cpu{core}"].split() for core in os.sched_getaffinity(0))
    return sum(int(user) + int(nice) + int(system) for user, nice, system, *_ in ticks) / os.sysconf("SC_CLK_TCK")


def _rivals(task: Task, num_envs: int, mjbatch: str | None, stack: ExitStack) -> tuple[int, dict[str, Steps]]:
    """Returns a number of steps, and a function for each rival that takes them. The stack closes the envs."""
    cores, steps = vecenv.available_cores(), STEPS
    rivals: dict[str, Steps] = {}
    if task == "quadruped":
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        steps, rivals = robot.num_steps(num_envs), robot.rivals(num_envs, mjbatch, folder / "recorded.npz")
        envs: dict[str, Any] = {"vecenv, workers": vecenv.make(robot.TASK, num_envs, num_workers=cores)}
    elif task == "no-op":
        fns = [functools.partial(Noise, (17, 1, 1))] * num_envs
        envs = {"vecenv": vecenv.AsyncVectorEnv(fns), "vecenv Sync": vecenv.SyncVectorEnv(fns)}
        envs["gymnasium Sync"] = gym.vector.SyncVectorEnv(fns)
    elif task == "HalfCheetah in Python":
        envs = {"vecenv": vecenv.make("HalfCheetah-v5", num_envs, backend="python")}
        if num_envs <= 64:  # it starts as many processes
            envs["gymnasium Async"] = gym.vector.AsyncVectorEnv([lambda: gym.make("HalfCheetah-v5")] * num_envs)
    else:
        workers = vecenv.make(f"{task}-v5", num_envs, num_workers=cores)
        envs = {"vecenv, threads": vecenv.make(f"{task}-v5", num_envs), "vecenv, workers": workers}
    for each in envs.values():
        stack.callback(each.close)
        each.reset(seed=0)
    each.action_space.seed(0)
    actions = [each.action_space.sample() for _ in range(steps)]

    def stepper(envs: Any) -> Steps:
        return lambda: [envs.step(batch) for batch in actions]

    rivals |= {name: stepper(each) for name, each in envs.items()}
    if task in ("HalfCheetah", "Ant", "Humanoid"):
        rivals |= _envpool(f"{task}-v5", num_envs, actions, stack)
    return steps, rivals


def _envpool(env_id: str, num_envs: int, actions: list[np.ndarray], stack: ExitStack) -> dict[str, Steps]:
    try:
        import envpool
    except ImportError as error:
        print(f"EnvPool is left out: {error}")
        return {}
    sizes = {"num_envs": num_envs, "num_threads": vecenv.available_cores()}
    sync = envpool.make(env_id, env_type="gymnasium", **sizes)
    halves = envpool.make(env_id, env_type="gymnasium", batch_size=num_envs // 2, **sizes)
    stack.callback(sync.close)
    stack.callback(halves.close)
    sync.reset()
    halves.async_reset()

    def steps() -> None:
        for batch in actions:
            for half in (batch[: num_envs // 2], batch[num_envs // 2 :]):
                ids = halves.recv()[4]["env_id"]
                halves.send(half, ids)

    return {"EnvPool": lambda: [sync.step(batch) for batch in actions], "EnvPool async": steps}


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
