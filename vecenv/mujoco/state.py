"""state.py: RestorableVectorEnv: the state of each simulation and its episode, taken and put back bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, ClassVar

import mujoco
import numpy as np
from gymnasium.vector import VectorEnv
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
            raise NotRestorable(f"the simulations have {what}, so they cannot be put back exactly: do without it")
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


_NO_SETTINGS = frozenset({"_ours", "_settings", "closed", "spec"})


class RestorableVectorEnv(VectorEnv):
    """The part of `MujocoVectorEnv` that saves its envs."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes of the task that change: arrays `[N, ...]`, of which `get_state` saves each env's row."""

    physics: Physics
    data: Any
    cfrc_ext: np.ndarray
    _generators: list[np.random.Generator | None]
    _seeds: list[int | None]
    _steps: np.ndarray
    _ended: np.ndarray
    _all_begun: bool
    _ours: set[str]
    _settings: dict[str, Any] | None

    def _assert_open(self) -> None:
        raise NotImplementedError

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env as plain values: its simulation, its generator, and where its episode is.

        Raises:
            NotRestorable: If the task has attributes that have changed and are not in `saved`, or the model has a
                state that MuJoCo's batch does not show.
        """
        self._assert_open()
        self._check_settings(strictly=True)
        return [
            {
                "simulation": simulation,
                "cfrc_ext": self.cfrc_ext[i].copy(),
                "generator": by_value(self._generators[i], "np_random"),
                "seed": self._seeds[i],
                "steps": int(self._steps[i]),
                "ended": bool(self._ended[i]),
                "saved": {name: np.array(getattr(self, name)[i]) for name in self.saved},
            }
            for i, simulation in enumerate(simulation_states(self.physics))
        ]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Puts the envs into states that `get_state` returned, of envs that were built in the same way."""
        self._assert_open()
        if len(states) != self.num_envs:
            raise ValueError(f"set_state() needs one state for each of {self.num_envs} envs, and got {len(states)}")
        self._check_settings(strictly=True)
        for i, state in enumerate(states):
            check_same_names("saved attributes", state["saved"], self.saved)
            put_simulation(self.physics, i, state["simulation"])
            self.cfrc_ext[i] = state["cfrc_ext"]
            self._generators[i], self._seeds[i] = from_value(state["generator"]), state["seed"]
            self._steps[i], self._ended[i] = state["steps"], state["ended"]
            for name in self.saved:
                getattr(self, name)[i] = state["saved"][name]
        self._all_begun = None not in self._generators

    def _check_settings(self, *, strictly: bool = False) -> None:
        """Remembers the attributes of the task before the first reset; raises, if `strictly`, if they have changed."""
        if self._settings is None or strictly:
            left_out = {*self._ours, *self.saved, *_NO_SETTINGS}
            values = {name: value for name, value in vars(self).items() if name not in left_out}
            covered = [
                self.physics.batch.state,
                self.cfrc_ext,
                *vars(self.data).values(),
                *self.physics.varied.values(),
            ]
            now = settings(values, type(self).__name__, covered)
            self._settings = now if self._settings is None else self._settings
            if strictly:
                check_settings(self._settings, now, type(self).__name__)
