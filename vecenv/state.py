"""Saves and restores the states of envs, in memory or in files that hold no code.

An env or wrapper may define `get_state()`, which returns a plain value, and `set_state(state)`. If it does not, its
attributes are its state, and all of them must be plain: None, bool, numbers, str, bytes, numpy arrays, scalars and
`Generator`s, and lists, tuples, dicts and deques of plain values. Any other value raises `NotRestorable`.

States hold plain values packed as JSON and arrays. For example, `{"tuple": [...]}` stands for a tuple.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, NoneType
from typing import IO, Any

import gymnasium as gym
import numpy as np
from numpy.random import MT19937, PCG64, PCG64DXSM, SFC64, Generator, Philox, SeedSequence

from vecenv import spaces as tree
from vecenv.errors import NotRestorable
from vecenv.memory import layout

__all__ = ["dumps", "load", "loads", "save"]

_FORMAT = 2
_ARRAY = "numpy.ndarray"  # no attribute has such a name
_ARRAY_KINDS = "biufcSUMm"
_BIT_GENERATORS = {cls.__name__: cls for cls in (MT19937, PCG64, PCG64DXSM, Philox, SFC64)}
_CONFIGURATION = {"spec", "metadata", "render_mode", "_metadata", "_cached_spec", "_saved_kwargs"}
_CONFIGURATION |= {"_ezpickle_args", "_ezpickle_kwargs"}  # of gymnasium.utils.EzPickle
_REBUILD = "Build the envs as they were built when the states were saved."


def save(path: str | os.PathLike, states: Any) -> None:
    """Writes the states that a vector env's `get_state()` returned to a .npz file, atomically replacing any old file.

    Raises:
        TypeError: If `states` contain a value that no `get_state()` returns.
    """
    content = dumps(states)
    draft = Path(f"{os.fspath(path)}.{secrets.token_hex(8)}.part")  # nobody can have put a link there
    try:
        with draft.open("xb") as file:
            file.write(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def dumps(states: Any) -> bytes:
    """Returns the content of the file that `save` writes."""
    text, data = encode({"format": _FORMAT, "states": states})
    file = io.BytesIO()
    np.savez_compressed(file, tree=np.frombuffer(text, np.uint8), data=np.frombuffer(data, np.uint8))
    return file.getvalue()


def load(path: str | os.PathLike) -> Any:
    """Returns the states that `save` wrote, and runs no code from the file.

    Raises:
        OSError: If the file cannot be opened.
        ValueError: If the file is damaged, or of another kind or version.
    """
    with open(path, "rb") as file:
        return _read(file, os.fspath(path))


def loads(content: bytes) -> Any:
    """Returns the states that were passed to `dumps`, and runs no code from `content`.

    Raises:
        ValueError: If the content is damaged, or of another kind or version.
    """
    return _read(io.BytesIO(content), "the content")


def _read(source: IO[bytes], name: str) -> Any:
    def decode(node: dict[str, Any]) -> Any:
        if node.keys() != {_ARRAY}:
            return node
        dtype, shape, order, offset = node[_ARRAY]
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(data, np.dtype(dtype), count, offset).reshape(shape, order=order).copy(order)

    try:
        with np.load(source, allow_pickle=False) as file:
            text, data = file["tree"].tobytes(), file["data"].tobytes()
        content = json.loads(text, object_hook=decode)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']}, but this version reads {_FORMAT}")
        return content["states"]
    except OSError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{name} holds no env states that this version of vecenv can read ({type(error).__name__}: {error}). "
            "Pass a complete file that was written by vecenv.state.save."
        ) from error


def encode(packed: Any) -> tuple[bytes, bytes]:
    """Returns a packed value as JSON text and the bytes of its arrays."""
    data = io.BytesIO()

    def array(value: Any) -> dict[str, Any]:
        if type(value) is not np.ndarray or value.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"states hold a {_kind(value)}, which cannot be saved. Pass what get_state() returned.")
        place = [value.dtype.str, value.shape, "F" if value.flags.fnc else "C", data.tell()]
        data.write(value.tobytes("A"))
        return {_ARRAY: place}

    return json.dumps(packed, default=array).encode(), data.getvalue()


class Packer:
    """Packs the states of all envs of a process. An object that is stored in two places is rejected, not duplicated."""

    def __init__(self) -> None:
        self._places: dict[int, str] = {}
        self._views: dict[int, list[tuple[np.ndarray, str]]] = {}  # by the owner of their memory
        self._spaces: set[int] = set()

    def env(self, env: Any) -> list[dict[str, Any]]:
        """Returns the state of an env: one dict per layer, the outermost wrapper first.

        Raises:
            NotRestorable: If an attribute is not plain, or shares an object or memory with another attribute.
        """
        return [self._layer(layer) for layer in layers_of(env)]

    def _layer(self, layer: Any) -> dict[str, Any]:
        name, attributes = type(layer).__qualname__, _attributes(layer)
        state: dict[str, Any] = {"class": name}
        if has_state_methods(layer):
            state["own"] = pack(layer.get_state(), f"{name}.get_state()")
            attributes = {key: value for key, value in attributes.items() if key.startswith("_np_random")}
        elif type(layer).__basicsize__ != gym.Env.__basicsize__:
            raise _refusal(name, "has __slots__ or a base class written in C")
        state["attributes"] = {key: self.pack(value, f"{name}.{key}") for key, value in attributes.items()}
        state["generators"] = []
        for space in _spaces(layer):  # layers of one env, and envs of one class, may share spaces
            packer = Packer() if id(space) in self._spaces else self
            self._spaces.add(id(space))
            generator = vars(space).get("_np_random")
            state["generators"].append(packer.pack(generator, f"{name}.np_random of a {type(space).__name__}"))
        return state

    def pack(self, value: Any, where: str) -> Any:
        """Returns a packed copy of a plain value. Messages refer to the value as `where`."""
        cls = type(value)
        if cls in (NoneType, bool, int, float, str):
            return value
        if cls is tuple:
            return {"tuple": [self.pack(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if cls is bytes:
            return {"bytes": value.hex()}
        if cls is complex:
            return {"complex": [value.real, value.imag]}
        if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
            return {"scalar": np.array(value)}
        bits: Any = value.bit_generator if cls is Generator else None
        place = self._places.setdefault(id(bits or value), where)
        if place is not where:
            raise _refusal(where, f"is the same object as {place}")
        if cls is list or cls is deque:
            items = [self.pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return items if cls is list else {"deque": [items, value.maxlen]}
        if cls is dict:
            return {"dict": [[self.pack(k, where), self.pack(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if cls is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            self._check_memory(value, where)
            return np.array(value, order="K")
        if type(bits) in _BIT_GENERATORS.values() and type(bits.seed_seq) is SeedSequence:
            return {"Generator": [type(bits).__name__, pack(bits.state, where), pack(bits.seed_seq.state, where)]}
        raise _refusal(where, f"is a {_kind(value)}")

    def _check_memory(self, array: np.ndarray, where: str) -> None:
        owner: Any = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        owner = getattr(owner, "obj", owner)  # of a memoryview
        if not isinstance(owner, (np.ndarray, bytes, bytearray)):
            raise _refusal(where, f"is a view of a {_kind(owner)}")
        views = self._views.setdefault(id(owner), [])
        for other, place in views:
            if np.may_share_memory(array, other):
                raise _refusal(where, f"shares memory with {place}")
        views.append((array, where))


def pack(value: Any, where: str) -> Any:
    """Returns a packed copy of a plain value that belongs to no env, such as the result of a `get_state()`."""
    return Packer().pack(value, where)


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


def restore(env: Any, state: Sequence[dict[str, Any]]) -> None:
    """Restores the state that `Packer.env` returned for an env that was built in the same way.

    Raises:
        ValueError: If the classes, methods or spaces of the env differ from those of the saved env.
    """
    check_classes(env, state)
    for layer, part in reversed([*zip(layers_of(env), state, strict=True)]):
        spaces, own = _spaces(layer), "own" in part
        if len(spaces) != len(part["generators"]) or own != has_state_methods(layer):
            raise ValueError(f"{type(layer).__qualname__} differs from its state in spaces or methods. {_REBUILD}")
        for space, generator in zip(spaces, part["generators"], strict=True):
            space._np_random = unpack(generator)
        attributes = {name: unpack(value) for name, value in part["attributes"].items()}
        for name in () if own else _attributes(layer).keys() - attributes.keys():
            del vars(layer)[name]
        vars(layer).update(attributes)
        if own:  # set_state() may pass the generator to other objects, and may draw from it
            generator = attributes.get("_np_random")
            start = generator and generator.bit_generator.state
            layer.set_state(unpack(part["own"]))
            vars(layer).update(attributes)
            if generator:
                generator.bit_generator.state = start


def check_classes(env: Any, state: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError if a state belongs to an env of another class or with other wrappers."""
    saved, here = [str(part["class"]) for part in state], [type(layer).__qualname__ for layer in layers_of(env)]
    if saved != here:
        raise ValueError(f"the state belongs to {' > '.join(saved)}, but this env is {' > '.join(here)}. {_REBUILD}")


def has_state_methods(layer: Any) -> bool:
    """Returns whether the class of an env or wrapper defines `get_state()` and `set_state(state)`."""
    cls = type(layer)  # not the instance, which may forward attributes of the env that it wraps
    try:
        inspect.signature(cls.get_state).bind(layer)
        inspect.signature(cls.set_state).bind(layer, None)  # MujocoEnv.set_state(qpos, qvel) is unrelated
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def layers_of(env: Any) -> list[Any]:
    """Returns the wrappers of an env, the outermost first, and the env itself."""
    return [env, *layers_of(env.env)] if isinstance(env, gym.Wrapper) else [env]


def _attributes(layer: Any) -> dict[str, Any]:
    """Returns the attributes of an env or wrapper that are state."""
    cls = type(layer)
    constants: tuple[type, ...] = (gym.Space,)
    # Functions that Gymnasium's wrappers hold are stateless, except those passed to a Transform... wrapper.
    if cls.__module__.startswith("gymnasium.wrappers.") and not cls.__name__.startswith("Transform"):
        constants = (gym.Space, FunctionType, type)
    names = vars(layer).keys() - _CONFIGURATION - ({"env"} if isinstance(layer, gym.Wrapper) else set())
    return {k: v for k, v in vars(layer).items() if k in names and not isinstance(v, constants)}


def _spaces(holder: Any) -> list[gym.Space]:
    """Returns the spaces of an env, wrapper or space, at any depth."""
    found: list[gym.Space] = []
    of_class = [getattr(type(holder), name, None) for name in ("action_space", "observation_space")]
    for value in [*of_class, *vars(holder).values()]:
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for member in members:
            found += [member, *_spaces(member)] if isinstance(member, gym.Space) else []
    return found


def _kind(value: Any) -> str:
    return type(value).__qualname__ + (f" of {value.dtype}" if isinstance(value, np.ndarray) else "")


def _refusal(where: str, problem: str) -> NotRestorable:
    return NotRestorable(
        f"{where} {problem}, so it cannot be restored exactly. Define get_state() and set_state(state) on "
        f"{where.partition('.')[0]} (see docs/engine.md), or do not save env states."
    )


Arrays = Mapping[tree.Path, np.ndarray]
Objects = Mapping[tree.Path, list[Any]]


def row_of(arrays: Arrays, objects: Objects, i: int, *, slot: int, observed: int) -> dict[str, Any]:
    """Returns a copy of row `i` of `slot` and its object leaves, with the observation taken from slot `observed`."""
    row = {name: pack(objects[path][i], name) for name, path in _fields(objects).items()}
    for name, path in _fields(arrays).items():
        row[name] = np.array(arrays[path][observed if path[0] == layout.OBSERVATION else slot, i])
    return row


def write_row(arrays: Arrays, objects: Objects, i: int, slot: int, row: dict[str, Any]) -> None:
    """Writes a row that `row_of` returned to row `i` of `slot`."""
    for name, path in _fields(arrays).items():
        arrays[path][slot, i] = row[name]
    for name, path in _fields(objects).items():
        objects[path][i] = unpack(row[name])


def row_types(autoreset_mode: str, arrays: Arrays, objects: Objects) -> list[str]:
    """Returns descriptions of the rows, which must be equal in two vector envs that exchange states."""
    types = [f"{name} {arrays[path].dtype}{list(arrays[path].shape[2:])}" for name, path in _fields(arrays).items()]
    return [f"autoreset_mode {autoreset_mode}", *types, *(f"{name} object" for name in _fields(objects))]


def check_states(states: Any, num_envs: int, types: list[str]) -> None:
    """Raises ValueError, naming the difference, if these are not states of `num_envs` envs with rows of these types."""
    if not isinstance(states, (list, tuple)) or len(states) != num_envs:
        found = f"{len(states)} states" if isinstance(states, (list, tuple)) else f"a {type(states).__name__}"
        raise ValueError(f"set_state() needs a list of {num_envs} states, one per env, but got {found}")
    for i, state in enumerate(states):
        if not isinstance(state, dict) or not state.keys() >= {"types", "row", "totals", "env"}:
            raise ValueError(f"the state of env {i} was not returned by get_state(). Pass the list unchanged.")
        if set(state["types"]) != set(types):
            saved, here = set(state["types"]) - set(types), set(types) - set(state["types"])
            raise ValueError(f"the state of env {i} has {sorted(saved)}; the vector env has {sorted(here)}. {_REBUILD}")
        if (state["row"] is None) != (states[0]["row"] is None):
            raise ValueError(f"only one of envs 0 and {i} had been reset: pass the states of one get_state()")


def _fields(paths: Iterable[tree.Path]) -> dict[str, tree.Path]:
    """Returns the fields of a row that are saved, by name. No step reads the other fields of an earlier step."""
    unsaved = (layout.ACTION, layout.FINAL_OBSERVATION, layout.EPISODE_INFO)
    saved = [path for path in paths if path[0] not in unsaved]
    return {tree.name_of(str(path[0]), path[1:]): path for path in saved}
