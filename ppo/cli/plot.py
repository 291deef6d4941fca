"""`ppo plot RUN...`: learning curves and other metrics, and a table of their last values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from ppo import cli as commands
from ppo.errors import RunError
from ppo.run.folder import Run
from ppo.run.scores import rounded

if TYPE_CHECKING:
    from ppo.results.curves import History


@dataclass(frozen=True)
class Arguments:
    """Plot returns or other metrics against environment steps and against hours.

    Runs that differ only in their seed become one line: their interquartile mean (IQM), with its 95% bootstrap interval
    or, if there are fewer than 5 runs, with their range. The deterministic policy has a line if training used
    --eval-interval, and a single point at the end of training otherwise.
    """

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)")
    ]
    """Run folders, or their names in "runs"."""

    outdir: Path = Path("plots")
    """Folder for METRIC-env_steps and METRIC-hours, each as .png and .svg. Existing files are replaced."""

    metric: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Plot this metric of metrics.jsonl, such as kl, entropy, value_loss or action_std. Can be repeated. Default:
    "return", the returns of the deterministic and the sampled policy."""


def command(argv: Sequence[str] | None = None) -> int:
    """Plots runs, prints their final scores and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="ppo plot")
    if not arguments.runs:
        raise RunError("no run folder given: pass at least one, such as runs/*")
    try:
        from ppo.results import curves
    except ImportError as error:
        raise RunError(f"{error.name} is missing, but plots need it: `pip install 'vecenv-ppo[plot]'`") from error
    figures = list(dict.fromkeys(arguments.metric)) or ["return"]
    panels = curves.grouped(_histories(arguments.runs, figures))
    files = curves.draw(panels, arguments.outdir, figures)
    for env, groups in panels.items():
        table = Table("settings", "metric", "runs", "env-steps", "mean", "IQM", "interval", title=env)
        for label, histories in groups.items():
            shown = [curves.metrics_in(figure, histories[0].config) for figure in figures]
            for metric, name in (item for metrics in shown for item in metrics.items()):
                curve = curves.aggregate(histories, metric, "env_steps")
                if curve is not None:
                    runs, (low, high) = len(curve.values), (rounded(values[-1]) for values in curve.interval)
                    scores = [rounded(values[-1]) for values in (curve.mean, curve.iqm)]
                    interval = f"{low} to {high}" if runs > 1 else ""
                    table.add_row(label, name, str(runs), f"{curve.x[-1]:,.0f}", *scores, interval)
        Console(width=10_000).print(table)  # no line is wrapped
    print(
        "Values are taken at the last env-step that all runs have reached. The interval is the 95% bootstrap interval "
        f"of the IQM, the interquartile mean, or the range of the runs if there are fewer than {curves.MIN_RUNS}."
    )
    print("\n".join(map(str, files)))
    return 0


def _histories(paths: Sequence[Path], figures: Sequence[str]) -> list[History]:
    """Reads the runs. With several paths, a run without anything to plot is skipped with a warning."""
    from ppo.results.curves import read_history

    found = []
    for path in paths:
        try:
            found.append(read_history(Run.open(path), figures))
        except RunError as error:
            if len(paths) == 1:
                raise
            commands.warn(f"skipped: {error}")
    if not found:
        raise RunError("none of the folders is a run with anything to plot")
    return found
