"""Packs plain values as JSON values and arrays, which hold no code; see `vecenv.state`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy as np
from numpy.random import MT19937, PCG64, PCG64DXSM, SFC64, Generator, Philox, SeedSequence

from vecenv.errors import NotRestorable

ARRAY_KINDS = "biufcSUMm"
"""The kinds of dtypes that a state may hold."""

_BIT_GENERATORS = {cls.__name__: cls for cls in (MT19937, PCG64, PCG64DXSM, Philox, SFC64)}


def pack(value: Any, where: str) -> Any:
    """Returns a packed copy of a plain value. Any other value raises NotRestorable, which calls it `where`."""
    cls = type(value)
    if cls in (NoneType, bool, int, float, str):
        return value
    if cls in (list, tuple, deque):
        items = [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if cls is list else {"tuple": items} if cls is tuple else {"deque": [items, value.maxlen]}
    if cls is dict:
        return {"dict": [[pack(key, where), pack(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    if cls is bytes:
        return {"bytes": value.hex()}
    if cls is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, np.generic) and value.dtype.kind in ARRAY_KINDS:
        return {"scalar": np.array(value)}
    if cls is np.ndarray and value.dtype.kind in ARRAY_KINDS:
        return np.array(value, order="K")
    bits: Any = value.bit_generator if cls is Generator else None
    if type(bits) in _BIT_GENERATORS.values() and type(bits.seed_seq) is SeedSequence:
        return {"Generator": [type(bits).__name__, pack(bits.state, where), pack(bits.seed_seq.state, where)]}
    raise NotRestorable(
        f"{where} is a {kind_of(value)}, which a state cannot hold: it may hold numbers, strings, numpy arrays and "
        "generators, and lists, tuples, dicts and deques of these. Return such values from get_state() (see "
        "docs/engine.md)."
    )


def unpack(value: Any) -> Any:
    """Returns the plain value that was packed, as a copy."""
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return _UNPACK[kind](content)
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return value.copy("K") if isinstance(value, np.ndarray) else value


def _generator(name: str, state: Any, seed: dict[str, Any]) -> Generator:
    bits = _BIT_GENERATORS[name](SeedSequence(**seed))
    bits.state = state
    return Generator(bits)


_UNPACK: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(unpack(items)),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "scalar": lambda array: array[()],
    "deque": lambda parts: deque(unpack(parts[0]), parts[1]),
    "dict": lambda items: {unpack(key): unpack(item) for key, item in items},
    "Generator": lambda parts: _generator(*unpack(parts)),
}


def kind_of(value: Any) -> str:
    """Returns the type of a value, for messages."""
    return type(value).__qualname__ + (f" of {value.dtype}" if isinstance(value, np.ndarray) else "")
