"""make.py: make: a vector env from an id that is registered with Gymnasium."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from vecenv.parallel import AsyncVectorEnv

BACKENDS = ("auto", "python")


def make(
    env_id: str | EnvSpec,
    num_envs: int = 1,
    num_workers: int | None = None,
    backend: str = "auto",
    *,
    wrappers: Sequence[Callable[[gym.Env], gym.Env]] = (),
    vector_kwargs: dict[str, Any] | None = None,
    **env_kwargs: Any,
) -> AsyncVectorEnv:
    """Returns `num_envs` copies of one registered env, in worker processes.

    Args:
        env_id: As for `gymnasium.make`: an id, "module:id", or a spec.
        num_envs: How many.
        num_workers: Processes to spread them over; None for one per core.
        backend: "python" for ordinary envs; "auto" for the fastest there is, which today is the same.
        wrappers: Put around each env, the first one innermost.
        vector_kwargs: Further arguments of `AsyncVectorEnv`.
        **env_kwargs: Arguments of the env itself.

    Raises:
        gymnasium.error.NameNotFound: If there is no such env; the message names the nearest.
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
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: use one of {BACKENDS}")
    # The spec is looked up here, so that a wrong id fails before any process starts.
    spec = env_id if isinstance(env_id, EnvSpec) else _spec(env_id)
    make_one = functools.partial(_make_env, spec, tuple(wrappers), env_kwargs)
    env_fns = [make_one] + [functools.partial(_quietly, make_one)] * (num_envs - 1)
    envs = AsyncVectorEnv(env_fns, num_workers=num_workers, **(vector_kwargs or {}))
    envs.spec = spec
    return envs


def _spec(env_id: str) -> EnvSpec:
    """Returns the spec of an id; "module:id" imports the module first, as Gymnasium does."""
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise gym.error.Error(
                f"env id {env_id!r}: the module {module!r} cannot be imported ({error}). "
                "Install it, or give an id without a module."
            ) from error
    return gym.spec(name)


def _make_env(spec: EnvSpec, wrappers: Sequence[Callable[[gym.Env], gym.Env]], env_kwargs: dict[str, Any]) -> gym.Env:
    env = gym.make(spec, **env_kwargs)
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
