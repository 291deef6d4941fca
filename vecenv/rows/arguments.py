"""Checks and converts the arguments that all vector envs have in common."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.rows.batched import ADVICE
from vecenv.rows.episode_infos import parse

Seeds = int | Sequence[int | None] | None


def check_functions(env_fns: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Returns the functions as a list. Raises ValueError if there are none, and TypeError if one is not callable."""
    if not isinstance(env_fns, Iterable) or isinstance(env_fns, str):
        raise TypeError(
            f"env_fns={env_fns!r} is not a list: for an id, call vecenv.make, or pass a list with one function per "
            "env, such as [make_env] * num_envs"
        )
    env_fns = list(env_fns)
    if not env_fns:
        raise ValueError("env_fns is empty: num_envs must be 1 or more")
    for i, env_fn in enumerate(env_fns):
        if not callable(env_fn):
            env_id = env_fn if isinstance(env_fn, str) else getattr(getattr(env_fn, "spec", None), "id", None)
            make = f"gymnasium.make({env_id!r})" if env_id else f"{type(env_fn).__name__}(...)"
            raise TypeError(f"env_fns[{i}] is {env_fn!r}, which is not a function: write `lambda: {make}`")
    return env_fns


def autoreset_mode_of(mode: str | AutoresetMode) -> AutoresetMode:
    """Returns the mode that a member, its value or its name stands for. Raises ValueError if there is none."""
    for member in AutoresetMode:
        if mode in (member, member.value, member.name):
            return member
    raise ValueError(f"autoreset_mode={mode!r} is unknown: use one of {[member.value for member in AutoresetMode]}")


def check_info_keys(info_keys: Sequence[str]) -> tuple[str, ...]:
    """Returns the keys as a tuple. Raises TypeError or ValueError if they are not distinct, non-empty strings."""
    if isinstance(info_keys, str) or not all(isinstance(key, str) for key in info_keys):
        raise TypeError(f"info_keys={info_keys!r} must be a sequence of strings, such as ('is_success',)")
    if "" in [parse(name)[0] for name in info_keys] or len(set(info_keys)) < len(info_keys):
        raise ValueError(f"info_keys={tuple(info_keys)!r} has an empty or a repeated key: remove it")
    return tuple(info_keys)


def per_env(values: Any, num_envs: int) -> list[Any]:
    """Returns one value per env: the elements of a list or tuple, or any other value repeated for every env."""
    if not isinstance(values, (list, tuple)):
        return [values] * num_envs
    if len(values) != num_envs:
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {num_envs} environments."
        )
    return list(values)


def check_equal(name: str, values: Sequence[Any]) -> None:
    """Raises ValueError if the values of an attribute differ, although a `Batched` has one for all its envs."""
    if any(value is not values[0] and not np.all(value == values[0]) for value in values):
        raise ValueError(f"{name!r} is one attribute of a vector env for all its envs: pass equal values. {ADVICE}")


def seed_of_each(seed: Seeds, num_envs: int) -> list[int | None]:
    """Returns one seed per env: None, `seed + i`, or the elements of a sequence."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    return [None if one is None else operator.index(one) for one in seed]


def split_reset_mask(options: dict[str, Any] | None, num_envs: int) -> tuple[dict[str, Any] | None, np.ndarray | None]:
    """Returns the options without `reset_mask`, and the mask `bool[N]` or None. Does not change `options`."""
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
    # Owner: the copy belongs to the reset. The caller may change its mask before `reset_wait`.
    return {key: value for key, value in options.items() if key != "reset_mask"}, mask.copy()
