"""Tests that the wheel and the sdist are complete, and that their metadata is correct."""

import configparser
import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from ppo.presets import PRESETS
from tests.vecenv.test_version import git, needs_git
from vecenv.version import RELEASE

ROOT = Path(__file__).parents[1]
FILES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CONTRIBUTING.md",
         "RELEASING.md", "SECURITY.md", "CITATION.cff", "Dockerfile", ".gitignore")  # fmt: skip
BUILD = "from setuptools import build_meta as b; b.build_wheel('{0}'); b.build_sdist('{0}')"

build = pytest.mark.build


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Returns a clone with one commit, which has the files that are built."""
    source = tmp_path_factory.mktemp("source")
    for name in ("vecenv", "ppo", "docs", "tests", "benchmarks", "examples"):
        for file in (ROOT / name).rglob("*"):
            if file.suffix in (".py", ".md", ".typed", ".xml"):
                target = source / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
    for name in FILES:
        (source / name).write_bytes((ROOT / name).read_bytes())
    if shutil.which("git"):
        git(source, "init", "-q")
        git(source, "add", ".")
        git(source, "commit", "-q", "-m", "all")
    return source


def build_in(folder, out):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", BUILD.format(out)]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def built(source):
    """Returns the folder with a wheel and an sdist."""
    build_in(source, source / "dist")
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Returns a folder with the contents of the wheel, like site-packages."""
    (wheel,) = built.glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(*words, packages, cwd):
    """Runs Python with the packages of a folder, and returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    words = [sys.executable, *words]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


VERSION = "import vecenv; print(vecenv.__version__)"


@build
def test_the_wheel_contains_both_packages_with_their_types_and_models_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    assert re.fullmatch(rf"vecenv_ppo-{re.escape(RELEASE)}(\+[\w.]+)?-py3-none-any\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vecenv", "ppo", "vecenv_ppo"}
    files = {file for package in ("vecenv", "ppo") for file in (ROOT / package).rglob("*.*")}
    expected = {str(file.relative_to(ROOT)) for file in files if file.suffix in (".py", ".typed", ".xml")}
    assert {"vecenv/py.typed", "ppo/py.typed", "vecenv/robots/quadruped.xml"} <= expected
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


@build
@needs_git
def test_wheel_and_sdist_keep_the_commit_that_they_were_built_from(source, built, installed, tmp_path):
    expected = f"{RELEASE}+g{git(source, 'rev-parse', '--short=10', 'HEAD')}"
    assert run("-c", VERSION, packages=source, cwd=tmp_path) == expected
    assert run("-c", VERSION, packages=installed, cwd=tmp_path) == expected
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert run("-c", VERSION, packages=unpacked, cwd=tmp_path) == expected
    build_in(unpacked, tmp_path / "again")
    assert f"-{expected}-" in next((tmp_path / "again").glob("*.whl")).name


@build
def test_the_installed_package_trains_and_evaluates_the_quadruped_outside_the_clone(installed, tmp_path):
    small = ["--num-envs", "4", "--num-steps", "8", "--minibatch-size", "16", "--epochs", "1", "--eval-episodes", "1",
             "--env-kwargs", "max_episode_steps=20", "--total-steps", "1"]  # fmt: skip
    run("-m", "ppo", "train", "--config", "quadruped", *small, packages=installed, cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    run("-m", "ppo", "evaluate", str(folder), "--episodes", "1", packages=installed, cwd=tmp_path)
    version = json.loads((folder / "versions.json").read_text())["vecenv-ppo"]
    assert version == run("-c", VERSION, packages=installed, cwd=tmp_path)
    report = run("-m", "vecenv", packages=installed, cwd=tmp_path)
    assert re.search(rf"^vecenv-ppo +{re.escape(version)}$", report, flags=re.MULTILINE)


def test_presets_name_only_modules_that_are_installed():
    modules = {config.env.rpartition(":")[0] for config in PRESETS.values()}
    assert {module.partition(".")[0] for module in modules} == {"", "vecenv"}
    assert all(importlib.import_module(module) for module in modules if module)


@build
def test_the_metadata_say_whose_work_it_is_and_what_it_is_for(built):
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    found = email.message_from_string(archive.read(name).decode())
    assert found["License-Expression"] == "MIT" and found["Author"] and "gymnasium" in found["Keywords"].split(",")
    assert {"Development Status :: 4 - Beta", "Typing :: Typed"} <= set(found.get_all("Classifier"))


@build
def test_the_sdist_contains_docs_tests_and_examples(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {*FILES, "docs/ppo.md", "ppo/notes.md", "tests/helpers.py", "examples/a2c.py"} <= names


@build
def test_every_console_script_is_a_function(built):
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (entries,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(archive.read(entries).decode())
    scripts = dict(parser["console_scripts"])
    assert set(scripts) == {"ppo"}
    for name, value in scripts.items():
        assert callable(metadata.EntryPoint(name, value, "console_scripts").load())


def test_the_version_is_the_newest_release_in_the_changelog():
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    releases = [heading for heading in headings if heading != "## Unreleased"]
    assert releases[0] == f"## {RELEASE}"
    assert headings[-len(releases) :] == releases  # unreleased changes come first


def test_the_citation_names_the_release_and_the_notes_on_it_are_short():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == RELEASE
    notes = (ROOT / "CHANGELOG.md").read_text().split(f"## {RELEASE}\n")[1].split("\n## ")[0]
    assert notes.strip() and notes.count("\n") < 80


def test_the_gate_runs_on_every_supported_python_and_a_bug_report_asks_for_the_machine():
    gate = yaml.safe_load((ROOT / ".github" / "workflows" / "gate.yml").read_text())["jobs"]
    pythons = gate["gate"]["strategy"]["matrix"]["python"]
    classifiers = setup()["metadata"]["classifiers"]
    assert pythons == re.findall(r"Python :: (3\.\d+)", classifiers)
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text())["body"]
    (machine,) = [field for field in form if field["id"] == "machine"]
    assert "`python -m vecenv`" in machine["attributes"]["label"] and machine["validations"]["required"]


def test_only_the_job_that_publishes_may_ask_pypi_for_trust():
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as True
    assert release["permissions"] == {"contents": "read"}
    assert {name for name, job in release["jobs"].items() if "permissions" in job} == {"publish"}
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_the_image_for_clusters_has_the_extras_that_collectors_need():
    (extras,) = re.findall(r"whl\)\[([\w,]+)\]", (ROOT / "Dockerfile").read_text())
    assert set(extras.split(",")) == {"mujoco", "ppo", "ray"} <= set(setup()["options.extras_require"])


@pytest.mark.parametrize("command", ["train", "evaluate", "visualize", "plot", "export"])
def test_the_error_of_a_command_without_its_packages_says_what_to_install(command):
    code = (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'tyro' else find(name, *rest)\n"
        f"from ppo.__main__ import main; main([{command!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: ppo's commands need tyro: `pip install 'vecenv-ppo[ppo]'`\n"


def test_messages_name_installs_that_work_without_a_clone():
    texts = [file.read_text() for package in ("vecenv", "ppo") for file in (ROOT / package).rglob("*.py")]
    extras = {extra for text in texts for extra in re.findall(r"pip install 'vecenv-ppo\[(\w+)\]'", text)}
    assert {"ppo", "video", "plot", "atari", "ray"} <= extras <= set(setup()["options.extras_require"])
    assert not any("pip install -e" in text or "pip install '." in text for text in texts)


def test_benchmarks_that_users_run_need_no_pytest():
    names = ("latency", "learning", "memory", "robot", "speedrun")
    code = "import sys; sys.modules['pytest'] = None; " + "; ".join(f"import benchmarks.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_oldest_python_is_the_one_that_ruff_and_mypy_check():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    oldest = tools["mypy"]["python_version"]
    assert setup()["options"]["python_requires"] == f">={oldest}"
    assert tools["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert f"Programming Language :: Python :: {oldest}" in setup()["metadata"]["classifiers"]


def test_every_pip_finds_every_extra():
    """setuptools replaces "_" by "-" in the names of extras, but pip before 23.3 does not: it skips such an extra."""
    assert all(re.fullmatch("[a-z0-9-]+", name) for name in setup()["options.extras_require"])


OMITTED = {"stable_baselines3", "torch"}
"""Packages of the extra sb3, which the extra test omits, because PyTorch takes gigabytes."""


def test_the_extra_test_installs_every_package_without_which_tests_are_skipped():
    extras, found, wanted = setup()["options.extras_require"], set(), {"test"}
    while wanted:
        for line in extras[wanted.pop()].split():
            name, _, inner = re.split(r"[><=]", line)[0].rstrip("]").partition("[")
            found.add(name.replace("-", "_").removesuffix("_skinny").removesuffix("_ce"))
            if inner:
                (wanted if name == "vecenv-ppo" else found).update(inner.split(","))
    texts = [file.read_text() for file in (ROOT / "tests").rglob("*.py")]
    needed = {name.lower() for text in texts for name in re.findall(r'importorskip\("(\w+)"', text)}
    assert {"ale_py", "pettingzoo", "ray", "wandb", *OMITTED} <= needed
    assert needed - found == OMITTED, f"add to the extra test in setup.cfg: {needed - found - OMITTED}"
