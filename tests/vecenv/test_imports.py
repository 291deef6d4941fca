"""Rooms import in one direction, importing vecenv starts nothing, and only vecenv/ingraph imports TensorFlow."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The rooms that the modules of each room may import, besides their own room. A top-level module is its own room.
ROOMS = {
    "errors": set(),
    "spaces": {"errors"},
    "resources": set(),
    "opengl": set(),
    "wrappers": {"spaces"},
    "atari": set(),
    "memory": {"resources", "spaces", "errors"},
    "state": {"spaces", "errors", "memory"},
    "batched": set(),
    "rows": {"batched", "resources", "spaces", "errors", "memory", "state"},
    "workers": {"batched", "resources", "spaces", "errors", "memory", "rows"},
    "results": {"spaces", "memory", "rows"},
    "vector_env": {"batched", "spaces", "errors", "memory", "rows", "results", "state", "workers"},
    "sync_vector_env": {"batched", "rows", "vector_env", "workers"},
    "async_vector_env": {"batched", "resources", "spaces", "errors", "results", "rows", "vector_env", "workers"},
    "mujoco": {"spaces", "errors", "opengl", "resources", "rows", "state"},
    "make": {"async_vector_env", "batched", "resources", "spaces", "workers"},
    "ingraph": {"spaces", "errors", "memory", "rows", "vector_env"},
    "adapters": {
        "batched",
        "spaces",
        "async_vector_env",
        "errors",
        "make",
        "memory",
        "rows",
        "state",
        "vector_env",
        "workers",
        "wrappers",
    },
    "testing": {"errors", "spaces", "rows", "sync_vector_env"},
    "__main__": {"opengl", "resources"},
    "__init__": {
        "async_vector_env",
        "batched",
        "errors",
        "make",
        "resources",
        "results",
        "rows",
        "state",
        "sync_vector_env",
        "vector_env",
        "workers",
    },
}

PPO_ROOMS = ("config", "model", "algorithm", "envs", "cluster", "run", "collectors", "results", "trainer", "cli")
"""Rooms of ppo that import only rooms to their left, even for type annotations."""


def imported(file: Path) -> set[str]:
    """Returns the full names of all modules that a file imports, at any level of nesting."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted((ROOT / "vecenv").rglob("*.py"))


def room_of(file: Path) -> str:
    """Returns "rows" for vecenv/rows/env_rows.py and "make" for vecenv/make.py."""
    return file.relative_to(ROOT / "vecenv").with_suffix("").parts[0]


def test_every_room_is_listed():
    assert {room_of(file) for file in FILES} == set(ROOMS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "vecenv")))
def test_rooms_import_in_one_direction(file):
    names, room = imported(file), room_of(file)
    ours = {name.split(".")[1] for name in names if name.startswith("vecenv.")} & set(ROOMS)
    assert ours - {room} <= ROOMS[room], f"{room} may not import {ours - ROOMS[room]}"
    assert not any(name.split(".")[0] == "ppo" for name in names)
    assert room == "ingraph" or not any(name.split(".")[0] == "tensorflow" for name in names)


def test_no_room_imports_itself_through_other_rooms():
    """ROOMS has no cycle."""
    graph = {room: set(allowed) for room, allowed in ROOMS.items()}
    while leaves := [room for room, allowed in graph.items() if not allowed]:
        for leaf in leaves:
            del graph[leaf]
        for allowed in graph.values():
            allowed.difference_update(leaves)
    assert not graph


PPO_FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted((ROOT / "ppo").rglob("*.py"))
}


@pytest.mark.parametrize(
    "name", [name for name in PPO_FILES if name.split(".")[1:2] and name.split(".")[1] in PPO_ROOMS]
)
def test_the_rooms_of_ppo_import_in_one_direction(name):
    ours = {other.split(".")[1] for other in imported(PPO_FILES[name]) if other.startswith("ppo.")}
    above = PPO_ROOMS[PPO_ROOMS.index(name.split(".")[1]) + 1 :]
    assert not ours & set(above)


def test_no_file_of_ppo_imports_itself_through_other_files():
    graph = {name: (imported(file) & PPO_FILES.keys()) - {name, "ppo"} for name, file in PPO_FILES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("file", PPO_FILES.values(), ids=PPO_FILES)
def test_ppo_uses_only_public_names_of_vecenv(file):
    ours = {name for name in imported(file) if name.startswith("vecenv")}
    public = ("vecenv.adapters", "vecenv.ingraph", "vecenv.opengl", "vecenv.spaces", "vecenv.wrappers")
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
