"""specs.py: finds the spec of an id; for "module:id", without importing the module into the process that asks.

A module may do anything when it is imported. dm_control loads EGL, which crashes a process that has loaded TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from vecenv.launch import environment, interrupts_deferred, start_method, start_process
from vecenv.processes import END_S, how_it_ended


def find(env_id: EnvSpec | str, *, here: bool) -> tuple[EnvSpec, EnvSpec | str]:
    """Returns the spec of an id, and its source: what processes that make envs of it `load`.

    Args:
        env_id: An id, "module:id", or a spec.
        here: Whether this process may import the module. Otherwise another process does so.

    Raises:
        gymnasium.error.NameNotFound: If there is no such env; the message names the nearest.
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
    """Returns the registered spec of an id. The module of "module:id" is imported here first, as Gymnasium does.

    Raises:
        gymnasium.error.NameNotFound: If there is no such env; the message names the nearest.
        gymnasium.error.Error: If the module cannot be imported.
    """
    if isinstance(env_id, EnvSpec):
        return env_id
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise _not_importable(env_id, error) from error
    return gym.spec(name)


@functools.cache
def describe(env_id: str) -> EnvSpec:
    """Returns the spec of "module:id", as a process of its own describes it after importing the module.

    Where JSON cannot hold the spec, it is described without its arguments and wrappers, and with the id in place of its
    entry points.

    Raises:
        gymnasium.error.NameNotFound: If there is no such env; the message names the nearest.
        gymnasium.error.Error: If the module cannot be imported, with its traceback, or ends the process.
    """
    ours, theirs = multiprocessing.Pipe(duplex=True)
    with ours:
        with theirs, interrupts_deferred():
            arguments = theirs, environment(), env_id
            process = start_process(start_method(None), _answer, arguments, name="vecenv-spec", daemon=True)
        answer: Any = None
        try:
            with contextlib.suppress(EOFError, OSError):  # the process has ended
                wait([ours, process.sentinel])
                answer = ours.recv() if ours.poll() else None
            if answer is None:
                module, how = env_id.rpartition(":")[0], how_it_ended(process)
                answer = gym.error.Error(f"env id {env_id!r}: the process that imported the module {module!r} {how}")
        finally:
            process.kill()
            process.join(END_S)
    if isinstance(answer, gym.error.Error):
        raise answer
    return EnvSpec.from_json(answer)


def _answer(connection: Connection, environ: dict[str, str], env_id: str) -> None:
    """Sends the description of a spec, or the error why there is none."""
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the parent answers to it, and ends this process
    os.set_inheritable(connection.fileno(), False)
    os.environ.clear()
    os.environ.update(environ)
    answer: str | gym.error.Error
    try:
        importlib.import_module(env_id.rpartition(":")[0])
        answer = _description(env_id, load(env_id))
    except gym.error.Error as error:
        # Of a type that the module defines, it could only be unpickled by importing the module.
        answer = error if type(error).__module__ == gym.error.__name__ else _not_importable(env_id, error)
    except BaseException as error:  # sys.exit() in the module included
        answer = _not_importable(env_id, error)
    connection.send(answer)


def _description(env_id: str, spec: EnvSpec) -> str:
    with contextlib.suppress(TypeError, ValueError):
        text = spec.to_json()
        if EnvSpec.from_json(text) == spec:  # a tuple, for one, would become a list
            return text
    outline = replace(
        spec,
        entry_point=None if spec.entry_point is None else env_id,
        vector_entry_point=None if spec.vector_entry_point is None else env_id,
        kwargs={},
        additional_wrappers=(),
    )
    return outline.to_json()


def _not_importable(env_id: str, error: BaseException) -> gym.error.Error:
    module, _, _ = env_id.rpartition(":")
    message = f"env id {env_id!r}: the module {module!r} cannot be imported"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return gym.error.Error(f"{message} ({error}). Install it, or give an id without a module.")
    text = "".join(traceback.format_exception(error))
    return gym.error.Error(f"{message}:\n\n{text}\nFix the module, or give an id without a module.")
