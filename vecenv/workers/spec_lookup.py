"""Looks up the spec of an env id. Another process imports the module of "module:id", so this process does not have to.

Importing a module can have side effects. For example, dm_control loads EGL, which crashes a process that has loaded
TensorFlow.
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

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from vecenv.workers.launch import environment, interrupts_deferred, start_method, start_process
from vecenv.workers.processes import END_S, how_it_ended, sentinel_of

IMPORT_TIMEOUT_S = 600.0  # the same as the default limit for constructing the envs


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
    """Returns the registered spec of an id, after importing the module of "module:id" in this process.

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id.
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
    """Returns the spec of "module:id", which a separate process reads after importing the module.

    If JSON cannot represent the spec, the returned spec has no arguments and no wrappers, and its entry points are
    replaced by the id.

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id.
        gymnasium.error.Error: If importing the module raises (the message holds the traceback) or ends the process.
    """
    module, answer, process = env_id.rpartition(":")[0], None, None
    ours, theirs = multiprocessing.Pipe(duplex=True)
    try:
        with theirs, interrupts_deferred():
            arguments = theirs, environment(), env_id
            process = start_process(start_method(None), _answer, arguments, name="vecenv-spec", daemon=True)
        sentinel = sentinel_of(process)
        try:
            ready = wait([ours, sentinel], IMPORT_TIMEOUT_S)
        finally:
            if sentinel != process.sentinel:
                os.close(sentinel)
        if not ready:
            raise gym.error.Error(f"env id {env_id!r}: importing {module!r} took more than {IMPORT_TIMEOUT_S} s")
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            answer = ours.recv() if ours.poll() else None
        if answer is None:
            how = how_it_ended(process)
            raise gym.error.Error(f"env id {env_id!r}: the process that imported the module {module!r} {how}")
    finally:
        ours.close()
        if process is not None:
            process.kill()
            process.join(END_S)
    if isinstance(answer, gym.error.Error):
        raise answer
    return EnvSpec.from_json(answer)


def _answer(connection: Connection, environ: dict[str, str], env_id: str) -> None:
    """Sends the spec as JSON, or the error that occurred."""
    signal.signal(signal.SIGINT, lambda number, frame: None)  # the parent handles Ctrl-C and ends this process
    os.set_inheritable(connection.fileno(), False)
    os.environ.clear()
    os.environ.update(environ)
    answer: str | gym.error.Error
    try:
        importlib.import_module(env_id.rpartition(":")[0])
        answer = _to_json(env_id, load(env_id))
    except gym.error.Error as error:
        # Unpickling an error type that the module defines would import the module in the parent.
        answer = error if type(error).__module__ == gym.error.__name__ else _not_importable(env_id, error)
    except BaseException as error:  # includes sys.exit() in the module
        answer = _not_importable(env_id, error)
    connection.send(answer)


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


def _not_importable(env_id: str, error: BaseException) -> gym.error.Error:
    module, _, _ = env_id.rpartition(":")
    message = f"env id {env_id!r}: the module {module!r} cannot be imported"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return gym.error.Error(f"{message} ({error}). Install it, or give an id without a module.")
    text = "".join(traceback.format_exception(error))
    return gym.error.Error(f"{message}:\n\n{text}\nFix the module, or give an id without a module.")
