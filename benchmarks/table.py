"""A table and a plot from the JSON of a benchmark run: `python -m benchmarks.table run.json --plot run.svg`.

Each number is the median over a rival's turns. Ratios are relative to the first rival of a group. Error bars in the
plot reach from the slowest turn to the fastest.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Annotated, Any

import tyro

Rates = dict[str, dict[str, list[float]]]
"""Env-steps per second of each turn, by group and rival."""


def rates(results: dict[str, Any]) -> Rates:
    """Returns the median rate of each turn, in the order of the run."""
    found: Rates = {}
    for result in results["benchmarks"]:
        info = result["extra_info"]
        turns = found.setdefault(result["group"], {}).setdefault(info["rival"], [])
        turns.append(info["env_steps"] / result["stats"]["median"])
    return found


def machine(results: dict[str, Any]) -> str:
    """Returns the commit, the machine and the package versions of the measurements."""
    info = results["benchmarks"][0]["extra_info"]
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items() if number)
    cpu = results["machine_info"]["cpu"].get("brand_raw", "unknown processor")
    return f"Commit {info['commit']}, {info['cores']} cores ({cpu}), Python {info['python']}, {versions}"


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table, preceded by the machine and the package versions."""
    lines = [machine(results), "", "| what | vector env | env-steps/s | ours / this |"]
    lines.append("|---|---|---:|---:|")
    for group, rivals in rates(results).items():
        medians = {rival: statistics.median(turns) for rival, turns in rivals.items()}
        ours = next(iter(medians.values()))
        for rival, rate in medians.items():
            lines.append(f"| {group} | {rival} | {rate:,.0f} | {ours / rate:.2f} |")
    return "\n".join(lines)


def draw(results: dict[str, Any], file: Path) -> None:
    """Writes a plot with one panel per group and one bar per rival. The file name's suffix selects the format."""
    import matplotlib
    from matplotlib.figure import Figure

    groups = rates(results)
    heights = [len(rivals) for rivals in groups.values()]
    figure = Figure(figsize=(8, 1 + sum(0.28 * height + 0.5 for height in heights)), layout="constrained")
    panels = figure.subplots(len(groups), height_ratios=[height + 1 for height in heights], squeeze=False)[:, 0]
    for panel, (group, rivals) in zip(panels, groups.items(), strict=True):
        names, turns = list(rivals), list(rivals.values())
        medians = [statistics.median(each) for each in turns]
        reach = [[m - min(t) for m, t in zip(medians, turns, strict=True)],
                 [max(t) - m for m, t in zip(medians, turns, strict=True)]]  # fmt: skip
        colors = ["tab:blue", *["tab:gray"] * (len(names) - 1)]
        bars = panel.barh(names, medians, xerr=reach, color=colors, error_kw={"linewidth": 1})
        panel.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=4, fontsize=8)
        panel.set_title(group, fontsize=9, loc="left")
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    label = ["env-steps/s; each panel has its own scale", *textwrap.wrap(machine(results), 110)]
    figure.supxlabel("\n".join(label), fontsize=7)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keeps text as text
        figure.savefig(file, dpi=150)


def main(results: Annotated[Path, tyro.conf.Positional], plot: Path | None = None) -> None:
    """Prints the table of a benchmark run.

    Args:
        results: The file written by `--benchmark-json`.
        plot: Path of the plot, .svg or .png.
    """
    read = json.loads(results.read_text())
    print(table(read))
    if plot is not None:
        draw(read, plot)


if __name__ == "__main__":
    tyro.cli(main)
