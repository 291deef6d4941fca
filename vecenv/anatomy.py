"""anatomy.py: what envs, spaces, functions and other objects are made of, as far as their state is concerned."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

import gymnasium as gym

LEFT_OUT = frozenset(
    {"spec", "metadata", "_metadata", "_saved_kwargs", "_cached_spec", "_ezpickle_args", "_ezpickle_kwargs"}
)
"""Attributes of envs and wrappers that say how they were built."""


class _Plain:
    """Has the size of every object of a class that is written in Python and has no slots."""


def is_plain_object(value: Any) -> bool:
    """Returns whether an object can be made without its constructor, of what lies in its `__dict__`."""
    return has_only_dict(value) and type(value).__new__ is object.__new__


def has_only_dict(value: Any) -> bool:
    """Returns whether an object has a `__dict__` and no place for anything else, such as slots."""
    cls = type(value)
    same_size = (cls.__basicsize__, cls.__itemsize__) == (_Plain.__basicsize__, _Plain.__itemsize__)
    return same_size and isinstance(getattr(value, "__dict__", None), dict)


def layers_of(env: Any) -> list[Any]:
    """Returns an env's wrappers, the outermost first, and at last the env itself."""
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    return layers


def has_protocol(layer: Any) -> bool:
    """Returns whether the class defines `get_state()` and `set_state(state)`, with these arguments."""
    # Not of the instance: a wrapper that hands attributes of its env on has no state of its own in them.
    if not all(callable(getattr(type(layer), name, None)) for name in ("get_state", "set_state")):
        return False
    try:
        inspect.signature(layer.get_state).bind()
        inspect.signature(layer.set_state).bind({})
    except (TypeError, ValueError):  # such as MujocoEnv.set_state(qpos, qvel)
        return False
    return True


def spaces_in(space: gym.Space) -> list[gym.Space]:
    """Returns a space and all spaces in it, always in the same order."""
    found = [space]
    for value in vars(space).values():
        children: Iterable[Any] = value.values() if isinstance(value, dict) else value
        children = children if isinstance(value, (dict, list, tuple)) else [value]
        found += [inner for child in children if isinstance(child, gym.Space) for inner in spaces_in(child)]
    return found


def text_of(space: gym.Space) -> str:
    """Returns what tells a space from others, as far as its `repr` does."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(space))  # of a space of one's own


def fingerprint(function: FunctionType) -> str:
    """Returns what tells a function from others that bear its name."""

    def of(code: CodeType) -> list[Any]:
        constants = [of(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts if type(c) is not frozenset]
        return [code.co_name, code.co_firstlineno, code.co_code.hex(), code.co_names, constants]

    return f"{function.__qualname__} {hashlib.sha256(repr(of(function.__code__)).encode()).hexdigest()[:16]}"


def order_is_certain(items: frozenset) -> bool:
    """Returns whether another process would iterate over the same items in the same order."""

    def has_own_hash(item: Any) -> bool:  # which does not differ between processes
        return all(map(has_own_hash, item)) if type(item) is tuple else type(item) in (bool, int, float)

    return len(items) < 2 or (all(map(has_own_hash, items)) and list(frozenset(list(items))) == list(items))
