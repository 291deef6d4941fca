"""Imports the modules that users name, with errors that say what to do."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from types import ModuleType

import gymnasium as gym


def import_module(name: str, what: str) -> ModuleType:
    """Imports a module in this process and returns it. Messages name `what` it is for, such as "env id 'module:id'".

    Raises:
        gymnasium.error.Error: If the module is not installed. Exceptions of the module itself are not caught.
    """
    check_installed(name, what)
    return importlib.import_module(name)


def check_installed(name: str, what: str) -> None:
    """Raises gymnasium.error.Error if a module's package is not installed. Imports nothing."""
    package = name.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise gym.error.Error(
            f"{what}: the module {name!r} cannot be imported (No module named {package!r}). Run the "
            "command in its folder, install it, or give a name without a module."
        )


def did_you_mean(name: str, module: ModuleType) -> str:
    """Returns " Did you mean ...?" with the nearest public names of classes and functions, or "" if none is close."""
    names = {key.lower(): key for key, value in vars(module).items() if callable(value) and key[0] != "_"}
    near = [repr(names[key]) for key in difflib.get_close_matches(name.lower(), names, cutoff=0.5)]
    return f" Did you mean {' or '.join(near)}?" if near else ""
