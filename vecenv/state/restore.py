"""Restores: puts what `capture` took into envs that were built in the same way.

Everything that can change is made anew, so that a constant from which a new env starts is not written to. Only what
several envs share is written in place. Variables of modules and classes and what functions refer to are left alone, and
must be as they were.
"""

from __future__ import annotations

import ast
import collections
import enum
import logging
import marshal
import random
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np

from vecenv.errors import NotRestorable
from vecenv.state.anatomy import (
    LEFT_OUT,
    MISSING,
    Names,
    branches_of,
    fingerprint,
    has_protocol,
    layers_of,
    path_of,
    spaces_in,
    text_of,
)
from vecenv.state.arrays import made
from vecenv.state.capture import by_value, held_by, is_leaf

Node = dict[str, Any]


class Restores:
    """Puts the states of several envs back, one after the other."""

    def __init__(self) -> None:
        self._shared: dict[int, tuple[Any, Node]] = {}
        self._parsed: dict[str, bytes] = {}

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
        restore = _Restore(layers, self._shared, self._parsed)
        new = [restore.attributes(layer, saved) for layer, saved in zip(layers, state["layers"], strict=True)]
        for layer, attributes, saved in zip(layers, new, state["layers"], strict=True):
            kept = {k: v for k, v in vars(layer).items() if k in LEFT_OUT or k == "env" or "own" in saved}
            vars(layer).clear()
            vars(layer).update({**kept, **attributes})


def from_value(encoded: Any) -> Any:
    """Returns what `by_value` took, as new objects."""
    return _Restore([], {}, {}).decode(encoded, MISSING, "the state")


class _Restore:
    """Puts the state of one env back."""

    def __init__(self, layers: list[Any], shared: dict[int, tuple[Any, Node]], parsed: dict[str, bytes]):
        self._layers = layers
        self._names = Names(layers)
        self._shared = shared
        self._parsed = parsed
        self._made: dict[int, Any] = {}
        self._spaces: dict[int, int] = {}  # that stay: whose place they take

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
                encoded = {**encoded, "bits": {**encoded.get("bits", {}), "shared": True}}
            new[key] = self.decode(encoded, here, f"{name}.{key}")
        return new

    def decode(self, encoded: Any, old: Any, where: str) -> Any:
        """Returns the value that a plain one stands for; `old` is what this env has in that place, or MISSING."""
        if is_leaf(encoded):
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
        if old is MISSING or (node["kind"] in _TYPES and type(old) is not _TYPES[node["kind"]]):
            self._refuse(where, "was shared with another env, but a new env has nothing like it there")
        before = self._shared.setdefault(id(old), (old, node))[1]
        if not same(before, node):
            self._refuse(where, "is shared by several envs here, for which it had different values")
        return old

    def _text(self, node: Node, old: Any, where: str) -> Any:
        text = node["text"]
        if text not in self._parsed:
            self._parsed[text] = marshal.dumps(ast.literal_eval(text))
        new = marshal.loads(self._parsed[text])  # as each env needs one of its own, and Python's parser is slow
        for number, branch in enumerate(branches_of(new) or (), node["id"]):
            self._made[number] = branch
        return new

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
            new = made(node)
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
        cls = self._permitted(node["class"], type(old), where)
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

    def _random(self, node: Node, old: Any, where: str) -> Any:
        new = old if "shared" in node else random.Random(0)
        new.setstate(node["state"])
        self._made[node["id"]] = new
        return new

    def _space(self, node: Node, old: Any, where: str) -> Any:
        inner = spaces_in(old) if isinstance(old, gym.Space) else []
        if not inner or text_of(old) != node["text"] or len(inner) != len(node["generators"]):
            self._refuse(where, f"was {node['text']}, but a new env has {'none' if old is MISSING else old} there")
        if any(node["generators"]) and self._spaces.setdefault(id(old), node["id"]) != node["id"]:
            self._refuse(where, "was an object of its own, but a new env has the same one in two places")
        self._made[node["id"]] = old
        for space, encoded in zip(inner, node["generators"], strict=True):
            vars(space)["_np_random"] = self.decode(encoded, vars(space).get("_np_random"), where)
        return old

    def _function(self, node: Node, old: Any, where: str) -> Any:
        if type(old) is not FunctionType or fingerprint(old) != node["code"]:
            self._refuse(where, f"was the function {node['code']}, but a new env has another one there, or none")
        self._made[node["id"]] = old
        here = held_by(old, where)
        if len(here) != len(node["held"]):
            self._refuse(where, "has another number of defaults here")
        for encoded, (name, content) in zip(node["held"], here, strict=True):
            if isinstance(content, gym.Space):
                is_same = self.decode(encoded, content, f"{name} of {where}") is content
            else:
                is_same = same(encoded, by_value(content, f"{name} of {where}", self._layers))
            if not is_same:
                self._refuse(where, f"is a function that refers to {name}, which is not as it was, and is not put back")
        return old

    def _method(self, node: Node, old: Any, where: str) -> Any:
        owner = self.decode(node["self"], getattr(old, "__self__", MISSING), where)
        if isinstance(owner, ModuleType):  # whose functions are not methods
            self._refuse(where, f"was a method of the module {owner.__name__}, but modules have no methods")
        return getattr(owner, node["name"])

    def _variable(self, node: Node, old: Any, where: str) -> Any:
        found = self._named(node["name"], where)
        if not same(node["content"], by_value(found, where, self._layers, by_name=False)):
            self._refuse(where, f"was the variable {node['name']}, which is not saved, and is not as it was")
        return found

    def _constant(self, node: Node, old: Any, where: str) -> Any:
        name, kind = node["name"], node["class"]
        if type(old).__name__ == kind and name in (getattr(old, key, None) for key in ("__name__", "name", "id")):
            return old
        if kind == ModuleType.__name__ and name in sys.modules:
            return sys.modules[name]
        if kind == logging.Logger.__name__:
            return logging.getLogger(name)
        self._refuse(where, f"was the {kind} {name}, but a new env has another one there, or none")

    def _enum(self, node: Node, old: Any, where: str) -> Any:
        cls = self._named(node["class"], where)
        if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):  # a damaged state must not call other functions
            self._refuse(where, f"was an enum, but {node['class']} is not an enum class")
        return cls(self.decode(node["value"], old, where))

    def _class(self, node: Node, old: Any, where: str) -> Any:
        is_it = isinstance(old, type) and path_of(old) == node["name"]
        return old if is_it else self._permitted(node["name"], old, where)

    def _permitted(self, name: str, old: Any, where: str) -> Any:
        """Returns the object with this name if it is from the env's packages, a math function, or already there.

        A state from an untrusted file must not give an env arbitrary functions of loaded modules.
        """
        found = self._named(name, where)
        is_maths = isinstance(found, np.ufunc) or name.startswith(("math:", "cmath:"))
        is_own = self._names.owns(name) and path_of(found) == name
        if found is not old and not (is_maths or is_own):
            self._refuse(where, f"was {name}, which is not from the env's packages, and a new env has something else")
        return found

    def _named(self, name: str, where: str) -> Any:
        found = self._names.find(name)
        if found is MISSING:
            self._refuse(where, f"needs {name}, which is not in any module that is loaded here")
        return found

    def _refuse(self, where: str, why: str) -> NoReturn:
        raise NotRestorable(
            f"{where} {why}. Build the envs as they were built for the state; or define get_state() and "
            "set_state(state), see docs/engine.md."
        )


def same(left: Any, right: Any) -> bool:
    """Returns whether two nodes stand for equal values, whatever numbers they have."""
    return _same(left, right, {})


def _same(left: Any, right: Any, numbers: dict[int | None, int | None]) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        if numbers.setdefault(left.get("id"), right.get("id")) != right.get("id"):
            return False
        keys = (left.keys() | right.keys()) - {"id"}
        return all(_same(left.get(key, MISSING), right.get(key, MISSING), numbers) for key in keys)
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(_same(*pair, numbers) for pair in zip(left, right, strict=True))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    return type(left) is type(right) and bool(left == right or left != left)


_TYPES: dict[str, Any] = {
    "list": list,
    "deque": collections.deque,
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "array": np.ndarray,
    "Generator": np.random.Generator,
    "Random": random.Random,
}

Decode = Callable[[_Restore, Node, Any, str], Any]

_DECODERS: dict[str, Decode] = {
    **dict.fromkeys(("list", "deque"), _Restore._list),
    **dict.fromkeys(("dict", "OrderedDict"), _Restore._dict),
    "ref": lambda self, node, old, where: self._made[node["id"]],
    "layer": lambda self, node, old, where: self._layers[node["index"]],
    "dtype": lambda self, node, old, where: np.dtype(node["value"]),
    "range": lambda self, node, old, where: range(*node["value"]),
    "enum": _Restore._enum,
    "namedtuple": lambda self, node, old, where: tuple.__new__(
        self._named(node["class"], where),
        self.decode(node["items"], tuple(old) if isinstance(old, tuple) else (), where),
    ),
    "name": lambda self, node, old, where: self._permitted(node["name"], old, where),
    "text": _Restore._text,
    "variable": _Restore._variable,
    "array": _Restore._array,
    "object": _Restore._object,
    "bits": _Restore._bits,
    "Generator": _Restore._generator,
    "Random": _Restore._random,
    "space": _Restore._space,
    "function": _Restore._function,
    "method": _Restore._method,
    "constant": _Restore._constant,
    "class": _Restore._class,
}
