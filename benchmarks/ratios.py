"""How fast is PPO compared with stepping alone? `python -m benchmarks.ratios --env HalfCheetah-v5 --setting A`.

Unit: env-steps per second, as the median of the rounds, and the median ratio of PPO to each rival within a round.
Not measured: start-up and compilation.

In each round, PPO performs one iteration, a rollout and its update. Then each rival takes the same number of env-steps
with random actions and learns nothing. Each of them takes less than a second, so other load on the machine usually
slows down a whole round. Ratios within a round are therefore more stable than ratios of measurements taken minutes
apart, as in bench_ppo.py.

The rivals are vecenv stepping the same envs and, for MuJoCo tasks in C++, EnvPool's `step` (if installed) and the
physics alone (see bench_mujoco.py). bench_ppo.py defines the settings A and B.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

import vecenv
from benchmarks.bench_mujoco import envpool_sync, physics, random_actions, vecenv_here
from benchmarks.bench_ppo import NUM_ENVS, SETTINGS, SIZES
from benchmarks.machine import in_turns
from benchmarks.processes import SB3_SETTINGS, ppo_in_a_process


def main(
    env: str = "HalfCheetah-v5",
    setting: Literal["A", "B"] = "A",
    backend: Literal["auto", "python"] = "auto",
    rounds: int = 50,
) -> None:
    """Prints the median env-steps per second of each rival, and the median ratio of PPO's speed to the rival's.

    Args:
        env: Env id.
        setting: Setting of bench_ppo.py.
        backend: "python" trains on ordinary envs.
        rounds: Number of rounds that count.
    """
    num_steps = SETTINGS[setting]["num_steps"]
    with tempfile.TemporaryDirectory() as folder:
        settings = {**SB3_SETTINGS, **SIZES, **SETTINGS[setting]}
        iterate, close = ppo_in_a_process(Path(folder), env=env, backend=backend, **settings)
        lives = _rivals(env, backend, random_actions(env, NUM_ENVS, num_steps))
        calls: dict[str, Callable[[], Any]] = {"ppo": iterate, **{name: next(life) for name, life in lives.items()}}
        seconds = in_turns(calls, rounds)
        for life in lives.values():
            next(life, None)  # closes the envs
        close()
    print(f"| {env}, {setting}, backend {backend} | env-steps/s | ppo / this |\n|---|---:|---:|")
    ours = np.array(seconds["ppo"])
    for name, taken in seconds.items():
        theirs = np.array(taken)
        speed = NUM_ENVS * num_steps / statistics.median(theirs)
        print(f"| {name} | {speed:,.0f} | {np.median(theirs / ours):.2f} |")


def _rivals(env: str, backend: str, actions: np.ndarray) -> dict[str, Iterator[Callable[[], Any]]]:
    if backend == "python":
        return {"vecenv, nothing learned": _python(env, actions)}
    found = {"vecenv, nothing learned": vecenv_here(env, NUM_ENVS, actions)}
    if find_spec("envpool"):
        found["EnvPool, nothing learned"] = envpool_sync(env, NUM_ENVS, actions)
    return {**found, "physics alone": physics(env, NUM_ENVS, actions, num_skipped=3)}


def _python(env: str, actions: np.ndarray) -> Iterator[Callable[[], Any]]:
    with vecenv.make(env, NUM_ENVS, backend="python", vector_kwargs={"infos": False}) as envs:
        envs.reset(seed=0)
        yield lambda: [envs.step(batch) for batch in actions]


if __name__ == "__main__":
    tyro.cli(main)
