"""Training and evaluation envs, made from an id or from functions, or passed by the user.

The commands import this module before they load TensorFlow, so it imports TensorFlow only in functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

import vecenv
from ppo.config import NORMALIZERS, Config, ConfigError, normalizer_error
from vecenv.tree import enclosing, leaves, name_of, pick
from vecenv.wrappers import ACTION_MASK, ActionMaskObservation

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import AgentRows, ParallelVectorEnv

    VectorEnvs = vecenv.AsyncVectorEnv | vecenv.SyncVectorEnv | ParallelVectorEnv

Envs = vecenv.AsyncVectorEnv | vecenv.SyncVectorEnv
EnvFn = Callable[[], gym.Env]
Wrapper = Callable[[gym.Env], gym.Env]
EnvSource = None | EnvFn | Sequence[EnvFn] | Envs
"""None for `config.env`; a function that makes an env; one function for each env; or a vector env of vecenv."""

MAX_EVALUATION_ENVS = 32  # maximum number of envs in an evaluation, unless more functions make the envs


def vector_options(config: Config) -> dict[str, Any]:
    """Returns the arguments of `vecenv.AsyncVectorEnv` for training envs.

    The engine clips actions: the learner needs the sampled action, and the env needs an action within its bounds.
    """
    from ppo.runtime.startup import load_tensorflow

    load_tensorflow()  # with training's settings and without its log, before `vecenv.ingraph` imports it
    from vecenv.ingraph import slots_for

    return {**evaluation_options(config), "num_slots": slots_for(config.num_steps, 2)}


def evaluation_options(config: Config) -> dict[str, Any]:
    """Returns the arguments of `vecenv.AsyncVectorEnv` for evaluation envs."""
    return {
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "num_slots": 2,
        "observation_mode": "different",  # the networks do not depend on the bounds of observations
        "clip_actions": True,
        "finite_observations": True,
        "infos": False,
        "info_keys": config.info_metrics,
        # `vecenv.make` starts workers for MuJoCo tasks in C++ if this argument is given.
        **({} if config.on_worker_death == "raise" else {"on_worker_death": config.on_worker_death}),
    }


def env_options(config: Config) -> dict[str, Any]:
    """Returns the arguments of `vecenv.make` and `vecenv.make_single` for each env, including its wrappers."""
    masks = [ActionMaskObservation] if config.info_masks else []
    return {**config.env_kwargs, "wrappers": [*config.wrappers, *masks]}


def evaluation_config(config: Config) -> Config:
    """Returns the settings of evaluations and videos, whose envs get `eval_env_kwargs` in addition to `env_kwargs`."""
    return dataclasses.replace(config, env_kwargs={**config.env_kwargs, **config.eval_env_kwargs})


def naming(config: Config, source: EnvSource, name: str | None = None) -> Config:
    """Returns settings whose `env` is no registered id if other envs were passed.

    Otherwise a command would later build an env that the run was not trained on. `env` becomes the name of the run, of
    the function that makes the envs, or "given". With several agents, it is kept.
    """
    check_source(source)
    if source is None or config.is_multi_agent or (":" not in config.env and config.env not in gym.registry):
        return config
    function = getattr(source[0] if isinstance(source, Sequence) and source else source, "__name__", "")
    return dataclasses.replace(
        config, env=(name or "").replace(":", "_") or (function if function.isidentifier() else "given")
    )


def check_source(source: Any) -> None:
    """Raises ConfigError unless a value has one of the forms of `EnvSource`."""
    if isinstance(source, str):
        raise ConfigError(f"envs={source!r} is a string: name the env in the settings, as Config(env={source!r})")
    if not (source is None or callable(source) or isinstance(source, Sequence | gym.vector.VectorEnv)):
        raise ConfigError(
            f"envs={source!r} is neither a function that makes an env, nor a list of such functions, nor a vector env "
            'of vecenv: write, for example, envs=lambda: gym.make("CartPole-v1")'
        )


def training_envs(
    config: Config, source: EnvSource, evaluated: EnvSource = None, *, share: range | None = None
) -> AbstractContextManager[VectorEnvs]:
    """Returns a context manager that makes and closes the training envs. A vector env passed by the user stays open.

    With several agents, it yields a `ParallelVectorEnv`. `evaluated` is what evaluations use; None for `source`.
    `share` holds the numbers of the envs to make, which get the same share of the run's workers; None for all envs of
    the run. Raises ConfigError if the passed envs do not match the config, or there is not enough memory.
    """
    from ppo.footprint import naming_settings

    check_settings(config, source, evaluated)
    share = range(config.num_envs) if share is None else share
    if isinstance(source, Sequence):
        source = source[share.start : share.stop]
    num_envs = len(share)
    if config.num_workers:
        config = dataclasses.replace(config, num_workers=math.ceil(config.num_workers * num_envs / config.num_envs))
    with naming_settings(config):
        return _envs(config, source, num_envs, vector_options(config), trains=True)


def check_settings(config: Config, source: EnvSource, evaluated: EnvSource) -> None:
    """Raises ConfigError if settings would have no effect on the envs that were passed, or need other envs."""
    settings = ["env_kwargs", "eval_env_kwargs", "wrappers"] if source is not None else []
    settings += ["eval_env_kwargs"] if source is None and evaluated is not None else []
    settings += ["info_masks"] if isinstance(source, gym.vector.VectorEnv) else []
    if made := [name for name in settings if getattr(config, name)]:
        raise ConfigError(
            f"{' and '.join(made)} would have no effect on the envs that were passed: apply them in the functions that "
            "make the envs (`vecenv.wrappers.ActionMaskObservation` adds masks)"
        )
    if isinstance(source, Sequence) and len(source) != config.num_envs:
        raise ConfigError(
            f"got {len(source)} functions that make envs, but num_envs is {config.num_envs}: pass one function per env"
        )
    same = evaluated is None or evaluated is source
    if config.eval_interval is not None and same and isinstance(source, gym.vector.VectorEnv):
        raise ConfigError("eval_interval needs separate envs: pass functions that make envs as eval_envs")


def _check_given(config: Config, source: gym.vector.VectorEnv, *, trains: bool) -> None:
    """Raises ConfigError if a vector env passed by the user for training, or only for evaluations, does not match."""
    if not isinstance(source, (vecenv.AsyncVectorEnv, vecenv.SyncVectorEnv)):
        raise ConfigError(
            f"ppo trains on vector envs of vecenv, whose memory it reads in place, but got {source!r}: pass functions "
            "that make the envs instead"
        )
    wanted = {**vector_options(config), "num_envs": config.num_envs}
    names = ["autoreset_mode", "info_keys"] + (["num_envs", "num_slots", "on_worker_death"] if trains else [])
    given = {name: getattr(source, name, None) for name in names if name in wanted}
    needed = {name: wanted[name] for name in given}
    if given != needed:
        raise ConfigError(
            f"the vector env has {given}, but ppo needs {needed}: build it as "
            "vecenv.AsyncVectorEnv(env_fns, **ppo.vector_options(config)), or pass env_fns instead"
        )
    boxes = [leaf for _, leaf in leaves(source.single_action_space) if isinstance(leaf, gym.spaces.Box)]
    floats = [box for box in boxes if np.issubdtype(box.dtype, np.floating)]
    if any(box.is_bounded("below") or box.is_bounded("above") for box in floats):
        raise ConfigError("the vector env does not clip actions: build it with **ppo.vector_options(config)")


def parallel_envs(
    config: Config, source: EnvSource, num_envs: int, options: dict[str, Any], wrap: Wrapper | None = None
) -> AbstractContextManager[ParallelVectorEnv]:
    """Returns a context manager that makes and closes envs with several agents. See `ParallelVectorEnv` for `wrap`.

    Raises ConfigError if PettingZoo is missing, or the groups of agents do not fit `config.policies`.
    """
    try:
        from vecenv.adapters.pettingzoo import ParallelVectorEnv
    except ImportError as error:
        raise ConfigError(str(error)) from error
    if isinstance(source, gym.vector.VectorEnv):
        raise ConfigError("with several agents, ppo makes the vector env: pass functions that make PettingZoo envs")
    options = {name: value for name, value in options.items() if name != "info_keys"}
    if config.num_workers is not None:
        options.setdefault("num_workers", min(config.num_workers, num_envs))
    envs = ParallelVectorEnv(
        functions_of(config, source, num_envs),
        groups="names" if config.policies == "group" else None,
        state=config.global_state,
        info_masks=config.info_masks or None,
        wrap=wrap,
        **options,
    )
    if config.policies == "shared" and len(envs.groups) > 1:
        groups = {name: list(rows.group.agents) for name, rows in envs.groups.items()}
        envs.close()
        raise ConfigError(
            f"the agents of {config.env} have different spaces, so they cannot share a policy: use --policies group. "
            f"The groups are {groups}."
        )
    return contextlib.closing(envs)


def evaluation_envs(
    config: Config, source: EnvSource, episodes: int, *, infos: bool = False
) -> AbstractContextManager[VectorEnvs]:
    """Returns a context manager that makes and closes evaluation envs, or yields a vector env passed by the user.

    With `infos`, the envs that it makes return infos. It makes the smaller of `config.num_envs` and
    `MAX_EVALUATION_ENVS` envs, but at least one for each function, and at most `episodes`. More envs than in training
    might not fit into memory, and some simulators allow only one env per process. Different functions take turns, and
    each makes an env if there are enough episodes.
    """
    num_envs = min(config.num_envs, MAX_EVALUATION_ENVS)
    if functions := distinct(source):
        source, count = functions, len(functions)
        num_envs = max(count, num_envs - num_envs % count)  # each function makes as many envs as any other
    num_envs = min(episodes, num_envs)
    options = {**evaluation_options(config), "infos": infos}
    return _envs(evaluation_config(config), source, num_envs, options, trains=False)


def mask_warning(config: Config, envs: VectorEnvs, infos: dict[str, Any]) -> str | None:
    """Returns a warning if the infos of a reset hold an action mask that no policy would see."""
    acted, seen = envs.single_action_space, envs.single_observation_space
    discrete = any(isinstance(leaf, gym.spaces.Discrete | gym.spaces.MultiDiscrete) for _, leaf in leaves(acted))
    masked = any(path[:1] == (ACTION_MASK,) for path, _ in leaves(seen))
    if config.is_multi_agent or masked or not discrete or ACTION_MASK not in infos:
        return None
    return (
        'infos hold an action mask under "action_mask", which the policy does not see, so it will take masked actions: '
        "set info_masks=True (--info-masks)"
    )


def distinct(source: EnvSource) -> list[EnvFn]:
    """Returns the functions of a source without repetitions, in order; none for `config.env` and a vector env."""
    if isinstance(source, Sequence):
        return list({id(make): make for make in source}.values())
    return [source] if callable(source) else []


def spaces_of(config: Config, envs: VectorEnvs) -> dict[str, tuple[gym.Space, gym.Space]]:
    """Returns the spaces of one agent of each team, with the actions' bounds. The team of a single agent is "".

    The bounds of observations include the bounds of all envs.

    Raises:
        ConfigError: If the observation spaces of the envs differ in anything else, or wrappers normalize with
            statistics of their own.
    """
    teams: Mapping[str, Envs | AgentRows]
    if config.is_multi_agent:
        teams = cast("ParallelVectorEnv", envs).groups
    else:
        single = cast(Envs, envs)
        if not isinstance(single.env_fns, vecenv.Batched):
            for i, found in enumerate(single.apply(_normalizers_of)):
                if found:
                    raise normalizer_error(f"the wrappers of env {i}", found[0])
        teams = {"": single}
    return {name: (_observation_space(rows), rows.env_action_space) for name, rows in teams.items()}


def _observation_space(rows: Envs | AgentRows) -> gym.Space:
    space, batched = rows.single_observation_space, rows.observation_space
    for path, leaf in leaves(space):
        found = pick(batched, path)
        if not isinstance(leaf, gym.spaces.Box) and found != batch_space(leaf, rows.num_envs):
            raise ConfigError(
                f"{name_of('the observation space', path)} must be the same in all envs, but in a batch it is {found}: "
                "wrap the envs so that it is"
            )
    return enclosing(space, batched)


def _normalizers_of(env: Any) -> list[str]:
    """Returns the wrappers of an env that update statistics of their own. It is called in the env's process."""
    return [
        name
        for layer in vecenv.state.layers_of(env)
        for name in NORMALIZERS
        if isinstance(layer, getattr(gym.wrappers, name)) and layer.update_running_mean
    ]


def has_action_masks(env: Any) -> bool:
    """Returns whether an env or a wrapper has the method from which sb3-contrib's MaskablePPO takes masks.

    Runs in the env's process.
    """
    return any(hasattr(type(layer), "action_masks") for layer in vecenv.state.layers_of(env))


def time_limit_of(envs: Envs) -> int:
    """Returns the largest known time limit of the envs, in steps, or 0 if none is known."""
    limits: Sequence[int | None] = [None]
    if not isinstance(envs.env_fns, vecenv.Batched):
        limits = envs.apply(_time_limit)
    else:
        with contextlib.suppress(AttributeError):
            limits = envs.get_attr("max_episode_steps")
    return max(limit or 0 for limit in limits)


def _time_limit(env: Any) -> int | None:
    """Returns the steps of the outermost `TimeLimit` around an env, or None if there is none."""
    while env is not None:  # also through adapters that are not Gymnasium's wrappers
        if isinstance(env, gym.wrappers.TimeLimit):
            return env._max_episode_steps
        env = getattr(env, "env", None)
    return None


def _envs(
    config: Config, source: EnvSource, num_envs: int, options: dict[str, Any], *, trains: bool
) -> AbstractContextManager[VectorEnvs]:
    if config.is_multi_agent:
        return parallel_envs(config, source, num_envs, options)
    if isinstance(source, gym.vector.VectorEnv):
        _check_given(config, source, trains=trains)
        return nullcontext(source)  # Owner: the caller, who closes it
    num_workers = None if config.num_workers is None else min(config.num_workers, num_envs)
    if source is None:
        how: dict[str, Any] = {"backend": config.backend, "num_workers": num_workers, "vector_kwargs": options}
        return vecenv.make(config.env, num_envs, **how, **env_options(config))
    return vecenv.AsyncVectorEnv(functions_of(config, source, num_envs), num_workers=num_workers, **options)


def functions_of(config: Config, source: EnvFn | Sequence[EnvFn] | None, num_envs: int) -> list[EnvFn]:
    """Returns functions that make `num_envs` single envs, wrapped as the settings say. A list is repeated or cut."""
    check_source(source)
    if isinstance(source, Sequence) and not source:
        raise ConfigError("got an empty list instead of functions that make envs: pass at least one")
    if source is None and config.is_multi_agent:
        from vecenv.adapters.pettingzoo import NamedParallelEnv

        return [NamedParallelEnv(config.pettingzoo_name, **config.env_kwargs)] * num_envs
    if source is None:
        return [functools.partial(vecenv.make_single, config.env, **env_options(config))] * num_envs
    functions = [source] * num_envs if callable(source) else [source[i % len(source)] for i in range(num_envs)]
    if config.info_masks and not config.is_multi_agent:
        return [functools.partial(_masked, make) for make in functions]
    return functions


def _masked(make: EnvFn) -> gym.Env:
    env = make()
    try:
        return ActionMaskObservation(env)
    except BaseException:
        env.close()
        raise
