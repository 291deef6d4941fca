"""Saves and restores the envs of a `MujocoVectorEnv` bit for bit: simulations, generators and episodes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS

from vecenv.errors import NotRestorable
from vecenv.state import encode, pack

Settings = dict[str, tuple[bytes, bytes] | None]


def states_of(envs: Any) -> list[dict[str, Any]]:
    """Returns the states for `MujocoVectorEnv.get_state`."""
    batch, model = envs.physics.batch, envs.physics.model
    for is_hidden, what in (
        (model.nplugin, "engine plugins, which may have their own state"),
        (model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP, "sleep enabled, which the states do not capture"),
        (batch.models is not None, "models set by set_models()"),
    ):
        if is_hidden:
            raise NotRestorable(f"the simulations cannot be restored exactly, because they have {what}")
    _check_settings(envs)
    columns = _columns(envs)
    return [
        {"generator": deepcopy(generator), "seed": envs._seeds[i]}
        | {name: np.array(column[i]) for name, column in columns.items()}
        for i, generator in enumerate(envs._generators)
    ]


def restore_states(envs: Any, states: Sequence[dict[str, Any]]) -> None:
    """Restores the states for `MujocoVectorEnv.set_state`."""
    if len(states) != envs.num_envs:
        raise ValueError(f"set_state() needs one state for each of {envs.num_envs} envs, but got {len(states)}")
    _check_settings(envs)
    saved = {name for state in states for name in state}
    for name in MODEL_FIELDS:
        if f"model {name}" in saved or envs.physics.batch.expanded(name) is not None:
            envs.physics.expand(name)
    columns = _columns(envs)
    unvaried = {name: attrgetter(name[6:])(envs.physics.batch.model) for name in columns if name.startswith("model ")}
    for i, state in enumerate(states):
        values = unvaried | {name: value for name, value in state.items() if name not in ("generator", "seed")}
        found, needed = ({k: np.shape(v) for k, v in values.items()}, {k: v.shape[1:] for k, v in columns.items()})
        if found != needed:
            names = sorted({name for name, _ in found.items() ^ needed.items()})
            raise ValueError(
                f"the entries {names} of a state do not fit these envs: build envs of the same class and model"
            )
        for name, column in columns.items():
            column[i] = values[name]
        envs._generators[i], envs._seeds[i] = deepcopy(state["generator"]), state["seed"]
    envs._all_begun = None not in envs._generators


def _columns(envs: Any) -> dict[str, np.ndarray]:
    """Returns the arrays `[N, ...]` that hold the state: one row for each env."""
    batch = envs.physics.batch
    columns = {"state": batch.state, "cfrc_ext": envs.cfrc_ext, "steps": envs._steps, "ended": envs._ended}
    # A step reads only the state, but the next rewards may depend on other fields that the last step computed.
    for name, values in vars(envs.physics.data).items():
        if not np.may_share_memory(values, batch.state):
            columns[f"data {name}"] = values.view()
            columns[f"data {name}"].flags.writeable = True
    for name in MODEL_FIELDS:
        if (values := batch.expanded(name)) is not None:
            columns[f"model {name}"] = envs.physics.varied.get(name, values)
    return columns | {f"saved {name}": getattr(envs, name) for name in envs.saved}


def settings_of(envs: Any) -> Settings:
    """Returns the task's attributes that all envs share, encoded for comparison; None for values that are not plain."""
    ignored = {*envs._ours, *envs.saved, "_ours", "_settings", "closed", "spec"}
    memory = [envs.physics.batch.state, envs.cfrc_ext, *vars(envs.data).values(), *envs.physics.varied.values()]
    settings: Settings = {}
    for name, value in vars(envs).items():
        in_memory = isinstance(value, np.ndarray) and any(np.may_share_memory(value, array) for array in memory)
        if name not in ignored and not in_memory:
            settings[name] = None
            with contextlib.suppress(NotRestorable):
                settings[name] = encode(pack(value, name))
    return settings


def _check_settings(envs: Any) -> None:
    """Raises NotRestorable if an attribute of the task has changed since the first reset, or may have."""
    now, owner = settings_of(envs), type(envs).__name__
    before = envs._settings = now if envs._settings is None else envs._settings
    for name in before.keys() | now.keys():
        if before.get(name) is None or before[name] != now.get(name):
            raise NotRestorable(
                f"{owner}.{name} has changed since the first reset, or is not a plain value: make it an array with one "
                f"row per env, and name it in {owner}.saved"
            )
