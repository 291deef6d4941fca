"""Looks up the spec of an env. Another process imports the module of "module:id", so this process does not have to.

The name after the colon is a registered id, or a class or function of the module that makes the env.

Importing a module can have side effects. For example, dm_control loads EGL, which crashes a process that has loaded
TensorFlow.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from vecenv.workers.launch import environment, interrupts_deferred, start_method, start_process
from vecenv.workers.pipes import Deadline, Waiter
from vecenv.workers.processes import END_S, how_it_ended, sentinel_of

IMPORT_TIMEOUT_S = 600.0  # the same as the default limit for constructing the envs

PACKAGES = {
    "ALE/": ("ale_py", "ale-py"),
    "BabyAI-": ("minigrid", "minigrid"),
    "MiniGrid-": ("minigrid", "minigrid"),
    "MiniWorld-": ("miniworld", "miniworld"),
    "dm_control/": ("shimmy", "shimmy[dm-control]"),
    "bsuite/": ("shimmy", "shimmy[bsuite]"),
    "AdroitHand": ("gymnasium_robotics", "gymnasium-robotics"),
    "AntMaze_": ("gymnasium_robotics", "gymnasium-robotics"),
    "Fetch": ("gymnasium_robotics", "gymnasium-robotics"),
    "FrankaKitchen-": ("gymnasium_robotics", "gymnasium-robotics"),
    "HandManipulate": ("gymnasium_robotics", "gymnasium-robotics"),
    "HandReach": ("gymnasium_robotics", "gymnasium-robotics"),
    "PointMaze_": ("gymnasium_robotics", "gymnasium-robotics"),
    "Meta-World/": ("metaworld", "metaworld"),
    "Vizdoom": ("vizdoom.gymnasium_wrapper", "vizdoom"),
    "FlappyBird-": ("flappy_bird_gymnasium", "flappy-bird-gymnasium"),
    "gym_aloha/": ("gym_aloha", "gym-aloha"),
    "gym_pusht/": ("gym_pusht", "gym-pusht"),
    "highway-": ("highway_env", "highway-env"),
    "mo-": ("mo_gymnasium", "mo-gymnasium"),
    "popgym-": ("popgym", "popgym"),
}
"""Maps prefixes of ids that well-known packages register to the module to import and the package to install."""


def find(env_id: EnvSpec | str, *, here: bool) -> tuple[EnvSpec, EnvSpec | str]:
    """Returns the spec of an id, and the source from which `load` finds it in the processes that build the envs.

    Args:
        env_id: An id, "module:id", or a spec.
        here: Whether this process may import the module. Otherwise another process imports it.

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id.
        gymnasium.error.Error: If the module cannot be imported.
    """
    if isinstance(env_id, str) and is_foreign(env_id) and not here:
        return describe(env_id), env_id
    spec = load(env_id)
    return spec, spec


def is_foreign(env_id: EnvSpec | str) -> bool:
    """Returns whether an id names a module that this process has not imported."""
    module = "" if isinstance(env_id, EnvSpec) else env_id.rpartition(":")[0]
    return bool(module) and module not in sys.modules


def load(env_id: EnvSpec | str) -> EnvSpec:
    """Returns the spec of an env, after importing the module of "module:id" in this process.

    A class or function that is not registered gets a spec whose id is "module:name".

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id, or says what else to try.
        gymnasium.error.Error: If the module cannot be imported.
    """
    if isinstance(env_id, EnvSpec):
        return env_id
    where, _, name = env_id.rpartition(":")
    module = import_module(where, f"env id {env_id!r}") if where else None
    if module is not None and name not in gym.registry and (creator := getattr(module, name, None)) is not None:
        return _unregistered(env_id, creator)
    try:
        return gym.spec(name)
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as error:
        if advice := _advice(name, module, str(error)):
            raise type(error)(f"{error} {advice}") from None
        raise


def _unregistered(env_id: str, creator: Any) -> EnvSpec:
    """Returns a spec for a class or function that is not registered."""
    if not callable(creator):
        raise gym.error.Error(
            f"env id {env_id!r} names a value of type {type(creator).__name__}: name a registered id, or a class or "
            "function that makes the env"
        )
    if isinstance(creator, type) and issubclass(creator, VectorEnv):
        vector_creator: Any = creator
        return EnvSpec(env_id, vector_entry_point=vector_creator)
    return EnvSpec(env_id, entry_point=creator)


def _advice(name: str, module: ModuleType | None, error: str) -> str:
    """Returns advice for the unknown id `name`, or "" if the error already gives it."""
    for beginning, (known, package) in PACKAGES.items():
        if name.startswith(beginning) and (module is None or module.__name__ != known):
            return f'Such ids are in the package {package}: `pip install "{package}"`, and use the id "{known}:{name}".'
    if module is None:
        if "Did you mean" in error:
            return ""
        return (
            'If a package registers this id, name the package\'s module: "module:id". Name an unregistered class or '
            'function as "module:name".'
        )
    if not name.isidentifier():
        return ""
    public = {key for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    return f"The module {module.__name__} has no class or function {name} either.{did_you_mean(name, public)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns " Did you mean ...?" with the names nearest to `name`, ignoring case, or "" if none is near."""
    lower = {known.lower(): known for known in names}
    near = [repr(lower[key]) for key in difflib.get_close_matches(name.lower(), lower, cutoff=0.5)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def import_module(name: str, what: str) -> ModuleType:
    """Imports a module in this process and returns it.

    Args:
        name: Name of the module.
        what: What the module is imported for, named in errors: "env id 'module:id'".

    Raises:
        gymnasium.error.Error: If the module cannot be imported. Other exceptions of the module are not caught.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _not_importable(what, name, error) from error


@functools.cache
def describe(env_id: str) -> EnvSpec:
    """Returns the spec of "module:id", which a separate process reads after importing the module.

    If JSON cannot represent the spec, the returned spec has no arguments and no wrappers, and its entry points are
    replaced by the id.

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id.
        gymnasium.error.Error: If importing the module raises (the message holds the traceback) or ends the process.
    """
    module = env_id.rpartition(":")[0]
    return EnvSpec.from_json(elsewhere(functools.partial(_describe, env_id), f"env id {env_id!r}", module))


def elsewhere(function: Callable[[], str], what: str, module: str) -> str:
    """Calls a function in another process and returns its result.

    Args:
        function: Imports the module.
        what: What the module is imported for, named in errors: "env id 'module:id'".
        module: Name of the module.

    Raises:
        gymnasium.error.Error: If `function` raises, with its traceback, or ends the process.
    """
    answer, process = None, None
    ours, theirs = multiprocessing.Pipe(duplex=True)
    try:
        with theirs, interrupts_deferred():
            arguments = theirs, environment(), function, what, module
            process = start_process(start_method(None), _answer, arguments, name="vecenv-lookup", daemon=True)
        sentinel = sentinel_of(process)
        try:
            ready = Waiter([ours, sentinel], spin=False).ready(Deadline(IMPORT_TIMEOUT_S))
        finally:
            if sentinel != process.sentinel:
                os.close(sentinel)
        if not ready:
            raise gym.error.Error(
                f"{what}: importing {module!r} took more than {IMPORT_TIMEOUT_S:.0f} s. Check whether the import hangs."
            )
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            answer = ours.recv() if ours.poll() else None
        if answer is None:
            how = how_it_ended(process)
            raise gym.error.Error(
                f"{what}: the process that imported the module {module!r} {how}. Check that the module can be imported."
            )
    finally:
        ours.close()
        if process is not None:
            process.kill()
            process.join(END_S)
    if isinstance(answer, gym.error.Error):
        raise answer
    return answer


def _answer(
    connection: Connection, environ: dict[str, str], function: Callable[[], str], what: str, module: str
) -> None:
    """Sends the function's result, or the error that occurred."""
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the parent handles Ctrl-C and ends this process
    os.set_inheritable(connection.fileno(), False)
    os.environ.clear()
    os.environ.update(environ)
    answer: str | gym.error.Error
    try:
        answer = function()
    except gym.error.Error as error:
        # Unpickling an error type that the module defines would import the module in the parent.
        answer = error if type(error).__module__ == gym.error.__name__ else _not_importable(what, module, error)
    except BaseException as error:  # includes sys.exit() in the module
        answer = _not_importable(what, module, error)
    connection.send(answer)


def _describe(env_id: str) -> str:
    return _to_json(env_id, load(env_id))


def _to_json(env_id: str, spec: EnvSpec) -> str:
    with contextlib.suppress(TypeError, ValueError):
        text = spec.to_json()
        if EnvSpec.from_json(text) == spec:  # JSON changes some values, for example tuples into lists
            return text
    outline = replace(
        spec,
        entry_point=None if spec.entry_point is None else env_id,
        vector_entry_point=None if spec.vector_entry_point is None else env_id,
        kwargs={},
        additional_wrappers=(),
    )
    return outline.to_json()


def _not_importable(what: str, module: str, error: BaseException) -> gym.error.Error:
    message = f"{what}: the module {module!r} cannot be imported"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        package = next((package for known, package in PACKAGES.values() if known == module), None)
        install = "Install it" if package is None else f'Install it (`pip install "{package}"`)'
        if module.endswith(".py"):
            install = f"Name the module {module[:-3].replace(os.sep, '.')!r}"
        return gym.error.Error(f"{message} ({error}). {install}, or give a name without a module.")
    text = "".join(traceback.format_exception(error))
    return gym.error.Error(f"{message}:\n\n{text}\nFix the module, or give a name without a module.")
