"""Saves and restores the states of envs, in memory or in files that hold no code.

An env or wrapper defines its state with `get_state()`, which returns a plain value, and `set_state(state)`. The states
of Gymnasium's classic control and toy text, and of the most common wrappers, are known here. Any other env raises
`NotRestorable`. Plain values are None, bool, numbers, str, bytes, numpy arrays, scalars and `Generator`s, and lists,
tuples, dicts and deques of plain values. States hold them as JSON and arrays: `{"tuple": [...]}` stands for a tuple.
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
from types import NoneType
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.random import MT19937, PCG64, PCG64DXSM, SFC64, Generator, Philox, SeedSequence

from vecenv import spaces as tree
from vecenv.errors import NotRestorable
from vecenv.memory import layout

__all__ = ["dumps", "load", "loads", "save"]

_FORMAT = 3
_ARRAY = "numpy.ndarray"  # the key that stands for an array; no packed value has such a key
_ARRAY_KINDS = "biufcSUMm"
_BIT_GENERATORS = {cls.__name__: cls for cls in (MT19937, PCG64, PCG64DXSM, Philox, SFC64)}
_KNOWN_MODULES = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.toy_text.",
    "gymnasium.wrappers.",
    "vecenv.wrappers",
)
# Known classes, and their attributes that change from step to step, except windows and images.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "AcrobotEnv": ("state",),
    "CartPoleEnv": ("state", "steps_beyond_terminated"),
    "Continuous_MountainCarEnv": ("state",),
    "MountainCarEnv": ("state",),
    "PendulumEnv": ("state", "last_u"),
    "BlackjackEnv": ("dealer", "player", "dealer_top_card_suit", "dealer_top_card_value_str"),
    "CliffWalkingEnv": ("s", "lastaction"),
    "FrozenLakeEnv": ("s", "lastaction"),
    "TaxiEnv": ("s", "lastaction", "fickle_step", "taxi_orientation"),
    "DelayObservation": ("observation_queue",),
    "FrameStackObservation": ("obs_queue",),
    "MaxAndSkipObservation": ("_obs_buffer",),
    "OrderEnforcing": ("_has_reset",),
    "PassiveEnvChecker": ("checked_reset", "checked_step", "checked_data_reuse", "_previous_data"),
    "RepeatAction": (),
    "StickyAction": ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken"),
    "TimeAwareObservation": ("timesteps",),
    "TimeLimit": ("_elapsed_steps",),
    "IgnoreKeys": (),
    "ActionMaskObservation": ("_mask",),
}
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
    """Returns the content of the file that `save` writes: JSON text, and the bytes of the arrays."""
    data = io.BytesIO()

    def array(value: Any) -> dict[str, Any]:
        if type(value) is not np.ndarray or value.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"states hold a {_kind(value)}, which cannot be saved. Pass what get_state() returned.")
        place = [value.dtype.str, value.shape, "F" if value.flags.fnc else "C", data.tell()]
        data.write(value.tobytes("A"))
        return {_ARRAY: place}

    text = json.dumps({"format": _FORMAT, "states": states}, default=array).encode()
    file = io.BytesIO()
    np.savez_compressed(file, tree=np.frombuffer(text, np.uint8), data=np.frombuffer(data.getbuffer(), np.uint8))
    return file.getvalue()


def load(path: str | os.PathLike) -> Any:
    """Returns the states that `save` wrote, as `loads` does.

    Raises:
        OSError: If the file cannot be opened.
        ValueError: If the file is damaged, or of another kind or version.
    """
    return loads(Path(path).read_bytes(), name=os.fspath(path))


def loads(content: bytes, *, name: str = "the content") -> Any:
    """Returns the states that were passed to `dumps`, and runs no code from `content`.

    Raises:
        ValueError: If the content is damaged, or of another kind or version. The message calls it `name`.
    """

    def decode(node: dict[str, Any]) -> Any:
        if node.keys() != {_ARRAY}:
            return node
        dtype, shape, order, offset = node[_ARRAY]
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(data, np.dtype(dtype), count, offset).reshape(shape, order=order).copy(order)

    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            text, data = file["tree"].tobytes(), file["data"].tobytes()
        found = json.loads(text, object_hook=decode)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']}, but this version reads {_FORMAT}")
        return found["states"]
    except Exception as error:  # damaged content can raise any exception
        raise ValueError(
            f"{name} holds no env states that this version of vecenv can read ({type(error).__name__}: {error}). "
            "Pass a complete file that was written by vecenv.state.save."
        ) from error


def pack(value: Any, where: str) -> Any:
    """Returns a packed copy of a plain value, called `where` in the NotRestorable that any other value raises."""
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
    if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
        return {"scalar": np.array(value)}
    if cls is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
        return np.array(value, order="K")
    bits: Any = value.bit_generator if cls is Generator else None
    if type(bits) in _BIT_GENERATORS.values() and type(bits.seed_seq) is SeedSequence:
        return {"Generator": [type(bits).__name__, pack(bits.state, where), pack(bits.seed_seq.state, where)]}
    raise NotRestorable(
        f"{where} is a {_kind(value)}, which a state cannot hold: it may hold numbers, strings, numpy arrays and "
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


def state_of(env: Any) -> list[dict[str, Any]]:
    """Returns the state of an env: one dict per layer, the outermost wrapper first.

    Raises:
        NotRestorable: If a layer neither defines its state nor is known here, or if its state is not plain.
    """
    *wrappers, inner = layers_of(env)
    random = [inner._np_random, inner._np_random_seed] if isinstance(inner, gym.Env) else [None, None]
    states = [{"class": type(layer).__qualname__, "state": _state_of_layer(layer)} for layer in (*wrappers, inner)]
    states[-1]["random"] = pack(random, f"{type(inner).__qualname__}.np_random")
    return states


def _state_of_layer(layer: Any) -> Any:
    name, attributes = type(layer).__qualname__, _attributes_of(type(layer))
    if has_state_methods(layer):
        return pack(layer.get_state(), f"{name}.get_state()")
    if attributes is None:
        raise unknown_state(layer)
    return pack({key: value for key, value in vars(layer).items() if key in attributes}, name)


def restore(env: Any, states: Sequence[dict[str, Any]]) -> None:
    """Restores the state that `state_of` returned for an env of the same classes; otherwise raises ValueError."""
    check_classes(env, states)
    layers = layers_of(env)
    inner = layers[-1]
    generator, seed = unpack(states[-1]["random"])
    start = generator and generator.bit_generator.state
    if isinstance(inner, gym.Env):  # set_state() may pass the generator to other objects
        inner._np_random, inner._np_random_seed = generator, seed
    for layer, part in reversed([*zip(layers, states, strict=True)]):
        state = unpack(part["state"])
        if has_state_methods(layer):
            layer.set_state(state)
        else:
            vars(layer).update(state)
    if isinstance(inner, gym.Env):  # set_state() may have reset the env, or drawn numbers
        inner._np_random, inner._np_random_seed = generator, seed
    if generator is not None:
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


def unknown_state(layer: Any) -> NotRestorable:
    """Returns the error for an env or wrapper whose state is unknown."""
    name = type(layer).__qualname__
    return NotRestorable(
        f"{name} does not define get_state() and set_state(state), so its state cannot be restored exactly. Define "
        f"both on {name} (see docs/engine.md)."
    )


def layers_of(env: Any) -> list[Any]:
    """Returns the wrappers of an env, the outermost first, and the env itself."""
    return [env, *layers_of(env.env)] if isinstance(env, gym.Wrapper) else [env]


def _attributes_of(cls: type) -> tuple[str, ...] | None:
    """Returns the names of the attributes that are the state of a known class; None for any other class."""
    if not cls.__module__.startswith(_KNOWN_MODULES):
        return None
    if cls.__module__.startswith("gymnasium.wrappers.transform_") and not cls.__name__.startswith("Transform"):
        return ()  # the functions that these wrappers define themselves have no state
    return _ATTRIBUTES.get(cls.__name__)


def _kind(value: Any) -> str:
    return type(value).__qualname__ + (f" of {value.dtype}" if isinstance(value, np.ndarray) else "")


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
