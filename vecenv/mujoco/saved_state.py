"""Saves and restores the envs of a `MujocoVectorEnv` bit for bit: simulations, generators and episodes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS

from vecenv.errors import NotRestorable


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
    cls = type(envs)
    if "saved" not in vars(cls) and not cls.__module__.startswith("vecenv.mujoco."):
        raise NotRestorable(
            f"{cls.__qualname__} does not declare `saved`, so its state cannot be restored exactly. Set the class "
            "attribute `saved` to the names of its attributes that change during episodes, which must be arrays with "
            "one row per env, or to () if there are none."
        )
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
    saved = {name for state in states for name in state}
    for name in saved:
        if name.startswith("return "):
            envs._returns.setdefault(name[7:], np.zeros(envs.num_envs))
    for name in MODEL_FIELDS:
        if f"model {name}" in saved or envs.physics.batch.expanded(name) is not None:
            envs.physics.expand(name)
    columns = _columns(envs)
    defaults = {name: np.float64(0) for name in columns if name.startswith("return ")}
    defaults |= {name: attrgetter(name[6:])(envs.physics.batch.model) for name in columns if name.startswith("model ")}
    for i, state in enumerate(states):
        values = defaults | {name: value for name, value in state.items() if name not in ("generator", "seed")}
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
    columns = {"state": batch.state, "cfrc_ext": envs.cfrc_ext, "steps": envs.steps, "ended": envs._ended}
    # A step reads only the state, but the next rewards may depend on other fields that the last step computed.
    for name, values in batch.derived.items():
        columns[f"data {name}"] = values.view()
        columns[f"data {name}"].flags.writeable = True
    for name in MODEL_FIELDS:
        if (values := batch.expanded(name)) is not None:
            columns[f"model {name}"] = envs.physics.varied.get(name, values)
    columns |= {f"return {term}": returns for term, returns in envs._returns.items()}
    return columns | {f"saved {name}": values for name, values in saved_arrays(envs).items()}


def saved_arrays(envs: Any) -> dict[str, np.ndarray]:
    """Returns the arrays `[N, ...]` that the task declares in `saved`; raises ValueError if one is missing."""
    arrays: dict[str, Any] = {name: getattr(envs, name, None) for name in envs.saved}
    for name, values in arrays.items():
        if not isinstance(values, np.ndarray) or values.shape[:1] != (envs.num_envs,):
            found = f"an array of shape {values.shape}" if isinstance(values, np.ndarray) else repr(values)
            raise ValueError(
                f"{type(envs).__name__}.saved lists {name!r}, which must be an array [N, ...] with N={envs.num_envs} "
                f"that the constructor sets, but it is {found}"
            )
    return arrays
