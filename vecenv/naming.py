"""naming.py: finds classes, functions and constants of loaded modules by name, without importing anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import gymnasium as gym

MISSING = object()  # where there is no value


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
        name = (
            f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', getattr(value, '__name__', None))}"
        )
        return name if self.find(name) is value else None

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

    def constants(self) -> dict[int, str]:
        """Returns the names of what lies in these classes and in their modules, by id."""
        found = {}
        for cls in self._classes:
            for names in self._places(cls.__module__):
                found.update({id(value): f"{cls.__module__}:{name}" for name, value in names.items()})
        for cls in self._classes:
            names = vars(cls).items()
            found.update({id(value): f"{cls.__module__}:{cls.__qualname__}.{name}" for name, value in names})
        return found

    def _places(self, module: str) -> Iterator[Mapping[str, Any]]:
        if module in sys.modules:
            yield vars(sys.modules[module])
        seen = set()
        for cls in self._classes:
            if cls.__module__ == module:
                yield {cls.__qualname__: cls}
                for function in vars(cls).values():
                    if isinstance(function, FunctionType) and id(function.__globals__) not in seen:
                        seen.add(id(function.__globals__))
                        yield function.__globals__
