"""`Pickler`: pickles functions and classes by value if another process cannot import them; preserves what they share.

Functions and classes of scripts and notebooks, and those defined in functions, are pickled by value. This module adds
three things to cloudpickle. Without them, an env would behave differently in a worker:

- Functions that share a captured variable still share it: each sees what the others assign.
- A class that the receiving process knows is not changed. cloudpickle would replace its methods and attributes with the
  sender's, for example when a worker returns an instance of it in an info.
- `functools.cached_property` and `functools.lru_cache` can be used, and tracebacks show the lines of the script's file.
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

CellValues: TypeAlias = "list[tuple[CellType, Any]]"  # cells, and the values of the variables that they hold

_unfinished: set[str] = set()  # identities of classes that are being received


def dumps(value: Any, known: Container[str] = ()) -> bytes:
    """Returns a pickle of a value, which `pickle.loads` reads. For `known`, see `Pickler`."""
    stream = io.BytesIO()
    Pickler(stream, known).dump(value)
    return stream.getvalue()


class Pickler(cloudpickle.Pickler):
    """Pickles functions and classes by value if they cannot be imported by their names.

    Args:
        stream: Receives the pickle.
        known: Identities of classes that the receiver is certain to know. They are not pickled again.
        **kwargs: Further arguments of `pickle.Pickler`.

    Attributes:
        classes: The classes that were pickled by value.
    """

    def __init__(self, stream: io.BytesIO, known: Container[str] = (), **kwargs: Any):
        super().__init__(stream, **kwargs)
        self.classes: list[type] = []
        self._known = known
        self._captured: set[int] = set()  # the ids of cells that are filled together with a function

    def reducer_override(self, obj: Any) -> Any:
        """Returns how to pickle an object, as `pickle.Pickler.reducer_override` does."""
        if type(obj) is CellType:
            return self._cell(obj)
        if type(obj) is CodeType:
            return _code, (obj.co_filename, *self.dispatch_table[CodeType](obj))
        if type(obj) is functools.cached_property:  # its lock cannot be pickled
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname}
        if type(obj) is functools._lru_cache_wrapper and self._is_by_value(obj):
            own = {name: value for name, value in vars(obj).items() if name not in ("__wrapped__", "cache_parameters")}
            return _cached, (obj.__wrapped__, obj.cache_parameters()), own
        if self._known and isinstance(obj, type) and (identity := identity_of(obj)) in self._known:
            return _known_class, (identity,)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return reduced
        # The tuples below are flat, because each level of nesting counts towards the recursion limit.
        if isinstance(obj, FunctionType):
            make, arguments, state, _, _, set_state = reduced
            cells = filled_cells(obj)
            self._captured.update(map(id, obj.__closure__ or ()))
            state = (set_state, cells, state[0], {**state[1], "__closure__": None})
            return make, (*arguments[:-1], obj.__closure__), state, None, None, _finish_function
        if isinstance(obj, type) and len(reduced) == 6:  # not a built-in class without a name, such as NoneType
            make, arguments, state, _, _, set_state = reduced
            self.classes.append(obj)
            identity = arguments[-2]
            return _make_class, (identity, make, *arguments), (identity, set_state, *state), None, None, _finish_class
        return reduced

    def _cell(self, cell: CellType) -> Any:
        if id(cell) not in self._captured:
            with contextlib.suppress(ValueError):  # the cell is empty
                return CellType, (), (None, {"cell_contents": cell.cell_contents})
        return CellType, ()  # filled after the functions that capture it, because it may hold them

    @staticmethod
    def _is_by_value(function: Any) -> bool:
        # `_should_pickle_by_reference` decides this for functions and classes, but raises for other types.
        found = internals._lookup_module_and_qualname(function)
        return found is None or internals._is_registered_pickle_by_value(found[0])


def filled_cells(function: FunctionType) -> CellValues:
    """Returns the cells that a function captures and their values, without empty cells."""
    filled = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            filled.append((cell, cell.cell_contents))
    return filled


def fill(cells: CellValues) -> None:
    """Fills the cells with their values."""
    for cell, value in cells:
        cell.cell_contents = value


def identity_of(cls: type) -> str | None:
    """Returns the identity of a class that this process has sent by value or received; None for any other class."""
    try:
        return internals._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(cls)
    except TypeError:  # its metaclass makes it unhashable
        return None


def identify_classes(is_importable: Callable[[str], bool]) -> None:
    """Gives each class that would be pickled by value an identity, which processes forked later inherit.

    `is_importable` tells whether other processes can import the module with a given name.
    """
    for cls in _subclasses(object, set()):
        with contextlib.suppress(Exception):  # raised by its metaclass, for example because it is not hashable
            if not (internals._should_pickle_by_reference(cls) and is_importable(str(cls.__module__))):
                internals._get_or_create_tracker_id(cls)


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


def _finish_function(function: FunctionType, state: tuple) -> None:
    set_state, cells, *own_state = state
    set_state(function, tuple(own_state))
    fill(cells)


def _known_class(identity: str) -> type:
    return internals._DYNAMIC_CLASS_TRACKER_BY_ID[identity]


def _make_class(identity: str, make: Callable[..., type], *arguments: Any) -> type:
    """Returns the class with this identity: the one that this process knows, or else a new, empty one."""
    known = internals._DYNAMIC_CLASS_TRACKER_BY_ID.get(identity)
    if known is not None:
        return known
    _unfinished.add(identity)
    return make(*arguments)


def _finish_class(cls: type, state: tuple) -> None:
    identity, set_state, *own_state = state
    if identity in _unfinished:
        set_state(cls, tuple(own_state))
        _unfinished.discard(identity)
