"""The vector envs that a run trains on and is evaluated on, whatever the user gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

import vecenv
from ppo.config import Config, ConfigError
from ppo.footprint import telling_what_to_lower
from ppo.halves import NEEDED_THREADS, num_loops, wants_halves
from vecenv.ingraph import slots_for

Envs = vecenv.AsyncVectorEnv | vecenv.SyncVectorEnv
EnvFn = Callable[[], gym.Env]
EnvSource = None | EnvFn | Sequence[EnvFn] | Envs
"""None for `config.env`; a function that makes an env; one function for each env; or a vector env of this package."""


def vector_options(config: Config) -> dict[str, Any]:
    """Returns the arguments with which `vecenv.AsyncVectorEnv` makes envs to train on.

    The engine clips actions: the learner needs the one that was sampled, the env one within its bounds.
    """
    # While one rollout is learnt from and the next is collected, the first observations of a third are written.
    return _options(slots_for(config.num_steps, 3 if config.overlap else 2))


def training_envs(config: Config, source: EnvSource) -> AbstractContextManager[Envs]:
    """Makes the envs of a run, with memory for their rollouts, as a context.

    Raises:
        ConfigError: If the envs that were given do not fit the config, or memory does not suffice.
    """
    if isinstance(source, Sequence) and len(source) != config.num_envs:
        raise ConfigError(f"there are {len(source)} functions that make envs, but num_envs is {config.num_envs}")
    in_shares = isinstance(source, gym.vector.VectorEnv) and len(getattr(source, "groups", ())) > 1
    if config.halves and source is not None and not in_shares:
        raise ConfigError(
            "halves=True is for the env that is named: build a vector env with num_workers=0, num_groups=2"
        )
    if in_shares and num_loops() < NEEDED_THREADS:
        raise ConfigError(f"the vector env has groups, but {_ONE_LOOP}")
    with telling_what_to_lower(config):
        if source is None and wants_halves(config):
            envs = _in_halves(config)
            if envs is not None:
                return envs
        if not isinstance(source, gym.vector.VectorEnv):
            return _make(config, source, config.num_envs, vector_options(config))
    if not isinstance(source, (vecenv.AsyncVectorEnv, vecenv.SyncVectorEnv)):
        raise ConfigError(
            f"ppo trains on vector envs of vecenv, whose memory it reads in place, but got {source!r}: give the "
            "functions that make the envs"
        )
    if source.num_envs != config.num_envs:
        raise ConfigError(f"the vector env has {source.num_envs} envs, but num_envs is {config.num_envs}")
    wanted = vector_options(config)
    given = {"autoreset_mode": source.autoreset_mode, "num_slots": source.num_slots}
    if any(given[name] != wanted[name] for name in given):
        raise ConfigError(
            f"the vector env has {given}, but training needs { ({name: wanted[name] for name in given}) }: build it as "
            "vecenv.AsyncVectorEnv(env_fns, **ppo.vector_options(config)), or give the functions alone"
        )
    acted = source.single_action_space
    if isinstance(acted, gym.spaces.Box) and acted.is_bounded("below") | acted.is_bounded("above"):
        raise ConfigError("the vector env does not clip actions: build it with **ppo.vector_options(config)")
    return nullcontext(source)  # Owner: whoever made it closes it


def _in_halves(config: Config) -> Envs | None:
    """Makes envs whose two halves are stepped apart; returns None if that cannot be, and was not asked for.

    Raises:
        ConfigError: If it was asked for.
    """
    if num_loops() >= NEEDED_THREADS:
        try:
            return _make(config, None, config.num_envs, {**vector_options(config), "num_groups": 2})
        except ValueError as error:
            if config.halves:
                raise ConfigError(f"halves={config.halves}: {error}") from error
    elif config.halves:
        raise ConfigError(f"halves={config.halves}, but {_ONE_LOOP}")
    return None


_ONE_LOOP = f"TensorFlow has one thread for loops: set TF_NUM_INTEROP_THREADS={NEEDED_THREADS} before it is imported"


def evaluation_envs(config: Config, source: EnvSource, num_envs: int) -> AbstractContextManager[Envs]:
    """Makes separate envs of the same kind, as a context; of a vector env that was given, itself."""
    if isinstance(source, gym.vector.VectorEnv):
        return nullcontext(source)
    return _make(config, source, num_envs, evaluation_options())


def evaluation_options() -> dict[str, Any]:
    """Returns the arguments with which `vecenv.AsyncVectorEnv` makes envs to evaluate on."""
    return _options(2)


def sentence_of(error: Exception) -> str:
    """Returns an error as one sentence; for an `EnvError`, whose text is a traceback, the line with the exception."""
    if not isinstance(error, vecenv.VecEnvError):
        return f"{type(error).__name__}: {error}"
    return str(error).split("\nraised by env")[0].strip().splitlines()[-1]


def _options(num_slots: int) -> dict[str, Any]:
    return {
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "num_slots": num_slots,
        "clip_actions": True,
        "float32_observations": True,
        "infos": False,
    }


def _make(
    config: Config, source: EnvFn | Sequence[EnvFn] | None, num_envs: int, options: dict[str, Any]
) -> vecenv.AsyncVectorEnv:
    num_workers = None if config.num_workers is None else min(config.num_workers, num_envs)
    if source is None:
        return vecenv.make(config.env, num_envs, backend=config.backend, num_workers=num_workers, vector_kwargs=options)
    if callable(source):
        source = [source] * num_envs
    source = list(source)[:num_envs]
    num_workers = None if num_workers is None else min(num_workers, len(source))
    return vecenv.AsyncVectorEnv(source, num_workers=num_workers, **options)
