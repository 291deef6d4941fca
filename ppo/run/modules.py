"""Locating the module that a setting names, without importing it or its parent packages."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import vecenv
from ppo.config import Config


def modules_of(config: Config, field: str) -> list[str]:
    """Returns the modules that a setting names, apart from Gymnasium's wrappers and this project's Atari games.

    Args:
        config: The settings.
        field: "env", "network" or "wrappers". An env id without a module needs no import.
    """
    if field == "wrappers":
        modules = [vecenv.NamedWrapper(wrapper).module for wrapper in config.wrappers]
        return [module for module in modules if module != "gymnasium.wrappers"]
    value = getattr(config, field) or ""
    if field == "env" and config.is_multi_agent:
        return [config.pettingzoo_name.partition(":")[0]]
    module = value.rpartition(":")[0] if field == "env" else value.partition(":")[0]
    return [] if module == "" or (field, module) == ("env", "vecenv.atari") else [module]


def file_inside(module: str, folders: Iterable[Path]) -> Path | None:
    """Returns a file in or below `folders` that importing `module` would run, or None if there is none.

    Files and folders are compared both as written and with symbolic links resolved.
    """
    zones = {place for folder in folders for place in _both(folder)}
    for file in _files_of(module):
        if any(place.is_relative_to(zone) for place in _both(file) for zone in zones):
            return file
    return None


def _both(path: Path) -> tuple[Path, Path]:
    return Path(os.path.abspath(path)), path.resolve()


def _files_of(module: str) -> list[Path]:
    """Returns the files that `import module` would run: its parent packages, outermost first, then the module."""
    found: list[Path] = []
    name, path = "", sys.path
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        file, path = _located(name, path)
        found += [] if file is None else [Path(file)]
    return found


def _located(name: str, path: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns a module's file (None for a namespace package) and the folders of its submodules.

    Does the same as `PathFinder.find_spec`, which cannot search a namespace package that has not been imported.
    """
    if name in sys.modules:
        loaded = sys.modules[name]
        return getattr(loaded, "__file__", None), list(getattr(loaded, "__path__", ()))
    portions: list[str] = []
    for entry in path:
        finder = pkgutil.get_importer(entry or os.getcwd())
        spec = None if finder is None else finder.find_spec(name)
        if spec is None:
            continue
        if spec.loader is not None:
            return spec.origin, list(spec.submodule_search_locations or ())
        portions += spec.submodule_search_locations or ()
    return None, portions
