"""Make: a vector env from an id that is registered with Gymnasium."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from vecenv import specs
from vecenv.async_vector_env import AsyncVectorEnv
from vecenv.errors import NotNative
from vecenv.native import NativeTask, RegisteredVectorEnv, why_not
from vecenv.rows.batched import Batched
from vecenv.workers.launch import start_fork_server
from vecenv.workers.processes import available_cores

BACKENDS = ("auto", "python")

_logger = logging.getLogger("vecenv")
_told: set[tuple[str, str]] = set()  # each thing is said once
# Who gives one of these wants worker processes.
_WORKERS_ARGUMENTS = {"context", "daemon", "max_concurrency", "on_worker_death", "shared_memory", "start_timeout_s"}


def make(
    env_id: str | EnvSpec,
    num_envs: int = 1,
    num_workers: int | None = None,
    backend: Literal["auto", "python"] = "auto",
    *,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
    vector_kwargs: dict[str, Any] | None = None,
    **env_kwargs: Any,
) -> AsyncVectorEnv:
    """Returns `num_envs` copies of one registered env.

    Gymnasium's MuJoCo tasks, v5, are stepped in C++ by `vecenv.mujoco`, and return what Gymnasium's own return, bit
    for bit. The logger "vecenv" says so, at level INFO, or why it is not so.

    Args:
        env_id: As for `gymnasium.make`: an id, "module:id", or a spec. The module is imported in the workers and in a
            process that looks up the id. This process imports it only if it builds the envs itself.
        num_envs: How many.
        num_workers: Processes to spread them over; None for one per core, but for none where envs are stepped all in
            one call, as MuJoCo tasks in C++ are: this process steps them, on a thread per core. With W processes
            each has its share of the cores.
        backend: "python" for ordinary envs; "auto" for MuJoCo tasks in C++ where that is possible.
        wrappers: Put around each env, the first one innermost.
        vector_kwargs: Further arguments of `AsyncVectorEnv`.
        **env_kwargs: Arguments of the env itself.

    Raises:
        gymnasium.error.NameNotFound: If there is no such env; the message names the nearest.
        gymnasium.error.Error: If the module of "module:id" cannot be imported.
        ValueError: If a number is out of range.

    Example:
        >>> import vecenv
        >>> with vecenv.make("CartPole-v1", num_envs=4) as envs:
        ...     observations, infos = envs.reset(seed=0)
        >>> observations.shape
        (4, 4)
    """
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs}: there must be 1 or more")
    _check_backend(backend)
    # The spec is looked up first, so that a wrong id fails before any worker starts.
    spec, source = specs.find(env_id, here=num_workers == 0)
    vector_kwargs = vector_kwargs or {}
    envs, reason = _at_once(spec, source, num_envs, num_workers, backend, wrappers, vector_kwargs, env_kwargs)
    if envs is not None:
        return envs
    if reason:
        _tell(spec.id, f"is not stepped in C++ by vecenv.mujoco, but as ordinary envs: {reason}")
    make_one = functools.partial(_make_env, source, tuple(wrappers), env_kwargs)
    env_fns = [make_one] + [functools.partial(_quietly, make_one)] * (num_envs - 1)
    envs = AsyncVectorEnv(env_fns, num_workers=num_workers, **vector_kwargs)
    envs.spec = spec
    return envs


def warm_up(
    env_id: str | EnvSpec, *, num_workers: int | None = None, backend: Literal["auto", "python"] = "auto"
) -> None:
    """Starts the process that the workers of `make(env_id, ...)` will be forked from, and does not wait.

    Its imports take half a second, in which this process can do something else. Where the system has no fork server, or
    these arguments mean that there will be no workers, nothing happens; of `make`'s other arguments it is not asked.
    If this process has not imported the module of "module:id", the id is not looked up: that would take too long.

    Raises:
        gymnasium.error.NameNotFound: If there is no such env; the message names the nearest.
        ValueError: If `backend` is unknown.
    """
    _check_backend(backend)
    at_once = False
    if not specs.is_foreign(env_id):
        spec, _ = specs.find(env_id, here=True)
        at_once = spec.entry_point is None or (backend == "auto" and why_not(spec, {}, ()) is None)
    if num_workers != 0 and not (at_once and num_workers is None):
        start_fork_server()


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: use one of {BACKENDS}")


def _at_once(
    spec: EnvSpec,
    source: EnvSpec | str,
    num_envs: int,
    num_workers: int | None,
    backend: str,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]],
    vector_kwargs: dict[str, Any],
    env_kwargs: dict[str, Any],
) -> tuple[AsyncVectorEnv | None, str]:
    """Returns envs that are stepped all in one call; or None, and why there are none if that is worth telling."""
    if spec.entry_point is None and spec.vector_entry_point is not None:
        if wrappers or backend == "python":
            asked = "wrappers" if wrappers else "backend='python'"
            raise ValueError(f"{spec.id} is registered as a vector env alone, and {asked} needs single envs")
        return _batched(
            RegisteredVectorEnv(source, env_kwargs), spec, num_envs, num_workers, vector_kwargs, env_kwargs
        ), ""
    reason = "" if backend == "python" else why_not(spec, env_kwargs, wrappers)
    if reason is not None:
        return None, reason
    try:
        envs = _batched(NativeTask(spec, env_kwargs), spec, num_envs, num_workers, vector_kwargs, env_kwargs)
    except NotNative as error:
        return None, _first_line(str(error))
    _tell(spec.id, "is stepped in C++ by vecenv.mujoco; backend='python' gives ordinary envs")
    return envs, ""


def _batched(
    task: RegisteredVectorEnv,
    spec: EnvSpec,
    num_envs: int,
    num_workers: int | None,
    vector_kwargs: dict[str, Any],
    env_kwargs: dict[str, Any],
) -> AsyncVectorEnv:
    """Returns envs that are stepped all in one call; here, if there is no reason for worker processes."""
    # Frames are drawn in workers, because Mesa's OpenGL ends a process that has loaded TensorFlow with SIGSEGV.
    drawn = env_kwargs.get("render_mode", spec.kwargs.get("render_mode"))
    if num_workers is None and not _WORKERS_ARGUMENTS & set(vector_kwargs) and not drawn:
        num_workers = 0
    num_parts = num_workers or vector_kwargs.get("num_groups", 1)
    task.num_threads = 1 if num_workers is None else max(1, available_cores() // num_parts)
    envs = AsyncVectorEnv(Batched(task, num_envs), num_workers=num_workers, **vector_kwargs)
    envs.spec = spec
    return envs


def _first_line(text: str) -> str:
    """Returns the reason out of a NotNative, whose text from a worker is a traceback."""
    mark = f"{NotNative.__name__}: "
    return next((line.partition(mark)[2] for line in text.splitlines() if mark in line), text)


def _tell(env_id: str, what: str) -> None:
    if (env_id, what) not in _told:
        _told.add((env_id, what))
        _logger.info("%s %s", env_id, what)


def _make_env(
    source: EnvSpec | str, wrappers: Sequence[Callable[[gym.Env], gym.Env]], env_kwargs: dict[str, Any]
) -> gym.Env:
    env = gym.make(specs.load(source), **env_kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def _quietly(make_one: Callable[[], gym.Env]) -> gym.Env:
    """Calls `make_one` in a worker without what native libraries write to stderr.

    Env 0 has shown it already; MuJoCo's warnings about a model would fill the screen once per env.
    """
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        return make_one()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nothing)
