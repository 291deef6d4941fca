"""What the README and the docs say is true: their code runs, their files exist, their quotes are in the source."""

import dataclasses
import doctest
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import ppo
from ppo import Config, Run
from ppo.cluster import cores_of_each
from ppo.presets import PRESETS
from tests.ppo.runs import QUICKLY_COMPILED, command, parsed
from vecenv.ingraph import InGraphVectorEnv, slots_for
from vecenv.workers import protocol

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "RELEASING", "SECURITY", "CHANGELOG", "ppo/notes")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


SHIM = """#!{python}
import configparser, json, os, re, sys
words, program = sys.argv[1:], os.path.basename(sys.argv[0])
if program == "ppo":
    words = ["-m", "ppo", *words]
if words[:2] == ["-m", "pytest"] or words[:5] == ["-m", "coverage", "run", "-m", "pytest"]:
    # Run a few quick benchmarks, because the next command shows their figures. Only collect some tests.
    few = "CartPole and 0- or (test_ppo and B-0-vecenv) or (test_size and 1-0)"
    few += " or (test_images and catch-0-SB3) or (test_multi_agent and 0-vecenv)"
    words += ["--quick", "-k", few] if "--benchmark-only" in words else ["--collect-only", "-q", "tests/test_site.py"]
elif words[:3] == ["-m", "ppo", "train"] and "--help" not in words:
    words += ["--total-steps", "1", "--eval-episodes", "1"] + ([] if "--resume" in words else ["--epochs", "1"])
elif words[:3] == ["-m", "vecenv", "measure"]:
    words += ["--seconds", "1"]
elif words[:2] == ["-m", "benchmarks.speedrun"]:
    words += ["--tasks"]
elif words[:2] == ["-m", "benchmarks.ratios"]:
    words += ["--rounds", "1"]
elif words[:2] == ["-m", "benchmarks.collectors"]:
    words += ["--rounds", "1", "--collectors", "1", "--step-ms", "1"]
elif words[:2] == ["-m", "benchmarks.budget"]:
    words += ["--turns", "1", "--num-steps", "4", "--minibatch-size", "64"]
elif words[:2] in (["-m", "benchmarks.environments"], ["-m", "benchmarks.learning"]):
    words += ["--table-only"]
elif words[:2] == ["-m", "examples.sweep"]:
    words += ["--trials", "1", "--total-steps", "1"]
elif words[:2] == ["-m", "venv"]:
    sys.exit(words[2:] != [".venv"])
if words[:2] == ["-m", "ppo"] and "COMMANDS" in os.environ:
    with open(os.environ["COMMANDS"], "a") as file:
        file.write(json.dumps(words[2:]) + "\\n")
    sys.exit(0)
if program == "pip":
    setup = configparser.ConfigParser()
    setup.read("setup.cfg")
    extras = [name for word in words for group in re.findall(r"^\\.\\[(.+)\\]$", word) for name in group.split(",")]
    unknown = set(extras) - set(setup["options.extras_require"])
    known = words[0] in ("install", "uninstall") and not unknown
    sys.exit(0 if known else f"{{words}} names an unknown command or extra")
if program == "mypy" and words:
    sys.exit("mypy checks the packages that pyproject.toml lists")
if program in ("ruff", "mypy"):
    words = ["-m", program, *words, "--help"]
os.environ["PYTHONPATH"] = {root!r}
os.execv({python!r}, [{python!r}, *words])
"""
"""Stands in for each program of a user's environment, so that a block takes seconds and needs no network.

Run as written: the shell's syntax, and `ppo` except for training. Run with less work: `ppo train` (one update, one
episode), benchmarks and sweeps. Not run: pip, whose extras are looked up; venv, whose folder must be `.venv`; pytest,
which collects the tests of one file, or runs a few benchmarks; ruff, whose arguments are parsed; and mypy, which takes
none. `test_the_readmes_test_command_runs_unaltered` runs venv, pip and pytest, and `.ci/run` runs ruff and mypy.

If the variable COMMANDS names a file, the arguments of `ppo` are appended to it, and nothing is trained.
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Returns a folder that links to the files of this repository and holds a trained and exported run."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()  # the tests set PATH
    for name in ("python", "pip", "ppo", "ruff", "mypy", "python3"):
        shim = folder / ".venv" / "bin" / name
        shim.write_text(SHIM.format(python=sys.executable, root=str(ROOT)))
        shim.chmod(0o755)
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".venv", "exports", "videos", "plots"):
            (folder / path.name).symlink_to(path)
    small = ["--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--total-steps", "1"]
    words = ["--config", "cartpole", *small, "--eval-episodes", "1", "--logdir", str(folder / "runs")]
    assert command("train", words) == 0
    (run,) = (folder / "runs").iterdir()
    run.rename(folder / "runs" / "NAME")
    for format in ("savedmodel", "tflite", "onnx"):
        ppo.export(Run.open(folder / "runs" / "NAME"), folder / "exports", format)
    return folder


def _blocks(page, language):
    """Returns the blocks of a page, named by the page and a number.

    Those that train, except in the README and mujoco.md, or that train on images or measure, are marked slow.
    """
    return [
        pytest.param(block, marks=pytest.mark.slow if _is_slow(page, block) else (), id=f"{page.name}-{number}")
        for number, block in enumerate(blocks(page, language))
    ]


def _is_slow(page, block):
    trains = page.name not in ("README.md", "mujoco.md") and any(
        word in block for word in ("ppo train", "ppo.train(", "-m pytest")
    )
    return trains or any(word in block for word in ("benchmarks", "sweep", "pong", "breakout"))


def _outside_xdist():
    """Returns the environment variables without pytest-xdist's: in its workers, pytest-benchmark measures nothing."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}


@pytest.mark.slow
def test_the_readmes_test_command_runs_unaltered(tmp_path):
    """With the real venv, pip and pytest, in a copy of this repository whose only tests are those of one file.

    Variables of pip replace what needs a network: the dependencies are those of this Python.
    """
    (block,) = [block for block in blocks(ROOT / "README.md", "sh") if "-m pytest" in block]
    folder = tmp_path / "clone"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "runs"))
    for file in (folder / "tests").rglob("test_*.py"):
        if file.name != "test_errors.py":
            file.unlink()
    (tmp_path / "python3").symlink_to(sys.executable)
    settings = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    settings |= {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = {**_outside_xdist(), **settings}
    done = subprocess.run(
        ["bash", "-ec", block], capture_output=True, text=True, timeout=280, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    (installed,) = folder.glob(".venv/lib/*/site-packages/vecenv_ppo-*.dist-info")
    assert str(folder) in (installed / "direct_url.json").read_text()


@pytest.mark.parametrize("block", [block for page in PAGES for block in _blocks(page, "sh")])
def test_every_command_runs(request, block, workplace, monkeypatch):
    """`SHIM` says what runs. The `ppo` commands of quick blocks run in this process, as TensorFlow loads slowly."""
    bin, commands = workplace / ".venv" / "bin", workplace / "commands"
    script = block.replace("PRESET", "cartpole").replace("for seed in 0 1 2 3 4", "for seed in 0")
    environment = {**_outside_xdist(), "PATH": f"{bin}:{os.environ['PATH']}", "COLUMNS": "100"}
    commands.write_text("")
    if request.node.get_closest_marker("slow") is None:
        environment["COMMANDS"] = str(commands)
    done = subprocess.run(
        ["bash", "-ec", script], capture_output=True, text=True, timeout=280, cwd=workplace, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    monkeypatch.chdir(workplace)
    for name, *words in map(json.loads, commands.read_text().splitlines()):
        assert command(name, words) == 0, words


ELSEWHERE = {"tutorial.md": "examples/tutorial.ipynb", "custom-networks.md": "examples/networks.py"}
"""Pages whose Python blocks another test runs, because they are the code of a file."""

OPTIONAL = {
    "adapters.sb3": ["stable_baselines3"],
    "ppo.callbacks": ["wandb", "mlflow"],
    "torchrl": ["torchrl"],
    "ray.rllib": ["torch", "pyarrow", "lz4", "pandas", "ray.rllib"],
}


def _scripts():
    """Yields slow Python blocks, then all others, which share a process because TensorFlow loads slowly."""
    together = {}
    for page in (page for page in PAGES if page.name not in ELSEWHERE):
        for block in _blocks(page, "python"):
            (code,) = block.values
            packages = next((names for text, names in OPTIONAL.items() if text in code), [])
            if packages or block.marks:
                yield pytest.param({block.id: code}, packages, marks=pytest.mark.slow, id=block.id)
            else:
                together[block.id] = code
    yield pytest.param(together, [], id="quick blocks")


@pytest.mark.parametrize(("codes", "packages"), [*_scripts()])
def test_every_python_block_runs(codes, packages, workplace):
    """The traceback of an error names the page and the number of the block."""
    for package in packages:
        pytest.importorskip(package)
    for name, code in codes.items():
        (workplace / name).write_text(code)
    run = "import runpy, sys\nfor file in sys.argv[1:]:\n    runpy.run_path(file, run_name='__main__')"
    words = [sys.executable, "-c", run, *codes]
    environment = {**os.environ, **QUICKLY_COMPILED}
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=workplace, env=environment)
    assert done.returncode == 0, done.stderr


def _code_of(file: str) -> list[str]:
    """Returns the code of a Python file, or of each code cell of a notebook."""
    text = (ROOT / file).read_text()
    if not file.endswith(".ipynb"):
        return [text]
    return ["".join(cell["source"]) + "\n" for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize(("page", "file"), ELSEWHERE.items())
def test_a_page_shows_the_code_of_its_example(page, file):
    assert blocks(ROOT / "docs" / page, "python") == _code_of(file)


def test_the_page_on_robots_shows_a_complete_task():
    assert _code_of("examples/crawler.py")[0] in blocks(ROOT / "docs" / "mujoco.md", "python")


@pytest.mark.slow
def test_the_notebook_trains_a_policy_that_reaches_the_target(tmp_path):
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(_code_of(ELSEWHERE["tutorial.md"])))
    words = [sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"distance at the end: ([\d.]+)", done.stdout)[1]) < 0.1
    assert list((tmp_path / "videos").glob("*.mp4"))


def test_troubleshooting_quotes_existing_messages():
    """Each quoted text is in the source, and each of our exceptions that the page names exists."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = "\n".join(file.read_text() for package in ("vecenv", "ppo") for file in (ROOT / package).rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # joins strings that span several lines
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    quotes = {text for row in rows for text in re.findall(r'"([^"]+)"', row)}
    assert len(quotes) > 12 and "often because memory ran out" in quotes
    parts = {part for quoted in quotes for part in re.split(r" \.\.\. ?| ?\.\.\. ", quoted)}
    assert not {part for part in parts if part not in source}
    names = set(re.findall(r"^class (\w+)\(.*(?:Error|RuntimeError|FloatingPointError)\)", source, flags=re.MULTILINE))
    assert {"EnvError", "WorkerDied", "ConfigError", "RowsLate"} <= names
    shown = set(re.findall(r"`(\w+)`", "\n".join(rows)))
    assert {name for name in shown if re.fullmatch(r"[A-Z]\w+(Error|Died|Full|Space|Diverged|Failed)", name)} <= names


def test_ci_runs_exactly_the_readmes_test_command():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert any(block.strip() == command for block in blocks(ROOT / "README.md", "sh"))


def _anchors(page):
    """Returns the anchors of a page's headings, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_to_a_heading_in_it():
    found = [
        (page, *link) for page in PAGES for link in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text())
    ]
    inside = [(page, target, anchor) for page, target, anchor in found if not target.startswith("http")]
    assert len(inside) > 100 and sum(bool(anchor) for *_, anchor in inside) > 10
    for page, target, anchor in inside:
        file = page.parent / target if target else page
        assert file.exists(), (page.name, target)
        assert not anchor or anchor in _anchors(file), (page.name, target, anchor)


def test_every_path_in_backticks_exists():
    """The site's pages cannot link to files outside of docs/, so they name these files in backticks."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    pattern = r"`((?:vecenv|ppo|tests|benchmarks|examples|docs)/[a-z][\w./-]*)`"
    paths = {path for page in pages for path in re.findall(pattern, page.read_text())}
    assert len(paths) > 15
    assert not {path for path in paths if not (ROOT / path).exists()}


def _in_the_shell(script, folder, **variables):
    """Runs a script in which the programs of a cluster print what they were called with."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("python", "srun", "scontrol", "openssl"):
        program = folder / "bin" / name
        program.write_text('#!/bin/sh\necho "$@"\n')
        program.chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    return subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True, env=environment).stdout


ON_A_CLUSTER = Config(env="HalfCheetah-v5", backend="python", num_envs=128)
"""The settings of the runs on clusters in docs/cluster.md."""


def test_the_kubernetes_job_trains_and_resumes_the_newest_run(tmp_path):
    (text,) = blocks(ROOT / "docs" / "cluster.md", "yaml")
    job = yaml.safe_load(text)["spec"]
    (learner,) = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {one["name"]: one["value"] for one in learner["env"]} == {"RUNS": "/runs/1"}
    runs = str(tmp_path / "runs")
    started = _in_the_shell(job["entrypoint"], tmp_path, RUNS=runs).split()
    assert started[:3] == ["-m", "ppo", "train"]
    config = parsed(*started[3:])
    assert config == dataclasses.replace(ON_A_CLUSTER, on_worker_death="restart")
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    collectors = int(started[started.index("--collectors") + 1])
    (pod,) = group["template"]["spec"]["containers"]
    assert cores_of_each([pod["resources"]["limits"]["cpu"]] * group["replicas"], collectors) == 4
    for name in ("20260101-000000-cheetah/checkpoints/step_9", "20260102-000000-cheetah/checkpoints/step_1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    resumed = _in_the_shell(job["entrypoint"], tmp_path, RUNS=runs)
    assert resumed.endswith(f"--resume {runs}/20260102-000000-cheetah\n")


def test_the_slurm_script_trains_and_resumes_its_run(tmp_path):
    (script,) = [block for block in blocks(ROOT / "docs" / "cluster.md", "bash") if "srun" in block]
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]"}
    words = _in_the_shell(script, tmp_path, **variables).split()
    separator = words.index("--")
    # `ray symmetric-run` calls `ray`, so the script must put it on the path.
    assert "PATH=$PWD/.venv/bin:$PATH" in script and words[1:3] == ["ray", "symmetric-run"]
    assert words[separator + 1 :][1:4] == ["-m", "ppo", "train"]
    config = parsed(*words[separator + 5 :])
    assert config == ON_A_CLUSTER and config.num_envs % int(words[words.index("--collectors") + 1]) == 0
    (tmp_path / "runs" / "7" / "20260101-000000-cheetah" / "checkpoints" / "step_1").mkdir(parents=True)
    assert _in_the_shell(script, tmp_path, **variables).endswith(
        "--resume " + str(tmp_path / "runs" / "7" / "20260101-000000-cheetah\n")
    )


def test_the_architecture_picture_names_what_the_engine_has():
    picture = ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot()
    words = " ".join(" ".join(picture.itertext()).split())
    for kind in re.findall(r"sends ([A-Z]+)", words):
        assert hasattr(protocol.Kind, kind), kind
    assert re.findall(r"sends ([A-Z]+)", words) == ["STEP", "READY"]
    for name in re.findall(r"InGraphVectorEnv\.(\w+)", words):
        assert callable(getattr(InGraphVectorEnv, name))
    assert "T+1 slots are a slab" in words and slots_for(7, num_slabs=1) == 7 + 1
    assert "A second slab" in words and slots_for(7) == 2 * (7 + 1)


EXAMPLES = [file for file in sorted((ROOT / "vecenv").rglob("*.py")) if ">>> " in file.read_text()]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstring_examples_are_correct(file):
    if file.stem == "sb3":
        pytest.importorskip("stable_baselines3")
    result = doctest.testmod(importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)))
    assert result.attempted > 0 and result.failed == 0


QUICK = ["paper/pendulum"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in PRESETS if name not in QUICK]


@pytest.mark.parametrize("preset", [*QUICK, *SLOW])
def test_every_preset_starts_and_has_no_settings_without_effect(preset, tmp_path, capfd):
    words = ["--config", preset, "--total-steps", "1", "--eval-episodes", "1", "--logdir", str(tmp_path)]
    assert command("train", words) == 0
    assert "settings have no effect" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_the_benchmarks_run():
    """Runs one small case of each file. A rival that is not installed is skipped with the command that installs it."""
    words = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", "--quick", "-q", "-rs"]
    choice = (
        "CartPole and 0- or (test_ppo and B-0-ppo) or 16-0-SB3 or (test_creation and 0-) or (test_partial and 0-) "
        "or (test_images and catch-0-SB3) or (test_multi_agent and 0-vecenv) "
        "or (test_infos and 0-infos) or (test_parent and 64-2-0) or (test_mujoco and Hopper and v5-8-0)"
    )
    done = subprocess.run(
        [*words, "-k", choice], capture_output=True, text=True, timeout=300, cwd=ROOT, env=_outside_xdist()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    wanted = ("torch==2.13.0 stable-baselines3", "torch==2.13.0 tianshou", "envpool")
    assert all(any(f"pip install {peer}" in line for peer in wanted) for line in skips)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (
            ["robot", "--num-envs", "64", "--rounds", "1"],
            {"64 | vecenv", "64 | mujoco.batch", "64 | loop over mj_step"},
        ),
        (
            ["cores", "--tasks", "no-op", "quadruped", "--num-envs", "4", "--rounds", "1"],
            {"vecenv", "vecenv Sync", "gymnasium Sync", "mujoco.batch", "loop over mj_step", "vecenv, workers"},
        ),
        (["latency", "runs/NAME", "--rounds", "3"], {"onnx", "tflite", "savedmodel"}),
    ],
)
def test_the_benchmarks_of_physics_cores_and_exports_run(workplace, words, rows):
    words = [str(workplace / ".venv" / "bin" / "python"), "-m", f"benchmarks.{words[0]}", *words[1:]]
    done = subprocess.run(words, cwd=workplace, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert {row for row in rows if f"| {row} |" in done.stdout} == rows
