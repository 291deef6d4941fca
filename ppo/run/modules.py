"""The modules that a run names. A loaded run imports them only if the user trusts it, and never from its own folder.

A module that is already imported needs trust, too, because a run can name any of its functions, with
arguments, such as "subprocess:run".
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import vecenv
from ppo.config import Config
from ppo.errors import RunError
from ppo.run.folder import Run

TRUSTED = ("vecenv.atari:Atari/", "vecenv.robots:Quadruped-v0")  # prefixes of this project's ids, which need no trust
WRAPPERS = ("gymnasium.wrappers", "vecenv.wrappers")  # modules that need no trust either


def modules_of(config: Config, *, env: bool = True) -> dict[str, str]:
    """Returns the modules that a config names, by setting, such as "network='module:function'".

    Without `env`, omits the modules of the env and the wrappers, which only the processes that build envs need.
    """
    found = {} if config.network is None else {f"network={config.network!r}": config.network.partition(":")[0]}
    if not env:
        return found
    if config.is_multi_agent:
        found[f"env={config.env!r}"] = config.pettingzoo_name.partition(":")[0]
    else:
        # Shimmy's "GymV26Environment-v0" makes the env that this argument names.
        ids = [config.env, *(str(kwargs.get("env_id", "")) for kwargs in (config.env_kwargs, config.eval_env_kwargs))]
        found |= {
            f"env={name!r}": name.rpartition(":")[0] for name in ids if ":" in name and not name.startswith(TRUSTED)
        }
    wrappers = {text: vecenv.NamedWrapper(text).module for text in config.wrappers}
    return found | {f"wrapper {text!r}": name for text, name in wrappers.items() if name not in WRAPPERS}


def config_to_load(run: Run, *, env: bool = True) -> Config:
    """Returns the settings of a run whose modules may be imported; see `modules_of`. Imports nothing itself.

    Raises RunError if the run names a module and the user does not trust it, or if a module is in the run folder or in
    the folder that contains it.
    """
    config = run.read_config()
    modules = modules_of(config, env=env)
    check_places(modules, run.path, Path(os.path.abspath(run.path)).parent, run.path.resolve().parent)
    if modules and not run.trust_modules:
        names = ", ".join(dict.fromkeys(modules.values()))
        raise RunError(
            f"{run.path} names {', '.join(modules)}, and importing {names} runs code. If you trust it, pass "
            "--trust-modules to the command, or trust_modules=True to the function that you called."
        )
    return config


def check_places(modules: Mapping[str, str], *folders: Path) -> None:
    """Raises RunError if one of the modules, the result of `modules_of`, is in one of the folders or below them.

    Files and folders are compared both as written and with symbolic links resolved. Imports nothing.
    """
    zones = [zone for folder in folders for zone in _both(folder)]
    for setting, module in modules.items():
        for file in _places(module):
            if any(place.is_relative_to(zone) for place in _both(file) for zone in zones):
                raise RunError(
                    f"the module of {setting} is {file}. Modules in a run folder or in the folder that contains it "
                    "are never imported. Keep runs in a folder without it: choose another --logdir, or move the run."
                )


def _places(module: str) -> list[Path]:
    """Returns the file of the module or, if it is part of a package, the files that it can have."""
    package, *names = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # `__main__`, or no name
        spec = None
    if spec is None:
        return []
    inner = [Path(folder, *names) for folder in spec.submodule_search_locations or ()]
    file = [Path(spec.origin)] if spec.origin and spec.has_location else []
    return [*inner, *(path.with_suffix(".py") for path in inner), *file]


def _both(path: Path) -> tuple[Path, Path]:
    return Path(os.path.abspath(path)), path.resolve()
