"""capture.py: Captures: takes the state of envs as plain values: what lies in them and in their wrappers.

A value of one of PLAIN stands for itself, a tuple for a tuple, and a dict with "kind" for anything else: a node. What
can change has a number, "id", and where it is met again, {"kind": "ref", "id": ...}: so what was one object before is
one afterwards. What could be put back only nearly, or might be, is refused. `restore` is the way back.
"""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import logging
import random
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from vecenv.anatomy import (
    LEFT_OUT,
    fingerprint,
    has_only_dict,
    has_protocol,
    is_plain_object,
    layers_of,
    order_is_certain,
    spaces_in,
    text_of,
)
from vecenv.errors import NotRestorable
from vecenv.naming import Names
from vecenv.regions import Region, copy_of, hidden_memory, overlapping

PLAIN = (NoneType, bool, int, float, str)
ARRAY_KINDS = "biufcSUMm"
NAMED = (FunctionType, BuiltinFunctionType, type, np.ufunc)
BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
ADVICE = "Define get_state() and set_state(state) on {}, see docs/engine.md, or do without an exact restore."


class Captures:
    """Takes the state of one env after the other, and then of what several of them share."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, dict[str, Any], int]] = {}
        self._regions: list[tuple[int, Region]] = []
        self._num_envs = 0

    def add(self, env: Any) -> dict[str, Any]:
        """Returns the state of an env and its wrappers.

        Raises:
            NotRestorable: If a part of it cannot be put back exactly.
        """
        capture = _Capture(env)
        state = capture.env()
        for key, (value, node) in capture.nodes.items():
            if key in self._owners:  # it must be the same object for all of them afterwards as well
                for shared in (node, self._owners[key][1]):
                    shared.setdefault("shared", "")
            self._owners.setdefault(key, (value, node, self._num_envs))
        self._regions += [(self._num_envs, region) for region in capture.regions]
        self._num_envs += 1
        return state

    def check(self) -> None:
        """Raises NotRestorable if arrays of different envs overlap, without being the same."""
        for group in overlapping([region for _, region in self._regions]):
            arrays = {id(region.array) for region in group}
            envs = {env for env, region in self._regions if id(region.array) in arrays}
            if len(arrays) > 1 and len(envs) > 1:
                raise NotRestorable(
                    f"{group[0].where} of one env is memory of which other envs of its process have other parts "
                    f"({', '.join(sorted({region.where for region in group}))}), so it cannot be put back for each "
                    "of them: give each env a copy of its own."
                )


class _Capture:
    """Takes the state of one env."""

    def __init__(self, env: Any):
        self.layers = layers_of(env)
        self.nodes: dict[int, tuple[Any, dict[str, Any]]] = {}  # with the objects: a number is theirs while they live
        self.regions: list[Region] = []
        self._names = Names(self.layers)
        self._constants = self._names.constants()
        self._numbers = {id(layer): i for i, layer in enumerate(self.layers)}
        self._open: set[int] = set()  # tuples that are being taken
        self._within = 0  # how many constants of a module or class are being taken
        opaque = [layer for layer in self.layers if has_protocol(layer)]
        self._hidden = {
            id(value): layer
            for layer in opaque
            for key, value in vars(layer).items()
            if key != "_np_random" and not isinstance(value, gym.Space)
        }

    def env(self) -> dict[str, Any]:
        states = []
        for layer in self.layers:
            name = type(layer).__qualname__
            state: dict[str, Any] = {"class": name}
            attributes = {k: v for k, v in vars(layer).items() if k not in LEFT_OUT and not self._is_link(layer, k)}
            if has_protocol(layer):
                # As plain values, all copied: numbers of its own, for it may hand out what it goes on to use.
                state["own"] = by_value(layer.get_state(), f"what {name}.get_state() returned")
                attributes = {k: v for k, v in attributes.items() if k == "_np_random"}
            elif not has_only_dict(layer):
                self._refuse(layer, name, "has slots, or a base that is not written in Python")
            else:
                for key in ("action_space", "observation_space"):
                    space = getattr(type(layer), key, None)
                    if key not in attributes and isinstance(space, gym.Space):
                        state[key] = self.encode(space, f"{name}.{key}")
            state["attributes"] = {k: self.encode(v, f"{name}.{k}") for k, v in attributes.items()}
            states.append(state)
        self.finish([Region.of(v, k) for k, v in self._hidden_arrays()])
        return {"layers": states}

    def _hidden_arrays(self) -> list[tuple[str, np.ndarray]]:
        layers = {id(layer): layer for layer in self._hidden.values()}.values()
        return [(k, v) for layer in layers for k, v in vars(layer).items() if type(v) is np.ndarray]

    @staticmethod
    def _is_link(layer: Any, name: str) -> bool:
        return name == "env" and isinstance(layer, gym.Wrapper)

    def finish(self, hidden: list[Region]) -> None:
        """Fills in the arrays, now that it is known which of them share memory."""
        unknown = {id(region) for region in hidden}
        for number, group in enumerate(overlapping(self.regions + hidden)):
            known = [region for region in group if id(region) not in unknown]
            if len(group) == 1 or not known:
                for region in known:
                    region.node.update(copy_of(region.array))
                continue
            if len(known) < len(group):
                self._refuse(known[0].array, known[0].where, "shares memory with a layer that has get_state()")
            low, high = min(region.low for region in group), max(region.high for region in group)
            for region in group:
                strides, offset = region.array.strides, region.address - low
                memory = {"memory": number, "offset": offset, "strides": strides, "size": high - low}
                region.node.update({**copy_of(region.array), **memory})

    def encode(self, value: Any, where: str) -> Any:
        """Returns a value as a plain one."""
        if type(value) in PLAIN:
            return value
        if id(value) in self.nodes:
            return {"kind": "ref", "id": self.nodes[id(value)][1]["id"]}
        if id(value) in self._numbers:
            return {"kind": "layer", "index": self._numbers[id(value)]}
        if type(value) is tuple:
            return self._tuple(value, where)
        taken = self._immutable(value, where)
        if taken is not None:
            return taken
        if id(value) in self._hidden:
            layer = type(self._hidden[id(value)]).__qualname__
            self._refuse(value, where, f"is a part of {layer} too, which has get_state()")
        node: dict[str, Any] = {"id": len(self.nodes)}
        if id(value) in self._constants:
            node["shared"] = self._constants[id(value)]
        elif self._within:
            node["shared"] = ""
        self.nodes[id(value)] = value, node
        self._within += "shared" in node
        taken = self._mutable(value, where, node)
        self._within -= "shared" in node
        if taken is None:
            self._refuse(value, where, "is of a type that vecenv cannot take apart")
        node.update(taken)
        return node

    def _tuple(self, value: tuple, where: str) -> tuple:
        if id(value) in self._open:
            self._refuse(value, where, "contains itself")
        self._open.add(id(value))
        try:
            return tuple(self.encode(item, f"{where}[{i}]") for i, item in enumerate(value))
        finally:
            self._open.discard(id(value))

    def _immutable(self, value: Any, where: str) -> dict[str, Any] | None:
        """Returns the node of a value that never changes, or holds nothing that does; None if it is not one."""
        cls = type(value)
        if cls in (bytes, complex, np.str_, np.bytes_):
            plain = {bytes: list, complex: _parts, np.str_: str.__str__, np.bytes_: lambda v: list(bytes(v))}[cls](
                value
            )
            return {"kind": cls.__name__, "value": plain}
        if isinstance(value, np.generic) and value.dtype.kind in ARRAY_KINDS:
            return {"kind": "scalar", "value": np.array(value)}
        if isinstance(value, np.dtype) and value.kind in ARRAY_KINDS:
            return {"kind": "dtype", "value": value.str}
        if cls is range:
            return {"kind": "range", "value": (value.start, value.stop, value.step)}
        if cls is frozenset:
            if not order_is_certain(value):
                self._refuse(value, where, "may be iterated in another order by another process: use a dict or a tuple")
            return {"kind": "frozenset", "items": tuple(self.encode(item, where) for item in value)}
        if isinstance(value, enum.Enum):
            return {"kind": "enum", "class": self._class(value, where), "value": self.encode(value.value, where)}
        if isinstance(value, tuple) and hasattr(cls, "_fields") and not getattr(value, "__dict__", None):
            return {"kind": "namedtuple", "class": self._class(value, where), "items": self._tuple(value, where)}
        if isinstance(value, (ModuleType, logging.Logger, EnvSpec)):
            name = value.id if isinstance(value, EnvSpec) else getattr(value, "__name__", None) or value.name
            return {"kind": "constant", "class": cls.__name__, "name": name}
        if cls is MethodType:
            return self._method(value, where)
        if cls is functools.partial and not vars(value):
            parts = (value.func, value.args, tuple(value.keywords.items()))
            return {"kind": "partial", "parts": self.encode(parts, where)}
        closed = getattr(value, "__closure__", None)
        if isinstance(value, NAMED) and not closed and self._names.name_of(value):
            return {"kind": "name", "name": self._names.name_of(value)}
        if isinstance(value, type):  # such as one of a script: there is one of it in each process
            return {"kind": "class", "name": f"{value.__module__}:{value.__qualname__}"}
        return None

    def _mutable(self, value: Any, where: str, node: dict[str, Any]) -> dict[str, Any] | None:
        cls = type(value)
        take = _TAKERS.get(cls)
        if take is not None:
            return take(self, value, where)
        if cls is np.ndarray:
            return self._array(value, where, node)
        if isinstance(value, gym.Space):
            generators = [vars(space).get("_np_random") for space in spaces_in(value)]
            encoded = tuple(self.encode(g, f"{where}.np_random") for g in generators)
            return {"kind": "space", "text": text_of(value), "generators": encoded}
        if isinstance(value, BIT_GENERATORS):
            return self._bits(value, where)
        if is_plain_object(value):
            attributes = {k: self.encode(v, f"{where}.{k}") for k, v in vars(value).items()}
            return {"kind": "object", "class": self._class(value, where), "attributes": attributes}
        return None

    def _list(self, value: Any, where: str) -> dict[str, Any]:
        items = tuple(self.encode(item, f"{where}[{i}]") for i, item in enumerate(value))
        extra = {"maxlen": value.maxlen} if type(value) is collections.deque else {}
        return {"kind": type(value).__name__, "items": items, **extra}

    def _dict(self, value: Any, where: str) -> dict[str, Any]:
        items = [(self._key(k, f"{where}: a key"), self.encode(v, f"{where}[{k!r}]")) for k, v in value.items()]
        extra = {}
        if type(value) is collections.defaultdict:
            extra["factory"] = getattr(value.default_factory, "__name__", None)
            if value.default_factory is not None and getattr(builtins, extra["factory"] or "", 0) not in FACTORIES:
                self._refuse(value, where, "makes values by a function of its own")
        return {"kind": type(value).__name__, "items": tuple(items), **extra}

    def _key(self, key: Any, where: str) -> Any:
        encoded = self.encode(key, where) if type(key) in (*PLAIN, tuple) else self._immutable(key, where)
        if encoded is None and key is not None:
            self._refuse(key, where, "is found by what it is, not by what it is equal to")
        return encoded

    def _array(self, value: np.ndarray, where: str, node: dict[str, Any]) -> dict[str, Any]:
        if value.dtype.kind not in ARRAY_KINDS:
            self._refuse(value, where, f"has dtype {value.dtype}, which is no number and no text")
        owner = hidden_memory(value)
        if owner is not None:
            self._refuse(value, where, f"lies in memory of {owner}")
        self.regions.append(Region.of(value, where, node))
        return {"kind": "array"}

    def _bits(self, value: Any, where: str) -> dict[str, Any]:
        seed = getattr(value, "seed_seq", None)
        if type(seed) not in (NoneType, np.random.SeedSequence):
            self._refuse(value, where, f"was seeded by a {type(seed).__name__}")
        state = {"kind": "bits", "class": type(value).__name__, "state": by_value(value.state, where)}
        parts = None if seed is None else {**seed.state, "n_children_spawned": seed.n_children_spawned}
        return {**state, "seed": by_value(parts, where)}

    def _generator(self, value: np.random.Generator, where: str) -> dict[str, Any]:
        return {"kind": "Generator", "bits": self.encode(value.bit_generator, where)}

    def _legacy_generator(self, value: np.random.RandomState, where: str) -> dict[str, Any]:
        if type(value._bit_generator) is not np.random.MT19937:
            self._refuse(value, where, "uses another bit generator than MT19937")
        bits = self.encode(value._bit_generator, where)
        return {"kind": "RandomState", "bits": bits, "state": by_value(value.get_state(legacy=False), where)}

    def _random(self, value: random.Random, where: str) -> dict[str, Any]:
        return {"kind": "Random", "state": value.getstate()}

    def _function(self, value: FunctionType, where: str) -> dict[str, Any]:
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                self._refuse(value, where, f"refers to {name}, which has no value")
            cells.append(self.encode(content, f"{name} of {where}"))
        return {"kind": "function", "code": fingerprint(value), "cells": tuple(cells)}

    def _method(self, value: MethodType, where: str) -> dict[str, Any]:
        if getattr(value.__self__, value.__name__, None) != value:
            self._refuse(value, where, "is a method that its object does not have by this name")
        return {"kind": "method", "self": self.encode(value.__self__, where), "name": value.__name__}

    def _class(self, value: Any, where: str) -> str:
        name = self._names.name_of(type(value))
        if name is None:
            self._refuse(value, where, f"is of a class that nobody can find by its name, {type(value).__qualname__}")
        return str(name)

    def _refuse(self, value: Any, where: str, why: str) -> NoReturn:
        owner = where.split(".")[0] if self.layers else "its owner"
        raise NotRestorable(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be put back exactly: it "
            f"{why}. {ADVICE.format(owner)}"
        )


def by_value(value: Any, where: str) -> Any:
    """Returns a plain copy of a value that belongs to no env, such as what an env's `get_state()` returned.

    Raises:
        NotRestorable: If it is not made of plain values.
    """
    capture = _Capture.__new__(_Capture)
    capture.layers, capture.nodes, capture.regions = [], {}, []
    capture._names, capture._constants, capture._numbers = Names(), {}, {}
    capture._open, capture._within, capture._hidden = set(), 0, {}
    encoded = capture.encode(value, where)
    capture.finish([])
    return encoded


def _parts(value: complex) -> tuple[float, float]:
    return value.real, value.imag


FACTORIES = (int, float, str, bool, list, dict)
"""What a defaultdict may make values with."""

_TAKERS: dict[type, Callable[[_Capture, Any, str], dict[str, Any]]] = {
    list: _Capture._list,
    collections.deque: _Capture._list,
    dict: _Capture._dict,
    collections.OrderedDict: _Capture._dict,
    collections.defaultdict: _Capture._dict,
    np.random.Generator: _Capture._generator,
    np.random.RandomState: _Capture._legacy_generator,
    random.Random: _Capture._random,
    FunctionType: _Capture._function,
}
