"""`Pickler`: pickles by value the functions and classes that another process cannot import, and keeps what they share.

Functions and classes of scripts and notebooks, and those defined in functions, are pickled by value. This module adds
three things to cloudpickle, without which such an env behaves differently in a worker:

- Functions that share a captured variable still share it: one of them sees what another one assigns.
- A class that the receiving process knows is not changed. cloudpickle would replace its methods and attributes by those
  of the sender, for example when a worker returns an instance of it in an info.
- `functools.cached_property` and `functools.lru_cache` can be used, and tracebacks show the lines of the script.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Container, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, TypeAlias

import cloudpickle
from cloudpickle import cloudpickle as internals  # its registry of classes has no public name

Filled: TypeAlias = "list[tuple[CellType, Any]]"  # cells, and the values of the variables that they hold

_unfinished: set[str] = set()  # identities of classes that are being received


def dumps(value: Any, known: Container[str] = ()) -> bytes:
    """Returns a pickle of a value, which `pickle.loads` reads. `known` is as for `Pickler`."""
    stream = io.BytesIO()
    pickler = Pickler(stream)
    pickler.known = known
    pickler.dump(value)
    return stream.getvalue()


class Pickler(cloudpickle.Pickler):
    """Pickles functions and classes by value if they cannot be imported by their names.

    Attributes:
        known: Identities of classes that the receiver knows for certain. They are not pickled again.
    """

    known: Container[str] = ()

    def reducer_override(self, obj: Any) -> Any:
        """Returns how to pickle an object, as `pickle.Pickler.reducer_override` does."""
        if type(obj) is CellType:  # filled with the functions that use it, because it may hold them
            return CellType, ()
        if type(obj) is CodeType:
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj))
        if type(obj) is functools.cached_property:  # its lock cannot be pickled
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj) is functools._lru_cache_wrapper and self._is_by_value(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if self.known and isinstance(obj, type) and (identity := _identity_of(obj)) in self.known:
            return _known_class, (identity,)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented or len(reduced) < 6:
            return reduced
        make, arguments, state, _, _, set_state = reduced
        if isinstance(obj, FunctionType):
            arguments = (*arguments[:-1], obj.__closure__)  # the cells themselves
            state = (state[0], {**state[1], "__closure__": None})
            return make, arguments, (set_state, state, filled_cells(obj)), None, None, _finish_function
        identity = arguments[-2]
        return _make_class, (identity, make, arguments), (identity, set_state, state), None, None, _finish_class

    @staticmethod
    def _is_by_value(function: Any) -> bool:
        found = internals._lookup_module_and_qualname(function)
        return found is None or internals._is_registered_pickle_by_value(found[0])


def filled_cells(function: FunctionType) -> Filled:
    """Returns the cells of the variables that a function captures, with their values, unless they have none."""
    filled = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            filled.append((cell, cell.cell_contents))
    return filled


def fill(cells: Filled) -> None:
    """Puts the values into the cells."""
    for cell, value in cells:
        cell.cell_contents = value


def identify_classes(is_importable: Callable[[str], bool]) -> None:
    """Gives each class that is pickled by value an identity, by which processes that are forked later know it.

    `is_importable` tells whether other processes can import the module with a given name.
    """
    for cls in _subclasses(object, set()):
        with contextlib.suppress(Exception):  # raised by its metaclass, for example because it is not hashable
            module = str(cls.__module__)
            if module == "__main__" or "<locals>" in cls.__qualname__ or not is_importable(module):
                internals._get_or_create_tracker_id(cls)


def identities() -> frozenset[str]:
    """Returns the identities of the classes that this process has sent by value or received."""
    return frozenset(internals._DYNAMIC_CLASS_TRACKER_BY_ID)


def _identity_of(cls: type) -> str | None:
    try:
        return internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    except TypeError:  # its metaclass makes it unhashable
        return None


def _known_class(identity: str) -> type:
    return internals._DYNAMIC_CLASS_TRACKER_BY_ID[identity]


def _subclasses(cls: type, seen: set[int]) -> Iterator[type]:
    each: type
    for each in type.__subclasses__(cls):
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            yield from _subclasses(each, seen)


def _code(filename: str, make: Callable[..., CodeType], arguments: tuple) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


def _cached(function: Callable, parameters: dict[str, Any]) -> Callable:
    return functools.lru_cache(**parameters)(function)


def _finish_function(function: FunctionType, state: tuple[Callable, Any, Filled]) -> None:
    set_state, own_state, cells = state
    set_state(function, own_state)
    fill(cells)


def _make_class(identity: str, make: Callable[..., type], arguments: tuple) -> type:
    """Returns the class with an identity, which is new and empty if this process does not know it."""
    known = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if known is not None:
        return known
    _unfinished.add(identity)
    return make(*arguments)


def _finish_class(cls: type, state: tuple[str, Callable, Any]) -> None:
    identity, set_state, own_state = state
    if identity in _unfinished:
        set_state(cls, own_state)
        _unfinished.discard(identity)
