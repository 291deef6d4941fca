"""`ppo plot RUN...`: learning curves, and a table of final scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from ppo import cli as commands
from ppo.run.folder import Run, RunError

if TYPE_CHECKING:
    from ppo.results.curves import Curve, History


@dataclass(frozen=True)
class Arguments:
    """Plot return against environment steps and against hours, for the deterministic and the sampled policy.

    Runs that differ only in their seed become one line with an interval. The deterministic policy has a line if
    training used --eval-interval, and a single point at the end of training otherwise.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""

    outdir: Path = Path("plots")
    """Folder for return-env_steps and return-hours, each as .png and .svg. Existing files are replaced."""

    middle: Literal["mean", "iqm"] = "mean"
    """Line drawn for several runs: their mean or their interquartile mean. The shaded interval is its 95% bootstrap
    interval, or the range of the runs if there are fewer than 5."""


def command(argv: Sequence[str] | None = None) -> int:
    """Plots runs, prints their final scores and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="ppo plot")
    if not arguments.runs:
        raise RunError("no run folder given: pass at least one, such as runs/*")
    try:
        from ppo.results import curves
    except ImportError as error:
        raise RunError(f"{error.name} is missing, but plots need it: `pip install -e '.[plot]'`") from error
    panels = curves.grouped(_histories(arguments.runs))
    files = curves.draw(panels, arguments.outdir, arguments.middle)
    for env, groups in panels.items():
        table = Table("settings", "policy", "runs", "env-steps", "mean", "IQM", "interval", title=env)
        for label, histories in groups.items():
            for policy in (curves.DETERMINISTIC, curves.SAMPLED):
                curve = curves.aggregate(histories, policy, "env_steps")
                if curve is not None:
                    table.add_row(label, policy, *_final(curve, arguments.middle))
        Console().print(table)
    print(
        "Scores are taken at the last env-step that all runs have reached. The interval is the 95% bootstrap interval "
        f"of the {arguments.middle}, or the range of the runs if there are fewer than {curves.MIN_RUNS}."
    )
    print("\n".join(map(str, files)))
    return 0


def _histories(paths: Sequence[Path]) -> list[History]:
    """Reads the runs. With several paths, a run without anything to plot is skipped with a warning."""
    from ppo.results.curves import read_history

    found = []
    for path in paths:
        try:
            found.append(read_history(Run.open(path)))
        except RunError as error:
            if len(paths) == 1:
                raise
            commands.warn(f"skipped: {error}")
    if not found:
        raise RunError("none of the folders is a run with anything to plot")
    return found


def _final(curve: Curve, middle: Literal["mean", "iqm"]) -> list[str]:
    """Returns the table cells for the end of a curve: number of runs, env-steps, mean, IQM and interval."""
    mean, iqm, low, high = (f"{values[-1]:,.1f}" for values in (curve.mean, curve.iqm, *curve.interval(middle)))
    runs = len(curve.returns)
    return [str(runs), f"{curve.x[-1]:,.0f}", mean, iqm, f"{low} to {high}" if runs > 1 else ""]
