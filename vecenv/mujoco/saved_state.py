"""Saves and restores the envs of a `MujocoVectorEnv` bit for bit: simulations, episodes and the task's arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from operator import attrgetter
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS

from vecenv.errors import NotRestorable
from vecenv.mujoco.episodes import Episodes
from vecenv.mujoco.physics import Physics

Arrays = dict[str, np.ndarray]
"""Arrays `[N, ...]` by name."""

_OF_THE_ENV = ("generator", "seed", "model")
"""Entries of a state that are no rows of arrays."""


def states_of(physics: Physics, episodes: Episodes, arrays: Arrays) -> list[dict[str, Any]]:
    """Returns one state per env: its generator and seed, and its rows of the simulations, the episodes and `arrays`.

    A state also holds a fingerprint of the model, without which it means nothing.

    Raises:
        NotRestorable: If MuJoCo's batch does not expose all of the simulations' state.
    """
    batch, model = physics.batch, physics.model
    for is_hidden, what in (
        (model.nplugin, "engine plugins, which may have their own state"),
        (model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP, "sleep enabled, which the states do not capture"),
        (batch.models is not None, "models set by set_models()"),
    ):
        if is_hidden:
            raise NotRestorable(f"the simulations cannot be restored exactly, because they have {what}")
    columns, fingerprint = _columns(physics, episodes) | arrays, _fingerprint(model)
    return [
        {"generator": deepcopy(generator), "seed": seed, "model": fingerprint}
        | {name: np.array(column[i]) for name, column in columns.items()}
        for i, (generator, seed) in enumerate(zip(episodes.generators, episodes.seeds, strict=True))
    ]


def restore_states(physics: Physics, episodes: Episodes, arrays: Arrays, states: Sequence[dict[str, Any]]) -> None:
    """Restores the states that `states_of` returned for envs that were built in the same way.

    Raises:
        ValueError: If the number of states, or the names and shapes of their entries, do not fit these envs.
        NotRestorable: If the model has changed since the states were saved.
    """
    num_envs = len(episodes.steps)
    if len(states) != num_envs:
        raise ValueError(f"set_state() needs one state for each of {num_envs} envs, but got {len(states)}")
    fingerprint = _fingerprint(physics.batch.model)
    if any(state.get("model") != fingerprint for state in states):
        raise NotRestorable(
            "the state belongs to another model: the model file or a setting has changed since it was saved. Restore "
            "what was used then."
        )
    saved = {name for state in states for name in state}
    for name in saved:
        if name.startswith("return "):
            episodes.returns.setdefault(name[7:], np.zeros(num_envs))
    for name in MODEL_FIELDS:
        if f"model {name}" in saved or physics.batch.expanded(name) is not None:
            physics.expand(name)
    columns = _columns(physics, episodes) | arrays
    defaults = {name: np.float64(0) for name in columns if name.startswith("return ")}
    defaults |= {name: attrgetter(name[6:])(physics.batch.model) for name in columns if name.startswith("model ")}
    for i, state in enumerate(states):
        values = defaults | {name: value for name, value in state.items() if name not in _OF_THE_ENV}
        found, needed = ({k: np.shape(v) for k, v in values.items()}, {k: v.shape[1:] for k, v in columns.items()})
        if found != needed:
            names = sorted({name for name, _ in found.items() ^ needed.items()})
            raise ValueError(
                f"the entries {names} of a state do not fit these envs: build envs of the same class and model"
            )
        for name, column in columns.items():
            column[i] = values[name]
        episodes.generators[i], episodes.seeds[i] = deepcopy(state["generator"]), state["seed"]
    episodes.all_begun = None not in episodes.generators


def _columns(physics: Physics, episodes: Episodes) -> Arrays:
    """Returns the arrays `[N, ...]` that hold the state of the simulations and of the episodes."""
    columns = {"state": physics.batch.state, "steps": episodes.steps, "ended": episodes.over}
    # A step reads only the state, but the next rewards may depend on other fields that the last step computed.
    for name, values in physics.batch.derived.items():
        columns[f"data {name}"] = values.view()
        columns[f"data {name}"].flags.writeable = True
    for name in MODEL_FIELDS:
        if (values := physics.batch.expanded(name)) is not None:
            columns[f"model {name}"] = physics.varied.get(name, values)
    return columns | {f"return {term}": returns for term, returns in episodes.returns.items()}


def _fingerprint(model: mujoco.MjModel) -> str:
    """Returns a hash of the model's values, rounded to float32, because its last bits may depend on the machine."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted({*MODEL_FIELDS, "hfield_data", "mesh_vert"}):
        values = np.asarray(attrgetter(name)(model))
        values = values.astype(np.float32) if values.dtype == np.float64 else values
        digest.update(f"{name} {values.shape}".encode() + values.tobytes())
    return digest.hexdigest()


def declared_arrays(task: object, names: Sequence[str], num_envs: int) -> Arrays:
    """Returns the arrays `[N, ...]` that a task declares in `saved`; raises ValueError if one is missing."""
    arrays: dict[str, Any] = {name: getattr(task, name, None) for name in names}
    for name, values in arrays.items():
        if not isinstance(values, np.ndarray) or values.shape[:1] != (num_envs,):
            found = f"an array of shape {values.shape}" if isinstance(values, np.ndarray) else repr(values)
            raise ValueError(
                f"{type(task).__name__}.saved lists {name!r}, which must be an array [N, ...] with N={num_envs} "
                f"that the constructor sets, but it is {found}"
            )
    return {f"saved {name}": values for name, values in arrays.items()}


def check_declares(task_class: type) -> None:
    """Raises NotRestorable if a custom task's class does not say in `saved` which of its arrays belong to its state."""
    if "saved" not in vars(task_class):
        raise NotRestorable(
            f"{task_class.__qualname__} does not declare `saved`, so its state cannot be restored exactly. Set the "
            "class attribute `saved` to the names of its attributes that change during episodes, which must be arrays "
            "with one row per env, or to () if there are none."
        )
