"""Finds the spec of an env id, in this process or in a worker, and imports the modules that users name.

An id that names a module which this process has not imported is resolved by the workers, because an import can have
side effects: dm_control, for example, loads EGL, which crashes a process that has loaded TensorFlow.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import VectorEnv

REGISTERED = "vecenv.make:make_registered"
"""Entry point of "vecenv/ID"."""

# Gymnasium's own MuJoCo tasks, under any id and with any registered arguments.
_MUJOCO_ENTRY_POINT = re.compile(r"gymnasium\.envs\.mujoco\.\w+_v5:(\w+)Env")

_vector_envs: dict[str, EnvSpec] = {}  # outlines of vector envs that workers found for ids of modules not imported here


def find_spec(env_id: str | EnvSpec, *, here: bool) -> tuple[EnvSpec | None, str | EnvSpec]:
    """Returns the spec of an id, and what `load_spec` needs to find it in the processes that build the envs.

    The spec is None if the module of the id is left to the workers, and they have not reported a vector env. With
    `here`, this process builds the envs, and imports the module itself.
    """
    if isinstance(env_id, str) and not here:
        module = env_id.rpartition(":")[0]
        if module and module not in sys.modules and module.partition(".")[0] != "vecenv":
            check_installed(module, f"env id {env_id!r}")
            return _vector_envs.get(env_id), env_id
    spec = load_spec(env_id)
    return spec, spec


def remember_vector_env(env_id: str, outline: EnvSpec) -> None:
    """Notes that a worker has found a vector env for an id, so that `find_spec` returns this outline of its spec."""
    _vector_envs[env_id] = outline


def load_spec(env_id: str | EnvSpec) -> EnvSpec:
    """Returns the spec of an env, after importing the module of "module:id" in this process.

    A class or function that is not registered gets a spec whose id is "module:name". The spec of "vecenv/ID" is the
    spec of ID, because the arguments of `make_registered` are not the env's. Gymnasium's MuJoCo tasks get the vector
    form of `vecenv.mujoco`.

    Raises:
        TypeError: If `env_id` is something else, such as a class.
    """
    if isinstance(env_id, str):
        where, _, name = env_id.rpartition(":")
        if name.endswith((".py", ".xml", ".mjb")):
            advice = "name the class of a task that loads this model"
            if name.endswith(".py"):
                advice = "name a class or function in it"
            raise gym.error.Error(f'env id {env_id!r} names a file: {advice}, as in "{Path(name).stem}:NAME"')
        try:
            module = import_module(where, f"env id {env_id!r}") if where else None
        except gym.error.Error as error:  # see below
            raise type(error)(str(error)) from None
        if module is not None and name not in gym.registry and (creator := getattr(module, name, None)) is not None:
            return _unregistered(env_id, creator)
        try:
            env_id = gym.spec(_with_version(name))
        except gym.error.Error as error:  # raised again here, which is how `worker_failed` recognizes a wrong id
            if not isinstance(error, (gym.error.NameNotFound, gym.error.NamespaceNotFound)):
                raise type(error)(str(error)) from None
            if module is not None:
                advice = f"The module {where} has no class or function {name} either.{did_you_mean(name, module)}"
            else:
                advice = (
                    'If a package registers this id, import it or name its module: "module:id". To use a class or '
                    'function, write "module:name".'
                )
            raise type(error)(f"{error} {advice}") from None
    if not isinstance(env_id, EnvSpec):
        raise TypeError(
            f'env_id={env_id!r} is neither a string nor an EnvSpec: name a class or function as "module:name", or '
            "pass functions that make the envs to vecenv.AsyncVectorEnv"
        )
    if env_id.vector_entry_point == REGISTERED:
        return load_spec(env_id.kwargs["env_id"])
    if isinstance(env_id.entry_point, str) and (task := _MUJOCO_ENTRY_POINT.fullmatch(env_id.entry_point)):
        return dataclasses.replace(env_id, vector_entry_point=f"vecenv.mujoco:{task[1]}")
    return env_id


def _with_version(name: str) -> str:
    """Returns an id with its newest version if it names none, as `gymnasium.make` does."""
    namespace, base, version = parse_env_id(name)
    newest = find_highest_version(namespace, base) if version is None and name not in gym.registry else None
    return name if newest is None else get_env_id(namespace, base, newest)


def load_outline(env_id: str) -> EnvSpec:
    """Returns a spec that every process can unpickle: without arguments and wrappers, and with no class or function.

    An entry point that is a class or a function is replaced by the id.
    """
    spec = load_spec(env_id)
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(EnvSpec) if field.init}
    for form in ("entry_point", "vector_entry_point"):
        if callable(values[form]):
            values[form] = env_id
    return EnvSpec(**{**values, "kwargs": {}, "additional_wrappers": ()})


def import_module(name: str, what: str) -> ModuleType:
    """Imports a module in this process and returns it. Messages name `what` it is for, such as "env id 'module:id'".

    Raises:
        gymnasium.error.Error: If the module is not installed. Exceptions of the module itself are not caught.
    """
    check_installed(name, what)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):  # the module exists, but not one that it imports
            raise
    raise gym.error.UnregisteredEnv(_missing(name, what, missing))


def check_installed(name: str, what: str) -> None:
    """Raises gymnasium.error.Error if a module's package is not installed. Imports nothing."""
    if name.endswith(".py") or os.sep in name:
        raise gym.error.Error(
            f"{what}: {name!r} names a file. Give its module, {Path(name).stem!r}, and run the command in the file's "
            "folder or install it."
        )
    package = name.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise gym.error.UnregisteredEnv(_missing(name, what, package))


def _missing(name: str, what: str, missing: str) -> str:
    return (
        f"{what}: the module {name!r} cannot be imported (No module named {missing!r}). Run the command in its folder, "
        "install it, or give a name without a module."
    )


def did_you_mean(name: str, module: ModuleType) -> str:
    """Returns " Did you mean ...?" with the nearest public names of classes and functions, or "" if none is close."""
    names = {key.lower(): key for key, value in vars(module).items() if callable(value) and key[0] != "_"}
    near = [repr(names[key]) for key in difflib.get_close_matches(name.lower(), names, cutoff=0.5)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def is_ours(spec: EnvSpec) -> bool:
    """Returns whether the vector env of a spec is one of this package."""
    return package_of(spec.vector_entry_point) == "vecenv"


def arguments_of(spec: EnvSpec, env_kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """Returns the arguments of the envs of a spec, without those of `gymnasium.make`, and their time limit."""
    arguments = {**spec.kwargs, **env_kwargs}
    arguments.pop("disable_env_checker", None)
    limit = arguments.pop("max_episode_steps", None)
    limit = spec.max_episode_steps if limit is None else limit
    return arguments, None if limit == -1 else limit


def package_of(entry_point: Any) -> str:
    """Returns the package that defines an entry point, or "" if there is no entry point."""
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return module.partition(".")[0]


def _unregistered(env_id: str, creator: Any) -> EnvSpec:
    """Returns a spec for a class or function that is not registered."""
    if not callable(creator):
        raise gym.error.Error(
            f"env id {env_id!r} names a value of type {type(creator).__name__}: name a registered id, or a class or "
            "function that makes the env"
        )
    if isinstance(creator, type) and any(package_of(base) == "pettingzoo" for base in creator.__mro__):
        raise gym.error.Error(
            f"env id {env_id!r} names a PettingZoo env with several agents: write 'pettingzoo:{env_id}' in ppo, or use "
            "vecenv.adapters.pettingzoo.ParallelVectorEnv"
        )
    if isinstance(creator, type) and issubclass(creator, VectorEnv):
        return EnvSpec(env_id, vector_entry_point=creator)  # type: ignore[arg-type]
    return EnvSpec(env_id, entry_point=creator)
