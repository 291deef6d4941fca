"""Captures: takes the state of envs as plain values: what lies in them and in their wrappers.

A value that `is_leaf` knows stands for itself, a tuple for a tuple, and a dict with "kind" for anything else: a node.
What can change has a number, "id", and where it is met again, {"kind": "ref", "id": ...}: so what was one object before
is one afterwards. What could be put back only nearly, or might be, is refused. `restore` is the way back.
"""

from __future__ import annotations

import collections
import enum
import logging
import random
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from vecenv.errors import NotRestorable
from vecenv.state.anatomy import (
    ATOMS,
    LEFT_OUT,
    Names,
    branches_of,
    fingerprint,
    has_only_dict,
    has_protocol,
    is_plain_object,
    layers_of,
    path_of,
    spaces_in,
    text_of,
    type_name,
)
from vecenv.state.arrays import Region, copy_of, hidden_memory, overlapping
from vecenv.state.files import ARRAY_KINDS

NAMED = (FunctionType, BuiltinFunctionType, type, np.ufunc)
BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
ADVICE = "Define get_state() and set_state(state) on {}, see docs/engine.md, or do without an exact restore."
_LEAVES = ATOMS | {bytes, complex, np.str_, np.bytes_}
_MANY = 64  # items from which on it is worth a try to take a list or dict as text


def is_leaf(value: Any) -> bool:
    """Returns whether a value stands for itself."""
    return type(value) in _LEAVES or (isinstance(value, np.generic) and value.dtype.kind in ARRAY_KINDS)


class Captures:
    """Takes the state of one env after the other, and then of what several of them share.

    Args:
        as_text: Whether big lists and dicts of plain values may be taken as one text. It is much faster, but nothing in
            them may be shared.

    Attributes:
        text_is_shared: Whether envs share a part of such a text, so that all must be taken anew without.
    """

    def __init__(self, *, as_text: bool = False) -> None:
        self.text_is_shared = False
        self._texts: dict[str, str] | None = {} if as_text else None
        self._owners: dict[int, tuple[Any, dict[str, Any], int]] = {}
        self._regions: list[tuple[int, Region]] = []
        self._num_envs = 0

    def add(self, env: Any) -> dict[str, Any]:
        """Returns the state of an env and its wrappers.

        Raises:
            NotRestorable: If a part of it cannot be restored exactly.
        """
        capture = _Capture(layers_of(env), self._texts)
        state = capture.env()
        for key, (value, node) in capture.nodes.items():
            if key in self._owners:  # it must be the same object for all of them afterwards as well
                for shared in (node, self._owners[key][1]):
                    self.text_is_shared |= shared.get("kind", "text") == "text"
                    shared.setdefault("shared", True)
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
    """Takes the state of one env, or with no layers of one value that belongs to none.

    Args:
        layers: An env, with its wrappers.
        texts: Where those are put that stand for big lists and dicts; None to take these apart.
        by_name: Whether variables of the env's modules and classes are taken by name.
    """

    def __init__(self, layers: Sequence[Any] = (), texts: dict[str, str] | None = None, *, by_name: bool = True):
        self.layers = layers
        self.nodes: dict[int, tuple[Any, dict[str, Any]]] = {}  # with the objects: a number is theirs while they live
        self.regions: list[Region] = []
        self._texts = texts
        self._names = Names(layers)
        self._variables = self._names.variables() if by_name else {}
        self._numbers = {id(layer): i for i, layer in enumerate(layers)}
        self._open: set[int] = set()  # tuples and functions that are being taken
        self._held: dict[int, tuple[Any, str]] = {}  # what is in variables or functions, and not put back
        self._held_regions: list[Region] = []
        opaque = [layer for layer in layers if has_protocol(layer)]
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
                arrays = [(k, v) for k, v in attributes.items() if type(v) is np.ndarray]
                self._held_regions += [Region.of(v, f"{name}.{k}") for k, v in arrays]
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
        self.finish()
        return {"layers": states}

    @staticmethod
    def _is_link(layer: Any, name: str) -> bool:
        return name == "env" and isinstance(layer, gym.Wrapper)

    def finish(self) -> None:
        """Refuses what is in two places of which only one is put back, and memory of which two arrays have a part."""
        for key in self._held.keys() & self.nodes.keys():
            self._refuse(*self._held[key], "is a part of the env too, but is not put back here, only compared")
        for group in overlapping(self.regions + self._held_regions):
            ours = [region for region in group if any(region is one for one in self.regions)] if len(group) > 1 else []
            if ours:
                other = next(region for region in group if region is not ours[0])
                self._refuse(ours[0].array, ours[0].where, f"shares memory with {other.where}")

    def encode(self, value: Any, where: str) -> Any:
        """Returns a value as a plain one."""
        if is_leaf(value):
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
        if id(value) in self._variables and not isinstance(value, gym.Space):
            content = self._held_value(value, where, by_name=False)
            return {"kind": "variable", "name": self._variables[id(value)], "content": content}
        node: dict[str, Any] = {"id": len(self.nodes)}
        self.nodes[id(value)] = value, node
        taken = self._as_text(value) or self._mutable(value, where)
        if taken is None:
            self._refuse(value, where, "is of a type that vecenv cannot take apart")
        node.update(taken)
        return node

    def _as_text(self, value: Any) -> dict[str, Any] | None:
        """Returns the node of a big list or dict of plain values; the lists and dicts in it get the numbers after."""
        if self._texts is None or type(value) not in (list, dict) or len(value) < _MANY:
            return None
        branches = branches_of(value)
        if branches is None or any(
            id(branch) in known for known in (self.nodes, self._hidden, self._variables) for branch in branches[1:]
        ):
            return None
        try:
            text = repr(value)
        except ValueError:  # an int of thousands of digits
            return None
        if "nan" in text or "inf" in text:
            return None
        for branch in branches[1:]:
            self.nodes[id(branch)] = branch, {"id": len(self.nodes)}
        return {"kind": "text", "text": self._texts.setdefault(text, text)}

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
        if isinstance(value, np.dtype) and value.kind in ARRAY_KINDS:
            return {"kind": "dtype", "value": value.str}
        if cls is range:
            return {"kind": "range", "value": (value.start, value.stop, value.step)}
        if isinstance(value, enum.Enum):
            return {"kind": "enum", "class": self._class(value, where), "value": self.encode(value.value, where)}
        if isinstance(value, tuple) and hasattr(cls, "_fields") and not getattr(value, "__dict__", None):
            return {"kind": "namedtuple", "class": self._class(value, where), "items": self._tuple(value, where)}
        if isinstance(value, (ModuleType, logging.Logger, EnvSpec)):
            name = value.id if isinstance(value, EnvSpec) else getattr(value, "__name__", None) or value.name
            return {"kind": "constant", "class": cls.__name__, "name": name}
        if cls is MethodType:
            return self._method(value, where)
        closed = getattr(value, "__closure__", None)
        if isinstance(value, NAMED) and not closed and self._names.name_of(value):
            return {"kind": "name", "name": self._names.name_of(value)}
        if isinstance(value, type):  # such as one of a script: there is one of it in each process
            return {"kind": "class", "name": path_of(value)}
        return None

    def _mutable(self, value: Any, where: str) -> dict[str, Any] | None:
        cls = type(value)
        take = _TAKERS.get(cls)
        if take is not None:
            return take(self, value, where)
        if cls is np.ndarray:
            return self._array(value, where)
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
        return {"kind": type(value).__name__, "items": tuple(items)}

    def _key(self, key: Any, where: str) -> Any:
        encoded = self.encode(key, where) if is_leaf(key) or type(key) is tuple else self._immutable(key, where)
        if encoded is None and key is not None:
            self._refuse(key, where, "is found by what it is, not by what it is equal to")
        return encoded

    def _array(self, value: np.ndarray, where: str) -> dict[str, Any]:
        if value.dtype.kind not in ARRAY_KINDS:
            self._refuse(value, where, f"has dtype {value.dtype}, which is no number and no text")
        owner = hidden_memory(value)
        if owner is not None:
            self._refuse(value, where, f"lies in memory of {owner}")
        self.regions.append(Region.of(value, where))
        return {"kind": "array", **copy_of(value)}

    def _bits(self, value: Any, where: str) -> dict[str, Any]:
        seed = getattr(value, "seed_seq", None)
        if type(seed) not in (NoneType, np.random.SeedSequence):
            self._refuse(value, where, f"was seeded by a {type(seed).__name__}")
        state = {"kind": "bits", "class": type(value).__name__, "state": by_value(value.state, where)}
        parts = None if seed is None else {**seed.state, "n_children_spawned": seed.n_children_spawned}
        return {**state, "seed": by_value(parts, where)}

    def _generator(self, value: np.random.Generator, where: str) -> dict[str, Any]:
        return {"kind": "Generator", "bits": self.encode(value.bit_generator, where)}

    def _random(self, value: random.Random, where: str) -> dict[str, Any]:
        return {"kind": "Random", "state": value.getstate()}

    def _function(self, value: FunctionType, where: str) -> dict[str, Any]:
        if vars(value):
            self._refuse(value, where, f"has attributes of its own, {sorted(vars(value))}")
        if id(value) in self._open:
            self._refuse(value, where, "refers to itself")
        self._open.add(id(value))
        held = []
        for name, content in held_by(value, where):
            if isinstance(content, gym.Space):  # stays as well, but its generator goes on
                held.append(self.encode(content, f"{name} of {where}"))
                continue
            held.append(self._held_value(content, f"{name} of {where}"))
            if name not in value.__code__.co_freevars and _can_change(held[-1]):
                self._refuse(value, where, f"has a default, {name}, that can change")
        self._open.discard(id(value))
        return {"kind": "function", "code": fingerprint(value), "held": tuple(held)}

    def _held_value(self, value: Any, where: str, *, by_name: bool = True) -> Any:
        """Returns a value as a plain one of its own, to be compared; remembers what is in it."""
        capture = _Capture(self.layers, by_name=by_name)
        capture._open = self._open
        encoded = capture.encode(value, where)
        capture.finish()
        objects = {k: v for k, (v, _) in capture.nodes.items() if not isinstance(v, (gym.Space, FunctionType))}
        self._held.update({**{key: (one, where) for key, one in objects.items()}, **capture._held})
        self._held_regions += [*capture.regions, *capture._held_regions]
        return encoded

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
            f"{where} is a {type_name(value)}, which cannot be restored exactly: it {why}. {ADVICE.format(owner)}"
        )


def _can_change(encoded: Any) -> bool:
    if isinstance(encoded, tuple):
        return any(map(_can_change, encoded))
    return isinstance(encoded, dict) and encoded["kind"] != "function" and ("id" in encoded or "items" in encoded)


def held_by(function: FunctionType, where: str) -> list[tuple[str, Any]]:
    """Returns the names and values of what a function closes over, and of its defaults.

    Raises:
        NotRestorable: If one of the first has no value.
    """
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise NotRestorable(f"{where} is a function that refers to a variable without a value") from None
    defaults = [(f"number {i}", value) for i, value in enumerate(function.__defaults__ or ())]
    defaults += (function.__kwdefaults__ or {}).items()
    return [*zip(function.__code__.co_freevars, cells, strict=True), *defaults]


def by_value(value: Any, where: str, layers: Sequence[Any] = (), *, by_name: bool = True) -> Any:
    """Returns a plain copy of a value that belongs to no env, such as what an env's `get_state()` returned.

    Args:
        value: Any.
        where: What it is, for messages.
        layers: Of an env, which it may refer to.
        by_name: Whether variables of that env's modules and classes are taken by name.

    Raises:
        NotRestorable: If it is not made of plain values.
    """
    capture = _Capture(layers, by_name=by_name)
    encoded = capture.encode(value, where)
    capture.finish()
    return encoded


_TAKERS: dict[type, Callable[[_Capture, Any, str], dict[str, Any]]] = {
    list: _Capture._list,
    collections.deque: _Capture._list,
    dict: _Capture._dict,
    collections.OrderedDict: _Capture._dict,
    np.random.Generator: _Capture._generator,
    random.Random: _Capture._random,
    FunctionType: _Capture._function,
}
