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
    for result in results["benchmarks"]:
        info = result["extra_info"]
        rates = groups.setdefault(result["group"], {}).setdefault(info["rival"], [])
        rates.append(info["env_steps"] / result["stats"]["median"])
    info = results["benchmarks"][0]["extra_info"]
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items() if number)
    cpu = results["machine_info"]["cpu"].get("brand_raw", "unknown processor")
    lines = [f"{info['cores']} cores ({cpu}), Python {info['python']}, {versions}", ""]
    lines += ["| what | vector env | env-steps/s | ours / this |", "|---|---|---:|---:|"]
    for group, rivals in groups.items():
        medians = {rival: statistics.median(rates) for rival, rates in rivals.items()}
        ours = next(iter(medians.values()))
        for rival, rate in medians.items():
            lines.append(f"| {group} | {rival} | {rate:,.0f} | {ours / rate:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
