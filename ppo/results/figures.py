"""Draw: return against env-steps and against hours, as PNG and SVG."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ppo.results.curves import AXES, DETERMINISTIC, SAMPLED, Curve, History, aggregate
from ppo.run.folder import RunError, part_of

FORMATS = ("png", "svg")
COLUMNS = 3
LABELS = {"mean": "return", "iqm": "return (interquartile mean)"}
STYLES = {DETERMINISTIC: "-", SAMPLED: "--"}
COLORS = rcParams["axes.prop_cycle"].by_key()["color"]


Panels = Mapping[str, Mapping[str, Sequence[History]]]
"""Runs that differ in their seed, by env and by label."""


def draw(panels: Panels, folder: Path, middle: str) -> list[Path]:
    """Draws both figures: a panel for each env, a colour for each group of runs, a line for each policy.

    Args:
        panels: What to draw.
        folder: Made if it is not there; figures in it of the same names are replaced.
        middle: "mean" or "iqm"; the band is its `Curve.interval`.

    Returns:
        The files.

    Raises:
        RunError: If the folder cannot be written.
    """
    try:
        return [file for axis in AXES for file in _save(_figure(panels, axis, middle), folder, f"return-{axis}")]
    except OSError as error:
        raise RunError(f"cannot write figures into {folder}: {error}. Choose another folder (--outdir).") from error


def _figure(panels: Panels, axis: str, middle: str) -> Figure:
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.8 * rows), layout="constrained")
    for number, (env, groups) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, number, title=env, xlabel=AXES[axis], ylabel=LABELS[middle])
        for (label, histories), color in zip(groups.items(), itertools.cycle(COLORS), strict=False):
            for policy in STYLES:
                curve = aggregate(histories, policy, axis)
                if curve is not None:
                    runs = f"{len(curve.returns)} runs" if len(curve.returns) > 1 else ""
                    name = ", ".join(filter(None, [label, policy, runs]))
                    _line(axes, curve, STYLES[policy], middle, label=name, color=color)
        axes.grid(alpha=0.3)
        if axis == "env_steps":
            axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    return figure


def _line(axes: Axes, curve: Curve, style: str, middle: str, *, label: str, color: str) -> None:
    low, high = curve.interval(middle)
    values = curve.mean if middle == "mean" else curve.iqm
    if len(curve.x) == 1:  # the score at the end, of runs that did not evaluate before
        axes.errorbar(curve.x, values, yerr=np.abs([low - values, high - values]), fmt="o", label=label, color=color)
        return
    axes.plot(curve.x, values, style, label=label, color=color)
    axes.fill_between(curve.x, low, high, alpha=0.2, color=color, linewidth=0)


def _save(figure: Figure, folder: Path, stem: str) -> list[Path]:
    files = [folder / f"{stem}.{format}" for format in FORMATS]
    with part_of(folder) as part:
        for file in files:
            figure.savefig(part / file.name, dpi=150)
        for file in files:
            os.replace(part / file.name, file)
    return files
