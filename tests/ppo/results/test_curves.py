"""Tests of ppo/results/curves.py and `ppo plot`: curves aggregate runs; the command writes figures and a table."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from ppo import Config, Run, RunError
from ppo.envs import naming
from ppo.results import curves
from ppo.results.curves import DETERMINISTIC, SAMPLED, Curve, History, aggregate, grouped, read_history
from tests.ppo.runs import command, with_reports


def a_run(folder, reports, **settings) -> Run:
    return with_reports(Run.create(folder, "x", Config(**settings)), reports)


def reports(returns, step=100, seconds=3600.0, **others):
    return [
        {"env_steps": step * (i + 1), "wall_s": seconds * (i + 1), "return_mean": value, **others}
        for i, value in enumerate(returns)
    ]


def test_a_history_covers_both_policies_and_skips_missing_values(tmp_path):
    rows = reports([None, 1.0, 2.0])
    rows[2]["eval_return_mean"] = 5.0
    history = read_history(a_run(tmp_path, rows))
    np.testing.assert_array_equal(history.points[SAMPLED], [[200, 300], [2, 3], [1, 2]])
    np.testing.assert_array_equal(history.points[DETERMINISTIC], [[300], [3], [5]])


def test_the_final_evaluation_is_a_point_of_the_deterministic_policy(tmp_path):
    run = a_run(tmp_path, reports([1.0, 2.0]))
    run.write_evaluation({"env_steps": 200, "return_mean": 7.0})
    np.testing.assert_array_equal(read_history(run).points[DETERMINISTIC], [[200], [2], [7]])


def test_an_evaluation_from_before_a_resume_keeps_its_step(tmp_path):
    run = a_run(tmp_path, reports([1.0, 2.0, 3.0]))
    run.write_evaluation({"env_steps": 200, "return_mean": 7.0})
    np.testing.assert_array_equal(read_history(run).points[DETERMINISTIC], [[200], [2], [7]])
    (run.path / "evaluation.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        read_history(run)


def test_an_incomplete_last_line_is_skipped(tmp_path):
    run = a_run(tmp_path, reports([1.0, 2.0]))
    with run.metrics.open("a") as file:
        file.write('{"env_steps": 300, "wal')
    assert read_history(run).points[SAMPLED].shape == (3, 2)


def test_a_run_without_returns_is_an_error(tmp_path):
    with pytest.raises(RunError, match="has no returns to show yet"):
        read_history(a_run(tmp_path, reports([None])))
    with pytest.raises(RunError, match="cannot be read"):
        read_history(Run.create(tmp_path, "y", Config()))


def history(x, returns, **settings):
    x, returns = np.array(x, float), np.array(returns, float)
    points = np.stack([x, x / 1000, returns])
    config = Config(**settings)
    return History(config, {SAMPLED: points, DETERMINISTIC: np.empty([3, 0])})


def test_runs_that_report_at_different_steps_become_one_curve():
    curve = aggregate([history([0, 10, 20], [0, 10, 20]), history([5, 15, 25], [1, 1, 1])], SAMPLED, "env_steps")
    np.testing.assert_array_equal(curve.x, [5, 10, 15, 20])  # the range that both runs reached
    np.testing.assert_allclose(curve.values, [[5, 10, 15, 20], [1, 1, 1, 1]])
    np.testing.assert_allclose(curve.mean, [3, 5.5, 8, 10.5])


def test_a_curve_over_hours_covers_the_hours_that_all_runs_reached():
    curve = aggregate([history([1000, 2000], [1, 2]), history([1000, 3000], [3, 5])], SAMPLED, "hours")
    np.testing.assert_allclose(curve.x, [1, 2])
    np.testing.assert_allclose(curve.values, [[1, 2], [3, 4]])


def test_a_run_without_points_is_not_part_of_the_curve():
    whole, empty = history([1, 2], [1, 2]), history([], [])
    curve = aggregate([whole, empty, whole], SAMPLED, "env_steps")
    assert curve.values.shape == (2, 2)


def test_a_single_run_is_plotted_without_resampling():
    x = np.arange(5 * curves.POINTS)
    np.testing.assert_array_equal(aggregate([history(x, x)], SAMPLED, "env_steps").x, x)
    assert len(aggregate([history(x, x)] * 2, SAMPLED, "env_steps").x) == curves.POINTS


def test_final_scores_are_one_point():
    curve = aggregate([history([1000], [1]), history([3000], [3])], SAMPLED, "hours")
    np.testing.assert_allclose(curve.x, [2])
    np.testing.assert_allclose(curve.mean, [2])


def test_without_points_there_is_no_curve():
    assert aggregate([history([1], [1])], DETERMINISTIC, "hours") is None
    assert aggregate([history([0, 1], [1, 1]), history([2, 3], [1, 1])], SAMPLED, "env_steps") is None


def test_the_interquartile_mean_ignores_the_best_and_the_worst_quarter():
    curve = Curve(np.array([0.0]), np.array([[-1000.0], [1.0], [3.0], [1000.0]]))
    np.testing.assert_allclose(curve.iqm, [2.0])


def test_the_interval_contains_the_true_mean_about_95_percent_of_the_time():
    """The mean and interquartile mean of normal returns agree. With 20 runs, the interval is slightly too narrow."""
    samples = np.random.default_rng(0).normal(5.0, 2.0, [20, 300])
    low, high = Curve(np.arange(300.0), samples).interval
    assert 0.88 < np.mean((low < 5.0) & (high > 5.0)) < 0.97


def test_the_interval_of_a_few_runs_is_their_range():
    curve = Curve(np.array([0.0, 1.0]), np.array([[1.0, 2.0], [5.0, 0.0], [2.0, 2.0]]))
    np.testing.assert_array_equal(curve.interval, [[1, 0], [5, 2]])


def test_one_run_has_no_spread():
    low, high = Curve(np.array([0.0, 1.0]), np.array([[1.0, 2.0]])).interval
    np.testing.assert_array_equal([low, high], [[1, 2], [1, 2]])


def test_runs_are_grouped_by_all_settings_except_the_seed():
    runs = [history([0], [0], env=env, seed=seed, gamma=gamma) for env, seed, gamma in
            (("A", 0, 0.9), ("A", 1, 0.9), ("A", 0, 0.99), ("B", 3, 0.99))]  # fmt: skip
    runs.append(dataclasses.replace(runs[0], config=dataclasses.replace(runs[0].config, eval_interval=5)))
    found = grouped(runs)
    assert {env: {label: len(group) for label, group in groups.items()} for env, groups in found.items()} == {
        "A": {"gamma 0.9": 3, "gamma 0.99": 1},
        "B": {"": 1},
    }
    longer = dataclasses.replace(runs[0], config=dataclasses.replace(runs[0].config, total_steps=5))
    assert set(grouped([runs[0], longer])["A"]) == {"total_steps 1000000", "total_steps 5"}


def test_runs_on_envs_passed_by_the_user_are_not_labeled_with_the_configs_env():
    config, made_up = Config(env="HalfCheetah-v5"), Config(env="made up")
    names = [naming(config, lambda: None), naming(config, a_run), naming(config, a_run, "x"), naming(config, None, "x")]
    assert [one.env for one in names] == ["given", "a_run", "x", "HalfCheetah-v5"]
    assert naming(made_up, a_run, "x").env == "made up"
    assert naming(config, a_run, "pettingzoo:x").env == "pettingzoo_x"  # not a PettingZoo env


def test_runs_without_returns_are_skipped_with_a_warning_if_another_run_has_some(tmp_path, capsys):
    good, young = a_run(tmp_path / "runs", reports([1.0])), a_run(tmp_path / "runs", reports([None]))
    words = [str(good.path), str(young.path), "nowhere", "--outdir", str(tmp_path / "out")]
    assert command("plot", words) == 0
    errors = capsys.readouterr().err
    assert "skipped" in errors and "no returns to show yet" in errors and "nowhere" in errors
    with pytest.raises(RunError, match="none of the folders"):
        command("plot", [str(young.path), "nowhere", "--outdir", str(tmp_path / "out")])


def test_the_command_writes_both_figures_in_both_formats_and_a_table(tmp_path, capsys):
    for seed in range(3):
        run = a_run(tmp_path / "runs", reports([seed, seed + 1.0]), env="CartPole-v1", seed=seed)
        run.write_evaluation({"env_steps": 200, "return_mean": 10.0 + seed})
    folders = [str(path) for path in (tmp_path / "runs").iterdir()]
    assert command("plot", [*folders, "--outdir", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    names = {f"return-{axis}.{format}" for axis in ("env_steps", "hours") for format in ("png", "svg")}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert (tmp_path / "out" / "return-hours.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "out" / "return-env_steps.svg").read_text()
    assert "CartPole-v1" in svg and "sampled policy, mean of 3 runs" in svg
    assert "IQM" not in svg  # three runs have no middle half
    assert command("plot", [*folders[:1], "--outdir", str(tmp_path / "out")]) == 0
    svg = (tmp_path / "out" / "return-env_steps.svg").read_text()
    assert "sampled policy, 1 run" in svg and "IQM" not in svg
    assert "11.0" in printed and "2.0" in printed and "return-hours.svg" in printed


def test_any_metric_is_plotted_on_request_and_no_line_of_the_table_wraps(tmp_path, capsys):
    kls = {None: 1, 0.0123: 2}
    rows = [{**report, "kl": kl, "a/entropy": 1.5} for report, kl in zip(reports([1.0, 2.0]), kls, strict=True)]
    runs = [a_run(tmp_path / "runs", rows, seed=seed) for seed in range(2)]
    runs.append(a_run(tmp_path / "runs", rows, gamma=0.9, gae_lambda=0.9, clip_range=0.1, learning_rate=0.01))
    young = a_run(tmp_path / "runs", reports([1.0]), seed=9)
    folders = [str(run.path) for run in (*runs, young)]
    assert (
        command("plot", ["--metric", "kl", *folders, "--metric", "a/entropy", "--outdir", str(tmp_path / "out")]) == 0
    )
    printed = capsys.readouterr()
    axes = [f"{axis}.{format}" for axis in ("env_steps", "hours") for format in ("png", "svg")]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"{metric}-{end}" for metric in ("kl", "a-entropy") for end in axes
    }
    assert f"skipped: {young.path} has no values of the metric 'kl': use one of ['env_steps', 'return" in printed.err
    lines = [line.split("│") for line in printed.out.splitlines() if "│" in line]
    cells = [tuple(cell.strip() for cell in line[1:-1]) for line in lines]
    other = "learning_rate 0.01, gamma 0.9, gae_lambda 0.9, clip_range 0.1"
    assert (other, "kl", "1", "200", "0.0123", "0.0123", "") in cells
    assert ("a/entropy", "2", "200", "1.5", "1.5", "1.5 to 1.5") in [row[1:] for row in cells] and len(cells) == 4


def test_evaluations_with_sampled_actions_are_not_labeled_as_those_of_the_deterministic_policy(tmp_path, capsys):
    run = a_run(tmp_path / "runs", reports([1.0, 2.0], eval_return_mean=5.0), sample=True)
    for words in (["--metric", "eval_return_mean"], ["--metric", "return", "--metric", "eval_return_mean"]):
        assert command("plot", [str(run.path), *words, "--outdir", str(tmp_path / "out")]) == 0
        table = capsys.readouterr().out.split("Values are taken")[0]
        assert "eval_return_mean" in table and "deterministic" not in table
    figures = [file.read_text() for file in (tmp_path / "out").glob("*.svg")]
    assert len(figures) == 4 and not any("deterministic" in figure for figure in figures)


def test_a_metric_that_no_run_has_is_an_error_that_lists_the_metrics(tmp_path):
    run = a_run(tmp_path, reports([1.0], action_std=0.5))
    with pytest.raises(
        RunError, match=r"no values of the metric 'std': use one of \['action_std', 'env_steps', 'return_"
    ):
        command("plot", [str(run.path), "--metric", "std", "--outdir", str(tmp_path / "out")])


def test_a_terminal_that_cannot_show_a_path_gets_it_escaped(tmp_path):
    run = a_run(tmp_path, reports([1.0]))
    words = [sys.executable, "-m", "ppo", "plot", str(run.path), "--outdir", str(tmp_path / "größe")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "gr\\xf6\\xdfe" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "pass at least one, such as"),
        (["nowhere"], "there is no folder nowhere or runs/nowhere, so it is not a run"),
    ],
)
def test_a_folder_that_is_not_a_run_is_a_one_sentence_error(tmp_path, words, message):
    with pytest.raises(RunError, match=message):
        command("plot", [*words, "--outdir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_written_is_a_one_sentence_error(tmp_path):
    run = a_run(tmp_path / "runs", reports([1.0]))
    (tmp_path / "out").write_text("")
    with pytest.raises(RunError, match="Choose another folder"):
        command("plot", [str(run.path), "--outdir", str(tmp_path / "out")])


def test_the_error_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    run = a_run(tmp_path / "runs", reports([1.0]))
    monkeypatch.delitem(sys.modules, "ppo.results.curves", raising=False)
    monkeypatch.delattr("ppo.results.curves", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match=r"matplotlib is missing, but plots need it: .*\[plot\]"):
        command("plot", [str(run.path)])
