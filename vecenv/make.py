"""Makes a vector env from an env id, with the fastest backend that gives Gymnasium's results.

`vecenv.ids` finds what an id names and builds its envs; this module chooses where, and in which form.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from typing import Any, Literal

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from vecenv.ids.forms import (
    NoSingleEnvs,
    SingleEnvsNeeded,
    VectorEnvFound,
    make_env,
    make_vector_env,
    render_mode_of,
    why_single_envs,
    wrapped,
)
from vecenv.ids.named_wrapper import Wrappers, named_wrappers
from vecenv.ids.specs import (
    REGISTERED,
    arguments_of,
    find_spec,
    is_ours,
    load_outline,
    load_spec,
    remember_vector_env,
)
from vecenv.resources import available_cores
from vecenv.rows.batched import Batched
from vecenv.vector.async_vector_env import AsyncVectorEnv
from vecenv.vector.single_env import SingleEnv
from vecenv.workers.launch import start_fork_server

BACKENDS = ("auto", "python")

# AsyncVectorEnv arguments that only have an effect with worker processes.
_WORKER_ARGUMENTS = {
    "context", "daemon", "max_concurrency", "on_worker_death", "shared_memory", "start_timeout_s", "worker_init",
}  # fmt: skip

# Arguments of the vector env. `gymnasium.make_vec` takes them as keyword arguments, `make` in `vector_kwargs`.
_VECTOR_ARGUMENTS = set(inspect.signature(AsyncVectorEnv.__init__).parameters) - {"self", "env_fns", "num_workers"}

_logger = logging.getLogger("vecenv")
_logged: set[tuple[str, str]] = set()  # each message is logged once per env id


def make(
    env_id: str | EnvSpec,
    /,
    num_envs: int = 1,
    num_workers: int | None = None,
    backend: Literal["auto", "python"] = "auto",
    *,
    wrappers: Wrappers = (),
    vector_kwargs: dict[str, Any] | None = None,
    **env_kwargs: Any,
) -> AsyncVectorEnv:
    """Returns a vector env of `num_envs` copies of an env.

    `vecenv.mujoco` steps Gymnasium's v5 MuJoCo tasks in C++ and returns the same values, bit for bit. If another
    package registers an id with a `vector_entry_point` that supports all arguments, that entry point builds the
    vector env, as in `gymnasium.make_vec`. For any other id, `make` builds single envs, even if Gymnasium registers the
    id with a `vector_entry_point`. The logger "vecenv" reports which form was chosen and why.

    Args:
        env_id: An id, "module:id", or a spec, as for `gymnasium.make`; or "module:name" for a class or function that is
            not registered. The workers import the module; the calling process imports it only if it builds the envs.
        num_envs: Number of envs.
        num_workers: Number of worker processes. None: one worker per core, or no workers for MuJoCo tasks in C++ and
            vector envs of other packages, which this process steps unless they render or `vector_kwargs` needs workers.
            MuJoCo tasks use one thread per core in all.
        backend: "auto" steps many envs in one call if possible. "python" always builds single envs, as by
            `gymnasium.make`.
        wrappers: Applied to each env in this order, so the first one is innermost. A wrapper is a function of the env,
            or a string as for `NamedWrapper`.
        vector_kwargs: Further arguments of `AsyncVectorEnv`.
        **env_kwargs: Arguments of the env.

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id.
        gymnasium.error.Error: If a module is not installed, or has no such env or wrapper.
        EnvError: If one of these errors occurs in a worker. It is also an instance of that error's type.
        TypeError: If `wrappers` is a string, or if `env_kwargs` has an argument of `AsyncVectorEnv`.
        ValueError: If an argument is out of range, or if a string in `wrappers` is malformed. Also, as a
            gymnasium.error.Error, if `wrappers` or `backend="python"` is given for an id that is registered only as a
            vector env.

    Example:
        >>> import vecenv
        >>> with vecenv.make("CartPole-v1", num_envs=4) as envs:
        ...     observations, infos = envs.reset(seed=0)
        >>> observations.shape
        (4, 4)
    """
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} is out of range: it must be 1 or more")
    _check_backend(backend)
    vector_kwargs, wrappers = vector_kwargs or {}, named_wrappers(wrappers)
    if misplaced := {name: value for name, value in env_kwargs.items() if name in _VECTOR_ARGUMENTS}:
        raise TypeError(
            f"arguments of the vector env, not of its envs: {', '.join(misplaced)}. Pass "
            f"vector_kwargs={vector_kwargs | misplaced!r}. For an env with an argument of this name, pass functions to "
            "AsyncVectorEnv."
        )
    spec, source = find_spec(env_id, here=num_workers == 0)

    def single_envs(unless_backend: str | None = None) -> AsyncVectorEnv:
        make_one = functools.partial(make_env, source, wrappers, env_kwargs, unless_backend)
        return AsyncVectorEnv([make_one] * num_envs, num_workers=num_workers, **vector_kwargs)

    if spec is None:  # only the workers import the module of the id, and find out which forms it has
        assert isinstance(source, str)
        try:
            envs = single_envs(unless_backend=backend)
        except VectorEnvFound as found:
            spec = found.spec
            remember_vector_env(source, spec)
        else:
            [outline] = envs.apply(lambda _: load_outline(source), [0])
            envs.spec = _with_kwargs(outline, env_kwargs)
            return envs

    reason, level = why_single_envs(spec, backend, wrappers, env_kwargs), logging.INFO
    if reason is None:
        if spec.entry_point is None and (wrappers or backend == "python"):
            argument = "`wrappers`" if wrappers else "backend='python'"
            raise NoSingleEnvs(
                f"{spec.id} is registered only as a vector env, but {argument} needs single envs: omit this argument"
            )
        try:
            return _one_vector_env(spec, source, num_envs, num_workers, vector_kwargs, env_kwargs)
        except SingleEnvsNeeded as error:
            reason, level = str(error), logging.WARNING
    if reason:
        _log_once(level, spec.id, f"is not {_vector_form(spec)}, but consists of single envs: {reason}")
    envs = single_envs()
    envs.spec = _with_kwargs(spec, env_kwargs)
    return envs


def make_single(env_id: str | EnvSpec, /, *, wrappers: Wrappers = (), **env_kwargs: Any) -> gym.Env:
    """Returns one env of the kind that `make` copies, built in the calling process, for example to show a policy.

    An id that has single envs gives one of these, like `make` with `backend="python"`. An id that is registered only as
    a vector env gives a vector env with one env, presented as a single env. See `make` for the arguments and errors.

    Example:
        >>> import vecenv
        >>> env = vecenv.make_single("CartPole-v1", wrappers=["TimeAwareObservation"], max_episode_steps=100)
        >>> env.observation_space.shape
        (5,)
    """
    spec, wrappers = load_spec(env_id), named_wrappers(wrappers)
    if spec.entry_point is not None:
        return make_env(spec, wrappers, env_kwargs)
    envs = make_vector_env(spec, env_kwargs, 1, False, num_envs=1, autoreset_mode=AutoresetMode.NEXT_STEP)
    return wrapped(SingleEnv(envs), wrappers)


def warm_up(
    env_id: str | EnvSpec,
    /,
    *,
    num_workers: int | None = None,
    backend: Literal["auto", "python"] = "auto",
    wrappers: Wrappers = (),
    **env_kwargs: Any,
) -> None:
    """Starts the fork server for the workers of a later `make(env_id, ...)`, and returns at once.

    The fork server's imports take half a second, during which the caller can do other work. Nothing happens if `make`
    with these arguments starts no workers. See `make` for the errors.
    """
    _check_backend(backend)
    spec, _ = find_spec(env_id, here=False)
    in_one_call = spec is not None and why_single_envs(spec, backend, wrappers, env_kwargs) is None
    here = num_workers is None and in_one_call and spec is not None and not render_mode_of(spec, env_kwargs)
    if num_workers != 0 and not here:
        start_fork_server()


def register_envs() -> None:
    """Registers "vecenv/ID" for `gymnasium.make_vec`, for every id with single envs that has no such entry yet.

    `import vecenv` calls this, because Gymnasium 1.0 removed the plugin hook. Call it again for envs that are
    registered later. A slash in an id becomes a dot: "ALE/Pong-v5" is registered as "vecenv/ALE.Pong-v5".
    """
    for spec in list(gym.registry.values()):
        vector_id = f"vecenv/{spec.id.replace('/', '.')}"
        if spec.namespace != "vecenv" and spec.entry_point is not None and vector_id not in gym.registry:
            gym.register(id=vector_id, vector_entry_point=REGISTERED, kwargs={"env_id": spec.id})


def make_registered(env_id: str, num_envs: int = 1, **arguments: Any) -> AsyncVectorEnv:
    """Returns the vector env of "vecenv/ID" for `gymnasium.make_vec`.

    The arguments may be those of `make`, the env and `AsyncVectorEnv`.
    """
    vector_kwargs = {name: arguments.pop(name) for name in _VECTOR_ARGUMENTS & set(arguments)}
    return make(env_id, num_envs, vector_kwargs=vector_kwargs, **arguments)


def _one_vector_env(
    spec: EnvSpec,
    source: str | EnvSpec,
    num_envs: int,
    num_workers: int | None,
    vector_kwargs: dict[str, Any],
    env_kwargs: dict[str, Any],
) -> AsyncVectorEnv:
    """Returns envs that one vector env steps in this process, or one in each worker.

    Raises:
        SingleEnvsNeeded: If the vector env does not support the arguments, but the id also has single envs.
    """
    # Envs render in workers, because Mesa's OpenGL crashes (SIGSEGV) in a process that has loaded TensorFlow.
    here = num_workers is None and not render_mode_of(spec, env_kwargs) and not _WORKER_ARGUMENTS & set(vector_kwargs)
    workers = 0 if here else num_workers
    num_threads = 1 if workers is None else max(1, available_cores() // (workers or 1))
    steps_subsets = vector_kwargs.get("on_worker_death") == "restart"
    build = functools.partial(make_vector_env, source, env_kwargs, num_threads, steps_subsets)
    envs = AsyncVectorEnv(Batched(build, num_envs), num_workers=workers, **vector_kwargs)
    if spec.entry_point is not None:
        level, results = (logging.INFO, "equal") if is_ours(spec) else (logging.WARNING, "possibly different")
        message = f"is {_vector_form(spec)}; backend='python' gives single envs with {results} spaces and rewards"
        _log_once(level, spec.id, message)
    envs.spec = _with_kwargs(spec, env_kwargs)
    return envs


def _with_kwargs(spec: EnvSpec, env_kwargs: dict[str, Any]) -> EnvSpec:
    """Returns a spec with the arguments of the envs, as `gymnasium.make_vec` does."""
    kwargs, limit = arguments_of(spec, env_kwargs)
    return dataclasses.replace(spec, kwargs=kwargs, max_episode_steps=limit)


def _vector_form(spec: EnvSpec) -> str:
    return "stepped in C++" if is_ours(spec) else "built from its vector_entry_point"


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: use one of {BACKENDS}")


def _log_once(level: int, env_id: str, message: str) -> None:
    if (env_id, message) not in _logged:
        _logged.add((env_id, message))
        _logger.log(level, "%s %s", env_id, message)
