"""The state of each simulation of a MujocoVectorEnv, and its episode, taken and put back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS

from vecenv.errors import NotRestorable
from vecenv.mujoco.physics import Physics
from vecenv.state.capture import by_value
from vecenv.state.restore import from_value, same


def simulation_states(physics: Physics) -> list[dict[str, Any]]:
    """Returns for each simulation its state, what its last step computed, and its own values of fields of the model.

    Raises:
        NotRestorable: If the model has a state of which MuJoCo's batch shows nothing.
    """
    batch, model = physics.batch, physics.model
    for hidden, what in (
        (model.nplugin, "engine plugins, which may keep a state of their own"),
        (model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP, "sleep enabled, whose islands are not in the state"),
        (batch.models is not None, "models set by set_models(), which are the caller's"),
    ):
        if hidden:
            raise NotRestorable(f"the simulations have {what}, so they cannot be restored exactly: do without it")
    # A step begins from the state, but rewards from what the step before has computed of the one before its last.
    computed = _computed(physics)
    varied = _varied(physics)
    return [
        {
            "state": batch.state[i].copy(),
            "computed": {name: values[i].copy() for name, values in computed.items()},
            "model": {name: values[i].copy() for name, values in varied.items()},
        }
        for i in range(batch.nsim)
    ]


def put_simulation(physics: Physics, i: int, state: dict[str, Any]) -> None:
    """Puts simulation `i` into a state that `simulation_states` returned."""
    computed = _computed(physics)
    check_same_names("computed", state["computed"], computed)
    if state["state"].shape != physics.batch.state[i].shape:
        raise ValueError(
            f"the state of a simulation has {len(state['state'])} numbers, but this model needs "
            f"{physics.batch.nstate}: build the envs from the same model"
        )
    for name in state["model"].keys() | _varied(physics).keys():
        physics.expand(name)[i] = state["model"][name] if name in state["model"] else _unvaried(physics, name)
    physics.batch.state[i] = state["state"]
    for name, values in state["computed"].items():
        computed[name][i] = values


def _varied(physics: Physics) -> dict[str, np.ndarray]:
    """Returns the fields of the model that each simulation has its own values of, also those that MuJoCo derived."""
    fields = {name: physics.batch.expanded(name) for name in MODEL_FIELDS}
    return {name: values for name, values in fields.items() if values is not None}


def _unvaried(physics: Physics, name: str) -> Any:
    """Returns the value of a field that simulations have before it is varied."""
    return attrgetter(name)(physics.batch.model)


def _computed(physics: Physics) -> dict[str, np.ndarray]:
    """Returns the fields that a step computes, to be read and written: the next step writes over them."""
    fields = {}
    for name, values in vars(physics.data).items():
        if not np.may_share_memory(values, physics.batch.state):
            fields[name] = values.view()
            fields[name].flags.writeable = True
    return fields


def check_same_names(what: str, saved: dict[str, Any], here: Any) -> None:
    """Raises ValueError if a state has other parts than the envs have."""
    if saved.keys() != set(here):
        raise ValueError(
            f"the state has {what} {sorted(saved)}, but these envs {sorted(here)}: build the envs of the same class"
        )


def settings(values: dict[str, Any], owner: str, covered: list[np.ndarray]) -> dict[str, Any]:
    """Returns attributes of a task as plain values; those that `covered` memory holds are left out.

    An attribute that cannot be taken apart stands for the error that says so.
    """
    taken: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray) and any(np.may_share_memory(value, memory) for memory in covered):
            continue
        try:
            taken[name] = by_value(value, f"{owner}.{name}")
        except NotRestorable as error:
            taken[name] = error
    return taken


def check_settings(before: dict[str, Any], now: dict[str, Any], owner: str) -> None:
    """Raises NotRestorable if an attribute has changed since the first reset, or nobody can tell."""
    for name in before.keys() | now.keys():
        first, last = before.get(name), now.get(name)
        for error in (first, last):
            if isinstance(error, NotRestorable):
                raise error
        if name not in before or name not in now or not same(first, last):
            raise NotRestorable(
                f"{owner}.{name} has changed since the envs were reset first, and it is not known what of it is which "
                f"env's: make it an array with one row for each env, and name it in {owner}.saved"
            )


def settings_of(envs: Any) -> dict[str, Any]:
    """Returns the attributes of a task that are not each env's own, see `settings`."""
    left_out = {*envs._ours, *envs.saved, *_NO_SETTINGS}
    values = {name: value for name, value in vars(envs).items() if name not in left_out}
    covered = [envs.physics.batch.state, envs.cfrc_ext, *vars(envs.data).values(), *envs.physics.varied.values()]
    return settings(values, type(envs).__name__, covered)


def states_of(envs: Any) -> list[dict[str, Any]]:
    """Returns what `MujocoVectorEnv.get_state` does."""
    _check_unchanged(envs)
    return [
        {
            "simulation": simulation,
            "cfrc_ext": envs.cfrc_ext[i].copy(),
            "generator": by_value(envs._generators[i], "np_random"),
            "seed": envs._seeds[i],
            "steps": int(envs._steps[i]),
            "ended": bool(envs._ended[i]),
            "saved": {name: np.array(getattr(envs, name)[i]) for name in envs.saved},
        }
        for i, simulation in enumerate(simulation_states(envs.physics))
    ]


def put_states(envs: Any, states: Sequence[dict[str, Any]]) -> None:
    """Does what `MujocoVectorEnv.set_state` does."""
    if len(states) != envs.num_envs:
        raise ValueError(f"set_state() needs one state for each of {envs.num_envs} envs, and got {len(states)}")
    _check_unchanged(envs)
    for i, state in enumerate(states):
        check_same_names("saved attributes", state["saved"], envs.saved)
        put_simulation(envs.physics, i, state["simulation"])
        envs.cfrc_ext[i] = state["cfrc_ext"]
        envs._generators[i], envs._seeds[i] = from_value(state["generator"]), state["seed"]
        envs._steps[i], envs._ended[i] = state["steps"], state["ended"]
        for name in envs.saved:
            getattr(envs, name)[i] = state["saved"][name]
    envs._all_begun = None not in envs._generators


def _check_unchanged(envs: Any) -> None:
    """Raises NotRestorable if an attribute of the task has changed since the first reset, if there was one."""
    now = settings_of(envs)
    envs._settings = now if envs._settings is None else envs._settings
    check_settings(envs._settings, now, type(envs).__name__)


_NO_SETTINGS = frozenset({"_ours", "_settings", "closed", "spec"})
