"""How fast is PPO relative to stepping alone? `python -m benchmarks.ratios --env HalfCheetah-v5 --setting A`.

PPO makes an update, then each rival takes as many env-steps with random actions and learns nothing; and so on, for some
rounds. A turn takes less than a second, so what else the machine does at the time slows down all of them, and a ratio
within a round holds better than one of figures that were taken minutes apart, as those of bench_ppo.py are.

The rivals: vecenv stepping the same envs; of MuJoCo tasks in C++ EnvPool (`step`), if it is installed, and the physics
alone (see bench_mujoco.py). Settings A and B are those of bench_ppo.py. Start-up and compilation are left out.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

import vecenv
from benchmarks.bench_mujoco import envpool_sync, physics, random_actions, vecenv_here
from benchmarks.bench_ppo import SETTINGS, in_a_process

NUM_ENVS, WARM_UP = 64, 3  # rounds that are not counted


def main(
    env: str = "HalfCheetah-v5",
    setting: Literal["A", "B"] = "A",
    backend: Literal["auto", "python"] = "auto",
    halves: bool | None = None,
    rounds: int = 50,
) -> None:
    """Prints env-steps per second, medians of the rounds, and the median of each round's ratio.

    Args:
        env: Its id.
        setting: A or B.
        backend: "python" for ordinary envs.
        halves: As of `ppo.Config`.
        rounds: How many are counted.
    """
    num_steps = SETTINGS[setting]["num_steps"]
    with tempfile.TemporaryDirectory() as folder:
        iterate, close = in_a_process(Path(folder), env=env, backend=backend, halves=halves, **SETTINGS[setting])
        lives = _rivals(env, backend, random_actions(env, NUM_ENVS, num_steps))
        calls: dict[str, Callable[[], Any]] = {"ppo": iterate, **{name: next(life) for name, life in lives.items()}}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(WARM_UP + rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        for life in lives.values():
            next(life, None)  # closes the envs
        close()
    print(f"| {env}, {setting}, backend {backend} | env-steps/s | ppo / this |\n|---|---:|---:|")
    ours = np.array(seconds["ppo"][WARM_UP:])
    for name, taken in seconds.items():
        theirs = np.array(taken[WARM_UP:])
        speed = NUM_ENVS * num_steps / statistics.median(theirs)
        print(f"| {name} | {speed:,.0f} | {np.median(theirs / ours):.2f} |")


def _rivals(env: str, backend: str, actions: np.ndarray) -> dict[str, Iterator[Callable[[], Any]]]:
    if backend == "python":
        return {"vecenv, nothing learned": _python(env, actions)}
    found = {"vecenv, nothing learned": vecenv_here(env, NUM_ENVS, actions)}
    if find_spec("envpool"):
        found["EnvPool, nothing learned"] = envpool_sync(env, NUM_ENVS, actions)
    return {**found, "physics alone": physics(env, NUM_ENVS, actions, left_away=3)}


def _python(env: str, actions: np.ndarray) -> Iterator[Callable[[], Any]]:
    with vecenv.make(env, NUM_ENVS, backend="python", vector_kwargs={"infos": False}) as envs:
        envs.reset(seed=0)
        yield lambda: [envs.step(batch) for batch in actions]


if __name__ == "__main__":
    tyro.cli(main)
