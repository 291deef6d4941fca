"""Layers import in one direction, importing vecenv starts nothing, and tests are where their modules are."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The layers that the modules of each layer may import, besides their own. A folder or a top-level module is a layer.
LAYERS = {
    "by_value": set(),
    "errors": {"by_value"},
    "tree": {"errors"},
    "resources": set(),
    "opengl": set(),
    "wrappers": {"tree"},
    "atari": {"rows"},
    "state": {"errors"},
    "memory": {"resources", "tree", "errors"},
    "rows": {"by_value", "resources", "tree", "errors", "memory", "state"},
    "workers": {"by_value", "resources", "tree", "errors", "memory", "rows"},
    "vector": {"resources", "tree", "errors", "memory", "rows", "state", "workers"},
    "mujoco": {"tree", "errors", "opengl", "resources", "rows", "state"},
    "robots": {"mujoco"},
    "ids": {"errors"},
    "kwargs": set(),
    "make": {"ids", "resources", "rows", "vector", "workers"},
    "ingraph": {"tree", "errors", "memory", "rows", "vector"},
    "adapters": {"tree", "errors", "ids", "memory", "rows", "state", "vector", "workers", "wrappers"},
    "testing": {"errors", "tree", "rows", "vector"},
    "version": set(),
    "measure": {"errors", "make", "resources", "vector"},
    "__main__": {"ids", "kwargs", "measure", "opengl", "resources", "version"},
    "__init__": {"errors", "ids", "make", "resources", "rows", "state", "vector", "version", "workers"},
}

PPO_LAYERS = (
    "errors", "runtime", "config", "model", "algorithm", "envs", "cluster", "run", "collectors", "policies", "results",
    "trainer", "cli",
)  # fmt: skip
"""Layers of ppo that import only layers to their left, even for type annotations."""


@functools.cache
def imported(file: Path) -> frozenset[str]:
    """Returns the full names of all modules that a file imports, at any level of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


FILES = sorted((ROOT / "vecenv").rglob("*.py"))

ACROSS = {
    "vecenv": {"imports", "portability"},
    "vecenv/ids": {"named_envs"},
    "vecenv/state": {"state"},
    "vecenv/vector": {"faults", "send_recv", "state_machine"},
    "vecenv/workers": {"chaos"},
    "ppo": {"api", "atari", "composite_actions", "learning", "long_runs", "multi_agent"},
    "ppo/algorithm": {"episode_ends"},
    "ppo/cli": {"commands"},
    "ppo/model": {"critic_keys"},
    "ppo/results": {"artifacts"},
}
"""The subjects of files of tests that concern several modules of a folder, or a part of one."""


def layer_of(file: Path) -> str:
    """Returns "rows" for vecenv/rows/env_rows.py and "make" for vecenv/make.py."""
    return file.relative_to(ROOT / "vecenv").with_suffix("").parts[0]


def test_every_layer_is_listed_here_and_in_the_map_for_contributors():
    assert {layer_of(file) for file in FILES} == set(LAYERS)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for package in ("vecenv", "ppo"):
        for path in (ROOT / package).glob("[a-z]*"):
            layer = f"{package}/{path.name}"
            assert path.name == "py.typed" or f"]({layer})" in page, f"add {layer} to the map in CONTRIBUTING.md"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "vecenv")))
def test_layers_import_in_one_direction(file):
    names, layer = imported(file), layer_of(file)
    ours = {name.split(".")[1] for name in names if name.startswith("vecenv.")} & set(LAYERS)
    assert ours - {layer} <= LAYERS[layer], f"{layer} may not import {ours - LAYERS[layer]}"
    assert not any(name.split(".")[0] == "ppo" for name in names)
    assert layer == "ingraph" or not any(name.split(".")[0] == "tensorflow" for name in names)


def test_no_layer_imports_itself_through_other_layers():
    """LAYERS has no cycle."""
    graph = {layer: set(allowed) for layer, allowed in LAYERS.items()}
    while leaves := [layer for layer, allowed in graph.items() if not allowed]:
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
    "name", [name for name in PPO_FILES if name.split(".")[1:2] and name.split(".")[1] in PPO_LAYERS]
)
def test_the_layers_of_ppo_import_in_one_direction(name):
    ours = {other.split(".")[1] for other in imported(PPO_FILES[name]) if other.startswith("ppo.")}
    above = PPO_LAYERS[PPO_LAYERS.index(name.split(".")[1]) + 1 :]
    assert not ours & set(above)


def test_no_file_of_ppo_imports_itself_through_other_files():
    graph = {name: (imported(file) & PPO_FILES.keys()) - {name, "ppo"} for name, file in PPO_FILES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("file", PPO_FILES.values(), ids=PPO_FILES)
def test_ppo_uses_only_public_names_of_vecenv(file):
    ours = {name for name in imported(file) if name.startswith("vecenv")}
    modules = ("adapters", "errors", "ingraph", "kwargs", "opengl", "tree", "wrappers")
    public = tuple(f"vecenv.{module}" for module in modules)
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


@pytest.mark.parametrize("package", ["vecenv", "ppo"])
def test_the_tests_of_a_module_are_in_the_file_of_its_path(package):
    for file in sorted((ROOT / "tests" / package).rglob("test_*.py")):
        folder, name = file.parent.relative_to(ROOT / "tests"), file.stem.removeprefix("test_")
        modules = [ROOT / folder / f"{name}.py", ROOT / folder / f"__{name}__.py"]
        of_a_module = name in ACROSS.get(folder.as_posix(), ()) or any(module.exists() for module in modules)
        assert of_a_module, f"{file} is not named after a module: rename it, or add its subject to ACROSS"


def test_only_the_tests_of_ingraph_import_tensorflow():
    """So `pytest -m engine` runs without it."""
    for file in sorted((ROOT / "tests" / "vecenv").rglob("*.py")):
        if "ingraph" not in file.parts:
            packages = ("tensorflow", "ppo", "tests.ppo", "vecenv.ingraph")
            assert not any(f"{name}.".startswith(f"{each}.") for name in imported(file) for each in packages), file
