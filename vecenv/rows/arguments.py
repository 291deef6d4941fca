"""Checks of constructor and method arguments, as far as they say the same for all vector envs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from vecenv.rows.batch_rows import Batched

Seeds = int | Sequence[int | None] | None


def check_env_fns(env_fns: Sequence[Callable[[], gym.Env]] | Batched) -> list[Callable[[], gym.Env]] | Batched:
    """Returns the functions as a list, or raises if there are none or one cannot be called."""
    if isinstance(env_fns, Batched):
        return env_fns
    env_fns = list(env_fns)
    if not env_fns:
        raise ValueError("env_fns is empty: num_envs must be 1 or more")
    for i, env_fn in enumerate(env_fns):
        if not callable(env_fn):
            raise TypeError(
                f"env_fns[{i}] is {env_fn!r}, which is not a function: write `lambda: {type(env_fn).__name__}(...)`"
            )
    return env_fns


def check_gymnasium_arguments(shared_memory: Any, worker: Any, max_concurrency: Any) -> None:
    """Raises if an argument of Gymnasium's AsyncVectorEnv has a value that cannot be used here."""
    if not isinstance(shared_memory, bool | np.bool_ | None):
        raise TypeError(
            f"shared_memory={shared_memory!r} is neither True, False nor None. As in Gymnasium it is the second "
            "argument; num_workers is given by name: AsyncVectorEnv(env_fns, num_workers=4)"
        )
    if worker is not None:
        raise ValueError(
            "worker= is not supported: a worker of vecenv steps many envs, and a function written for Gymnasium's "
            "pipes and processes cannot. To change what an env does, wrap it in env_fns; to change what happens at "
            "the end of an episode, use autoreset_mode; to step many envs in one call, pass a "
            "vecenv.Batched."
        )
    if max_concurrency is not None:
        if not isinstance(max_concurrency, (int, np.integer)):
            raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
        if max_concurrency < 1:
            raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")


def check_worker_arguments(num_workers: int | None, num_groups: int = 1, **given: Any) -> None:
    """Raises if what is said about workers cannot be, or if there are none, or about groups where there are workers."""
    choice = given["on_worker_death"]
    if choice not in ("raise", "restart"):
        raise ValueError(f"on_worker_death={choice!r}: use 'raise' or 'restart'")
    for name, value in given.items():
        if num_workers == 0 and value not in ("raise", None):
            raise ValueError(f"{name}={value!r} is about worker processes, and with num_workers=0 there are none")
    if num_groups != 1 and num_workers != 0:
        raise ValueError(f"num_groups={num_groups} is about envs that this process steps: it needs num_workers=0")


def per_env(values: Any, num_envs: int) -> list[Any]:
    """Returns one value for each env, as Gymnasium's `set_attr` reads its argument."""
    if not isinstance(values, (list, tuple)):
        return [values] * num_envs
    if len(values) != num_envs:
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {num_envs} environments."
        )
    return list(values)


def seed_of_each(seed: Seeds, num_envs: int) -> list[int | None]:
    """Returns one seed per env: as given, or `seed + i`."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    return list(seed)


def split_reset_mask(options: dict[str, Any] | None, num_envs: int) -> tuple[dict[str, Any] | None, np.ndarray | None]:
    """Splits `options` into those of the envs and the mask of envs to reset; changes nothing in it."""
    if options is None or "reset_mask" not in options:
        return options, None
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return {key: value for key, value in options.items() if key != "reset_mask"}, mask
