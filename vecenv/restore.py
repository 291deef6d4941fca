"""restore.py: Restores: puts what `capture` took into envs that were built in the same way.

Everything that can change is made anew, so that a constant from which a new env starts is not written to. Only what
several envs share, or what is a constant of a module itself, is written in place.
"""

from __future__ import annotations

import builtins
import collections
import functools
import logging
import random
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from vecenv.anatomy import LEFT_OUT, fingerprint, has_protocol, layers_of, spaces_in, text_of
from vecenv.capture import PLAIN
from vecenv.errors import NotRestorable
from vecenv.naming import MISSING, Names
from vecenv.regions import made

Node = dict[str, Any]


class Restores:
    """Puts the states of several envs back, one after the other."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[Any, Node]] = {}

    def put(self, env: Any, state: Mapping[str, Any]) -> None:
        """Puts the state back that `Captures.add` returned.

        Raises:
            ValueError: If it is of an env with other layers.
            NotRestorable: If it has parts that this env has no place for.
        """
        layers = layers_of(env)
        now = [(type(layer).__qualname__, has_protocol(layer)) for layer in layers]
        then = [(layer["class"], "own" in layer) for layer in state["layers"]]
        if now != then:
            names = [" of ".join(name for name, _ in chain) for chain in (then, now)]
            raise ValueError(
                f"the state is of a {names[0]}, but this env is a {names[1]}"
                f"{' (or get_state was added or removed since)' if names[0] == names[1] else ''}: build the same env"
            )
        for layer, saved in zip(layers, state["layers"], strict=True):
            if "own" in saved:
                layer.set_state(from_value(saved["own"]))
        restore = _Restore(layers, self._shared)
        new = [restore.attributes(layer, saved) for layer, saved in zip(layers, state["layers"], strict=True)]
        for layer, attributes, saved in zip(layers, new, state["layers"], strict=True):
            kept = {k: v for k, v in vars(layer).items() if k in LEFT_OUT or k == "env" or "own" in saved}
            vars(layer).clear()
            vars(layer).update({**kept, **attributes})


def from_value(encoded: Any) -> Any:
    """Returns what `by_value` took, as new objects."""
    return _Restore([], {}).decode(encoded, MISSING, "the state")


class _Restore:
    """Puts the state of one env back."""

    def __init__(self, layers: list[Any], shared: dict[int, tuple[Any, Node]]):
        self._layers = layers
        self._names = Names(layers)
        self._shared = shared
        self._made: dict[int, Any] = {}
        self._kept: dict[int, int] = {}  # of functions and spaces that stay: whose place they take
        self._memories: dict[int, np.ndarray] = {}

    def attributes(self, layer: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the attributes of a layer, as they were."""
        name = saved["class"]
        for key in ("action_space", "observation_space"):
            if key in saved:
                self.decode(saved[key], getattr(type(layer), key, MISSING), f"{name}.{key}")
        old, new = vars(layer), {}
        for key, encoded in saved["attributes"].items():
            here = old.get(key, MISSING)
            if "own" in saved and type(here) is np.random.Generator and isinstance(encoded, dict):
                # In place, because set_state() may have handed it to others.
                encoded = {**encoded, "bits": {**encoded.get("bits", {}), "shared": ""}}
            new[key] = self.decode(encoded, here, f"{name}.{key}")
        return new

    def decode(self, encoded: Any, old: Any, where: str) -> Any:
        """Returns the value that a plain one stands for; `old` is what this env has in that place, or MISSING."""
        if type(encoded) in PLAIN:
            return encoded
        if type(encoded) is tuple:
            olds = old if type(old) is tuple else ()
            pairs = [(item, olds[i] if i < len(olds) else MISSING) for i, item in enumerate(encoded)]
            return tuple(self.decode(item, one, f"{where}[{i}]") for i, (item, one) in enumerate(pairs))
        decode = _DECODERS.get(encoded["kind"])
        if decode is None:
            raise ValueError(f"{where} is a {encoded['kind']!r} in this state, which this vecenv does not know")
        if "shared" in encoded:
            old = self._find_shared(encoded, old, where)
        return decode(self, encoded, old, where)

    def _find_shared(self, node: Node, old: Any, where: str) -> Any:
        """Returns what this process has that takes the place of what several envs shared."""
        found = self._names.find(node["shared"]) if node["shared"] else MISSING
        found = old if found is MISSING else found
        if found is MISSING or (node["kind"] in _TYPES and type(found) is not _TYPES[node["kind"]]):
            self._refuse(where, "was shared with another env or its module, but a new env has nothing like it there")
        before = self._shared.setdefault(id(found), (found, node))[1]
        if not same(before, node):
            self._refuse(where, "is shared by several envs here, for which it had different values")
        return found

    def _list(self, node: Node, old: Any, where: str) -> Any:
        kind = _TYPES[node["kind"]]
        new: Any = old if "shared" in node else kind([], node["maxlen"]) if kind is collections.deque else kind()
        self._made[node["id"]] = new
        olds = list(old) if type(old) is kind else []
        pairs = [(item, olds[i] if i < len(olds) else MISSING) for i, item in enumerate(node["items"])]
        items = [self.decode(item, one, f"{where}[{i}]") for i, (item, one) in enumerate(pairs)]
        new.clear()
        new.extend(items)
        return new

    def _dict(self, node: Node, old: Any, where: str) -> Any:
        kind = _TYPES[node["kind"]]
        new: Any = old if "shared" in node else kind()
        if kind is collections.defaultdict:
            new.default_factory = None if node["factory"] is None else getattr(builtins, node["factory"])
        self._made[node["id"]] = new
        olds = dict(old) if type(old) is kind else {}
        items = {}
        for encoded, item in node["items"]:
            key = self.decode(encoded, MISSING, where)
            items[key] = self.decode(item, olds.get(key, MISSING), f"{where}[{key!r}]")
        new.clear()
        new.update(items)
        return new

    def _array(self, node: Node, old: Any, where: str) -> np.ndarray:
        if "shared" not in node:
            new = made(node, self._memories)
        else:
            new, data = old, node["data"]
            if (new.dtype, new.shape) != (data.dtype, data.shape):
                self._refuse(where, f"was shared with others and {data.dtype}{list(data.shape)}, but is not here")
            if new.tobytes() != data.tobytes():
                if not new.flags.writeable:
                    self._refuse(where, "was shared with others, and is for reading only here")
                new[...] = data
        self._made[node["id"]] = new
        return new

    def _object(self, node: Node, old: Any, where: str) -> Any:
        cls = self._named(node["class"], where)
        new = old if "shared" in node and type(old) is cls else object.__new__(cls)
        self._made[node["id"]] = new
        olds = vars(old) if type(old) is cls else {}
        attributes = {k: self.decode(v, olds.get(k, MISSING), f"{where}.{k}") for k, v in node["attributes"].items()}
        vars(new).clear()
        vars(new).update(attributes)
        return new

    def _bits(self, node: Node, old: Any, where: str) -> Any:
        cls, parts = getattr(np.random, node["class"]), from_value(node["seed"])
        seed = None if parts is None else np.random.SeedSequence(**parts)
        if "shared" in node and type(old) is cls:
            new = old
            new.__setstate__((from_value(node["state"]), seed))  # the one way to set its seed too
        else:
            new = cls(seed)
        new.state = from_value(node["state"])
        self._made[node["id"]] = new
        return new

    def _generator(self, node: Node, old: Any, where: str) -> Any:
        bits = self.decode(node["bits"], getattr(old, "bit_generator", MISSING), where)
        new = old if getattr(old, "bit_generator", None) is bits else np.random.Generator(bits)
        self._made[node["id"]] = new
        return new

    def _legacy_generator(self, node: Node, old: Any, where: str) -> Any:
        bits = self.decode(node["bits"], getattr(old, "_bit_generator", MISSING), where)
        new = old if getattr(old, "_bit_generator", None) is bits else np.random.RandomState(bits)
        new.set_state(from_value(node["state"]))
        self._made[node["id"]] = new
        return new

    def _random(self, node: Node, old: Any, where: str) -> Any:
        new = old if "shared" in node else random.Random(0)
        new.setstate(node["state"])
        self._made[node["id"]] = new
        return new

    def _space(self, node: Node, old: Any, where: str) -> Any:
        inner = spaces_in(old) if isinstance(old, gym.Space) else []
        if not inner or text_of(old) != node["text"] or len(inner) != len(node["generators"]):
            self._refuse(where, f"was {node['text']}, but a new env has {'none' if old is MISSING else old} there")
        if any(node["generators"]):
            self._keep(node, old, where)
        self._made[node["id"]] = old
        for space, encoded in zip(inner, node["generators"], strict=True):
            vars(space)["_np_random"] = self.decode(encoded, vars(space).get("_np_random"), where)
        return old

    def _function(self, node: Node, old: Any, where: str) -> Any:
        if type(old) is not FunctionType or fingerprint(old) != node["code"]:
            self._refuse(where, f"was the function {node['code']}, but a new env has another one there, or none")
        if node["cells"]:
            self._keep(node, old, where)
        self._made[node["id"]] = old
        for encoded, cell in zip(node["cells"], old.__closure__ or (), strict=True):
            content = self.decode(encoded, cell.cell_contents, f"what {where} refers to")
            if content is not cell.cell_contents:
                cell.cell_contents = content
        return old

    def _method(self, node: Node, old: Any, where: str) -> Any:
        owner = self.decode(node["self"], getattr(old, "__self__", MISSING), where)
        return getattr(owner, node["name"])

    def _partial(self, node: Node, old: Any, where: str) -> Any:
        parts = (old.func, old.args, tuple(old.keywords.items())) if type(old) is functools.partial else MISSING
        function, arguments, keywords = self.decode(node["parts"], parts, where)
        return functools.partial(function, *arguments, **dict(keywords))

    def _constant(self, node: Node, old: Any, where: str) -> Any:
        name, kind = node["name"], node["class"]
        if type(old).__name__ == kind and name in (getattr(old, key, None) for key in ("__name__", "name", "id")):
            return old
        if kind == ModuleType.__name__ and name in sys.modules:
            return sys.modules[name]
        if kind == logging.Logger.__name__:
            return logging.getLogger(name)
        self._refuse(where, f"was the {kind} {name}, but a new env has another one there, or none")

    def _class(self, node: Node, old: Any, where: str) -> Any:
        is_it = isinstance(old, type) and f"{old.__module__}:{old.__qualname__}" == node["name"]
        return old if is_it else self._named(node["name"], where)

    def _named(self, name: str, where: str) -> Any:
        found = self._names.find(name)
        if found is MISSING:
            self._refuse(where, f"needs {name}, which is not in any module that is loaded here")
        return found

    def _keep(self, node: Node, old: Any, where: str) -> None:
        if self._kept.setdefault(id(old), node["id"]) != node["id"]:
            self._refuse(where, "was an object of its own, but a new env has the same one in two places")

    def _refuse(self, where: str, why: str) -> NoReturn:
        raise NotRestorable(
            f"{where} {why}. Build the envs as they were built for the state; or define get_state() and "
            "set_state(state), see docs/engine.md."
        )


def same(left: Any, right: Any) -> bool:
    """Returns whether two nodes stand for equal values, whatever numbers they have."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = (left.keys() | right.keys()) - {"id"}
        return all(same(left.get(key, MISSING), right.get(key, MISSING)) for key in keys)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    return type(left) is type(right) and bool(left == right or left != left)


_TYPES: dict[str, Any] = {
    "list": list,
    "deque": collections.deque,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "array": np.ndarray,
    "Generator": np.random.Generator,
    "RandomState": np.random.RandomState,
    "Random": random.Random,
}

Decode = Callable[[_Restore, Node, Any, str], Any]

_DECODERS: dict[str, Decode] = {
    **dict.fromkeys(("list", "deque"), _Restore._list),
    **dict.fromkeys(("dict", "OrderedDict", "defaultdict"), _Restore._dict),
    "ref": lambda self, node, old, where: self._made[node["id"]],
    "layer": lambda self, node, old, where: self._layers[node["index"]],
    "bytes": lambda self, node, old, where: bytes(node["value"]),
    "bytes_": lambda self, node, old, where: np.bytes_(bytes(node["value"])),
    "str_": lambda self, node, old, where: np.str_(node["value"]),
    "complex": lambda self, node, old, where: complex(*node["value"]),
    "scalar": lambda self, node, old, where: node["value"][()],
    "dtype": lambda self, node, old, where: np.dtype(node["value"]),
    "range": lambda self, node, old, where: range(*node["value"]),
    "frozenset": lambda self, node, old, where: frozenset(self.decode(node["items"], MISSING, where)),
    "enum": lambda self, node, old, where: self._named(node["class"], where)(self.decode(node["value"], old, where)),
    "namedtuple": lambda self, node, old, where: tuple.__new__(
        self._named(node["class"], where),
        self.decode(node["items"], tuple(old) if isinstance(old, tuple) else old, where),
    ),
    "name": lambda self, node, old, where: self._named(node["name"], where),
    "array": _Restore._array,
    "object": _Restore._object,
    "bits": _Restore._bits,
    "Generator": _Restore._generator,
    "RandomState": _Restore._legacy_generator,
    "Random": _Restore._random,
    "space": _Restore._space,
    "function": _Restore._function,
    "method": _Restore._method,
    "partial": _Restore._partial,
    "constant": _Restore._constant,
    "class": _Restore._class,
}
