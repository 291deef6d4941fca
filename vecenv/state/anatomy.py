"""What envs, spaces, functions and other objects are made of, and by which names classes are found."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, NoneType
from typing import Any

import gymnasium as gym

LEFT_OUT = frozenset(
    {"spec", "metadata", "_metadata", "_saved_kwargs", "_cached_spec", "_ezpickle_args", "_ezpickle_kwargs"}
)
"""Attributes of envs and wrappers that say how they were built."""


MISSING = object()  # where there is no value

ATOMS = frozenset({NoneType, bool, int, float, str})
_BRANCHES = frozenset({list, tuple, dict})
_DEEP = 20  # levels of lists in lists, well below what Python's parser can take


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


def branches_of(value: list | dict) -> list[list | dict] | None:
    """Returns a list or dict and those in it, always in the same order.

    None if anything but numbers, text, lists, tuples and dicts is in it, or one of them twice, or they go too deep.
    """
    found: list[Any] = []
    level: list[Any] = [value]
    for _ in range(_DEEP):
        found += [branch for branch in level if type(branch) is not tuple]
        below: list[Any] = []
        for branch in level:
            items = branch.values() if type(branch) is dict else branch
            kinds = set(map(type, items)) - ATOMS
            if not kinds <= _BRANCHES or (type(branch) is dict and not ATOMS.issuperset(map(type, branch))):
                return None
            if kinds:
                below += [item for item in items if type(item) in _BRANCHES]
        if not below:
            return found if len(set(map(id, found))) == len(found) else None
        level = below
    return None


def path_of(value: Any) -> str:
    """Returns `module:qualname` of a class or function; a missing part is "None", as in classes made by SWIG."""
    return f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', getattr(value, '__name__', None))}"


def type_name(value: Any) -> str:
    """Returns the name of a value's class with its module, for messages."""
    return path_of(type(value)).replace(":", ".").removeprefix("None.")


def _package(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


class Names:
    """What the modules of some envs call things.

    Envs of a script reach workers by value, so their module cannot be looked up there; what their methods refer to
    is found through the methods themselves.

    Args:
        layers: An env, with its wrappers.
    """

    def __init__(self, layers: Sequence[Any] = ()):
        self._classes: dict[type, None] = {}
        for layer in layers:
            self._classes.update(dict.fromkeys(c for c in type(layer).__mro__ if c not in (object, gym.Env)))

    def name_of(self, value: Any) -> str | None:
        """Returns the name by which `find` finds this class or function; None if there is none."""
        name = path_of(value)
        return name if self.find(name) is value else None

    def owns(self, name: str) -> bool:
        """Returns whether this name belongs to a package that a class of the envs comes from."""
        return _package(name) in {_package(path_of(cls)) for cls in self._classes}

    def find(self, name: str) -> Any:
        """Returns what has this name, or MISSING."""
        module, _, qualname = name.partition(":")
        for names in self._places(module):
            found: Any = names.get(qualname, MISSING)
            if found is MISSING:
                first, *rest = qualname.split(".")
                found = names.get(first, MISSING)
                for part in rest:
                    found = MISSING if found is MISSING else getattr(found, part, MISSING)
            if found is not MISSING:
                return found
        return MISSING

    def variables(self) -> dict[int, str]:
        """Returns the names of what lies in these classes and in their modules, by id."""
        found = {}
        for cls in self._classes:
            module = path_of(cls).partition(":")[0]
            for names in self._places(module):
                found.update({id(value): f"{module}:{name}" for name, value in names.items()})
        for cls in self._classes:
            own = vars(cls).items()
            found.update({id(value): f"{path_of(cls)}.{name}" for name, value in own})
        return found

    def _places(self, module: str) -> Iterator[Mapping[str, Any]]:
        if module in sys.modules:
            yield vars(sys.modules[module])
        seen = set()
        for cls in self._classes:
            if path_of(cls).partition(":")[0] == module:
                yield {cls.__qualname__: cls}
                for function in vars(cls).values():
                    if isinstance(function, FunctionType) and id(function.__globals__) not in seen:
                        seen.add(id(function.__globals__))
                        yield function.__globals__
