"""How well does ppo learn? `python -m benchmarks.learning` trains the missing runs and prints a table of scores.

Protocol, fixed before the first run:

- Settings are chosen with seeds below 283, and with seed 290 of Hopper and of the continuous lander. Seeds from 290 up
  are reported, Hopper's from 291. The presets are older, and their seeds begin at 100. The seeds of envs, weights and
  noise come from separate `numpy.random.SeedSequence` streams.
- A score is the mean return of the deterministic policy over 20 episodes of new envs. The policy is evaluated at ten
  equally spaced env-step counts, each time after the first update that reaches the count. The final score is the last
  one, never the best. All evaluations of a run use the same env seeds.
- IQM is the interquartile mean over the seeds: the mean without the lowest and highest quarter of the runs (two of ten,
  one of five). Its interval is a 95% percentile bootstrap interval (Agarwal et al., NeurIPS 2021, for a single task).
  In trials with normally distributed returns, the interval of five seeds contained the true value 85% of the time. With
  fewer seeds it is omitted.
- A failed run stops the command, and its folder is kept. No finished run with the reported settings is discarded.

Each finished run is added to `benchmarks/results/STUDY.json` at once. An interrupted command can be run again and
trains only the missing seeds. Runs train concurrently, each on its own cores.
Not measured: speed, because concurrent runs slow each other down. See `benchmarks.speedrun`.
"""

from __future__ import annotations

import fnmatch
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.machine import commit, machine
from ppo.config import RESUMABLE, Config
from vecenv import available_cores

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHECKPOINTS, EPISODES = 10, 20

CONTINUOUS_LANDER = "LunarLander-v3, continuous"
FLAGS = {CONTINUOUS_LANDER: "--env LunarLander-v3 --env-kwargs continuous=true"}
"""Flags of tasks that are not just an id."""


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

    @property
    def preset(self) -> str | None:
        """The preset that the flags name; None for the defaults."""
        flag, value, *_ = self.flags.split()
        return None if flag == "--env" else value


def _studies() -> dict[str, Study]:
    tasks = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
    others = ("Reacher-v5", "Pusher-v5", "InvertedDoublePendulum-v5", "Swimmer-v5")
    small = {
        "Pendulum-v1": 0.3,
        "CartPole-v1": 0.2,
        "Acrobot-v1": 0.2,
        "LunarLander-v3": 1,
        CONTINUOUS_LANDER: 1,
        "BipedalWalker-v3": 3,
        "MountainCarContinuous-v0": 0.3,
    }
    ten, five = tuple(range(290, 300)), tuple(range(290, 295))
    fresh = {"Hopper-v5": 1}  # its seed 290 was used to choose what entropy the objective rewards
    plans = [(env, None, 1, tuple(seed + fresh.get(env, 0) for seed in ten)) for env in (*tasks, *others)]
    plans += [(env, None, 3, tuple(seed + fresh.get(env, 0) for seed in five)) for env in tasks]
    plans += [(env, None, millions, five) for env, millions in small.items()]
    plans += [
        ("Swimmer-v5", "swimmer", 1, tuple(range(100, 110))),
        ("Reacher-v5", "paper/reacher", 5, tuple(range(100, 103))),
    ]
    found = []
    for env, preset, millions, seeds in plans:
        flags = FLAGS.get(env, f"--env {env}") if preset is None else f"--config {preset}"
        name = f"{(preset or env.replace(', ', '-')).replace('/', '-')}-{millions}M"
        found.append(Study(name, env, flags, int(millions * 1_000_000), seeds))
    return {study.name: study for study in found}


STUDIES = _studies()


def read(study: Study, results: Path) -> dict[str, Any]:
    """Returns the record of a study, with no runs if its file does not exist.

    Raises:
        SystemExit: If the file has runs with other settings.
    """
    file = results / f"{study.name}.json"
    planned = {"env": study.env, "flags": study.flags, "env_steps": study.env_steps, "settings": _settings(study)}
    if not file.is_file():
        return {**planned, "runs": []}
    record = json.loads(file.read_text())
    # Runs from before a setting existed behaved as its current default does, except that the runs without `final_gamma`
    # whose gamma was 0.99 have been deleted, or record it. A setting that no longer exists had its default, because
    # the study's flags do not name it.
    defaults = _as_json(Config())
    record["settings"] = {name: record["settings"].get(name, default) for name, default in defaults.items()}
    if changed := [name for name in planned if record[name] != planned[name]]:
        raise SystemExit(
            f"error: {file} holds runs with different {' and '.join(changed)}: a default, a preset or the study has "
            "changed. Delete it, and run `python -m benchmarks.learning` to train again."
        )
    return record


def _settings(study: Study) -> dict[str, Any]:
    from ppo.cli.train import parse

    return _as_json(parse(shlex.split(study.flags))[1])


def _as_json(config: Config) -> dict[str, Any]:
    """Returns every setting that influences scores, as JSON values, except the seed and the number of env-steps."""
    ignored = {*RESUMABLE, "seed"} - {"eval_env_kwargs"}
    settings = json.loads(json.dumps(asdict(config)))
    return {name: value for name, value in settings.items() if name not in ignored}


def add(study: Study, run: dict[str, Any], results: Path) -> None:
    """Adds a run to the file of its study. The file is replaced atomically."""
    record = read(study, results)
    if run["seed"] in {other["seed"] for other in record["runs"]}:
        raise SystemExit(f"error: seed {run['seed']} of {study.name} was trained twice. Run one command at a time.")
    record["runs"] = sorted([*record["runs"], run], key=lambda other: other["seed"])
    head = json.dumps({**record, "runs": []}, indent=1)[: -len("[]\n}")]
    lines = ",\n".join(f"  {json.dumps(other)}" for other in record["runs"])
    results.mkdir(parents=True, exist_ok=True)
    part = results / f"{study.name}.json.part"
    part.write_text(f"{head}[\n{lines}\n ]\n}}\n")
    os.replace(part, results / f"{study.name}.json")


class Trainer:
    """Trains each seed in its own process, several at a time, and records each run as soon as it finishes.

    Args:
        results: Folder of the results.
        jobs: Number of concurrent runs.
    """

    def __init__(self, results: Path, jobs: int):
        self._results = results
        self._jobs = jobs
        self._adding = threading.Lock()
        self._processes: set[subprocess.Popen] = set()
        self._errors: list[BaseException] = []
        cores = sorted(os.sched_getaffinity(0))
        self._shares: queue.Queue[set[int]] = queue.Queue()
        for number in range(jobs):
            self._shares.put(set(cores[number::jobs]))

    def fill(self, studies: Iterable[Study]) -> None:
        """Trains all missing seeds. The first error ends all other runs and is raised.

        Raises:
            SystemExit: If a run fails, or at SIGINT or SIGTERM.
        """
        missing = [
            (study, seed)
            for study in studies
            for seed in set(study.seeds) - {run["seed"] for run in read(study, self._results)["runs"]}
        ]
        missing.sort(key=lambda plan: plan[1])  # if interrupted, all studies have about as many runs
        before = {number: signal.signal(number, self._interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with ThreadPoolExecutor(self._jobs) as pool:
                list(pool.map(lambda plan: self._one(*plan), missing))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._errors:
            raise self._errors[0]

    def _interrupted(self, number: int, _: Any) -> None:
        self._stop(SystemExit(128 + number))

    def _stop(self, error: BaseException) -> None:
        self._errors.append(error)  # before the processes are killed, see `_train`
        for process in list(self._processes):
            process.kill()

    def _one(self, study: Study, seed: int) -> None:
        share = self._shares.get()
        try:
            if not self._errors:
                run = {"seed": seed, "cores": len(share), **_facts()}
                folder = self._train(study, seed, share)
                (finished,) = folder.glob("*/evaluation.json")
                run |= _scores(finished.parent, study.env_steps)
                with self._adding:
                    add(study, run, self._results)
                shutil.rmtree(folder)
                print(f"{study.name} {seed}: {run['scores'][-1]:,.1f}", file=sys.stderr, flush=True)
        except BaseException as error:
            self._stop(error)
        finally:
            self._shares.put(share)

    def _train(self, study: Study, seed: int, cores: set[int]) -> Path:
        """Trains a seed on the given cores and returns the folder that holds its run folder."""
        folder = Path(tempfile.mkdtemp(prefix=f"{study.name}-{seed}-"))
        words = [sys.executable, "-m", "ppo", "train", *shlex.split(study.flags)]
        words += ["--total-steps", study.env_steps, "--seed", seed, "--logdir", folder]
        words += ["--eval-interval", study.env_steps // CHECKPOINTS, "--eval-episodes", EPISODES]
        words += ["--checkpoint-interval", 10**9]
        os.sched_setaffinity(0, cores)  # of this thread, which the child inherits
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                list(map(str, words)), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._processes.add(process)
        print(f"{study.name} {seed}: training", file=sys.stderr, flush=True)
        if self._errors:  # `_stop` may have read the processes before this one was added
            process.kill()
        code = process.wait()
        self._processes.remove(process)
        if code == -signal.SIGKILL and self._errors:
            shutil.rmtree(folder)
            raise SystemExit(f"seed {seed} of {study.name} was stopped")
        if code:
            raise SystemExit(
                f"error: seed {seed} of {study.name} failed with exit code {code}; its files are in {folder}. Fix the "
                f"cause and run the command again. The output ends with:\n{_tail(folder / 'output.txt')}"
            )
        return folder


def _tail(file: Path) -> str:
    return file.read_text(errors="replace")[-2000:]


def _facts() -> dict[str, Any]:
    """Returns the commit and the versions that a run is about to use."""
    facts = machine()
    versions = {name: facts["versions"][name] for name in ("gymnasium", "mujoco", "numpy", "tensorflow")}
    return {"commit": commit(), "python": facts["python"], "versions": versions}


def _scores(run: Path, env_steps: int) -> dict[str, Any]:
    """Returns the scores of a finished run at the checkpoints."""
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
        raise SystemExit(f"error: {run} has evaluations at {steps}, not at {CHECKPOINTS} counts up to {env_steps}")
    return {
        "env_steps": steps,
        "scores": [round(points[step][0], 2) for step in steps],
        "stds": [round(points[step][1], 2) for step in steps],
        "minutes": round(reports[-1]["wall_s"] / 60, 2),
    }


def table(studies: Iterable[Study], results: Path) -> str:
    """Returns the table in Markdown. A task without a preset in parentheses has the defaults.

    Studies without runs are omitted.
    """
    from ppo.results.curves import MIN_RUNS

    lines = ["| task (preset) | env-steps | seeds | IQM | 95% interval of the IQM | mean ± s.d. | lowest | highest |"]
    lines += ["|---|---:|---:|---:|---|---:|---:|---:|"]
    for study in studies:
        runs = read(study, results)["runs"]
        if not runs:
            continue
        curve = _curve(runs)
        final = curve.values[:, -1]
        digits = 0 if np.abs(final).max() >= 100 else 1

        def shown(value: float, digits: int = digits) -> str:
            return f"{round(float(value), digits) + 0.0:,.{digits}f}"  # never -0.0

        interval = ", ".join(shown(values[-1]) for values in curve.interval)
        cells = [
            f"{study.env} (`{study.preset}`)" if study.preset else study.env,
            f"{study.env_steps:,}",
            len(runs),
            shown(curve.iqm[-1]),
            f"[{interval}]" if len(runs) >= MIN_RUNS else "-",
            shown(final.mean()) + (f" ± {shown(final.std(ddof=1))}" if len(runs) > 1 else ""),
            shown(final.min()),
            shown(final.max()),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _curve(runs: list[dict[str, Any]]) -> Any:
    from ppo.results.curves import Curve

    return Curve(np.mean([run["env_steps"] for run in runs], axis=0), np.array([run["scores"] for run in runs]))


def draw(studies: Iterable[Study], results: Path, file: Path) -> None:
    """Draws scores against env-steps as SVG, with a panel for each task and budget, and a line for each study."""
    import matplotlib

    from ppo import Config
    from ppo.results.curves import DETERMINISTIC, SAMPLED, History
    from ppo.results.curves import draw as draw_panels

    panels: dict[str, dict[str, list[History]]] = {}
    for study in studies:
        for run in read(study, results)["runs"]:
            points = np.array([run["env_steps"], np.zeros(CHECKPOINTS), run["scores"]])
            history = History(Config(env=study.env), {DETERMINISTIC: points, SAMPLED: np.empty((3, 0))})
            label = f"preset {study.preset}" if study.preset else "defaults"
            panel = f"{study.env}, {study.env_steps / 1_000_000:g}M env-steps"
            panels.setdefault(panel, {}).setdefault(label, []).append(history)
    if not panels:
        raise SystemExit(f"error: there is nothing to draw: {results} has no runs")
    # For a small file, text stays text, with one font name instead of a dozen, and coordinates have one decimal.
    small = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "svg.hashsalt": file.name}
    with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context(small):
        draw_panels(panels, Path(folder))
        drawn = (Path(folder) / "return-env_steps.svg").read_text()
    file.write_text(re.sub(r"(\.\d)\d{3,}", r"\1", drawn))


def main(
    only: tuple[str, ...] = (),
    seeds: int | None = None,
    jobs: int = available_cores(),
    table_only: bool = False,
    plot: Path | None = None,
    results: Path = RESULTS,
) -> None:
    """Trains the missing runs and prints the table of all finished runs.

    Args:
        only: Names of studies, or patterns such as "*-1M". Empty: all.
        seeds: Number of seeds of each study to train, counted from the first. None: all.
        jobs: Number of concurrent runs, each pinned to its own cores. Linux only.
        table_only: Train nothing.
        plot: Draw the learning curves into this SVG file.
        results: Folder of the results.
    """
    if unknown := [name for name in only if not fnmatch.filter(STUDIES, name)]:
        raise SystemExit(f"error: unknown studies {unknown}: use names from {list(STUDIES)}")
    if seeds is not None and seeds < 1:
        raise SystemExit(f"error: --seeds {seeds} trains nothing: use 1 or more, or --table-only")
    if not 1 <= jobs <= available_cores():
        raise SystemExit(f"error: --jobs {jobs}: use 1 to {available_cores()}, the number of cores of this process")
    if plot is not None and not plot.parent.is_dir():
        raise SystemExit(f"error: --plot {plot}: {plot.parent} is not a folder")
    studies = [study for study in STUDIES.values() if any(fnmatch.fnmatch(study.name, name) for name in only or "*")]
    if not table_only:
        if not hasattr(os, "sched_setaffinity"):
            raise SystemExit("error: only Linux can pin runs to cores: use --table-only")
        Trainer(results, jobs).fill(replace(study, seeds=study.seeds[:seeds]) for study in studies)
    print(table(studies, results))
    if plot is not None:
        draw(studies, results, plot)


if __name__ == "__main__":
    tyro.cli(main)
