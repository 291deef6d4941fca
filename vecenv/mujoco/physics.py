"""Physics: N simulations of one model in MuJoCo's batch, without work that has no effect on results.

MuJoCo splits the constraints of a single robot into islands, reads the clock for `MjData.timer` several times in each
substep, and searches for geoms that may touch. This module skips the first two, and `vecenv.mujoco.contacts` replaces
the search for some tasks. benchmarks/bench_mujoco.py measures the three.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import mujoco
import numpy as np
from gymnasium import logger
from gymnasium.envs.mujoco.mujoco_env import expand_model_path

from vecenv.mujoco.contacts import CONTACT_FIELDS, with_listed_contacts
from vecenv.resources import available_cores

try:
    import mujoco.batch

    _ = mujoco.batch.Batch.models  # new in mujoco 4.0
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"vecenv.mujoco needs mujoco 4.0 or newer, but this is {mujoco.__version__}: pip install -U mujoco"
    ) from error
if not hasattr(np, "vecdot"):
    raise ImportError(f"vecenv.mujoco needs numpy 2.0 or newer, but this is {np.__version__}: pip install -U numpy")


Model: TypeAlias = "str | os.PathLike[str] | mujoco.MjSpec | mujoco.MjModel"
INPUTS = ("qpos", "qvel", "act", "ctrl", "qfrc_applied", "xfrc_applied", "mocap_pos", "mocap_quat")
"""Fields of MjData in the state of a simulation that a task may write."""
_NAMED = ("actuator", "body", "geom", "joint", "sensor", "site", "tendon")


class Batch(mujoco.batch.Batch):  # type: ignore[misc]
    """A batch that records which of its fields are in use, including those that a task reaches through named objects.

    `derived` are the fields of MjData that every call computes and that are read, and `varied` are the fields of
    MjModel with separate values for each simulation, both by name.
    """

    def __init__(self, model: mujoco.MjModel, num_sims: int, *, contacts_are_listed: bool, **kwargs: Any):
        super().__init__(model, num_sims, **kwargs)
        self.derived: dict[str, np.ndarray] = {}
        self.varied: dict[str, np.ndarray] = {}
        self._contacts_are_listed = contacts_are_listed

    def bind(self, name: str) -> np.ndarray:
        """Returns a field of MjData as an array `[N, ...]`."""
        values = super().bind(name)
        if values.size and not np.may_share_memory(values, self.state):
            self.derived[name] = values
        return values

    def expand(self, name: str) -> np.ndarray:
        """Returns a field of MjModel as an array `[N, ...]`; see `Physics.expand`."""
        if name == "opt.timestep":
            raise ValueError(f"{name} must be equal in all envs, which share `dt`: change it in the model file instead")
        if name in CONTACT_FIELDS and self._contacts_are_listed:
            raise ValueError(
                f"{name} has no effect on this model, whose contacts are listed with their own parameters: "
                "subclass the task, because subclasses list no contacts, or expand the corresponding pair_ field"
            )
        self.varied[name] = super().expand(name)
        return self.varied[name]

    def ray(self, pnt: Any, vec: Any, *args: Any, **kwargs: Any) -> tuple[np.ndarray, ...]:
        """Returns the distances and the geom ids of rays, `[N, R]`, or -1 for a miss, as `mujoco.batch.Batch.ray`.

        Origins and directions are `[N, R, 3]`, `[N, 1, 3]`, `[1, R, 3]` or `[3]`. `[K, 3]`, which MuJoCo takes for K
        rays that are the same in all simulations, is an error, because it may be meant as one ray of each simulation.
        """
        for what, values in (("origins", pnt), ("directions", vec)):
            if np.ndim(values) == 2 and len(values) > 1:
                raise ValueError(
                    f"the {what} of rays have shape {np.shape(values)}, but need [N, R, 3]: pass {what}[:, None] for "
                    f"one ray in each simulation, or {what}[None] for the same rays in all simulations"
                )
        return super().ray(pnt, vec, *args, **kwargs)


class Fields(SimpleNamespace):
    """The fields of MjData that a task reads, and methods that return views of named objects."""

    def __getattr__(self, name: str) -> Any:
        if name in mujoco.batch.DATA_FIELDS:
            raise AttributeError(f"to use data.{name}, list {name!r} in the task's class attribute `fields`")
        raise AttributeError(f"data has no field or method {name!r}: it has {sorted(vars(self))}")


class Physics:
    """N simulations of one model. Arguments that are not listed are those of `MujocoVectorEnv`.

    Args:
        source: The model, which is copied.
        whole: Whether to keep everything that a step computes for each simulation, which `write_contact_forces` and
            rendering need, instead of `fields` only.
        list_contacts: Whether to list the contacts of the model. `vecenv.mujoco.contacts` says which models gain.

    Raises:
        ValueError: If a callback is set that MuJoCo's batch cannot call, or the model is invalid.
        KeyError: If the model has no such keyframe.

    Attributes:
        model: The `mujoco.MjModel` of all simulations, as it was built; the batch has a copy.
        batch, varied: The `Batch`, and its `varied`.
        data: The fields, as `[N, ...]`, and methods that return views of named objects; see `MujocoVectorEnv`.
    """

    def __init__(
        self,
        source: Model,
        num_sims: int,
        *,
        num_threads: int | None,
        fields: tuple[str, ...],
        whole: bool,
        keyframe: str | None = None,
        list_contacts: bool = False,
    ):
        _refuse_callbacks()
        self.model = _built(source, list_contacts)
        without_islands(self.model)
        whole = whole or bool(self.model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP)
        threads = num_threads or _default_threads()
        self.batch = Batch(self.model, num_sims, contacts_are_listed=list_contacts, nthread=threads, persistent=whole)
        self.varied = self.batch.varied
        arrays = {name: self.batch.bind(name) for name in ("qpos", "qvel", "ctrl", *fields)}
        self.data = Fields(**arrays, **{kind: _finder(kind, getattr(self.batch, kind)) for kind in _NAMED})
        self._one = mujoco.MjData(self.model)
        self._contacts = mujoco.batch.Batch.bind(self.batch, "ncon")  # not `Batch.bind`: the task does not read it
        self._pushes = self.batch.bind("xfrc_applied")
        self._key = -1 if keyframe is None else _finder("keyframe", self.model.key)(keyframe).id
        if keyframe is not None:
            self.batch.reset(keyframe=self._key, stage=mujoco.mjtStage.mjSTAGE_NONE)
        self._new = self.batch.state[0].copy()  # the state of a simulation that was just reset

    def expand(self, name: str) -> np.ndarray:
        """Returns a field of MjModel as an array `[N, ...]` to write to, with separate values for each simulation.

        After writing to a field from which MuJoCo derives constants, such as masses, call `batch.set_const(ids)`;
        `start` calls it for simulations that begin an episode.

        Raises:
            ValueError: If the field must be equal in all simulations, or has no effect because contacts are listed.
        """
        return self.batch.expand(name)

    def step(self, num_substeps: int, ids: np.ndarray | None = None, *, refreshes: bool = False) -> None:
        """Steps the simulations `ids`, or all simulations; `refreshes` does the work of `refresh` in the same call."""
        stage = _REFRESHED if refreshes and self.batch.derived else mujoco.mjtStage.mjSTAGE_NONE
        with untimed():
            self.batch.step(ids, nstep=num_substeps, stage=stage)

    def refresh(self, ids: np.ndarray | None) -> None:
        """Makes derived positions and velocities, and their sensors, describe the state after a step."""
        if self.batch.derived:
            with untimed():
                self.batch.forward(ids, stage=_REFRESHED)

    def reset(self, ids: np.ndarray) -> None:
        """Resets simulations to the keyframe or the model's defaults. Call `start` when their state is complete."""
        if self.model.nsensor:
            self.batch.reset(ids, keyframe=self._key, stage=mujoco.mjtStage.mjSTAGE_NONE)
        else:  # equivalent and faster, because `forward` computes everything else that is read
            self.batch.state[ids] = self._new

    def start(self, ids: np.ndarray) -> None:
        """Computes the constants and fields of simulations that were reset."""
        if self.varied:
            self.batch.set_const(ids)
        with untimed():
            self.batch.forward(ids)

    def write_contact_forces(self, ids: np.ndarray, forces: np.ndarray) -> None:
        """Writes `cfrc_ext` of the last step of these simulations into the rows of `forces`, float64[N, nbody, 6]."""
        # A step computes `cfrc_ext` only if a sensor needs it, and RK4 then computes it before its last stage.
        model, one, of_one, get_data = self.model, self._one, self._one.cfrc_ext, self.batch.get_data
        if model.neq == 0 and not self._pushes.any():  # only contacts cause such forces
            forces[ids] = 0.0
            ids = ids[self._contacts[ids] > 0]
        for i in ids.tolist():
            get_data(i, one)
            mujoco.mj_rnePostConstraint(model, one)
            forces[i] = of_one

    def write_first_contact_forces(self, ids: np.ndarray, forces: np.ndarray) -> None:
        """Writes `cfrc_ext` of simulations that were just reset: 0, unless a sensor makes MuJoCo compute it."""
        forces[ids] = 0.0
        for i in ids.tolist() if self.model.nsensor else ():
            self.batch.get_data(i, self._one)
            forces[i] = self._one.cfrc_ext


_REFRESHED = mujoco.mjtStage.mjSTAGE_VEL


def _finder(kind: str, find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that finds an object of the model by name, with an error that says what has no such name."""

    @functools.wraps(find)
    def finder(name: Any) -> Any:
        try:
            return find(name)
        except KeyError as error:
            names = str(error.args[0]).rpartition("Valid names: ")[2]
            raise KeyError(f"the model has no {kind} {name!r}; its names are {names}") from None

    return finder


def _built(source: Model, list_contacts: bool) -> mujoco.MjModel:
    if isinstance(source, mujoco.MjModel):
        return copy.copy(source)
    if isinstance(source, mujoco.MjSpec):
        return source.copy().compile()
    path = os.path.abspath(source) if isinstance(source, os.PathLike) else _path_of(source)
    if os.path.isdir(path):  # which MuJoCo takes for an empty or a huge file
        raise IsADirectoryError(f"xml_file={str(source)!r} is a folder: name the model's file in it")
    try:
        if list_contacts:
            return with_listed_contacts(mujoco.MjSpec.from_file(path))
        return mujoco.MjModel.from_xml_path(path)
    except ValueError as error:
        raise ValueError(f"MuJoCo cannot load the model {path}: {error}") from None


def _path_of(name: str) -> str:
    """Returns the path of a model: a name that does not begin with ".", "/" or "~" is that of one of Gymnasium's."""
    own = f"./{name}" if name[:1] not in (".", "/", "~") else None
    try:
        path = expand_model_path(name)
    except OSError:
        if own is None:
            raise
        raise OSError(f"Gymnasium has no model {name!r}. For a file in the current folder, pass {own!r}") from None
    if own is not None and os.path.exists(own):
        logger.warn(f"xml_file={name!r} is Gymnasium's model. For the file in the current folder, pass {own!r}.")
    return path


def _refuse_callbacks() -> None:
    """Raises if a callback is set that MuJoCo's batch cannot call. Otherwise, the first step would raise."""
    for name in ("act_bias", "act_dyn", "act_gain", "contactfilter", "control", "passive", "sensor"):
        if getattr(mujoco, f"get_mjcb_{name}")() is not None:
            raise ValueError(
                f"mjcb_{name} is a Python function, which MuJoCo's batch cannot call: remove it with "
                f"mujoco.set_mjcb_{name}(None), or step the model in ordinary envs"
            )


def _default_threads() -> int:
    """Returns the number of threads for num_threads=None."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (given.isdecimal() and int(given)) or available_cores()


def without_islands(model: mujoco.MjModel) -> None:
    """Disables the search for islands of constraints in a model with a single kinematic tree.

    A tree belongs to at most one island, so the search would find nothing to split.
    """
    if model.ntree <= 1 and not model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP:
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND


def _clock() -> Any:
    """Returns MuJoCo's global `mjcb_time`, the clock of its timers, or None if its library cannot be found."""
    # set_mjcb_time(None) would not remove the clock, because it restores the clock that the Python package sets.
    folder = Path(mujoco.__file__).parent
    for pattern in ("libmujoco.so*", "libmujoco*.dylib", "mujoco.dll"):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError, ValueError):
                return ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), "mjcb_time")
    return None


_CLOCK = _clock()
# `double PyFloat_GetMin(void)` has a clock's signature, returns a constant, and needs no GIL.
_NO_CLOCK = ctypes.cast(ctypes.pythonapi.PyFloat_GetMin, ctypes.c_void_p).value
_lock = threading.Lock()
_untimed_calls = 0
_saved_clock: int | None = None  # the address in _CLOCK before the first untimed call


def _restore_after_fork() -> None:
    """Restores the clock and the lock in a process that was forked while another thread was stepping."""
    global _lock, _untimed_calls
    if _untimed_calls:
        _CLOCK.value = _saved_clock
    _lock, _untimed_calls = threading.Lock(), 0


os.register_at_fork(after_in_child=_restore_after_fork)


class untimed:  # a class, because entering a generator with `contextlib.contextmanager` takes longer
    """Stops MuJoCo from reading the clock inside a `with` block. MuJoCo's timers in other threads are wrong then.

    The pointer to the clock is never NULL, because another thread may be about to call it.
    """

    def __enter__(self) -> None:
        global _untimed_calls, _saved_clock
        if _CLOCK is not None:
            with _lock:
                if _untimed_calls == 0:
                    _saved_clock, _CLOCK.value = _CLOCK.value, _NO_CLOCK
                _untimed_calls += 1

    def __exit__(self, *_: object) -> None:
        global _untimed_calls
        if _CLOCK is not None:
            with _lock:
                _untimed_calls -= 1
                if _untimed_calls == 0:
                    _CLOCK.value = _saved_clock
