"""How well does ppo learn? `python -m benchmarks.learning` trains what is missing and prints a table.

Protocol, fixed before the first run:

- The settings of a study were chosen with seeds 0 to 4, or other seeds below 100. The reported seeds, 100 and up, were
  not used for this. The seeds of envs, weights and noise come from separate `numpy.random.SeedSequence` streams.
- A score is the mean return of the deterministic policy over 20 episodes of new envs. It is taken at ten equally spaced
  checkpoints; each is the end of the first rollout that reaches it. The final score is the last one, never the best.
- The area is the mean of the ten scores: the area under the curve, divided by the env-steps.
- IQM is the interquartile mean over the seeds, which leaves out a quarter of the runs at either end. Its interval is
  the 95% percentile bootstrap over seeds (Agarwal et al., NeurIPS 2021, for a single task).
- A run that ends with an error stops the whole command. No finished run is discarded.

Each finished run is added to `benchmarks/results/STUDY.json` at once, so the command can be interrupted and called
again. It then trains only the seeds that are missing. Several runs proceed at the same time, with a share of the cores
each: two runs with one core take less time than one run after the other with two (see docs/results.md).
Not measured: seconds, because of the runs beside it. See `benchmarks.time_to_return` and `benchmarks.speedrun`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.conftest import machine
from vecenv import available_cores

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHECKPOINTS, EPISODES = 10, 20


@dataclass(frozen=True)
class Study:
    """Runs with the same settings and different seeds.

    Attributes:
        name: Name of the file of results.
        env: Name of the task in the tables.
        flags: Flags of `ppo train`.
        env_steps: Env-steps of training.
        seeds: The seeds.
    """

    name: str
    env: str
    flags: str
    env_steps: int
    seeds: tuple[int, ...]


def _studies() -> dict[str, Study]:
    tasks = {
        "HalfCheetah-v5": "cheetah",
        "Hopper-v5": "hopper",
        "Walker2d-v5": "walker",
        "Ant-v5": "ant",
        "Humanoid-v5": "humanoid",
        "Swimmer-v5": "swimmer",
        "Reacher-v5": "reacher",
        "InvertedDoublePendulum-v5": "double_pendulum",
        "InvertedPendulum-v5": None,
        "Pusher-v5": None,
        "HumanoidStandup-v5": None,
    }
    ten, five = tuple(range(100, 110)), tuple(range(100, 105))
    plans = [(env, preset, 1, ten) for env, preset in tasks.items()]
    plans += [(env, preset, 3, five) for env, preset in list(tasks.items())[:5]]
    plans += [(env, tasks[env], 10, five) for env in ("HalfCheetah-v5", "Ant-v5")]
    found = []
    for env, preset, millions, seeds in plans:
        flags = f"--env {env}" if preset is None else f"--config {preset}"
        found.append(Study(f"{preset or env}-{millions}M", env, flags, millions * 1_000_000, seeds))
    return {study.name: study for study in found}


STUDIES = _studies()


def read(study: Study, results: Path) -> dict[str, Any]:
    """Returns the record of a study; one without runs if there is no file.

    Raises:
        SystemExit: If the file has runs with other settings.
    """
    file = results / f"{study.name}.json"
    planned = {"env": study.env, "flags": study.flags, "env_steps": study.env_steps, "settings": _settings(study)}
    if not file.is_file():
        return {**planned, "runs": []}
    record = json.loads(file.read_text())
    if changed := [name for name in planned if record[name] != planned[name]]:
        raise SystemExit(
            f"error: the runs in {file} were made with other {' and '.join(changed)}. Remove the file to measure the "
            "new ones."
        )
    return record


def _settings(study: Study) -> dict[str, Any]:
    """Returns the settings that differ from the defaults, as JSON values, except those of every study."""
    from ppo import Config
    from ppo.cli.train import parse

    default, chosen = asdict(Config()), asdict(parse(shlex.split(study.flags))[1])
    settings = {name: value for name, value in chosen.items() if value != default[name] and name != "total_steps"}
    return json.loads(json.dumps(settings))


def train(study: Study, seed: int, cores: set[int]) -> dict[str, Any]:
    """Trains one seed in a process that uses only the given cores, and returns its record.

    Raises:
        RuntimeError: If the run fails. The message holds the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "ppo", "train", *shlex.split(study.flags)]
        words += ["--total-steps", study.env_steps, "--seed", seed, "--logdir", folder]
        words += ["--eval-interval", study.env_steps // CHECKPOINTS, "--eval-episodes", EPISODES]
        words += ["--checkpoint-interval", 10**9]
        everywhere = os.sched_getaffinity(0)  # of this thread, which its children inherit
        os.sched_setaffinity(0, cores)
        try:
            process = subprocess.Popen(
                list(map(str, words)), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        finally:
            os.sched_setaffinity(0, everywhere)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"seed {seed} of {study.name} failed: {output[-2000:]}")
        (run,) = Path(folder).iterdir()
        return {"seed": seed, "cores": len(cores), **_scores(run, study.env_steps)}


def _scores(run: Path, env_steps: int) -> dict[str, Any]:
    """Returns the scores at the checkpoints of a finished run."""
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((run / "evaluation.json").read_text())
    points = {
        report["env_steps"]: (report["eval_return_mean"], report["eval_return_std"])
        for report in reports
        if report.get("eval_return_mean") is not None
    }
    points[final["env_steps"]] = (final["return_mean"], final["return_std"])
    steps = sorted(points)
    if len(steps) != CHECKPOINTS or steps[-1] < env_steps:
        raise RuntimeError(f"{run} has evaluations at {steps}, not at {CHECKPOINTS} checkpoints up to {env_steps}")
    return {
        "env_steps": steps,
        "scores": [round(points[step][0], 2) for step in steps],
        "stds": [round(points[step][1], 2) for step in steps],
        "minutes": round(reports[-1]["wall_s"] / 60, 2),
    }


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()


def add(study: Study, run: dict[str, Any], results: Path) -> None:
    """Adds a run to the file of its study, which is replaced as a whole."""
    record = read(study, results)
    record["runs"] = sorted([*record["runs"], run], key=lambda other: other["seed"])
    lines = json.dumps({**record, "runs": []}, indent=1)[: -len("[]\n}")]
    runs = ",\n".join(f"  {json.dumps(other)}" for other in record["runs"])
    results.mkdir(parents=True, exist_ok=True)
    part = results / f"{study.name}.json.part"
    part.write_text(f"{lines}[\n{runs}\n ]\n}}\n")
    os.replace(part, results / f"{study.name}.json")


def fill(studies: Iterable[Study], results: Path, jobs: int) -> None:
    """Trains the seeds that are missing, `jobs` at a time, and adds each to its study when it has finished."""
    facts = {"commit": _commit(), **machine()}
    facts["versions"] = {name: facts["versions"][name] for name in ("gymnasium", "mujoco", "numpy", "tensorflow")}
    cores = sorted(os.sched_getaffinity(0))
    shares: queue.Queue[set[int]] = queue.Queue()
    for number in range(jobs):
        shares.put(set(cores[number::jobs]))

    def one(study: Study, seed: int) -> tuple[Study, dict[str, Any]]:
        share = shares.get()
        try:
            return study, {**facts, **train(study, seed, share)}
        finally:
            shares.put(share)

    missing = [
        (study, seed)
        for study in studies
        for seed in sorted(set(study.seeds) - {run["seed"] for run in read(study, results)["runs"]})
    ]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, *plan) for plan in missing]
        try:
            for future in as_completed(futures):
                study, run = future.result()
                add(study, run, results)
                print(f"{study.name} {run['seed']}: {run['scores'][-1]:,.1f}", file=sys.stderr, flush=True)
        finally:
            for future in futures:
                future.cancel()


def table(studies: Iterable[Study], results: Path) -> str:
    """Returns the table in Markdown. Studies without runs are left out."""
    lines = [
        "| task | flags | env-steps | seeds | IQM | its 95% interval | mean | standard deviation | each seed | area |"
    ]
    lines += ["|---|---|---:|---:|---:|---|---:|---:|---|---:|"]
    for study in studies:
        runs = read(study, results)["runs"]
        if not runs:
            continue
        curve = _curve(runs)
        low, high = (values[-1] for values in curve.interval("iqm"))
        final = curve.returns[:, -1]
        digits = 0 if np.abs(final).max() >= 100 else 1
        iqm, low, high, mean, std, area = (
            f"{value:,.{digits}f}"
            for value in (curve.iqm[-1], low, high, final.mean(), final.std(ddof=1), curve.returns.mean())
        )
        each = ", ".join(f"{score:,.{digits}f}" for score in final)
        cells = [study.env, f"`{study.flags}`", f"{study.env_steps:,}", len(runs), iqm, f"{low} to {high}", mean, std]
        lines.append(f"| {' | '.join(map(str, [*cells, each, area]))} |")
    return "\n".join(lines)


def _curve(runs: list[dict[str, Any]]) -> Any:
    from ppo.results.curves import Curve

    return Curve(np.mean([run["env_steps"] for run in runs], axis=0), np.array([run["scores"] for run in runs]))


def draw(studies: Iterable[Study], results: Path, file: Path) -> None:
    """Draws the scores against env-steps, with a panel for each task and a line for each study, as SVG."""
    from ppo import Config
    from ppo.results.curves import DETERMINISTIC, SAMPLED, History
    from ppo.results.curves import draw as draw_panels

    panels: dict[str, dict[str, list[History]]] = {}
    for study in studies:
        for run in read(study, results)["runs"]:
            points = np.array([run["env_steps"], np.zeros(CHECKPOINTS), run["scores"]])
            history = History(study.env, Config(), {DETERMINISTIC: points, SAMPLED: np.empty((3, 0))})
            label = f"{study.env_steps // 1_000_000}M env-steps"
            panels.setdefault(study.env, {}).setdefault(label, []).append(history)
    with tempfile.TemporaryDirectory() as folder:
        draw_panels(panels, Path(folder), "iqm")
        shutil.copyfile(Path(folder) / "return-env_steps.svg", file)


def main(
    only: tuple[str, ...] = (),
    seeds: int | None = None,
    jobs: int = available_cores(),
    table_only: bool = False,
    plot: Path | None = None,
    results: Path = RESULTS,
) -> None:
    """Trains the runs that are missing, and prints the table of all finished runs.

    Args:
        only: Names of studies, such as cheetah-1M. Empty: all.
        seeds: Train only this many seeds of each study.
        jobs: Number of runs at the same time, each on its own share of the cores. Needs Linux.
        table_only: Train nothing.
        plot: Draw the learning curves into this SVG file.
        results: Folder of the results.
    """
    if unknown := sorted(set(only) - set(STUDIES)):
        raise SystemExit(f"error: unknown studies {unknown}: use names from {list(STUDIES)}")
    studies = [study for study in STUDIES.values() if study.name in (only or STUDIES)]
    if not table_only:
        with contextlib.suppress(KeyboardInterrupt):
            fill([Study(**{**asdict(s), "seeds": s.seeds[:seeds]}) for s in studies], results, jobs)
    print(table(studies, results))
    if plot is not None:
        draw(studies, results, plot)


if __name__ == "__main__":
    tyro.cli(main)
