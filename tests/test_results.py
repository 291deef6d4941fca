"""Tests that the tables and plots in docs/ show the measured numbers unchanged."""

import json
import re
from pathlib import Path

from benchmarks import table as measured
from benchmarks.learning import table
from benchmarks.time_to_return import Progress, Reached, _row

DOCS = Path(__file__).parents[1] / "docs"


def run(folder, name, seed, score, wall_s):
    path = folder / f"20260101-00000{seed}-{name}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"env": "Env-v0", "seed": seed}))
    (path / "metrics.jsonl").write_text('{"wall_s": 1.0}\n' + json.dumps({"wall_s": wall_s}) + "\n")
    if score is not None:
        (path / "evaluation.json").write_text(json.dumps({"env_steps": 2048, "return_mean": score}))
    return path


def test_a_row_lists_the_scores_by_seed_with_their_mean_and_the_longest_time(tmp_path):
    folders = [
        run(tmp_path, "some-preset", seed, score, 60.0 * seed) for seed, score in ((2, 3000), (0, 1000), (1, 0.5))
    ]
    folders.append(run(tmp_path, "unfinished", 3, None, 60.0))
    assert table(folders).splitlines()[2:] == ["| `some-preset` | Env-v0 | 2,048 | 1,000, 0.5, 3,000 | 1,333.5 | 2.0 |"]


def result(group, rival, median):
    info = {"rival": rival, "env_steps": 100, "cores": 2, "python": "3.11", "versions": {"numpy": "2", "torch": None}}
    return {"group": group, "extra_info": info, "stats": {"median": median}}


RESULTS = {
    "machine_info": {"cpu": {"brand_raw": "some processor"}},
    "benchmarks": [
        *(result("a", "ours", median) for median in (0.1, 0.2, 0.4)),
        result("a", "theirs", 0.5),
        result("b", "ours", 0.01),
    ],
}


def test_a_number_is_the_median_of_the_rounds_and_its_ratio_is_relative_to_the_first_rival():
    assert measured.table(RESULTS).splitlines() == [
        "2 cores (some processor), Python 3.11, numpy 2",
        "",
        "| what | vector env | env-steps/s | one call, us | ours / this |",
        "|---|---|---:|---:|---:|",
        "| a | ours | 500 | 200,000 | 1.00 |",
        "| a | theirs | 200 | 500,000 | 2.50 |",
        "| b | ours | 10,000 | 10,000 | 1.00 |",
    ]


def test_the_plot_shows_every_group_and_rival(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RESULTS))
    measured.main(tmp_path / "run.json", plot=tmp_path / "run.svg")
    texts = re.findall(r">([^<>]+)</text>", (tmp_path / "run.svg").read_text())
    assert {"a", "b", "ours", "theirs", "500", "200", "10,000"} <= set(texts)


def test_the_readmes_chart_shows_numbers_of_the_performance_page():
    shown = set(re.findall(r">([\d,]+)</text>", (DOCS / "speed.svg").read_text()))
    page = (DOCS / "performance.md").read_text()
    assert len(shown) == 10 and all(re.search(rf"\b{number}\b", page) for number in shown)


def test_a_return_is_reached_at_the_first_evaluation_above_it_and_evaluation_time_is_not_counted():
    progress = Progress((2000, 3000))
    assert not progress.take(10, 5.0, 1999.0)
    progress.evaluation_s += 3.0
    assert not progress.take(20, 9.0, 2001.0)
    progress.evaluation_s += 3.0
    assert not progress.take(30, 20.0, 1500.0)
    assert progress.take(40, 30.0, 3001.0)
    assert progress.reached == {2000: Reached(20, 6.0), 3000: Reached(40, 24.0)}


def test_a_run_stops_at_its_time_limit_and_is_shown_as_longer_than_the_limit():
    progress = Progress((2000,), limit_s=30.0, evaluation_s=5.0)
    assert not progress.take(10, 34.0, 1999.0)
    assert progress.take(20, 36.0, 1999.0)
    runs = [{"startup_s": 1.0, "reached": {"2000": [10, 20.0]} if seed == 0 else {}} for seed in range(3)]
    assert _row("hopper", 2000, "SB3", runs, 30.0) == "| hopper | 2,000 | SB3 | 20.0, > 30, > 30 | > 30 |  | 1.0 |"
