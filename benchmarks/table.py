"""Turns the JSON of a benchmark run into a table: `python -m benchmarks.table results.json`.

Each figure is the median over the turns of that rival; the ratio is to the rival named first in its group.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def table(results: dict) -> str:
    """Returns the table as Markdown, with the machine and the versions above it."""
    groups: dict[str, dict[str, list[float]]] = {}
    env_steps: dict[tuple[str, str], int] = {}
    for result in results["benchmarks"]:
        info = result["extra_info"]
        times = groups.setdefault(result["group"], {}).setdefault(info["rival"], [])
        times.append(result["stats"]["median"])
        env_steps[result["group"], info["rival"]] = info["env_steps"]
    info = results["benchmarks"][0]["extra_info"]
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items() if number)
    cpu = results["machine_info"]["cpu"].get("brand_raw", "unknown processor")
    lines = [f"{info['cores']} cores ({cpu}), Python {info['python']}, {versions}", ""]
    lines += ["| what | vector env | env-steps/s | one call, us | ours / this |", "|---|---|---:|---:|---:|"]
    for group, rivals in groups.items():
        times = {rival: statistics.median(measured) for rival, measured in rivals.items()}
        rates = {rival: env_steps[group, rival] / time for rival, time in times.items()}
        ours = next(iter(rates.values()))
        for rival, rate in rates.items():
            lines.append(f"| {group} | {rival} | {rate:,.0f} | {times[rival] * 1e6:,.0f} | {ours / rate:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
