"""How do collectors on Ray scale, and what do they cost? `python -m benchmarks.collectors` prints three tables.

- The speed of PPO, in env-steps per second, with envs that sleep for 1 or 5 ms, so that a few cores can stand in for
  many: 8 envs per collector, which steps them in its own process, 64 steps, 4 minibatches and 2 epochs. The ideal is
  the speed of the 8 envs of a collector, stepped in a loop by nothing else, times the number of collectors. "One
  process" has the same envs in as many workers.
- The time of a rollout of 4,096 rows of HalfCheetah-v5 through Ray, in milliseconds: an actor returns a stored rollout,
  so this is the time for sending the weights and for sending, joining and converting the rollout.
- The speed of PPO on HalfCheetah-v5 in C++, with the settings A and B of bench_ppo.py, in one process and with two
  collectors: a case in which collectors do not help.

Speeds are medians over the reports of all rounds, which are interleaved. Not measured: start-up, compilation, and a
network between machines.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import vecenv
from benchmarks.bench_ppo import NUM_ENVS, SETTINGS
from benchmarks.machine import load_tensorflow
from benchmarks.slow import Sleeping

ENVS = 8  # of a collector
REPORTS = 4  # of a run; the first one is not counted, because it includes compilation
UPDATES = 3  # per report
ROLLOUTS = 50


def main(collectors: tuple[int, ...] = (1, 2, 4, 8), step_ms: tuple[int, ...] = (1, 5), rounds: int = 3) -> None:
    """Measures and prints the tables.

    Args:
        collectors: Numbers of collectors of the first table.
        step_ms: Durations of a step of the envs of the first table.
        rounds: Repetitions, interleaved over the cases of a table.
    """
    print("| step, ms | collectors | one process | share of the ideal | collectors on Ray | share of the ideal |")
    print("|---:|---:|---:|---:|---:|---:|")
    for duration in step_ms:
        ideal = statistics.median(sleeping_alone(duration) for _ in range(rounds))
        cases = [(count, on_ray) for count in collectors for on_ray in (False, True)]
        found: dict[Any, list[float]] = {case: [] for case in cases}
        for _ in range(rounds):
            for count, on_ray in cases:
                found[count, on_ray] += sleeping_run(duration, count, on_ray)
        for count in collectors:
            speeds = [statistics.median(found[count, on_ray]) for on_ray in (False, True)]
            cells = " | ".join(f"{speed:,.0f} | {speed / (count * ideal):.0%}" for speed in speeds)
            print(f"| {duration} | {count} | {cells} |", flush=True)

    print(f"\n4,096 rows through Ray: {1e3 * transport(rounds):.1f} ms")

    found = {(name, on_ray): [] for name in SETTINGS for on_ray in (False, True)}
    for _ in range(rounds):
        for name, on_ray in found:
            found[name, on_ray] += cheetah_run(name, on_ray)
    print("\n| setting | one process | two collectors |\n|---|---:|---:|")
    for name in SETTINGS:
        one, two = (statistics.median(found[name, on_ray]) for on_ray in (False, True))
        print(f"| {name} | {one:,.0f} | {two:,.0f} |")


def sleeping_run(duration: int, count: int, on_ray: bool) -> list[float]:
    """Trains on `ENVS` sleeping envs per collector; returns the env-steps per second of each report."""
    setting = SETTINGS["A"]
    batch = ENVS * count * setting["num_steps"]
    where = {"num_workers": 0, "collectors": count} if on_ray else {"num_workers": count}
    flags = {"env": "benchmarks.slow:Sleeping-v0", "env_kwargs": f"step_ms={duration}", "num_envs": ENVS * count}
    return run({**setting, **flags, **where, "minibatch_size": batch // 4}, batch)


def cheetah_run(setting: str, on_ray: bool) -> list[float]:
    """Trains on HalfCheetah-v5 in C++; returns the env-steps per second of each report."""
    flags = {"env": "HalfCheetah-v5", "num_envs": NUM_ENVS, **({"collectors": 2} if on_ray else {})}
    return run({**SETTINGS[setting], **flags}, NUM_ENVS * SETTINGS[setting]["num_steps"])


def run(flags: Mapping[str, Any], batch: int) -> list[float]:
    """Trains; returns the env-steps per second of each report."""
    more = {"report_interval": batch * UPDATES, "total_steps": batch * UPDATES * REPORTS, "eval_episodes": 1}
    words = [word for name, value in {**flags, **more}.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ppo", "train", *words, "--logdir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (path,) = Path(folder).iterdir()
        reports = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [one["steps_per_s"] for one in reports[1:]]


def sleeping_alone(duration: int, seconds: float = 2.0) -> float:
    """Returns the env-steps per second of the envs of one collector, stepped in this process."""
    with vecenv.SyncVectorEnv([lambda: Sleeping(duration)] * ENVS) as envs:
        envs.reset(seed=0)
        actions, steps, start = np.zeros((ENVS, 6), np.float32), 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            envs.step(actions)
            steps += ENVS
        return steps / (time.perf_counter() - start)


def transport(rounds: int) -> float:
    """Returns the median of the seconds in which an actor returns a stored rollout of 4,096 rows of HalfCheetah-v5."""
    load_tensorflow()
    import ppo
    from ppo.algorithm.ray_collector import RayCollector
    from ppo.algorithm.teams import team_of
    from ppo.cluster import cluster

    config = ppo.Config(num_envs=64, num_steps=64, num_workers=0)
    with cluster(None, 1, print) as cores:
        shares = [range(64)]
        pickled = [vecenv.pickle_for_workers((config, Stored(config, own))) for own in shares]
        collector = RayCollector(config, pickled, shares, cores=cores, warn=print)
        try:
            collector.start()
            (team,) = [team_of(config, name, (), spaces) for name, spaces in collector.spaces.items()]
            collector.use([team.actor])
            collector.begin(0)
            seconds = []
            for number in range(rounds * ROLLOUTS):
                start = time.perf_counter()
                collector.collect(number, 0)
                seconds.append(time.perf_counter() - start)
            return statistics.median(seconds[ROLLOUTS // 5 :])
        finally:
            collector.close()


class Stored:
    """Makes a collector whose `collect` returns the same rollout again and again, in the process of an actor."""

    def __init__(self, config: Any, own: range):
        self._config, self._own = config, own

    @contextmanager
    def __call__(self) -> Iterator[Any]:
        from ppo.collectors import local_share

        with local_share(self._config, None, (), {}, self._own) as collector:
            stored: list[Any] = []
            original = collector.collect

            def collect(number: int, env_steps: int) -> Any:
                if not stored:
                    stored.append(original(number, env_steps))
                return stored[0]

            collector.collect = collect  # type: ignore[method-assign]
            yield collector


if __name__ == "__main__":
    tyro.cli(main)
