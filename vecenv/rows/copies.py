"""Copies within a process, which make the results of envs independent of the process that steps them.

`copiers` copies what goes to envs. An env that is alone in a worker has its own copies of what its function captures
and of all arguments, because they were pickled. Envs that share a process get such copies from `copiers`.

`copied` copies what comes from envs, and single actions. It runs once per env and step.
"""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np

from vecenv import by_value
from vecenv.rows.checks import NUMBERS

_CONSTANT = NUMBERS | {complex, str, bytes, type(None)}
"""Exact types whose values cannot change."""

_LARGE = 2**20  # from this size in bytes, the copies of an array share the pages that none of them writes to


def copied(value: Any) -> Any:
    """Returns a copy of an info, a frame or an action, which does not change when an env changes its objects.

    An object that cannot be copied is returned itself, where `deepcopy` would raise. `deepcopy` also takes several
    times as long for the usual dicts of numbers and arrays.
    """
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind is dict:
        if _CONSTANT.issuperset(map(type, value.values())):  # the usual info
            return value.copy()
        return {key: copied(item) for key, item in value.items()}
    if kind is np.ndarray and not value.dtype.hasobject:
        return value.copy()
    if kind is list or kind is tuple:
        return kind(map(copied, value))
    try:
        return deepcopy(value)
    except Exception:  # for example a lock, which cannot be pickled for the pipe either
        return value


def copiers(values: Sequence[Any]) -> list[Callable[[], Any]]:
    """Returns a function for each value, which returns a new copy of the value as it is now.

    The copies are those that `pickle` would make. Functions are copied with their closures and defaults, but share
    their globals. Modules, classes, functions that can be imported, cached functions that capture no variables,
    and memory-mapped files (`np.memmap`) are not copied. Values and captured variables that cannot be pickled are
    shared, too.
    """
    pages = _Pages()
    snapshots: dict[int, Callable[[], Any]] = {}
    for value in values:
        if id(value) not in snapshots:
            snapshots[id(value)] = _copier(value, pages)
    pages.sources.clear()
    return [snapshots[id(value)] for value in values]


def _copier(value: Any, pages: _Pages) -> Callable[[], Any]:
    if value is None:  # as the options of most resets
        return lambda: None
    for keeps_variables in (False, True):
        stream = io.BytesIO()
        pickler = _Pickler(stream, pages, keeps_variables=keeps_variables)
        with contextlib.suppress(Exception):
            pickler.dump(value)
            return functools.partial(_load, stream.getvalue(), pickler.kept, pages, pickler.places)
    return lambda: value


def _load(data: bytes, kept: list[Any], pages: _Pages, places: list[slice]) -> Any:
    unpickler = _Unpickler(io.BytesIO(data), buffers=pages.copies(places))
    unpickler.kept = kept
    return unpickler.load()


class _Kept:
    """Marks an object that all copies share."""

    def __init__(self, value: Any):
        self.value = value


class _Pickler(by_value.Pickler):
    """Pickles a value for copies in this process.

    With `keeps_variables`, variables that functions capture are not copied if they cannot be pickled.

    Attributes:
        kept: The objects that all copies share.
        places: Where the pages hold the large arrays.
    """

    def __init__(self, stream: io.BytesIO, pages: _Pages, *, keeps_variables: bool):
        self.kept: list[Any] = []
        self.places = places = list[slice]()

        def is_in_stream(buffer: pickle.PickleBuffer) -> bool:  # not a method, which would be a reference cycle
            data = buffer.raw()
            if data.nbytes < _LARGE or (place := pages.place_of(data)) is None:
                return True
            places.append(place)
            return False

        super().__init__(stream, protocol=5, buffer_callback=is_in_stream)
        self._pages, self._keeps_variables = pages, keeps_variables

    def persistent_id(self, obj: Any) -> int | None:
        """Returns the index in `kept` of an object that all copies share; None for any other object."""
        kind = type(obj)
        kept = kind is _Kept or issubclass(kind, type | ModuleType) or (kind in (str, bytes) and len(obj) >= _LARGE)
        if kind is functools._lru_cache_wrapper:  # a copy would fill its cache again, but may hold what must be copied
            kept = type(obj.__wrapped__) is FunctionType and obj.__wrapped__.__closure__ is None
        # Processes would share the file of a `memmap`, too, which may be larger than the memory. Copies have no file.
        if not (kept or (kind is np.memmap and obj._mmap is not None)):
            return None
        self.kept.append(obj.value if kind is _Kept else obj)
        return len(self.kept) - 1

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if type(obj) is not FunctionType or reduced is NotImplemented:  # pickled by its name
            return reduced
        cells = [(cell, _Kept(held) if self._keeps(held) else held) for cell, held in by_value.filled_cells(obj)]
        state = obj.__defaults__, obj.__kwdefaults__, obj.__dict__, cells
        return _new_function, (_Kept(obj), obj.__closure__), state, None, None, _fill_function

    def _keeps(self, held: Any) -> bool:
        """Returns whether a variable of a function is not copied. Functions are copied, with their own variables."""
        if not self._keeps_variables or type(held) is FunctionType:
            return False
        try:
            _Pickler(io.BytesIO(), self._pages, keeps_variables=False).dump(held)
        except Exception:
            return True
        return False


class _Unpickler(pickle.Unpickler):
    kept: list[Any]

    def persistent_load(self, pid: int) -> Any:
        return self.kept[pid]


def _new_function(like: FunctionType, closure: tuple[CellType, ...] | None) -> FunctionType:
    new = FunctionType(like.__code__, like.__globals__, like.__name__, None, closure)
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(like, name):
            setattr(new, name, getattr(like, name))
    return new


def _fill_function(function: FunctionType, state: tuple) -> None:
    function.__defaults__, function.__kwdefaults__, attributes, cells = state
    function.__dict__.update(attributes)
    by_value.fill(cells)


class _Pages:
    """The data of large arrays, in a file in memory that copies map privately: writing to a page copies this page.

    Otherwise, each of many envs that use one dataset would hold a copy of all of it.

    Attributes:
        sources: The place of the data that was added, and the data, by address and size. Holding the data keeps its
            address from being reused.
    """

    def __init__(self) -> None:
        self.sources: dict[tuple[int, int], tuple[slice, memoryview]] = {}
        self._file: Any = None
        self._size = 0

    def place_of(self, data: memoryview) -> slice | None:
        """Adds some data to the file, unless it is there, and returns its place; None if there can be no such file."""
        key = (np.frombuffer(data, np.uint8).ctypes.data, data.nbytes)
        if key not in self.sources:
            try:
                if self._file is None:
                    self._file = os.fdopen(os.memfd_create("vecenv", os.MFD_CLOEXEC), "r+b")
                    weakref.finalize(self, self._file.close)
                start = -(-self._size // mmap.PAGESIZE) * mmap.PAGESIZE
                self._file.seek(start)
                self._file.write(data)
                self._file.flush()
            except (AttributeError, OSError):  # not Linux, or not enough memory
                return None
            self._size = start + data.nbytes
            self.sources[key] = slice(start, self._size), data
        return self.sources[key][0]

    def copies(self, places: Sequence[slice]) -> list[memoryview]:
        """Returns copies of the data in these places."""
        if not places:
            return []
        low, high = min(place.start for place in places), max(place.stop for place in places)
        try:
            copy: Any = mmap.mmap(self._file.fileno(), high - low, access=mmap.ACCESS_COPY, offset=low)
        except OSError:  # too many files are open, or `ulimit -v`
            copy = bytearray(high - low)
            self._file.seek(low)
            self._file.readinto(copy)
        return [memoryview(copy)[place.start - low : place.stop - low] for place in places]
