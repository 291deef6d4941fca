"""How does stepping scale with cores? `taskset -c 0-7 python -m benchmarks.cores` measures with eight of them.

Unit: env-steps per second of all envs, as the median of the rounds, and the share of the cores' time in which any
process ran, including busy-waiting. Each rival uses one thread or worker process per core, except Gymnasium's
AsyncVectorEnv, which uses one process per env, and the envs that are stepped in a plain loop.
Not measured: creation and the policy.

The rivals of a task take turns, with the same random actions. "send and recv" receive a half or a quarter of the envs
at a time, while the other envs are stepped. The bare physics of the quadruped repeats vecenv's states and controls and
computes nothing else; mjbatch needs its own version of MuJoCo (see `benchmarks.robot`). The other benchmarks check that
the rivals return the same values.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np

import vecenv
from benchmarks import robot
from benchmarks.noise import Noise

Task = Literal["no-op", "HalfCheetah in Python", "HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "quadruped"]
Steps = Callable[[], Any]

STEPS = 8  # per call
ROUND_S = 0.3  # minimum


@dataclass
class Rival:
    """`call` is timed. `begin` and `end` surround its turn, so that nothing runs while others take theirs."""

    call: Steps
    begin: Steps = lambda: None
    end: Steps = lambda: None


def main(
    tasks: tuple[Task, ...] = get_args(Task),
    num_envs: tuple[int, ...] = (64, 512, 4096),
    mjbatch: str | None = None,
    rounds: int = 5,
) -> None:
    """Prints the median env-steps per second of each rival and the share of the cores' time that was used.

    Args:
        tasks: Tasks to step.
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


def _in_turns(rivals: dict[str, Rival], rounds: int) -> dict[str, tuple[float, float]]:
    """Returns each rival's median seconds per call and share of the cores' time. The first round only warms up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for _ in range(1 + rounds):
        for name, rival in rivals.items():
            rival.begin()
            calls, start, used = 0, time.perf_counter(), _cpu_seconds()
            while (seconds := time.perf_counter() - start) < ROUND_S:
                rival.call()
                calls += 1
            share = (_cpu_seconds() - used) / seconds / len(os.sched_getaffinity(0))
            taken[name].append((seconds / calls, share))
            rival.end()
    return {
        name: (statistics.median(s for s, _ in found[1:]), statistics.median(share for _, share in found[1:]))
        for name, found in taken.items()
    }


def _cpu_seconds() -> float:
    """Returns the busy seconds of the cores that this process may use, in steps of 10 ms. Linux only."""
    lines = dict(line.split(maxsplit=1) for line in Path("/proc/stat").read_text().splitlines())
    ticks = (lines[f"cpu{core}"].split() for core in os.sched_getaffinity(0))
    return sum(int(user) + int(nice) + int(system) for user, nice, system, *_ in ticks) / os.sysconf("SC_CLK_TCK")


def _rivals(task: Task, num_envs: int, mjbatch: str | None, stack: ExitStack) -> tuple[int, dict[str, Rival]]:
    """Returns the number of steps per call, and the rivals. The stack closes their envs."""
    workers, steps = min(vecenv.available_cores(), num_envs), STEPS
    rivals: dict[str, Rival] = {}
    actions = None
    if task == "quadruped":
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        calls = robot.rivals(num_envs, mjbatch, folder / "recorded.npz")
        steps, rivals = robot.num_steps(num_envs), {name: Rival(call) for name, call in calls.items()}
        actions = robot.random_actions(num_envs)
        envs: dict[str, Any] = {"vecenv, workers": vecenv.make(robot.TASK, num_envs, num_workers=workers)}
    elif task == "no-op":
        fns = [functools.partial(Noise, (17, 1, 1))] * num_envs
        envs = {"vecenv": vecenv.AsyncVectorEnv(fns), "vecenv Sync": vecenv.SyncVectorEnv(fns)}
        envs["gymnasium Sync"] = gym.vector.SyncVectorEnv(fns)
    elif task == "HalfCheetah in Python":
        envs = {"vecenv": vecenv.make("HalfCheetah-v5", num_envs, backend="python")}
        if num_envs <= 64:  # it starts as many processes
            envs["gymnasium Async"] = gym.vector.AsyncVectorEnv([lambda: gym.make("HalfCheetah-v5")] * num_envs)
    else:
        envs = {
            "vecenv, threads": vecenv.make(f"{task}-v5", num_envs),
            "vecenv, workers": vecenv.make(f"{task}-v5", num_envs, num_workers=workers),
        }
    for each in envs.values():
        stack.callback(each.close)
        each.reset(seed=0)
    if actions is None:
        space = next(iter(envs.values())).action_space
        space.seed(0)
        actions = np.stack([space.sample() for _ in range(steps)])

    def stepper(envs: Any) -> Steps:
        return lambda: [envs.step(batch) for batch in actions]

    rivals |= {name: Rival(stepper(each)) for name, each in envs.items()}
    if task in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid"):
        rivals["vecenv, workers, send and recv of halves"] = _halves(envs["vecenv, workers"], actions)
        rivals |= _envpool(f"{task}-v5", num_envs, actions, stack)
    return steps, rivals


def _halves(envs: vecenv.AsyncVectorEnv, actions: np.ndarray) -> Rival:
    """Returns a rival that receives at least half of the envs at a time."""
    surplus = 0  # steps that the last call took beyond its own

    def steps() -> None:
        nonlocal surplus
        t, missing = 0, actions.shape[0] * envs.num_envs - surplus
        while missing > 0:
            ids = envs.recv(envs.num_envs // 2).env_ids
            envs.send(actions[t, : len(ids)], ids)
            t, missing = (t + 1) % len(actions), missing - len(ids)
        surplus = -missing

    return Rival(steps, begin=lambda: envs.send(actions[0]), end=envs.recv)


def _envpool(env_id: str, num_envs: int, actions: np.ndarray, stack: ExitStack) -> dict[str, Rival]:
    try:
        import envpool
    except ImportError as error:
        print(f"EnvPool is skipped: {error}")
        return {}
    sizes = {"num_envs": num_envs, "num_threads": vecenv.available_cores()}
    sync = envpool.make(env_id, env_type="gymnasium", **sizes)
    stack.callback(sync.close)
    sync.reset()
    rivals = {"EnvPool": Rival(lambda: [sync.step(batch) for batch in actions])}
    for parts, name in ((2, "halves"), (4, "quarters")):
        envs = envpool.make(env_id, env_type="gymnasium", batch_size=num_envs // parts, **sizes)
        stack.callback(envs.close)
        envs.async_reset()
        rivals[f"EnvPool, send and recv of {name}"] = _parts(envs, parts, actions)
    return rivals


def _parts(envs: Any, parts: int, actions: np.ndarray) -> Rival:
    """Returns a rival that receives one part of EnvPool's envs at a time."""
    batches = [part for batch in actions for part in np.split(batch, parts)]
    waiting: list[np.ndarray] = []

    def begin() -> None:
        for ids in waiting:
            envs.send(batches[0], ids)

    def steps() -> None:
        for batch in batches:
            envs.send(batch, envs.recv()[4]["env_id"])

    def end() -> None:
        waiting[:] = [envs.recv()[4]["env_id"].copy() for _ in range(parts)]

    end()
    return Rival(steps, begin, end)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
