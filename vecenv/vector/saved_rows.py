"""The rows of memory in the state of a vector env: reading them, writing them, and checking that they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vecenv import tree
from vecenv.memory import layout
from vecenv.state.envs import REBUILD
from vecenv.state.plain import pack, unpack

Arrays = Mapping[tree.Path, np.ndarray]
Objects = Mapping[tree.Path, list[Any]]


def row_of(arrays: Arrays, objects: Objects, i: int, slot: int) -> dict[str, Any]:
    """Returns a copy of row `i` of `slot` and its object leaves."""
    row = {name: pack(objects[path][i], name) for name, path in _fields(objects).items()}
    for name, path in _fields(arrays).items():
        row[name] = np.array(arrays[path][slot, i])
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
            raise ValueError(f"the state of env {i} has {sorted(saved)}; the vector env has {sorted(here)}. {REBUILD}")
        if (state["row"] is None) != (states[0]["row"] is None):
            raise ValueError(f"only one of envs 0 and {i} had been reset: pass the states of one get_state()")


def _fields(paths: Iterable[tree.Path]) -> dict[str, tree.Path]:
    """Returns the fields of a row that are saved, by name. No step reads the other fields of an earlier step."""
    unsaved = (layout.ACTION, layout.FINAL_OBSERVATION, layout.EPISODE_INFO)
    saved = [path for path in paths if path[0] not in unsaved]
    return {tree.name_of(str(path[0]), path[1:]): path for path in saved}
