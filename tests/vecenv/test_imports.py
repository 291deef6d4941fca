"""Imports go one way, importing vecenv does nothing, and only ingraph.py knows TensorFlow."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each module may import from this package; nothing else.
ALLOWED = {
    "errors": set(),
    "state.files": set(),
    "state.arrays": set(),
    "state.anatomy": set(),
    "state.capture": {"errors", "state.anatomy", "state.arrays", "state.files"},
    "state.restore": {"errors", "state.anatomy", "state.arrays", "state.capture"},
    "state.saved_rows": {"layout", "state.capture", "state.restore"},
    "state.__init__": {"state.files"},
    "layout": {"errors"},
    "extras": {"layout"},
    "infos": {"extras", "layout"},
    "actions": {"layout"},
    "conversion": {"layout"},
    "writing": {"extras", "layout"},
    "results": set(),
    "batched": set(),
    "totals": {"layout"},
    "arguments": {"batched"},
    "memory": {"errors", "layout"},
    "messages": {"errors"},
    "launch": set(),
    "rows": {
        "state.capture",
        "conversion",
        "errors",
        "extras",
        "infos",
        "layout",
        "results",
        "state.restore",
        "state.saved_rows",
        "totals",
        "writing",
    },
    "batch_rows": {
        "state.anatomy",
        "batched",
        "state.capture",
        "conversion",
        "errors",
        "extras",
        "infos",
        "layout",
        "merging",
        "results",
        "state.restore",
        "state.saved_rows",
        "rows",
        "totals",
    },
    "agreement": {"rows"},
    "merging": set(),
    "base": {
        "actions",
        "agreement",
        "arguments",
        "errors",
        "extras",
        "infos",
        "layout",
        "memory",
        "merging",
        "state.saved_rows",
        "rows",
    },
    "asking": {"arguments", "local", "messages", "partial", "pool"},
    "partial": {"layout", "extras", "merging", "base"},
    "serial": {
        "layout",
        "extras",
        "memory",
        "infos",
        "arguments",
        "agreement",
        "batched",
        "batch_rows",
        "base",
        "partial",
    },
    "worker": {"errors", "layout", "extras", "memory", "messages", "batch_rows", "rows"},
    "processes": {"launch", "worker", "messages"},
    "pool": {"errors", "launch", "memory", "messages", "processes"},
    "parallel": {
        "errors",
        "layout",
        "extras",
        "infos",
        "messages",
        "arguments",
        "agreement",
        "asking",
        "batched",
        "base",
        "local",
        "processes",
        "pool",
        "underway",
    },
    "local": {"batched", "extras", "memory", "messages", "batch_rows", "pool", "processes"},
    "underway": {"layout", "extras", "actions", "local", "messages", "pool", "processes"},
    "specs": {"launch", "processes"},
    "native": {"errors", "mujoco.__init__", "specs"},
    "make": {"batched", "errors", "launch", "native", "parallel", "processes", "specs"},
    "transitions": {"layout"},
    "threads": set(),
    "simulation": {"transitions"},
    "ingraph": {"arguments", "errors", "transitions", "layout", "base", "simulation", "threads"},
    "registration": {"make", "parallel"},
    "testing": {"results", "serial"},
    "wrappers": set(),
    "__init__": {"batched", "errors", "make", "memory", "parallel", "partial", "processes", "registration", "serial"},
    "adapters.dm_env": {"errors"},
    "adapters.sb3": {"base", "parallel"},
    "adapters.__init__": set(),
    "mujoco.contacts": set(),
    "mujoco.physics": {"mujoco.contacts"},
    "opengl": set(),
    "info": {"opengl"},
    "mujoco.rendering": {"errors", "mujoco.physics", "opengl"},
    "mujoco.state": {"errors", "mujoco.physics", "state.capture", "state.restore"},
    "mujoco.env": {"arguments", "errors", "merging", "mujoco.physics", "mujoco.rendering", "mujoco.state"},
    "mujoco.locomotion": {"mujoco.env"},
    "mujoco.humanoids": {"mujoco.env", "mujoco.locomotion"},
    "mujoco.classics": {"mujoco.env", "mujoco.locomotion"},
    "mujoco.__init__": {"mujoco.env", "mujoco.locomotion", "mujoco.humanoids", "mujoco.classics"},
}


def imported(file: Path) -> set[str]:
    """Returns the full names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted((ROOT / "vecenv").rglob("*.py"))


def name_of(file: Path) -> str:
    """Returns "rows" for vecenv/rows.py and "mujoco.env" for vecenv/mujoco/env.py."""
    return ".".join(file.relative_to(ROOT / "vecenv").with_suffix("").parts)


MODULES = {name_of(file) for file in FILES}


def is_of(name: str, module: str) -> bool:
    """Returns whether an imported name, without "vecenv.", is this module or something in it."""
    return name == module or name.startswith(f"{module}.")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_imports_go_one_way(file):
    names = imported(file)
    ours = {module for name in names if name.startswith("vecenv.") for module in MODULES if is_of(name[7:], module)}
    module = name_of(file)
    assert ours - {module} <= ALLOWED[module], f"{module} may not import {ours - ALLOWED[module]}"
    assert not any(name.split(".")[0] == "ppo" for name in names)
    assert file.stem == "ingraph" or not any(name.split(".")[0] == "tensorflow" for name in names)


@pytest.mark.parametrize("file", sorted((ROOT / "ppo").rglob("*.py")), ids=lambda file: file.stem)
def test_ppo_uses_only_public_names_of_vecenv(file):
    ours = {name for name in imported(file) if name.startswith("vecenv")}
    public = ("vecenv.ingraph", "vecenv.opengl")
    assert all(
        name == "vecenv" or (name.count(".") == 1 and name[7:8].isupper()) or name.startswith(public) for name in ours
    )


def test_importing_vecenv_starts_nothing_and_loads_little():
    code = (
        "import sys, threading, multiprocessing, vecenv\n"
        "assert threading.active_count() == 1 and not multiprocessing.active_children()\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "loaded = {'tensorflow', 'torch', 'mujoco', 'keras', 'rich', 'tyro'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
