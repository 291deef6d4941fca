"""Tests that the tables and plots in docs/ show the measured numbers unchanged."""

import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import chart, learning, speedrun
from benchmarks import table as measured
from benchmarks.speedrun import Progress, Reached, _row
from ppo.presets import PRESETS
from vecenv import available_cores

DOCS = Path(__file__).parents[1] / "docs"


def result(group, rival, median):
    versions = {"numpy": "2", "torch": None}
    info = {"rival": rival, "env_steps": 100, "commit": "c0ffee", "cores": 2, "python": "3.11", "versions": versions}
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
        "Commit c0ffee, 2 cores (some processor), Python 3.11, numpy 2",
        "",
        "| what | vector env | env-steps/s | ours / this |",
        "|---|---|---:|---:|",
        "| a | ours | 500 | 1.00 |",
        "| a | theirs | 200 | 2.50 |",
        "| b | ours | 10,000 | 1.00 |",
    ]


def test_the_plot_shows_every_group_and_rival(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(RESULTS))
    measured.main(tmp_path / "run.json", plot=tmp_path / "run.svg")
    texts = re.findall(r">([^<>]+)</text>", (tmp_path / "run.svg").read_text())
    assert {"a", "b", "ours", "theirs", "500", "200", "10,000"} <= set(texts)
    assert "env-steps/s; each panel has its own scale" in texts


README = (DOCS.parent / "README.md").read_text()


def bars(figure):
    """Returns the shown number and the width of each bar: by group, by name."""
    found = {}
    for element in ElementTree.parse(figure).iter():
        match element.get("class"):
            case "group":
                group = found.setdefault(element.text, {})
            case "name":
                name = element.text
            case "ours" | "rival":
                width = float(element.get("width"))
            case "value":
                group[name] = (int(element.text.replace(",", "")), width)
    return found


def test_the_readmes_chart_shows_the_numbers_of_its_table_to_scale():
    shown = list(bars(DOCS / "speed.svg").values())
    rows = [rates for what, rates in chart.speeds(README).items() if "HalfCheetah" in what or "training" in what]
    for group, rates in zip(shown, rows, strict=True):
        assert {name: number for name, (number, _) in group.items()} == rates
    scales = [width / number for group in shown for number, width in group.values()]
    assert max(scales) / min(scales) < 1.01
    names = [name for group in shown for name in group]
    assert "gymnasium Sync" in names and "EnvPool, send and recv" in names  # the strongest rivals


def _measured():
    """Returns the speeds of the performance page: by vector env or trainer, then by env or setting."""
    found = {}
    for header, *rows in chart.tables((DOCS / "performance.md").read_text().replace("`", "")):
        for label, *cells in rows:
            envs = cells[0] if header[1:2] == ["envs"] else None
            for column, cell in zip(header[1:], cells, strict=True):
                if number := re.match(r"[\d,]{4,}", cell):
                    where = f"{label}, {envs} envs" if envs else f"{column}, {header[0]}"
                    found.setdefault(column if envs else label, {})[where] = int(number[0].replace(",", ""))
    return found


WHERE = {
    "HalfCheetah-v5 in Python": "HalfCheetah-v5 in Python, 64 envs",
    "CartPole-v1": "CartPole-v1, 64 envs",
    "no-op env, 2 envs": "no-op env, float32[17], 2 envs",
    "HalfCheetah-v5 in C++": "HalfCheetah, 64 envs",
    "Humanoid-v5 in C++, 16 cores": "Humanoid, 64 envs, 16 cores",
    "training HalfCheetah-v5 in Python": "B, ",
    "training HalfCheetah-v5 in C++": "B, ",
    "training, minibatches of 1024": "A, ",
}
"""Where the performance page has the speeds of a row of the README."""


def test_the_readmes_speeds_are_those_of_the_performance_page_and_its_speedups_are_their_ratios():
    page, speeds = _measured(), chart.speeds(README)
    assert speeds.keys() == WHERE.keys()
    for what, rates in speeds.items():
        for name, rate in rates.items():
            assert page[name][WHERE[what]] == rate, (what, name)
    (table,) = [table for table in chart.tables(README) if table[0][1:] == ["ours", "rivals"]]
    for what, _, rivals in table[1:]:
        ours, *rates = speeds[what].values()
        factors = [float(factor) for factor in re.findall(r"\(([\d.]+) x\)", rivals)]
        assert factors == [shortened(ours / rate) for rate in rates], what
        assert rivals.startswith("**") == (factors[0] < 1), what  # losses are bold
    assert sum(rivals.startswith("**") for *_, rivals in table[1:]) >= 3


def test_the_readme_says_when_it_helps_with_the_measured_envs():
    rows = [row for table in chart.tables((DOCS / "environments.md").read_text()) for row in table]
    speeds = {row[1]: tuple(int(rate.replace(",", "")) for rate in row[3].split(" / ")) for row in rows
              if re.fullmatch(r"[\d,]+ / [\d,]+", row[-1])}  # fmt: skip
    (shown,) = [table[1:] for table in chart.tables(README) if table[0] == ["env", "a step takes", "gain"]]
    for env, time, gain in shown:
        (flags,) = [flags for flags in speeds if env in flags]
        ours, theirs = speeds[flags]
        assert float(time.removesuffix(" ms")) == float(f"{2000 / ours:.1g}" if ours > 2000 else f"{2000 / ours:.2g}")
        assert float(gain.removesuffix(" x")) == shortened(ours / theirs)
    gains = [ours / theirs for ours, theirs in speeds.values()]
    says = re.search(r"Of \[(\d+) such envs\]\S+ (\d+) gain at least (\d+) x, and (\d+) less\s+than ([\d.]+) x", README)
    high, low = float(says[3]), float(says[5])
    assert [int(says[1]), int(says[2]), int(says[4])] == [
        len(gains), sum(gain >= high for gain in gains), sum(gain < low for gain in gains)
    ]  # fmt: skip


def shortened(ratio):
    """Returns a ratio with two digits."""
    return float(f"{ratio:.2g}")


NUMBERS = {2: "two", 3: "three", 5: "five", 10: "ten"}


def test_the_readmes_scores_are_those_of_the_results_page_and_the_best_published_ones():
    scores = next(table for table in chart.tables(README) if table[0][0] == "task")
    page = chart.tables((DOCS / "results.md").read_text())
    (ours,) = [table for table in page if table[0][-1] == "highest"]
    (published,) = [table for table in page if table[0][0] == "source"]
    assert len(scores) == 7
    for task, score, best in scores[1:]:
        (row,) = [row for row in ours if [task, "1,000,000"] == row[:2]]
        seeds = int(row[2])
        named = f"{task.removesuffix('-v5')}: over {NUMBERS[seeds]} seeds" in README
        assert (named or f"over {NUMBERS[seeds]} seeds not used" in README) and score == row[5]
        column = published[0].index(task.removesuffix("-v5"))
        found = {row[column]: row[0] for row in published[1:] if row[2] in ("1M", "1M of 3M") and row[column] != "-"}
        highest = max(found, key=lambda cell: float(cell.replace(",", "")))
        number, source = best.removesuffix("])").split(" ([")
        assert (number, source.lower()) == (highest, found[highest].split("]")[0].strip("[").lower())


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
    row = _row("today | abc", "walker", 2000, "SB3-PPO", runs, 30.0)
    assert row == "| today | abc | walker | 2,000 | SB3-PPO | 20.0, > 30, > 30 | > 30 |  | 1.0 |"


def test_a_single_run_prints_what_the_leaderboard_reads(monkeypatch, capsys):
    progress = Progress((2000,), begin_s=5.0)
    progress.take(10, 1.0, 2001.0)
    monkeypatch.setitem(speedrun.RIVALS, "ppo", lambda *_: progress)
    speedrun.main(tasks=("walker",), only_seed=0)
    assert json.loads(capsys.readouterr().out) == {"begin_s": 5.0, "reached": {"2000": [10, 1.0]}}


def study(**changed):
    fields = {"name": "s", "env": "CartPole-v1", "flags": SMALL, "env_steps": 1280, "seeds": (100, 101, 102)}
    return learning.Study(**{**fields, **changed})


SMALL = "--config cartpole --num-envs 4 --num-steps 32 --minibatch-size 32 --epochs 1"


def a_run(seed, scores):
    return {"seed": seed, "env_steps": [128 * (i + 1) for i in range(10)], "scores": scores, "stds": [0.0] * 10}


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has sched_setaffinity")


@pytest.mark.slow
@needs_affinity
def test_a_study_trains_only_the_missing_seeds_each_on_its_own_cores(tmp_path):
    learning.add(study(), a_run(100, [1.0] * 10), tmp_path)
    jobs, own = min(2, available_cores()), os.sched_getaffinity(0)
    learning.Trainer(tmp_path, jobs).fill([study()])
    record = json.loads((tmp_path / "s.json").read_text())
    old, *new = record["runs"]
    assert (old["seed"], old["scores"]) == (100, [1.0] * 10)
    assert [run["seed"] for run in new] == [101, 102]
    assert sum(run["cores"] for run in new[:jobs]) == available_cores()
    for run in new:
        assert run["env_steps"] == [128 * (i + 1) for i in range(10)]
        assert all(8 <= score <= 500 for score in run["scores"])
    assert new[0]["scores"] != new[1]["scores"] and new[0]["versions"]["tensorflow"]
    learning.Trainer(tmp_path, jobs).fill([study()])  # nothing is missing
    assert json.loads((tmp_path / "s.json").read_text()) == record
    assert os.sched_getaffinity(0) == own


@needs_affinity
def test_a_failed_run_ends_the_command_and_keeps_its_folder_and_the_finished_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    learning.add(study(name="good"), a_run(100, [1.0] * 10), tmp_path)
    bad = study(name="bad", flags="--env CartPole-v1 --wrappers NoSuchWrapper", seeds=(100, 101))
    train, begun = learning.Trainer._train, []
    monkeypatch.setattr(learning.Trainer, "_train", lambda *call: (begun.append(call[2]), train(*call))[1])
    with pytest.raises(SystemExit, match=r"(?s)seed 100 of bad failed with exit code \d+; its files are in .*NoSuch"):
        learning.Trainer(tmp_path, 1).fill([bad, study(name="good")])
    (kept,) = tmp_path.glob("bad-10*")
    assert begun == [100]
    assert "NoSuchWrapper" in (kept / "output.txt").read_text()
    assert not (tmp_path / "bad.json").exists()
    assert len(json.loads((tmp_path / "good.json").read_text())["runs"]) == 1


@needs_affinity
def test_sigterm_ends_the_runs_too(tmp_path):
    words = ["--only", "Swimmer-v5-1M", "--seeds", "1", "--jobs", "1", "--results", str(tmp_path / "results")]
    command = [sys.executable, "-m", "benchmarks.learning", *words]
    options = {"cwd": DOCS.parent, "env": {**os.environ, "TMPDIR": str(tmp_path)}, "text": True}
    with subprocess.Popen(command, stderr=subprocess.PIPE, **options) as process:
        try:
            assert process.stderr.readline() == "Swimmer-v5-1M 290: training\n"
            assert len(list(tmp_path.glob("Swimmer-v5-1M-290-*"))) == 1
        finally:
            process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("Swimmer-v5-1M-290-*"))  # removed after the run has ended


def test_runs_with_different_settings_are_not_mixed(tmp_path):
    learning.add(study(), a_run(100, [1.0] * 10), tmp_path)
    with pytest.raises(SystemExit, match="holds runs with different flags and settings"):
        learning.add(study(flags="--config swimmer"), a_run(101, [1.0] * 10), tmp_path)


def test_runs_with_other_defaults_are_not_mixed(tmp_path):
    learning.add(study(), a_run(100, [1.0] * 10), tmp_path)
    file = tmp_path / "s.json"
    file.write_text(file.read_text().replace('"observation_clip": 10.0', '"observation_clip": 5.0'))
    with pytest.raises(SystemExit, match="holds runs with different settings"):
        learning.read(study(), tmp_path)


def test_a_setting_that_is_newer_than_the_runs_does_not_separate_them(tmp_path):
    learning.add(study(), a_run(100, [1.0] * 10), tmp_path)
    file = tmp_path / "s.json"
    record = json.loads(file.read_text())
    assert record["settings"].pop("observation_clip") == 10.0
    file.write_text(json.dumps(record))
    learning.read(study(), tmp_path)
    with pytest.raises(SystemExit, match="holds runs with different flags and settings"):
        learning.read(study(flags=f"{SMALL} --observation-clip 5"), tmp_path)


def test_a_setting_that_no_longer_exists_does_not_separate_runs(tmp_path):
    learning.add(study(), a_run(100, [1.0] * 10), tmp_path)
    file = tmp_path / "s.json"
    file.write_text(file.read_text().replace('"observation_clip":', '"removed": null, "observation_clip":'))
    learning.add(study(), a_run(101, [1.0] * 10), tmp_path)
    assert "removed" not in learning.read(study(), tmp_path)["settings"]


def test_a_seed_that_was_trained_twice_is_an_error(tmp_path):
    learning.add(study(), a_run(100, [1.0] * 10), tmp_path)
    with pytest.raises(SystemExit, match="seed 100 of s was trained twice"):
        learning.add(study(), a_run(100, [2.0] * 10), tmp_path)


def test_the_interquartile_mean_drops_the_lowest_and_the_highest_quarter(tmp_path):
    finals = (900, 100, 200, 300, 400, 500, 600, -5000, 1000, 5000)
    for seed, final in enumerate(finals, start=100):
        learning.add(study(), a_run(seed, [0.0] * 9 + [float(final)]), tmp_path)
    row = learning.table([study()], tmp_path).splitlines()[2].split(" | ")
    assert row[2:4] == ["10", "483"]  # the mean of 200, 300, 400, 500, 600 and 900
    assert row[6:] == ["-5,000", "5,000 |"]


def test_fewer_than_five_runs_have_no_interval(tmp_path):
    learning.add(study(), a_run(100, [1.0] * 10), tmp_path)
    row = learning.table([study()], tmp_path).splitlines()[2].split(" | ")
    assert row[2:6] == ["1", "1.0", "-", "1.0"]


def test_a_run_that_misses_a_checkpoint_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"env_steps": 128, "eval_return_mean": 1.0, "eval_return_std": 0.0}\n')
    (tmp_path / "evaluation.json").write_text('{"env_steps": 1280, "return_mean": 2.0, "return_std": 0.0}')
    with pytest.raises(SystemExit, match=r"evaluations at \[128, 1280\], not at 10 counts"):
        learning._scores(tmp_path, 1280)


def texts(figure):
    return [text.strip() for element in ElementTree.parse(figure).iter() for text in element.itertext() if text.strip()]


def test_the_curves_of_a_budget_have_their_own_panel_and_labels_say_what_a_line_shows(tmp_path):
    plans = [("--env CartPole-v1", 1000, 10), ("--config cartpole", 1000, 3), ("--env CartPole-v1", 20_000, 1)]
    studies = [
        study(name=str(number), flags=flags, env_steps=env_steps, seeds=tuple(range(runs)))
        for number, (flags, env_steps, runs) in enumerate(plans)
    ]
    for one in studies:
        for seed in one.seeds:
            steps = [one.env_steps // 10 * (i + 1) for i in range(10)]
            learning.add(one, {**a_run(seed, [float(seed)] * 10), "env_steps": steps}, tmp_path)
    learning.draw(studies, tmp_path, tmp_path / "curves.svg")
    found = texts(tmp_path / "curves.svg")
    assert {text for text in found if "policy" in text} == {
        "defaults, deterministic policy, IQM of 10 runs",
        "preset cartpole, deterministic policy, mean of 3 runs",
        "defaults, deterministic policy, 1 run",
    }
    assert {"CartPole-v1, 0.001M env-steps", "CartPole-v1, 0.02M env-steps"} <= set(found)


def test_the_documented_curves_have_a_panel_for_each_task_and_are_a_small_file():
    page = (DOCS / "results.md").read_text()
    (pattern,) = re.findall(r"benchmarks.learning --table-only --only '(\S+)' --plot", page)
    studies = [study for study in learning.STUDIES.values() if fnmatch.fnmatch(study.name, pattern)]
    recorded = [study for study in studies if learning.read(study, learning.RESULTS)["runs"]]
    titles = {f"{study.env}, {study.env_steps / 1_000_000:g}M env-steps" for study in recorded}
    assert titles == {text for text in texts(DOCS / "learning.svg") if text.endswith("M env-steps")}
    assert (DOCS / "learning.svg").stat().st_size < 150_000


def test_the_documented_table_shows_the_recorded_runs():
    begin, end = "<!-- begin: python -m benchmarks.learning --table-only -->", "<!-- end -->"
    shown = (DOCS / "results.md").read_text().partition(begin)[2].partition(end)[0]
    table = learning.table(learning.STUDIES.values(), learning.RESULTS)
    assert shown.strip() == table, f"paste the output of the command after {begin!r} in docs/results.md"


def test_the_results_page_says_why_each_preset_exists():
    reasons = (DOCS / "results.md").read_text().partition("## Why there are presets\n")[2].partition("\n## ")[0]
    missing = [name for name in PRESETS if "/" not in name and f"`{name}`" not in reasons]
    assert not missing, f'name {missing} in the section "Why there are presets" of docs/results.md'
