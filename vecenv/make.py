"""Makes a vector env from an env id, with the fastest backend that gives Gymnasium's results.

An id that names a module which this process has not imported is resolved by the workers, because an import can have
side effects: dm_control, for example, loads EGL, which crashes a process that has loaded TensorFlow.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from vecenv.resources import available_cores
from vecenv.rows.batched import Batched
from vecenv.tree import nest, pick
from vecenv.vector.async_vector_env import AsyncVectorEnv
from vecenv.workers.launch import start_fork_server

BACKENDS = ("auto", "python")
_GYMNASIUMS = "gymnasium.wrappers"
_REGISTERED = "vecenv.make:make_registered"  # entry point of "vecenv/ID"

Wrapper: TypeAlias = Callable[[gym.Env], gym.Env]
Wrappers: TypeAlias = Sequence[Wrapper | str]

# Gymnasium's own MuJoCo tasks, under any id and with any registered arguments.
_MUJOCO_ENTRY_POINT = re.compile(r"gymnasium\.envs\.mujoco\.\w+_v5:(\w+)Env")
_RENDER_MODES = (None, "rgb_array", "depth_array", "rgbd_tuple")  # of vecenv.mujoco

# AsyncVectorEnv arguments that only have an effect with worker processes.
_WORKER_ARGUMENTS = {
    "context", "daemon", "max_concurrency", "on_worker_death", "shared_memory", "start_timeout_s", "worker_init",
}  # fmt: skip

# Arguments of `make_vec` that go to the vector env. All other arguments go to the envs.
_VECTOR_ARGUMENTS = set(inspect.signature(AsyncVectorEnv.__init__).parameters) - {"self", "env_fns", "num_workers"}

_logger = logging.getLogger("vecenv")
_logged: set[tuple[str, str]] = set()  # each message is logged once per env id
_vector_forms: dict[str, EnvSpec] = {}  # vector envs that workers found for ids of modules not imported here


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
            vector envs of other packages, which this process steps. MuJoCo tasks use one thread per core in all.
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
    vector_kwargs, wrappers = vector_kwargs or {}, _named(wrappers)
    spec, source = _find(env_id, here=num_workers == 0)

    def single_envs(unless_backend: str | None = None) -> AsyncVectorEnv:
        make_one = functools.partial(_make_env, source, wrappers, env_kwargs, unless_backend)
        return AsyncVectorEnv([make_one] * num_envs, num_workers=num_workers, **vector_kwargs)

    if spec is None:
        assert isinstance(source, str)
        try:
            envs = single_envs(unless_backend=backend)
        except OtherForm as error:
            spec = _vector_forms[source] = EnvSpec.from_json(_message_of(error))
        else:
            envs.spec = EnvSpec.from_json(envs.apply(functools.partial(_outline, source), [0])[0])
            return envs
    reason, level = _why_single_envs(spec, backend, wrappers, env_kwargs), logging.INFO
    equal = _package_of(spec.vector_entry_point) == "vecenv"
    form = "stepped in C++" if equal else "built from its vector_entry_point"
    if reason is None:
        if spec.entry_point is None and (wrappers or backend == "python"):
            argument = "wrappers" if wrappers else "backend='python'"
            raise ValueError(f"{spec.id} is registered only as a vector env, but {argument} needs single envs: omit it")
        # Envs render in workers, because Mesa's OpenGL crashes (SIGSEGV) in a process that has loaded TensorFlow.
        here = num_workers is None and not _render_mode(spec, env_kwargs) and not _WORKER_ARGUMENTS & set(vector_kwargs)
        workers = 0 if here else num_workers
        num_threads = 1 if workers is None else max(1, available_cores() // (workers or 1))
        steps_subsets = vector_kwargs.get("on_worker_death") == "restart"
        build = functools.partial(_make_vector_env, source, env_kwargs, num_threads, steps_subsets)
        try:
            envs = AsyncVectorEnv(Batched(build, num_envs), num_workers=workers, **vector_kwargs)
        except OtherForm as error:
            reason, level = _message_of(error), logging.WARNING
        else:
            if spec.entry_point is not None:
                level, results = (logging.INFO, "equal") if equal else (logging.WARNING, "possibly different")
                message = f"is {form}; backend='python' gives single envs with {results} spaces and rewards"
                _log_once(level, spec.id, message)
            envs.spec = spec
            return envs
    if reason:
        _log_once(level, spec.id, f"is not {form}, but consists of single envs: {reason}")
    envs = single_envs()
    envs.spec = spec
    return envs


def make_single(env_id: str | EnvSpec, /, *, wrappers: Wrappers = (), **env_kwargs: Any) -> gym.Env:
    """Returns one env of the kind that `make` copies, built in the calling process, for example to show a policy.

    An id that has single envs gives one of these, like `make` with `backend="python"`. An id that is registered only as
    a vector env gives a vector env with one env, presented as a single env. Arguments and errors are those of `make`.

    Example:
        >>> import vecenv
        >>> env = vecenv.make_single("CartPole-v1", wrappers=["TimeAwareObservation"], max_episode_steps=100)
        >>> env.observation_space.shape
        (5,)
    """
    spec, wrappers = _load(env_id), _named(wrappers)
    if spec.entry_point is not None:
        return _make_env(spec, wrappers, env_kwargs)
    envs = _make_vector_env(spec, env_kwargs, 1, False, num_envs=1, autoreset_mode=AutoresetMode.NEXT_STEP)
    return _wrapped(SingleEnv(envs), wrappers)


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
    with these arguments starts no workers. Errors are those of `make`.
    """
    _check_backend(backend)
    spec, _ = _find(env_id, here=False)
    in_one_call = spec is not None and _why_single_envs(spec, backend, wrappers, env_kwargs) is None
    if num_workers != 0 and not (in_one_call and num_workers is None):
        start_fork_server()


def register_envs() -> None:
    """Registers "vecenv/ID" for `gymnasium.make_vec`, for every registered id that has no such entry yet.

    `import vecenv` calls this, because Gymnasium 1.0 removed the plugin hook. Call it again for envs that are
    registered later. A slash in an id becomes a dot: "ALE/Pong-v5" is registered as "vecenv/ALE.Pong-v5".
    """
    for spec in list(gym.registry.values()):
        vector_id = f"vecenv/{spec.id.replace('/', '.')}"
        if spec.namespace != "vecenv" and spec.entry_point is not None and vector_id not in gym.registry:
            gym.register(id=vector_id, vector_entry_point=_REGISTERED, kwargs={"env_id": spec.id})


def make_registered(env_id: str, num_envs: int = 1, **arguments: Any) -> AsyncVectorEnv:
    """Returns the vector env of "vecenv/ID" for `gymnasium.make_vec`, with arguments of all three functions."""
    vector_kwargs = {name: arguments.pop(name) for name in _VECTOR_ARGUMENTS & set(arguments)}
    return make(env_id, num_envs, vector_kwargs=vector_kwargs, **arguments)


class NamedWrapper:
    """A wrapper named "Wrapper" or "module:Wrapper", optionally followed by ":" and its arguments as a JSON object.

    A name without a module is one of Gymnasium's wrappers. `vecenv.make` also accepts the plain string.

    Args:
        text: For example "TimeAwareObservation", 'FrameStackObservation:{"stack_size": 4}' or "module:Wrapper".

    Attributes:
        module: The wrapper's module. A call imports it.
        name: Name of the wrapper, a class or a function that takes an env.
        kwargs: Arguments of the wrapper. For Gymnasium's wrappers, JSON arrays become tuples, as some of them require.

    Raises:
        ValueError: If the text does not have this form.

    Example:
        >>> import gymnasium as gym
        >>> from vecenv import NamedWrapper
        >>> env = NamedWrapper('FrameStackObservation:{"stack_size": 4}')(gym.make("CartPole-v1"))
        >>> env.observation_space.shape
        (4, 4)
    """

    def __init__(self, text: str):
        named, brace, arguments = text.partition(":{")
        module, _, self.name = named.rpartition(":")
        if not self.name.isidentifier():
            raise ValueError(
                f"{text!r} names no wrapper: write 'Wrapper' for one of Gymnasium's, or 'module:Wrapper', and add its "
                "arguments as JSON: 'Wrapper:{\"size\": 4}'"
            )
        self.text, self.module = text, module or _GYMNASIUMS
        self.kwargs: dict[str, Any] = {}
        if brace:
            try:
                self.kwargs = json.loads("{" + arguments)
            except ValueError as error:
                raise ValueError(
                    f"the arguments of the wrapper {text!r} are not JSON ({error}): write, for example, "
                    f"'{named}:{{\"size\": 4}}'"
                ) from error
        if self.module == _GYMNASIUMS:
            self.kwargs = _with_tuples(self.kwargs)
        # Workers have another `__main__`, so they get what the name refers to in this process.
        self._in_main = getattr(sys.modules["__main__"], self.name, None) if self.module == "__main__" else None

    def __call__(self, env: gym.Env) -> gym.Env:
        """Returns the wrapped env.

        Raises:
            gymnasium.error.Error: If there is no such wrapper. The message names the nearest ones.
        """
        module = import_module(self.module, f"wrapper {self.text!r}")
        wrapper = getattr(module, self.name, self._in_main)
        if not callable(wrapper):
            advice = did_you_mean(self.name, module)
            if self.module == _GYMNASIUMS:
                advice += ' Name a wrapper of another package as "module:Wrapper".'
            raise gym.error.Error(f"wrapper {self.text!r}: {self.module} has no wrapper {self.name!r}.{advice}")
        try:
            return wrapper(env, **self.kwargs)
        except Exception as error:
            error.add_note(f"The wrapper {self.text!r} raised this error.")
            raise

    def __repr__(self) -> str:
        return f"NamedWrapper({self.text!r})"


class OtherForm(Exception):
    """Envs must be built in the other form, single envs or one vector env: the reason, or the vector env's outline."""


class SingleEnv(gym.Env):
    """Presents a vector env that has one env, `vector_env`, as a single env. Infos are empty."""

    def __init__(self, envs: VectorEnv):
        self.vector_env, self.metadata, self.render_mode = envs, envs.metadata, envs.render_mode
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, _ = self.vector_env.reset(seed=seed, options=options)
        return self._first(observations), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = concatenate(self.action_space, [action], create_empty_array(self.action_space, 1))  # type: ignore[arg-type]
        observations, rewards, terminated, truncated, _ = self.vector_env.step(actions)
        return self._first(observations), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        frames = self.vector_env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self.vector_env.close()

    def _first(self, observations: Any) -> Any:
        return nest(self.observation_space, lambda path: pick(observations, path)[0])


def _find(env_id: str | EnvSpec, *, here: bool) -> tuple[EnvSpec | None, str | EnvSpec]:
    """Returns the spec of an id, and what `_load` needs to find it in the processes that build the envs.

    The spec is None if only the workers may import the module of the id, unless this process builds the envs (`here`),
    or the workers have reported a vector env.
    """
    if isinstance(env_id, str) and not here:
        module = env_id.rpartition(":")[0]
        if module and module not in sys.modules and module.partition(".")[0] != "vecenv":
            check_installed(module, f"env id {env_id!r}")
            return _vector_forms.get(env_id), env_id
    spec = _load(env_id)
    return spec, spec


def _load(env_id: str | EnvSpec) -> EnvSpec:
    """Returns the spec of an env, after importing the module of "module:id" in this process.

    A class or function that is not registered gets a spec whose id is "module:name". The spec of "vecenv/ID" is that of
    ID, because the arguments of `make_registered` are not the env's. Gymnasium's MuJoCo tasks get the vector form of
    `vecenv.mujoco`.
    """
    if isinstance(env_id, str):
        where, _, name = env_id.rpartition(":")
        module = import_module(where, f"env id {env_id!r}") if where else None
        if module is not None and name not in gym.registry and (creator := getattr(module, name, None)) is not None:
            return _unregistered(env_id, creator)
        try:
            env_id = gym.spec(name)
        except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as error:
            if module is not None:
                advice = f"The module {where} has no class or function {name} either.{did_you_mean(name, module)}"
            elif "Did you mean" in str(error):
                raise
            else:
                advice = 'If a package registers this id, import it or name its module: "module:id".'
            raise type(error)(f"{error} {advice}") from None
    if env_id.vector_entry_point == _REGISTERED:
        return _load(env_id.kwargs["env_id"])
    if isinstance(env_id.entry_point, str) and (task := _MUJOCO_ENTRY_POINT.fullmatch(env_id.entry_point)):
        return replace(env_id, vector_entry_point=f"vecenv.mujoco:{task[1]}")
    return env_id


def _unregistered(env_id: str, creator: Any) -> EnvSpec:
    """Returns a spec for a class or function that is not registered."""
    if not callable(creator):
        raise gym.error.Error(
            f"env id {env_id!r} names a value of type {type(creator).__name__}: name a registered id, or a class or "
            "function that makes the env"
        )
    if isinstance(creator, type) and issubclass(creator, VectorEnv):
        return EnvSpec(env_id, vector_entry_point=creator)  # type: ignore[arg-type]
    return EnvSpec(env_id, entry_point=creator)


def _outline(env_id: str, _: Any = None) -> str:
    """Returns the JSON text of a spec without its arguments and wrappers, which JSON may not be able to represent."""
    spec = _load(env_id)
    single, vector = (env_id if callable(entry) else entry for entry in (spec.entry_point, spec.vector_entry_point))
    return replace(spec, entry_point=single, vector_entry_point=vector, kwargs={}, additional_wrappers=()).to_json()


def _why_single_envs(spec: EnvSpec, backend: str, wrappers: Wrappers, env_kwargs: dict[str, Any]) -> str | None:
    """Returns why `make` builds single envs, or None if one vector env may step them.

    The reason is "", which is not logged, if the caller chose single envs or the id has no other form. Gymnasium's own
    vector forms (CartPole, phys2d) do not count: they draw the random numbers of all envs from one generator, so
    results would depend on the number of workers.
    """
    if spec.entry_point is None:
        return None
    if backend == "python" or _package_of(spec.vector_entry_point) in ("", "gymnasium"):
        return ""
    if wrappers or spec.additional_wrappers:
        return "wrappers need single envs"
    mode = _render_mode(spec, env_kwargs)
    equal = _package_of(spec.vector_entry_point) == "vecenv"
    return f"render_mode={mode!r} needs single envs" if equal and mode not in _RENDER_MODES else None


def _make_vector_env(
    source: str | EnvSpec,
    env_kwargs: dict[str, Any],
    num_threads: int,
    steps_subsets: bool,
    *,
    num_envs: int,
    autoreset_mode: AutoresetMode,
) -> VectorEnv:
    """Returns the vector env of an id, for `Batched`.

    `num_threads` is for a `MujocoVectorEnv`. With `steps_subsets`, the vector env must define `step_rows`.

    Raises:
        OtherForm: If this vector env does not support the arguments, but the id also has single envs.
    """
    spec = _load(source)
    arguments = {**spec.kwargs, **env_kwargs}
    arguments.pop("disable_env_checker", None)
    limit = arguments.pop("max_episode_steps", None)
    limit = spec.max_episode_steps if limit is None else limit
    if limit not in (None, -1):
        arguments["max_episode_steps"] = limit
    try:
        entry_point: Any = spec.vector_entry_point
        if _package_of(entry_point) == "ale_py":
            entry_point = "vecenv.atari:VectorGame"  # the same env, with the seeds and infos that `Batched` requires
        creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        if _accepts(creator, "autoreset_mode"):
            arguments.setdefault("autoreset_mode", autoreset_mode)
        # If the creator is a subclass of MujocoVectorEnv, vecenv.mujoco is already imported.
        module = sys.modules.get("vecenv.mujoco")
        if module is not None and isinstance(creator, type) and issubclass(creator, module.MujocoVectorEnv):
            arguments["num_threads"] = num_threads
        envs: VectorEnv = creator(num_envs=num_envs, **arguments)
    except Exception as error:  # single envs may accept the arguments, or raise their own error
        if spec.entry_point is None:
            raise
        raise OtherForm(f"{type(error).__name__}: {error}") from error
    reason = None
    if envs.metadata.get("autoreset_mode") != autoreset_mode:
        reason = f"{type(envs).__name__} does not support autoreset_mode={autoreset_mode.value!r}"
    elif steps_subsets and not hasattr(envs, "step_rows"):
        reason = f"on_worker_death='restart' needs step_rows(ids, actions), which {type(envs).__name__} lacks"
    if reason is not None and spec.entry_point is not None:
        envs.close()
        raise OtherForm(reason)
    return envs


def _make_env(
    source: str | EnvSpec, wrappers: Sequence[Wrapper], env_kwargs: dict[str, Any], unless_backend: str | None = None
) -> gym.Env:
    """Returns one env.

    Raises:
        OtherForm: If `make` would build a vector env with `backend=unless_backend`.
    """
    spec = _load(source)
    if unless_backend is not None and _why_single_envs(spec, unless_backend, wrappers, env_kwargs) is None:
        assert isinstance(source, str)
        raise OtherForm(_outline(source))
    return _wrapped(gym.make(spec, **env_kwargs), wrappers)


def _wrapped(env: gym.Env, wrappers: Sequence[Wrapper]) -> gym.Env:
    try:
        for wrapper in wrappers:
            env = wrapper(env)
    except BaseException:
        env.close()
        raise
    return env


def _named(wrappers: Wrappers) -> tuple[Wrapper, ...]:
    """Returns wrappers with `NamedWrapper` in place of strings."""
    if isinstance(wrappers, str):  # its letters would be taken for names
        raise TypeError(f"wrappers={wrappers!r} is a string: pass a list of wrappers")
    return tuple(NamedWrapper(wrapper) if isinstance(wrapper, str) else wrapper for wrapper in wrappers)


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: use one of {BACKENDS}")


def _accepts(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function accepts a keyword argument."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of extension modules have no signature
        return True
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _package_of(entry_point: Any) -> str:
    """Returns the package that defines an entry point, or "" if there is no entry point."""
    module = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    return module.partition(".")[0]


def _render_mode(spec: EnvSpec, env_kwargs: dict[str, Any]) -> str | None:
    return env_kwargs.get("render_mode", spec.kwargs.get("render_mode"))


def _message_of(error: OtherForm) -> str:
    """Returns the message of an error. If a worker raised it, its text is a traceback."""
    found = re.search(rf"{OtherForm.__module__}\.{OtherForm.__name__}: (.*)", str(error))
    return found[1] if found else str(error)


def _log_once(level: int, env_id: str, message: str) -> None:
    if (env_id, message) not in _logged:
        _logged.add((env_id, message))
        _logger.log(level, "%s %s", env_id, message)


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


def _with_tuples(value: Any) -> Any:
    """Returns a JSON value with tuples in place of its lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
