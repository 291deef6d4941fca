"""What is saved of an env's row of memory, and whether given states fit the rows that are here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vecenv import spaces as tree
from vecenv.memory import layout
from vecenv.spaces import Path
from vecenv.state.capture import by_value
from vecenv.state.restore import from_value

STATE_FORMAT = 1
KEYS = {"format", "autoreset_mode", "row", "kind", "totals", "env"}


def saved_fields(paths: Iterable[Path]) -> dict[str, Path]:
    """Returns the fields that are saved, by name; actions and final observations were handed on already."""
    fields = [path for path in paths if path[0] not in (layout.ACTION, layout.FINAL_OBSERVATION)]
    return {tree.name_of(str(path[0]), path[1:]): path for path in fields}


def take(
    arrays: Mapping[Path, np.ndarray], loose: Mapping[Path, list[Any]], i: int, *, slot: int, observed: int
) -> dict[str, Any]:
    """Returns a copy of row `i` of `slot`, but its observation of slot `observed`, and of its loose leaves."""
    row: dict[str, Any] = {}
    for name, path in saved_fields(arrays).items():
        row[name] = np.array(arrays[path][observed if path[0] == layout.OBSERVATION else slot, i])
    leaves = {name: by_value(loose[path][i], name) for name, path in saved_fields(loose).items()}
    return {"fields": row, "loose": leaves}


def put(arrays: Mapping[Path, np.ndarray], loose: Mapping[Path, list[Any]], i: int, slot: int, row: Any) -> None:
    """Writes what `take` returned."""
    for name, path in saved_fields(arrays).items():
        arrays[path][slot, i] = row["fields"][name]
    for name, path in saved_fields(loose).items():
        loose[path][i] = from_value(row["loose"][name])


def check(
    states: Any, num_envs: int, autoreset_mode: str, arrays: Mapping[Path, np.ndarray], loose: Mapping[Path, list[Any]]
) -> None:
    """Raises ValueError if these are not the states of `num_envs` envs with such rows, and says what does not fit."""
    if not isinstance(states, (list, tuple)) or len(states) != num_envs:
        found = f"{len(states)} states" if isinstance(states, (list, tuple)) else f"a {type(states).__name__}"
        raise ValueError(f"set_state() needs a list of {num_envs} states, one for each env, and got {found}")
    fields, leaves = saved_fields(arrays), saved_fields(loose)
    for i, state in enumerate(states):
        if not isinstance(state, dict) or not state.keys() >= KEYS:
            missing = sorted(KEYS - state.keys()) if isinstance(state, dict) else f"all, it is a {type(state).__name__}"
            raise ValueError(f"the state of env {i} is not what get_state() returned: it lacks {missing}")
        if state["format"] != STATE_FORMAT:
            raise ValueError(
                f"the state of env {i} has format {state['format']}, but this vecenv reads {STATE_FORMAT}: use the "
                "version of vecenv that saved it"
            )
        if state["autoreset_mode"] != autoreset_mode:
            raise ValueError(
                f"the state of env {i} is of autoreset_mode={state['autoreset_mode']!r}, but this vector env was built "
                f"with {autoreset_mode!r}: build it with the other"
            )
        if (state["row"] is None) != (states[0]["row"] is None):
            raise ValueError(f"of envs 0 and {i} only one had been reset: states of different vector envs are mixed")
        if state["row"] is not None:
            _check_row(i, state["row"], fields, leaves, arrays)


def _check_row(
    i: int, row: Any, fields: Mapping[str, Path], leaves: Mapping[str, Path], arrays: Mapping[Path, np.ndarray]
) -> None:
    for kind, names in (("fields", fields), ("loose", leaves)):
        if row[kind].keys() != names.keys():
            raise ValueError(
                f"the state of env {i} has {sorted(row[kind])}, but this vector env {sorted(names)}: the observation "
                "spaces differ"
            )
    for name, path in fields.items():
        value, here = row["fields"][name], arrays[path]
        if (value.dtype, value.shape) != (here.dtype, here.shape[2:]):
            raise ValueError(
                f"the state of env {i} has {name} {value.dtype}{list(value.shape)}, but this vector env "
                f"{here.dtype}{list(here.shape[2:])}: build it with the same spaces and options"
            )


def check_kind(states: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Raises ValueError if envs that were stepped together are to be put back into single ones, or the reverse."""
    if any(state["kind"] != kind for state in states):
        raise ValueError(
            f"the states are of envs of kind {states[0]['kind']!r}, but these are {kind!r}: 'batched' envs are stepped "
            "by one vector env in one call, and each 'env' by itself. Build them as they were built (backend=...)"
        )
