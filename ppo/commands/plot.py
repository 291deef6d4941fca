"""plot.py: the command `python -m ppo.plot RUN...`: curves of return, and a table of final scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from ppo import commands
from ppo.run import Run, RunError

if TYPE_CHECKING:
    from ppo.curves import Curve


@dataclass(frozen=True)
class Arguments:
    """Draw return against env-steps and against hours, of the deterministic and of the sampled policy.

    Runs that differ in nothing but their seed become one line with its spread. The deterministic policy has a line
    where runs were made with --eval-interval, and otherwise a point at their end.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""

    outdir: Path = Path("plots")
    """Folder for return-env_steps and return-hours, .png and .svg; those that are there are replaced."""

    middle: Literal["mean", "iqm"] = "mean"
    """What of several seeds is drawn: their mean, or the interquartile mean; with its 95 % bootstrap interval."""


def command(argv: Sequence[str] | None = None) -> int:
    """Draws, and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ppo.plot")
    if not arguments.runs:
        raise RunError("name one run folder or more, such as runs/*")
    runs = [Run.open(path) for path in arguments.runs]
    try:
        from ppo import curves, figures
    except ImportError as error:
        raise RunError(f"{error.name} is not installed, which plots need: `pip install 'vecenv-ppo[plot]'`") from error
    panels = curves.grouped(map(curves.read_history, runs))
    files = figures.draw(panels, arguments.outdir, arguments.middle)
    for env, groups in panels.items():
        table = Table("runs", "policy", "seeds", "mean", "IQM", f"95 % interval of the {arguments.middle}", title=env)
        for label, histories in groups.items():
            for policy in (curves.DETERMINISTIC, curves.SAMPLED):
                curve = curves.aggregate(histories, policy, "env_steps")
                if curve is not None:
                    table.add_row(label or env, policy, str(len(histories)), *_final(curve, arguments.middle))
        Console().print(table)
    print("\n".join(map(str, files)))
    return 0


def _final(curve: Curve, middle: str) -> list[str]:
    """Returns mean, IQM and interval where the curve ends."""
    mean, iqm, low, high = (f"{values[-1]:,.1f}" for values in (curve.mean, curve.iqm, *curve.interval(middle)))
    return [mean, iqm, f"{low} to {high}" if len(curve.returns) > 1 else "one seed"]


def main() -> None:
    """Runs the command and exits."""
    commands.main(command)
