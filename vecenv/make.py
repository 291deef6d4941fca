"""Builds a vector env from a registered env id, with the fastest backend that gives Gymnasium's results."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.adapters.single import SingleEnv
from vecenv.async_vector_env import AsyncVectorEnv
from vecenv.batched import Batched
from vecenv.errors import VecEnvError
from vecenv.resources import available_cores
from vecenv.workers import spec_lookup
from vecenv.workers.launch import start_fork_server
from vecenv.workers.wrapper_lookup import NamedWrapper, check_wrappers

BACKENDS = ("auto", "python")
NAMESPACE = "vecenv"
_REGISTERED = "vecenv.make:make_registered"  # entry point of "vecenv/ID"

Wrapper: TypeAlias = Callable[[gym.Env], gym.Env]
Wrappers: TypeAlias = Sequence[Wrapper | str]

# Gymnasium's own MuJoCo tasks, under any id and with any registered arguments.
_MUJOCO_ENTRY_POINT = re.compile(r"gymnasium\.envs\.mujoco\.\w+_v5:(\w+)Env")
_MUJOCO_RENDER_MODES = (None, "rgb_array", "depth_array", "rgbd_tuple")

# AsyncVectorEnv arguments that only have an effect with worker processes.
_WORKER_ARGUMENTS = {"context", "daemon", "max_concurrency", "on_worker_death", "shared_memory", "start_timeout_s"}

# Arguments of `make_vec` that go to the vector env. All other arguments go to the envs.
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

    `vecenv.mujoco` steps Gymnasium's v5 MuJoCo tasks in C++ and returns the same values as Gymnasium's envs, bit for
    bit. If another package registers an id with a `vector_entry_point` that supports all arguments, this entry point
    builds the vector env, as in `gymnasium.make_vec`. For any other id, `make` builds single envs, even if Gymnasium
    registers the id with a `vector_entry_point`. The logger "vecenv" reports which form was chosen and why.

    Args:
        env_id: An id, "module:id", or a spec, as for `gymnasium.make`; or "module:name" for a class or function that is
            not registered, to which the arguments and the wrappers of `gymnasium.make` also apply. A short-lived
            process imports the module to look up the name, and the workers import it. The calling process imports it
            only if it builds the envs itself.
        num_envs: Number of envs.
        num_workers: Number of worker processes. None: one worker per core, or no workers for MuJoCo tasks in C++ and
            vector envs of other packages, which this process steps. MuJoCo tasks use one thread per core, and each of W
            workers steps them on 1/W of the cores.
        backend: "auto" steps many envs in one call if possible. "python" always builds single envs, as by
            `gymnasium.make`.
        wrappers: Applied to each env in this order, so the first one is innermost. A wrapper is a function of the env,
            or a string as for `NamedWrapper`, whose module is imported by the processes that import the env's module.
        vector_kwargs: Further arguments of `AsyncVectorEnv`.
        **env_kwargs: Arguments of the env.

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id.
        gymnasium.error.Error: If a module cannot be imported or has no such wrapper.
        TypeError: If `wrappers` is a string.
        ValueError: If an argument is out of range, if a string in `wrappers` is malformed, or if `wrappers` or
            `backend="python"` is given for an id that is registered only as a vector env.

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
    vector_kwargs = vector_kwargs or {}
    # Names are looked up first, so that a wrong one fails before any worker starts.
    spec, source = _find(env_id, here=num_workers == 0)
    wrappers = _found(wrappers, here=num_workers == 0)
    if _is_vector_only(spec):
        if wrappers or backend == "python":
            argument = "wrappers" if wrappers else "backend='python'"
            raise ValueError(f"{spec.id} is registered only as a vector env, but {argument} needs single envs: omit it")
        return _make_batched(VectorEntryPoint(source, env_kwargs), spec, num_envs, num_workers, vector_kwargs)
    builder = _builder(spec, source, env_kwargs)
    reason = "" if backend == "python" else why_single_envs(spec, env_kwargs, wrappers)
    level = logging.INFO
    if reason is None:
        try:
            envs = _make_batched(builder, spec, num_envs, num_workers, vector_kwargs)
        except UnsupportedTask as error:
            reason = _reason_in(str(error))
            level = logging.WARNING if isinstance(error, OutdatedPackage) else builder.level
        else:
            _log_once(builder.level, spec.id, builder.chosen)
            return envs
    if reason:
        _log_once(level, spec.id, f"{builder.rejected}: {reason}")
    make_one = functools.partial(_make_env, source, wrappers, env_kwargs)
    env_fns = [make_one] + [functools.partial(_without_stderr, make_one)] * (num_envs - 1)
    envs = AsyncVectorEnv(env_fns, num_workers=num_workers, **vector_kwargs)
    envs.spec = spec
    return envs


def make_single(env_id: str | EnvSpec, /, *, wrappers: Wrappers = (), **env_kwargs: Any) -> gym.Env:
    """Returns one env of the kind that `make` copies, built in the calling process, for example to show a policy.

    Args:
        env_id: As for `make`. An id that is registered only as a vector env gives a vector env with one env, which is
            presented as a single env. An id that also has single envs gives one of these, like `make` with
            `backend="python"`.
        wrappers: As for `make`.
        **env_kwargs: Arguments of the env.

    Raises:
        gymnasium.error.Error: If the env or a wrapper does not exist, or a module cannot be imported.
        TypeError: If `wrappers` is a string.
        ValueError: If a string in `wrappers` is malformed.

    Example:
        >>> import vecenv
        >>> env = vecenv.make_single("CartPole-v1", wrappers=["TimeAwareObservation"], max_episode_steps=100)
        >>> env.observation_space.shape
        (5,)
    """
    spec, source = _find(env_id, here=True)
    wrappers = _found(wrappers, here=True)
    if not _is_vector_only(spec):
        return _make_env(source, wrappers, env_kwargs)
    build = VectorEntryPoint(source, env_kwargs)
    build.num_threads = 1
    return _wrapped(SingleEnv(build(num_envs=1, autoreset_mode=AutoresetMode.NEXT_STEP)), wrappers)


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

    The fork server's imports take half a second, during which the caller can do other work. Nothing happens if the
    system has no fork server, or if `make` with these arguments starts no workers. The id is not looked up if its
    module is not imported yet, because the import may be slow.

    Raises:
        gymnasium.error.NameNotFound: If no env has this id. The message names the nearest id.
        ValueError: If `backend` is unknown.
    """
    _check_backend(backend)
    batched = False
    if not spec_lookup.is_foreign(env_id):
        spec, _ = _find(env_id, here=True)
        in_one_call = backend == "auto" and why_single_envs(spec, env_kwargs, wrappers) is None
        batched = spec.entry_point is None or in_one_call
    if num_workers != 0 and not (batched and num_workers is None):
        start_fork_server()


def register_envs() -> None:
    """Registers "vecenv/ID" for `gymnasium.make_vec`, for every registered id that has no such entry yet.

    `import vecenv` calls this, because Gymnasium 1.0 removed the plugin hook. Call it again for envs that are
    registered later. A slash in an id becomes a dot: "ALE/Pong-v5" is registered as "vecenv/ALE.Pong-v5".
    """
    for spec in list(gym.registry.values()):
        vector_id = f"{NAMESPACE}/{spec.id.replace('/', '.')}"
        if spec.namespace != NAMESPACE and spec.entry_point is not None and vector_id not in gym.registry:
            gym.register(id=vector_id, vector_entry_point=_REGISTERED, kwargs={"env_id": spec.id})


def make_registered(env_id: str, num_envs: int = 1, **arguments: Any) -> AsyncVectorEnv:
    """Returns the vector env for `gymnasium.make_vec("vecenv/ID", num_envs, ...)`.

    Args:
        env_id: The id without "vecenv/".
        num_envs: Number of envs.
        **arguments: Arguments of `make`, of `AsyncVectorEnv`, or of the env.
    """
    vector_kwargs = {name: arguments.pop(name) for name in _VECTOR_ARGUMENTS & set(arguments)}
    return make(env_id, num_envs, vector_kwargs=vector_kwargs, **arguments)


class UnsupportedTask(VecEnvError):
    """Envs that cannot be stepped in one call. `make` builds single envs instead and logs the reason."""


class OutdatedPackage(UnsupportedTask):
    """A MuJoCo task that `vecenv.mujoco` could step if a package were newer."""


class VectorEntryPoint:
    """Builds the vector env of a spec's `vector_entry_point`, for `Batched`.

    Args:
        source: The spec, or "module:id". The module is imported in the process that builds the vector env.
        env_kwargs: As for `gymnasium.make`.

    Attributes:
        num_threads: Passed to the vector env if it is a `MujocoVectorEnv`.
        steps_subsets: Whether the vector env must be able to step a subset of its envs.
    """

    level: ClassVar = logging.WARNING  # the envs may differ from those of `gymnasium.make`
    chosen: ClassVar = (
        "is built from its vector_entry_point, as by gymnasium.make_vec; backend='python' gives the single envs of "
        "gymnasium.make, which may have different spaces and rewards"
    )
    rejected: ClassVar = (
        "is not built from its vector_entry_point, as by gymnasium.make_vec, but from single envs, which may have "
        "different spaces and rewards"
    )

    def __init__(self, source: EnvSpec | str, env_kwargs: dict[str, Any]):
        self._source = source
        self._env_kwargs = env_kwargs
        self.num_threads: int | None = None
        self.steps_subsets = False

    def __call__(self, *, num_envs: int, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env.

        Raises:
            UnsupportedTask: If this vector env does not support the arguments, but the id also has single envs. The
                message gives the reason.
        """
        spec = spec_lookup.load(self._source)
        entry_point = spec.vector_entry_point
        creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        arguments = self._arguments(spec)
        if arguments["max_episode_steps"] is None:
            del arguments["max_episode_steps"]
        if _accepts(creator, "autoreset_mode"):
            arguments.setdefault("autoreset_mode", autoreset_mode)
        # If the creator is a subclass of MujocoVectorEnv, vecenv.mujoco is already imported.
        module = sys.modules.get("vecenv.mujoco")
        if module is not None and isinstance(creator, type) and issubclass(creator, module.MujocoVectorEnv):
            arguments["num_threads"] = self.num_threads
        if spec.entry_point is None:
            return creator(num_envs=num_envs, **arguments)
        try:
            envs: VectorEnv = creator(num_envs=num_envs, **arguments)
        except Exception as error:  # single envs may accept the arguments, or raise their own error
            raise UnsupportedTask(f"{type(error).__name__}: {error}") from error
        mode = envs.metadata.get("autoreset_mode")
        reason = None
        if mode != autoreset_mode:
            reason = f"{type(envs).__name__} does not support autoreset_mode={autoreset_mode.value!r}"
        elif self.steps_subsets and not hasattr(envs, "step_rows"):
            reason = f"on_worker_death='restart' needs step_rows(ids, actions), which {type(envs).__name__} lacks"
        if reason is not None:
            envs.close()
            raise UnsupportedTask(reason)
        return envs

    def renders(self, spec: EnvSpec) -> bool:
        """Returns whether the envs have a render mode."""
        return bool(_render_mode(spec, self._env_kwargs))

    def _arguments(self, spec: EnvSpec) -> dict[str, Any]:
        """Returns the env's arguments and `max_episode_steps`, which is None for no limit."""
        arguments = {**spec.kwargs, **self._env_kwargs}
        limit = self._env_kwargs.get("max_episode_steps")
        limit = spec.max_episode_steps if limit is None else limit
        arguments.pop("disable_env_checker", None)
        return {**arguments, "max_episode_steps": None if limit == -1 else limit}


class EqualForm(VectorEntryPoint):
    """Builds a vector env of this package, whose single envs return the same values."""

    level: ClassVar = logging.INFO
    chosen: ClassVar = "is stepped by a vector env; backend='python' gives single envs with equal results"
    rejected: ClassVar = "is not stepped by a vector env, but by single envs with equal results"


class MujocoTask(VectorEntryPoint):
    """Builds the `vecenv.mujoco` vector env of one of Gymnasium's tasks."""

    level: ClassVar = logging.INFO
    chosen: ClassVar = "is stepped in C++ by vecenv.mujoco; backend='python' gives ordinary envs"
    rejected: ClassVar = "is not stepped in C++ by vecenv.mujoco, but as ordinary envs"

    def __call__(self, *, num_envs: int, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env.

        Raises:
            UnsupportedTask: If vecenv.mujoco cannot step this task with these arguments and the installed packages. The
                message gives the reason.
        """
        try:
            from vecenv.mujoco import TASKS
        except ModuleNotFoundError as error:
            raise UnsupportedTask(str(error)) from error
        except ImportError as error:
            raise OutdatedPackage(str(error)) from error
        spec = spec_lookup.load(self._source)
        name = _mujoco_task_name(spec)
        task: Callable[..., VectorEnv] | None = TASKS.get(f"{name}-v5")
        if task is None:
            raise UnsupportedTask(f"vecenv.mujoco has no {name}")
        try:
            arguments = self._arguments(spec)
            return task(num_envs, num_threads=self.num_threads, autoreset_mode=autoreset_mode, **arguments)
        except Exception as error:  # ordinary envs may accept the arguments, or raise Gymnasium's own error
            raise UnsupportedTask(f"{type(error).__name__}: {error}") from error


def _builder(spec: EnvSpec, source: EnvSpec | str, env_kwargs: dict[str, Any]) -> VectorEntryPoint:
    """Returns the builder of the vector env of an id that also has single envs."""
    if _mujoco_task_name(spec) is not None:
        return MujocoTask(spec, env_kwargs)
    is_ours = _package_of(spec.vector_entry_point) == NAMESPACE
    return (EqualForm if is_ours else VectorEntryPoint)(source, env_kwargs)


def why_single_envs(spec: EnvSpec, env_kwargs: dict[str, Any], wrappers: Wrappers) -> str | None:
    """Returns why these envs cannot be stepped in one call, or None if that may be possible.

    The reason is an empty string, which is not logged, if the id has only single envs.
    """
    if _mujoco_task_name(spec) is None:
        if not _has_foreign_vector_form(spec):
            return ""
        return "wrappers need single envs" if wrappers or spec.additional_wrappers else None
    if wrappers or spec.additional_wrappers:
        return "wrappers need single envs"
    mode = _render_mode(spec, env_kwargs)
    if mode not in _MUJOCO_RENDER_MODES:
        return f"render_mode={mode!r} needs single envs"
    return None


def _find(env_id: str | EnvSpec, *, here: bool) -> tuple[EnvSpec, EnvSpec | str]:
    """Returns the result of `spec_lookup.find`, which for "vecenv/ID" is the result for ID.

    The entry point of "vecenv/ID" is `make_registered`, which takes arguments that are not the env's.
    """
    spec, source = spec_lookup.find(env_id, here=here)
    if spec.vector_entry_point == _REGISTERED and "env_id" in spec.kwargs:
        return spec_lookup.find(spec.kwargs["env_id"], here=here)
    return spec, source


def _found(wrappers: Wrappers, *, here: bool) -> tuple[Wrapper, ...]:
    """Returns wrappers with `NamedWrapper` in place of strings, and checks that these exist."""
    if isinstance(wrappers, str):  # its letters would be taken for names
        raise TypeError(f"wrappers={wrappers!r} is a string: pass a list of wrappers")
    found = tuple(NamedWrapper(wrapper) if isinstance(wrapper, str) else wrapper for wrapper in wrappers)
    check_wrappers([wrapper for wrapper in found if isinstance(wrapper, NamedWrapper)], here=here)
    return found


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: use one of {BACKENDS}")


def _is_vector_only(spec: EnvSpec) -> bool:
    return spec.entry_point is None and spec.vector_entry_point is not None


def _has_foreign_vector_form(spec: EnvSpec) -> bool:
    """Returns whether a package other than Gymnasium provides the vector form of an id that also has single envs.

    Gymnasium's own forms (CartPole, phys2d) draw the random numbers of all envs from one generator. They therefore
    differ from single envs with the same seeds, and results would depend on the number of workers.
    """
    if spec.entry_point is None or spec.vector_entry_point is None:
        return False
    return _package_of(spec.vector_entry_point) != "gymnasium"


def _package_of(entry_point: Any) -> str:
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return module.partition(".")[0]


def _accepts(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function accepts a keyword argument."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of extension modules have no signature
        return True
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _mujoco_task_name(spec: EnvSpec) -> str | None:
    """Returns the name of Gymnasium's MuJoCo task, such as "Hopper", or None for any other env."""
    match = _MUJOCO_ENTRY_POINT.fullmatch(spec.entry_point) if isinstance(spec.entry_point, str) else None
    return match and match[1]


def _render_mode(spec: EnvSpec, env_kwargs: dict[str, Any]) -> str | None:
    return env_kwargs.get("render_mode", spec.kwargs.get("render_mode"))


def _make_batched(
    builder: VectorEntryPoint, spec: EnvSpec, num_envs: int, num_workers: int | None, vector_kwargs: dict[str, Any]
) -> AsyncVectorEnv:
    """Returns an `AsyncVectorEnv` of `Batched` envs: in this process, unless an argument or rendering needs workers."""
    # Envs render in workers, because Mesa's OpenGL crashes (SIGSEGV) in a process that has loaded TensorFlow.
    if num_workers is None and not _WORKER_ARGUMENTS & set(vector_kwargs) and not builder.renders(spec):
        num_workers = 0
    builder.steps_subsets = vector_kwargs.get("on_worker_death") == "restart"
    builder.num_threads = 1 if num_workers is None else max(1, available_cores() // (num_workers or 1))
    envs = AsyncVectorEnv(Batched(builder, num_envs), num_workers=num_workers, **vector_kwargs)
    envs.spec = spec
    return envs


def _reason_in(text: str) -> str:
    """Returns the reason from the text of an UnsupportedTask. If a worker raised it, the text is a traceback."""
    found = re.search(rf"\.(?:{UnsupportedTask.__name__}|{OutdatedPackage.__name__}): (.*)", text)
    return found[1] if found else text


def _log_once(level: int, env_id: str, message: str) -> None:
    if (env_id, message) not in _logged:
        _logged.add((env_id, message))
        _logger.log(level, "%s %s", env_id, message)


def _make_env(source: EnvSpec | str, wrappers: Sequence[Wrapper], env_kwargs: dict[str, Any]) -> gym.Env:
    return _wrapped(gym.make(spec_lookup.load(source), **env_kwargs), wrappers)


def _wrapped(env: gym.Env, wrappers: Sequence[Wrapper]) -> gym.Env:
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def _without_stderr(make_one: Callable[[], gym.Env]) -> gym.Env:
    """Calls `make_one` and discards what native libraries write to stderr.

    `make` wraps all envs except env 0, so that MuJoCo's warnings about a model appear once instead of once per env.
    """
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        return make_one()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
