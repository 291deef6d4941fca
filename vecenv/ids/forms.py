"""Builds the envs of an id in one of its two forms: single envs, or one vector env that steps all envs in one call.

A form is known for certain only where it is built, which may be in a worker. If that turns out to be the wrong form,
the builder raises an `OtherForm`, which reaches the caller of `vecenv.make` unchanged, even from a worker.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.errors import OtherForm
from vecenv.ids.named_wrapper import Wrapper
from vecenv.ids.specs import arguments_of, is_ours, load_outline, load_spec, package_of

_RENDER_MODES = (None, "rgb_array", "depth_array", "rgbd_tuple")  # in which vecenv.mujoco renders only when asked to


class SingleEnvsNeeded(OtherForm):
    """The vector env of an id does not support the arguments, for this reason, but the id also has single envs."""


class VectorEnvFound(OtherForm):
    """An id that was to be built as single envs has a vector env, whose outline is `spec`."""

    def __init__(self, spec: EnvSpec):
        super().__init__(spec)
        self.spec = spec


class NoSingleEnvs(gym.error.Error, ValueError):
    """An id is registered only as a vector env, but an argument of `vecenv.make` needs single envs."""


def why_single_envs(
    spec: EnvSpec, backend: str, wrappers: Sequence[Wrapper | str], env_kwargs: dict[str, Any]
) -> str | None:
    """Returns why `make` builds single envs, or None if one vector env may step them.

    The reason is "", which is not logged, if the caller chose single envs or the id has no other form. Gymnasium's own
    vector forms (CartPole, phys2d) do not count: they draw the random numbers of all envs from one generator, so
    results would depend on the number of workers.
    """
    if spec.entry_point is None:
        return None
    if backend == "python" or package_of(spec.vector_entry_point) in ("", "gymnasium"):
        return ""
    if wrappers or spec.additional_wrappers:
        return "wrappers need single envs"
    mode = render_mode_of(spec, env_kwargs)
    return f"render_mode={mode!r} needs single envs" if is_ours(spec) and mode not in _RENDER_MODES else None


def render_mode_of(spec: EnvSpec, env_kwargs: dict[str, Any]) -> str | None:
    """Returns the render mode of the envs that a spec makes with these arguments."""
    return env_kwargs.get("render_mode", spec.kwargs.get("render_mode"))


def make_env(
    source: str | EnvSpec, wrappers: Sequence[Wrapper], env_kwargs: dict[str, Any], unless_backend: str | None = None
) -> gym.Env:
    """Returns one env.

    Raises:
        VectorEnvFound: If `make` would build a vector env with `backend=unless_backend`.
    """
    spec = load_spec(source)
    if unless_backend is not None and why_single_envs(spec, unless_backend, wrappers, env_kwargs) is None:
        assert isinstance(source, str)
        raise VectorEnvFound(load_outline(source))
    return wrapped(gym.make(spec, **env_kwargs), wrappers)


def wrapped(env: gym.Env, wrappers: Sequence[Wrapper]) -> gym.Env:
    """Returns the env in these wrappers, the first one innermost. Closes the env if a wrapper raises."""
    try:
        for wrapper in wrappers:
            env = wrapper(env)
    except BaseException:
        env.close()
        raise
    return env


def make_vector_env(
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
        SingleEnvsNeeded: If this vector env does not support the arguments, but the id also has single envs.
    """
    spec = load_spec(source)
    arguments, limit = arguments_of(spec, env_kwargs)
    if limit is not None:
        arguments["max_episode_steps"] = limit
    try:
        entry_point: Any = spec.vector_entry_point
        if package_of(entry_point) == "ale_py":
            entry_point = "vecenv.atari:VectorGame"  # the same env, with the seeds and infos that `Batched` requires
        creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
        if _accepts(creator, "autoreset_mode"):
            arguments.setdefault("autoreset_mode", autoreset_mode)
        # If the creator is a subclass of MujocoVectorEnv, vecenv.mujoco is already imported.
        module = sys.modules.get("vecenv.mujoco")
        if module is not None and isinstance(creator, type) and issubclass(creator, module.MujocoVectorEnv):
            arguments["num_threads"] = num_threads
        envs: VectorEnv = _called(creator, num_envs=num_envs, **arguments)
    except Exception as error:  # single envs may accept the arguments, or raise their own error
        if spec.entry_point is None:
            raise
        raise SingleEnvsNeeded(f"{type(error).__name__}: {error}") from error
    reason = None
    if envs.metadata.get("autoreset_mode") != autoreset_mode:
        reason = f"{type(envs).__name__} does not support autoreset_mode={autoreset_mode.value!r}"
    elif steps_subsets and not hasattr(envs, "step_rows"):
        reason = f"on_worker_death='restart' needs step_rows(ids, actions), which {type(envs).__name__} lacks"
    if reason is not None and spec.entry_point is not None:
        envs.close()
        raise SingleEnvsNeeded(reason)
    return envs


def _called(creator: Callable[..., Any], **arguments: Any) -> Any:
    """Calls a creator. If its signature does not fit, adds the names of the arguments to the error."""
    try:
        return creator(**arguments)
    except TypeError as error:
        with contextlib.suppress(ValueError):  # some functions of extension modules have no signature
            try:
                inspect.signature(creator).bind(**arguments)
            except TypeError:
                error.add_note(f"vecenv passed {', '.join(arguments)}.")
        raise


def _accepts(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function accepts a keyword argument."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of extension modules have no signature
        return True
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
