"""How well does ppo learn? Prints the table of docs/results.md from run folders.

    python -m ppo train --config cheetah --seed 0 --logdir runs      (repeat for each preset and seed)
    python -m benchmarks.learning runs/*

Each row is a preset or an env. It shows the score of each seed, their mean, the env-steps, and the training time of the
slowest run in minutes. A score is the mean return of the deterministic policy over the episodes of the final evaluation
(`evaluation.json`). The training time is `wall_s` in the last line of metrics.jsonl.
Not measured: start-up and evaluation.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np


def table(folders: list[Path]) -> str:
    """Returns the table in Markdown.

    Args:
        folders: Run folders named TIME-PRESET; folders without an evaluation are skipped.
    """
    rows: dict[tuple[str, str, int], dict[int, tuple[float, float]]] = defaultdict(dict)
    for folder in sorted(folders):
        if not (folder / "evaluation.json").is_file():
            continue
        config = json.loads((folder / "config.json").read_text())
        score = json.loads((folder / "evaluation.json").read_text())
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        name = folder.name.split("-", 2)[-1]
        rows[name, config["env"], score["env_steps"]][config["seed"]] = (score["return_mean"], last["wall_s"] / 60)
    lines = ["| preset | env | env-steps | score of each seed | mean | minutes |", "|---|---|---:|---|---:|---:|"]
    for (name, env, steps), runs in rows.items():
        scores = [runs[seed][0] for seed in sorted(runs)]
        each = ", ".join(f"{score:,.1f}" if abs(score) < 100 else f"{score:,.0f}" for score in scores)
        minutes = max(minutes for _, minutes in runs.values())
        lines.append(f"| `{name}` | {env} | {steps:,} | {each} | {np.mean(scores):,.1f} | {minutes:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]))
