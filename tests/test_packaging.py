"""Tests that the wheel and the sdist are complete, and that their metadata is correct."""

import configparser
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import vecenv

ROOT = Path(__file__).parents[1]


build = pytest.mark.build


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns the folder with a wheel and an sdist built from a copy of the repository."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in ("vecenv", "ppo", "docs", "tests", "benchmarks", "examples"):
        for file in (ROOT / name).rglob("*"):
            if file.suffix in (".py", ".md", ".typed", ".xml"):
                target = source / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
    for name in (
        "setup.cfg",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ):
        (source / name).write_bytes((ROOT / name).read_bytes())
    code = "from setuptools import build_meta as b; b.build_wheel('../out'); b.build_sdist('../out')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    return folder / "out"


@build
def test_the_wheel_contains_both_packages_with_their_types_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    assert f"-{vecenv.__version__}-py3-none-any" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vecenv", "ppo", "vecenv_ppo"}
    assert {"vecenv/py.typed", "ppo/py.typed"} <= set(names)
    modules = {str(file.relative_to(ROOT)) for package in ("vecenv", "ppo") for file in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert any(name.endswith("licenses/LICENSE") for name in names)


@build
def test_the_sdist_contains_docs_tests_and_examples(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "docs/ppo.md", "tests/helpers.py", "examples/a2c.py"} <= names


@build
def test_every_console_script_is_a_function(built):
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (entries,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(archive.read(entries).decode())
    scripts = dict(parser["console_scripts"])
    assert set(scripts) == {"ppo", "vecenv-info"}
    for name, value in scripts.items():
        assert callable(metadata.EntryPoint(name, value, "console_scripts").load())


def test_the_version_is_the_newest_release_in_the_changelog():
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    releases = [heading for heading in headings if heading != "## Unreleased"]
    assert releases[0] == f"## {vecenv.__version__}"
    assert headings[-len(releases) :] == releases  # unreleased changes come first


@pytest.mark.parametrize("command", ["train", "evaluate", "visualize", "plot", "export"])
def test_the_error_of_a_command_without_its_packages_says_what_to_install(command):
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'tyro' else find(name, *rest)\n"
        f"from ppo.__main__ import main; main([{command!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: ppo's commands need tyro: `pip install -e '.[ppo]'`\n"


def test_benchmarks_that_users_run_need_no_pytest():
    names = ("latency", "learning", "memory", "robot", "speedrun")
    code = "import sys; sys.modules['pytest'] = None; " + "; ".join(f"import benchmarks.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
