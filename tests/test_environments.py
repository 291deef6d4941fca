"""Tests of `python -m benchmarks.environments`, on packages that the tests need anyway."""

import contextlib
import functools
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from benchmarks import environments
from benchmarks.environments import Failed, Row, call, conformance, equal, last_error, same, table


def a_row(env):
    return Row("a-row", ("package[extra]>=1",), f"--env {env}")


def command(out, *words):
    words = [sys.executable, "-m", "benchmarks.environments", "--here", "--out", str(out), *words]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=environments.ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def version_of(package):
    with contextlib.suppress(PackageNotFoundError):
        return version(package)


INSTALLED = [row.name for row in environments.ROWS if row.fast and version_of(row.package)]


def test_some_fast_rows_are_of_packages_that_the_tests_install():
    assert {"lunar-lander", "minigrid"} <= set(INSTALLED)


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_the_fast_rows_of_installed_packages_are_equal_and_conform(tmp_path, name):
    text = command(tmp_path, "--only", name, "--steps", "30", "--measure", "single", "equal", "conformance")
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert "| 30 | - |" in text
    assert record["conformance"]["ok"] and record["conformance"]["rules"] >= 12
    assert record["equal"] == {"ok": True, "steps": 30}
    assert record["versions"]["gymnasium"] == version("gymnasium")


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_the_fast_rows_of_installed_packages_pass_every_stage(tmp_path, name):
    text = command(tmp_path, "--only", name, "--steps", "200", "--train-steps", "4096", "--time-limit", "60")
    assert "no (" not in text, text
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["train"]["env_steps"] >= 4096
    assert record["speed"]["vecenv"] > 0 and record["speed"]["gymnasium"] > 0


def test_equality_is_counted_in_steps_until_the_limit():
    assert equal(a_row("CartPole-v1"), steps=5, time_limit=60) == {"steps": 5}


def test_a_nondeterministic_env_is_the_fault_of_its_package():
    with pytest.raises(Failed, match="nondeterministic: observations of two") as caught:
        equal(a_row("tests.registered:Unseeded-v0"), steps=5, time_limit=60)
    assert caught.value.blame == "package"


def test_an_env_that_fails_in_gymnasium_too_is_the_fault_of_its_package():
    with pytest.raises(Failed, match="TypeError: unsupported operand") as caught:
        equal(a_row("tests.registered:Raising-v0"), steps=30, time_limit=60)
    assert caught.value.blame == "package"


def test_equal_nans_are_no_difference():
    nan = np.array([np.nan, 1.0])
    assert same({"a": (nan, "text")}, {"a": (nan.copy(), "text")})
    assert not same({"a": nan}, {"a": nan.astype(np.float32)})
    assert not same((nan,), (np.array([np.nan, 2.0]),))
    assert not same(np.array([nan, None], object), np.array([nan, 0], object))


def test_a_vector_env_that_gymnasium_cannot_make_is_the_fault_of_its_package(monkeypatch):
    def raising(*args, **kwargs):
        raise TypeError("no such argument")

    monkeypatch.setattr("gymnasium.vector.SyncVectorEnv", raising)
    for stage in (conformance, functools.partial(equal, steps=5, time_limit=60)):
        monkeypatch.setattr("vecenv.make", raising)
        with pytest.raises(Failed, match="without this project: TypeError: no such argument") as caught:
            stage(a_row("CartPole-v1"))
        assert caught.value.blame == "package"


def test_an_env_that_cannot_be_made_is_the_fault_of_its_package():
    with pytest.raises(Failed) as caught:
        environments.single(a_row("FrozenLake-v1 --env-kwargs map_name=9x9"))
    assert caught.value.blame == "package"


def test_an_error_of_make_single_is_our_fault(monkeypatch):
    with pytest.raises(Failed) as caught:
        environments.single(a_row("CartPole-v1 --wrappers NoSuchWrapper"))
    assert caught.value.blame == "ours"


def test_a_crash_is_no_one_s_fault_yet(monkeypatch):
    monkeypatch.setattr(environments, "call", lambda *words, **options: ("", "SIGSEGV"))
    outcome = environments.run_stage("equal", a_row("CartPole-v1"), sys.executable)
    assert outcome == {"ok": False, "error": "SIGSEGV", "blame": "unknown"}


def test_outcomes_of_other_versions_are_discarded(tmp_path, monkeypatch):
    file = tmp_path / "a-row.json"
    record = {"install": {"ok": True}, "versions": {"package": "1"}, "equal": {"ok": True, "steps": 10}}
    file.write_text(json.dumps(record))
    outcomes = {"versions": {"versions": {"package": "1"}}, "conformance": {"ok": True, "rules": 15}}
    monkeypatch.setattr(environments, "run_stage", lambda stage, *args, **options: outcomes[stage])
    words = (a_row("A-v0"), sys.executable, file, ["conformance"], 10, 10, 10)
    environments.measure_row(*words)
    assert json.loads(file.read_text()) == record | {"conformance": {"ok": True, "rules": 15}}
    outcomes["versions"] = {"versions": {"package": "2"}}
    environments.measure_row(*words)
    assert json.loads(file.read_text()).keys() == {"install", "versions", "conformance"}


def test_environments_cannot_be_kept_in_a_temporary_folder():
    with pytest.raises(SystemExit, match="--keep needs --envs-dir"):
        environments.main(keep=True)


def test_a_difference_from_gymnasium_is_our_fault(monkeypatch):
    import vecenv

    make = vecenv.make
    monkeypatch.setattr(vecenv, "make", lambda *args, **kwargs: make(*args, **{**kwargs, "max_episode_steps": 3}))
    with pytest.raises(Failed, match="truncated differ from those of Gymnasium's vector env at step 3") as caught:
        equal(a_row("CartPole-v1"), steps=5, time_limit=60)
    assert caught.value.blame == "ours"


@pytest.mark.slow
def test_a_broken_rule_is_the_fault_of_the_package_if_gymnasium_breaks_it_too():
    with pytest.raises(Failed, match='"Two vector envs with the same seed') as caught:
        conformance(a_row("tests.registered:Unseeded-v0"))
    assert caught.value.blame == "package"


def test_failures_are_numbered_and_explained_below_the_table(tmp_path, monkeypatch):
    rows = (a_row("A-v0"), Row("other", ("other",), "--env B-v0"), Row("unmeasured", (), ""))
    monkeypatch.setattr(environments, "ROWS", rows)
    record = {
        "install": {"ok": True},
        "versions": {"package": "1.2"},
        "single": {"ok": True},
        "equal": {"ok": False, "error": "rewards | differ", "blame": "ours"},
        "conformance": {"ok": True, "rules": 15},
        "train": {"ok": True, "env_steps": 100_352, "before": -0.25, "after": 1234.5},
        "speed": {"ok": True, "vecenv": 12345.6, "gymnasium": 999.5},
    }
    (tmp_path / "a-row.json").write_text(json.dumps(record))
    broken = {"install": {"ok": False, "error": "ERROR: no such package", "blame": "package"}}
    (tmp_path / "other.json").write_text(json.dumps(broken))
    assert table(tmp_path).splitlines()[2:] == [
        "| package 1.2 | `--env A-v0` | no (1) | 12,346 / 1,000 |",
        "| other | `--env B-v0` | no (2) | - |",
        "",
        "1. package, fault of this project: `rewards | differ`",
        "2. other: `ERROR: no such package`",
    ]


def test_the_table_calls_an_env_nondeterministic_that_differs_from_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "ROWS", (a_row("A-v0"),))
    equal = {"ok": False, "error": "nondeterministic: rewards of two of Gymnasium's ...", "blame": "package"}
    (tmp_path / "a-row.json").write_text(json.dumps({"install": {"ok": True}, "equal": equal}))
    assert table(tmp_path).splitlines()[2:] == ["| package | `--env A-v0` | nondeterministic | - |"]


def test_an_env_that_does_not_work_alone_counts_as_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "ROWS", (a_row("A-v0"),))
    record = {"install": {"ok": True}, "single": {"ok": False, "error": "SIGSEGV", "blame": "unknown"}}
    (tmp_path / "a-row.json").write_text(json.dumps(record))
    text = table(tmp_path)
    assert "| package | `--env A-v0` | no (1) | - |" in text
    assert "1. package, unknown fault: `SIGSEGV`" in text


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path):
    script = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '600'])"
    assert call([sys.executable, "-c", script], timeout_s=1) == ("begun\n", "no end after 1 s")


def test_a_command_that_is_asked_to_stop_and_stops_has_not_failed():
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(600)"
    assert call([sys.executable, "-c", script], timeout_s=60, stop_s=1)[1] == ""
    assert call(["sleep", "60"], timeout_s=60, stop_s=0.1)[1] == ""


def test_a_command_gets_variables_and_an_empty_folder():
    script = "import os; print(os.environ['A_VARIABLE'], os.listdir())"
    assert call([sys.executable, "-c", script], timeout_s=60, variables=["A_VARIABLE=x=1"]) == ("x=1 []\n", "")


def test_a_command_killed_by_a_signal_names_it():
    assert call([sys.executable, "-c", "import os; os.abort()"], timeout_s=60)[1] == "SIGABRT"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("Traceback\n  line\nValueError: the reason\n", "ValueError: the reason"),
        ("ERROR: a and b conflict\nERROR: ResolutionImpossible: for help\n", "ERROR: a and b conflict"),
        ("error: unknown id\nother words\n", "error: unknown id"),
        ("", "exit code 3"),
    ],
)  # fmt: skip
def test_the_reason_is_the_line_that_says_most(output, reason):
    assert last_error(output, "exit code 3") == reason


def test_the_documented_table_has_the_rows_of_the_command_in_order():
    page = (environments.ROOT / "docs" / "environments.md").read_text()
    begin, end = "<!-- begin: python -m benchmarks.environments --table-only -->", "<!-- end -->"
    lines = page[page.index(begin) : page.index(end)].splitlines()
    shown = [line.removeprefix("| ").split(" | ")[:2] for line in lines if line.startswith("| ") and "--env" in line]
    rows = [(row.package, f"`{row.command}`") for row in environments.ROWS]
    assert [(package.split()[0], command) for package, command in shown] == rows
