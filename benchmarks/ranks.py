"""What do several ranks cost? `python -m benchmarks.ranks` measures it on this machine and prints three tables.

- The time of the sum of one vector over the ranks, as each update ends with one. It is the median over the rounds of
  the mean time of 50 sums, on rank 0. The vector has float64 numbers: three for each weight, with Adam's moments.
- The speed of PPO with envs that sleep for a millisecond, so that two cores can stand in for many. Each rank has one
  worker with 8 envs, and trains with 64 steps, minibatches of 128 and 2 epochs. "One process" has the same envs, as
  many workers, and minibatches of 128 samples per worker. The ideal is the speed of the sleeping envs of one worker,
  stepped by nothing else, times the number of workers.
- The speed of PPO on HalfCheetah-v5 in C++, with the settings A and B of bench_ppo.py, in one process on all cores and
  in two ranks with half of the cores and 64 envs each, and the time of an update, which begins after its rollout.

Speeds are medians over the reports of all rounds. Not measured: start-up, compilation, and a network between machines.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import vecenv
from benchmarks.bench_ppo import NUM_ENVS, SETTINGS
from benchmarks.slow import Sleeping
from ppo.cli.launch import free_ports

BYTES = (10_000, 50_000, 100_000, 1_000_000, 10_000_000)
SUMS = 50
ENVS = 8  # of a rank
REPORTS = 5  # of a run; the first one is not counted, because it includes compilation
UPDATES = 8  # per report
ROUND = "from benchmarks.ranks import measure_sums; measure_sums({})"


def main(ranks: tuple[int, ...] = (1, 2, 4, 8), rounds: int = 3) -> None:
    """Measures and prints the tables.

    Args:
        ranks: Numbers of ranks of the second table. The first table omits 1.
        rounds: Repetitions, interleaved over the cases of a table.
    """
    several = [count for count in ranks if count > 1]
    summed = [sums(count, rounds) for count in several]
    print("| bytes | " + " | ".join(f"{count} ranks, us" for count in several) + " |")
    print("|---:|" + "---:|" * len(several))
    for number, size in enumerate(BYTES):
        print(f"| {size:,} | " + " | ".join(f"{1e6 * column[number]:,.0f}" for column in summed) + " |")

    ideal = statistics.median(sleeping_alone() for _ in range(rounds))
    cases = [(count, processes) for count in ranks for processes in sorted({1, count})]
    found: dict[Any, list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for workers, processes in cases:
            found[workers, processes] += sleeping_run(workers, processes)
    print(f"\none worker: {ideal:,.0f} env-steps/s\n")
    print("| workers | one process | share of the ideal | one rank per worker | share of the ideal |")
    print("|---:|---:|---:|---:|---:|")
    for count in ranks:
        speeds = [median(found[count, processes], "speed") for processes in (1, count)]
        cells = [f"{speed:,.0f} | {speed / (count * ideal):.0%}" for speed in speeds]
        print(f"| {count} | {cells[0]} | {cells[1]} |", flush=True)

    found = {(name, processes): [] for name in SETTINGS for processes in (1, 2)}
    for _ in range(rounds):
        for name, processes in found:
            found[name, processes] += cheetah_run(name, processes)
    print("\n| setting | one process | an update, ms | two ranks | an update, ms |\n|---" + "|---:" * 4 + "|")
    for name in SETTINGS:
        both = [found[name, processes] for processes in (1, 2)]
        cells = [f"{median(one, 'speed'):,.0f} | {1e3 * median(one, 'update_s'):.1f}" for one in both]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


def median(reports: list[dict[str, float]], name: str) -> float:
    """Returns the median of a quantity over reports."""
    return statistics.median(report[name] for report in reports)


def sleeping_run(workers: int, ranks: int) -> list[dict[str, float]]:
    """Trains on `ENVS` sleeping envs per worker; returns the result of `run`."""
    setting = SETTINGS["A"]
    num_envs = ENVS * workers
    batch = num_envs * setting["num_steps"]
    flags = {"env": "benchmarks.slow:Sleeping-v0", "num_envs": num_envs, "num_workers": workers, "ranks": ranks}
    return run({**setting, **flags, "minibatch_size": batch // 4 // ranks}, batch)


def cheetah_run(setting: str, ranks: int) -> list[dict[str, float]]:
    """Trains on HalfCheetah-v5 in C++; returns the result of `run`."""
    num_envs = NUM_ENVS * ranks
    flags = {"env": "HalfCheetah-v5", "num_envs": num_envs, "ranks": ranks}
    return run({**SETTINGS[setting], **flags}, num_envs * SETTINGS[setting]["num_steps"])


def run(flags: Mapping[str, Any], batch: int) -> list[dict[str, float]]:
    """Trains; returns the env-steps per second and the seconds of learning per update of each report."""
    more = {"report_interval": batch * UPDATES, "total_steps": batch * UPDATES * REPORTS, "eval_episodes": 1}
    words = [word for name, value in {**flags, **more}.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ppo", "train", *words, "--logdir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (path,) = Path(folder).iterdir()
        reports = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {"speed": one["steps_per_s"], "update_s": batch / one["steps_per_s"] - batch / one["collect_steps_per_s"]}
        for one in reports[1:]
    ]


def sleeping_alone(steps: int = 200) -> float:
    """Returns the env-steps per second of the envs of one worker, stepped in this process."""
    with vecenv.SyncVectorEnv([Sleeping] * ENVS) as envs:
        envs.reset(seed=0)
        actions = np.zeros((ENVS, 6), np.float32)
        start = time.perf_counter()
        for _ in range(steps):
            envs.step(actions)
        return ENVS * steps / (time.perf_counter() - start)


def sums(count: int, rounds: int) -> list[float]:
    """Returns the seconds of a sum of each of the `BYTES` over `count` ranks."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    ranks = []
    for number in range(count):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", ROUND.format(rounds)],
                env={**os.environ, "TF_CONFIG": json.dumps(task)},
                stdout=subprocess.PIPE,
            )
        )
    outputs = [rank.communicate()[0] for rank in ranks]
    return json.loads(outputs[0].splitlines()[-1])


def measure_sums(rounds: int) -> None:
    """Prints the seconds of a sum of each of the `BYTES`, as one of the ranks of `TF_CONFIG`."""
    from ppo.run.ranks import connected

    taken = []
    with connected() as ranks:
        for size in BYTES:
            values, times = np.zeros(size // 8), []
            for _ in range(rounds):
                start = time.perf_counter()
                for _ in range(SUMS):
                    ranks.sum(values)
                times.append((time.perf_counter() - start) / SUMS)
            taken.append(statistics.median(times))
    print(json.dumps(taken))


if __name__ == "__main__":
    tyro.cli(main)
