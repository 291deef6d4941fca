"""The command `python -m ppo.plot RUN...`: curves of return, and a table of final scores."""

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
    """Draw return against env-steps and against hours, of the deterministic and of the sampled policy.

    Runs whose settings differ in nothing but the seed become one line with its spread. The deterministic policy has
    a line where runs were made with --eval-interval, and otherwise a point at their end.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""

    outdir: Path = Path("plots")
    """Folder for return-env_steps and return-hours, .png and .svg; those that are there are replaced."""

    middle: Literal["mean", "iqm"] = "mean"
    """What of several runs is drawn: their mean, or the interquartile mean; with its 95 % bootstrap interval, or, of
    fewer than 5 runs, their range."""


def command(argv: Sequence[str] | None = None) -> int:
    """Draws, and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ppo.plot")
    if not arguments.runs:
        raise RunError("name one run folder or more, such as runs/*")
    try:
        from ppo.results import curves
    except ImportError as error:
        raise RunError(f"{error.name}, which plots need, is missing: `pip install -e '.[plot]'`") from error
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
        "Values are those at the env-steps that all runs have reached. The interval is that of the "
        f"{arguments.middle}, 95 %, by bootstrap; of fewer than {curves.MIN_RUNS} runs, their lowest and highest."
    )
    print("\n".join(map(str, files)))
    return 0


def _histories(paths: Sequence[Path]) -> list[History]:
    """Reads the runs; of several, those that have nothing to show are left out with a warning."""
    from ppo.results.curves import read_history

    found = []
    for path in paths:
        try:
            found.append(read_history(Run.open(path)))
        except RunError as error:
            if len(paths) == 1:
                raise
            commands.warn(f"left out: {error}")
    if not found:
        raise RunError("none of the folders is a run that has something to show")
    return found


def _final(curve: Curve, middle: Literal["mean", "iqm"]) -> list[str]:
    """Returns how many runs, where the curve ends, and there mean, IQM and interval."""
    mean, iqm, low, high = (f"{values[-1]:,.1f}" for values in (curve.mean, curve.iqm, *curve.interval(middle)))
    runs = len(curve.returns)
    return [str(runs), f"{curve.x[-1]:,.0f}", mean, iqm, f"{low} to {high}" if runs > 1 else ""]
