"""curves.py: Curve: how the return of several runs of the same settings grew, as one line with its spread."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from ppo.config import Config
from ppo.run import CHANGEABLE, Run, RunError

SAMPLED, DETERMINISTIC = "sampled policy", "deterministic policy"
AXES = {"env_steps": "env-steps", "hours": "hours"}
POINTS = 200  # of a curve of several runs, whose reports may lie at different steps
RESAMPLES = 1000  # of the bootstrap


@dataclasses.dataclass(frozen=True)
class History:
    """The reports of one run.

    Attributes:
        run: Its folder.
        config: Its settings.
        points: By policy, "sampled policy" (mean return of the last 100 episodes while training) or "deterministic
            policy" (mean return of an evaluation): env-steps, hours and return, `float64[3, P]`.
    """

    run: Path
    config: Config
    points: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Return over env-steps or hours, of S runs together.

    Attributes:
        x: Env-steps or hours, `float64[P]`, rising, from where all runs have something to show.
        returns: Of each run, `float64[S, P]`.
    """

    x: np.ndarray
    returns: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean over the runs, `float64[P]`."""
        return self.returns.mean(axis=0)

    @property
    def iqm(self) -> np.ndarray:
        """Interquartile mean, that of the middle half of the runs, `float64[P]` (Agarwal et al., NeurIPS 2021)."""
        return stats.trim_mean(self.returns, 0.25, axis=0)

    def interval(self, middle: str, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Returns lower and upper bound of the mean or the IQM, `float64[P]` each, by bootstrap over the runs.

        Args:
            middle: "mean" or "iqm".
            confidence: How often such an interval holds the true value.
        """
        statistic = np.mean if middle == "mean" else lambda runs, axis: stats.trim_mean(runs, 0.25, axis=axis)
        if len(self.returns) == 1:
            return self.returns[0], self.returns[0]
        found = stats.bootstrap(
            (self.returns,), statistic, axis=0, confidence_level=confidence, n_resamples=RESAMPLES,
            method="percentile", vectorized=True, rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        return found.low, found.high


def read_history(run: Run) -> History:
    """Reads what a run has reported so far.

    Raises:
        RunError: If there is nothing that can be read.
    """
    config = run.read_config()
    try:
        reports = [json.loads(line) for line in run.metrics.read_text().splitlines() if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise RunError(f"{run.metrics} cannot be read: {error}") from error
    points = {
        SAMPLED: _points(reports, "return_mean"),
        DETERMINISTIC: _points([*reports, *_final(run, reports)], "eval_return_mean"),
    }
    if not any(found.shape[1] for found in points.values()):
        raise RunError(f"{run.path} has no returns to show yet: no episode has ended. Try again later.")
    return History(run.path, config, points)


def grouped(histories: Iterable[History]) -> dict[str, dict[str, list[History]]]:
    """Returns the runs whose settings are the same but for the seed: by env, and by what differs among those of it."""
    alike = {name: getattr(Config(), name) for name in (*CHANGEABLE, "seed")}
    envs: dict[str, dict[Config, list[History]]] = {}
    for history in histories:
        groups = envs.setdefault(history.config.env, {})
        groups.setdefault(dataclasses.replace(history.config, **alike), []).append(history)
    return {env: {_label(config, groups): found for config, found in groups.items()} for env, groups in envs.items()}


def _label(config: Config, among: Iterable[Config]) -> str:
    names = [f.name for f in dataclasses.fields(Config) if len({getattr(other, f.name) for other in among}) > 1]
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def _points(reports: Iterable[dict], name: str) -> np.ndarray:
    rows = [
        (report["env_steps"], report["wall_s"] / 3600, report[name])
        for report in reports
        if report.get(name) is not None
    ]
    return np.array(rows, np.float64).reshape(-1, 3).T


def _final(run: Run, reports: Sequence[dict]) -> list[dict]:
    """Returns the evaluation at the end as a report, if there is one and the run did not evaluate then anyway."""
    file = run.path / "evaluation.json"
    if not reports or not file.is_file() or "eval_return_mean" in reports[-1]:
        return []
    final = json.loads(file.read_text())
    return [{**reports[-1], "env_steps": final["env_steps"], "eval_return_mean": final["return_mean"]}]


def aggregate(histories: Sequence[History], policy: str, axis: str) -> Curve | None:
    """Returns the runs as one curve; None if one has no points, or none in common.

    Args:
        histories: Of runs that differ in their seed.
        policy: Whose return.
        axis: "env_steps" or "hours".
    """
    row = list(AXES).index(axis)
    lines = [(history.points[policy][row], history.points[policy][2]) for history in histories]
    if any(not len(x) for x, _ in lines):
        return None
    if all(len(x) == 1 for x, _ in lines):  # the scores at the end
        return Curve(np.mean([x for x, _ in lines], axis=0), np.stack([values for _, values in lines]))
    # A run that ended keeps its return while hours pass, but has none at steps that it did not take.
    last = max if axis == "hours" else min
    low, high = max(x[0] for x, _ in lines), last(x[-1] for x, _ in lines)
    x = np.unique(np.concatenate([x[(x >= low) & (x <= high)] for x, _ in lines]))
    if not len(x):
        return None
    if len(x) > POINTS:
        x = np.linspace(low, high, POINTS)
    return Curve(x, np.stack([np.interp(x, *line) for line in lines]))
