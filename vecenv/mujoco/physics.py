"""Physics: N simulations of one model on MuJoCo's own batch, at no more cost than their results need.

Three things that MuJoCo does by default change no result and are left away: to split the constraints of a single
robot into islands, to read the clock for `MjData.timer` several times in each substep, and, where a task says so, to
search for geoms that may touch (see contacts.py). benchmarks/bench_mujoco.py measures what each is worth.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
from gymnasium.envs.mujoco.mujoco_env import expand_model_path

from vecenv.mujoco.contacts import CONTACT_FIELDS, with_listed_contacts

try:
    from mujoco.batch import Batch
except ImportError as error:
    raise ImportError(
        f"vecenv.mujoco needs mujoco 4.0 or newer, but this is {mujoco.__version__}: pip install -U mujoco"
    ) from error
if not hasattr(np, "vecdot"):
    raise ImportError(f"vecenv.mujoco needs numpy 2.0 or newer, but this is {np.__version__}: pip install -U numpy")


class Physics:
    """N simulations of one model.

    Args:
        xml_file: MJCF model, as Gymnasium's envs take it: one of its assets by name, or a path.
        num_sims: N.
        num_threads: Threads that step them; None for OMP_NUM_THREADS, or else one per core.
        fields: Of MjData, which `data` shall have besides qpos, qvel and ctrl.
        whole: Whether to keep everything that a step computes of each simulation, as `write_contact_forces` and
            frames need, and not `fields` alone.
        list_contacts: Whether to list the contacts of the model. See `contacts` for which models that is good.

    Raises:
        ValueError: If there is a callback that MuJoCo's batch cannot call, or the model is not valid.

    Attributes:
        model: The `mujoco.MjModel` of all, as it was built; the batch has a copy.
        batch: The `mujoco.batch.Batch`. To expand a field of the model, use `expand`, which knows more.
        varied: The fields that were expanded.
        data: The fields, as `float64[N, ...]`, current after each call.
    """

    def __init__(
        self,
        xml_file: str,
        num_sims: int,
        *,
        num_threads: int | None,
        fields: tuple[str, ...],
        whole: bool,
        list_contacts: bool = False,
    ):
        _refuse_callbacks()
        path = expand_model_path(xml_file)
        self._contacts_are_listed = list_contacts
        if list_contacts:
            self.model = with_listed_contacts(mujoco.MjSpec.from_file(path))
        else:
            self.model = mujoco.MjModel.from_xml_path(path)
        without_islands(self.model)
        whole = whole or bool(self.model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP)
        self.batch = Batch(self.model, num_sims, nthread=num_threads or _default_threads(), persistent=whole)
        names = ("qpos", "qvel", "ctrl", *fields)
        self.data = SimpleNamespace(**{name: self.batch.bind(name) for name in names})
        self.varied: dict[str, np.ndarray] = {}
        self._one = mujoco.MjData(self.model)
        self._contacts, self._pushes = self.batch.bind("ncon"), self.batch.bind("xfrc_applied")
        self._new = self.batch.state[0].copy()  # of a simulation to which nothing has happened

    def expand(self, name: str) -> np.ndarray:
        """Gives a field of MjModel values for each simulation: returns them, `[N, ...]`, to be written.

        After a change of one that constants are derived from (masses, lengths), `batch.set_const(ids)` must be
        called; after `MujocoVectorEnv.randomize` it is.

        Raises:
            ValueError: If the field must be the same for all, or has no effect because contacts are listed.
        """
        if name == "opt.timestep":
            raise ValueError(f"{name} must be the same for all envs, because `dt` is: give the model another one")
        if name in CONTACT_FIELDS and self._contacts_are_listed:
            raise ValueError(
                f"{name} has no effect on this model, whose contacts are listed with parameters of their own: "
                "subclass the task, which lists none, or expand the field of the same name that begins with pair_"
            )
        self.varied[name] = self.batch.expand(name)
        return self.varied[name]

    def step(self, num_substeps: int, ids: np.ndarray | None = None) -> None:
        """Steps the simulations of these numbers, or all."""
        with untimed():
            self.batch.step(ids, nstep=num_substeps)

    def reset(self, ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Puts simulations into states `float64[len(ids), nq]` and `[len(ids), nv]`, all else as in a new MjData."""
        if self.model.nsensor:
            self.batch.reset(ids, stage=mujoco.mjtStage.mjSTAGE_NONE)
        else:  # the same, and faster, where `forward` computes all else that is read
            self.batch.state[ids] = self._new
        self.data.qpos[ids], self.data.qvel[ids] = qpos, qvel
        with untimed():
            self.batch.forward(ids)

    def write_contact_forces(self, ids: np.ndarray, forces: np.ndarray) -> None:
        """Writes `cfrc_ext` of the last step of these simulations into the rows of `forces`, float64[N, nbody, 6]."""
        # It is not a part of a step, unless a sensor wants it; and then RK4 has it from before its last stage.
        model, one, of_one, get_data = self.model, self._one, self._one.cfrc_ext, self.batch.get_data
        if model.neq == 0 and not self._pushes.any():  # nothing else but contacts makes such forces
            forces[ids] = 0.0
            ids = ids[self._contacts[ids] > 0]
        for i in ids.tolist():
            get_data(i, one)
            mujoco.mj_rnePostConstraint(model, one)
            forces[i] = of_one

    def write_first_contact_forces(self, ids: np.ndarray, forces: np.ndarray) -> None:
        """Writes `cfrc_ext` of simulations that were just reset: 0, but where a sensor has them computed."""
        forces[ids] = 0.0
        for i in ids.tolist() if self.model.nsensor else ():
            self.batch.get_data(i, self._one)
            forces[i] = self._one.cfrc_ext


def _refuse_callbacks() -> None:
    """Raises here, and not in the midst of a step, if there are callbacks that MuJoCo's batch cannot call."""
    for name in ("act_bias", "act_dyn", "act_gain", "contactfilter", "control", "passive", "sensor"):
        if getattr(mujoco, f"get_mjcb_{name}")() is not None:
            raise ValueError(
                f"mjcb_{name} is a Python function, which MuJoCo's batch cannot call: remove it with "
                f"mujoco.set_mjcb_{name}(None), or step ordinary envs"
            )


def _default_threads() -> int:
    """Returns how many threads step simulations if nobody says; 0 for one per core."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else 0


def without_islands(model: mujoco.MjModel) -> None:
    """Has the constraints of a model solved all at once where that is what its islands come to.

    A tree of bodies is in one island at most, so with one tree there is nothing to split.
    """
    if model.ntree <= 1 and not model.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP:
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND


def _clock() -> Any:
    """Returns MuJoCo's global `mjcb_time`, the clock of its timers; or None if its library cannot be found."""
    # The Python package sets a clock when it is imported, and its set_mjcb_time(None) sets that clock again.
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
_taken: int | None = None  # the address that _CLOCK had before the first of these calls


def _restore_after_fork() -> None:
    """Restores the clock and the lock in a process that was forked while another thread was stepping."""
    global _lock, _untimed_calls
    if _untimed_calls:
        _CLOCK.value = _taken
    _lock, _untimed_calls = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_after_fork)


@contextlib.contextmanager
def untimed() -> Iterator[None]:
    """Stops MuJoCo from reading the clock inside the block; timers in other threads are wrong during that time.

    The pointer to the clock is never NULL, because another thread may be about to call it.
    """
    global _untimed_calls, _taken
    if _CLOCK is None:
        yield
        return
    with _lock:
        if _untimed_calls == 0:
            _taken, _CLOCK.value = _CLOCK.value, _NO_CLOCK
        _untimed_calls += 1
    try:
        yield
    finally:
        with _lock:
            _untimed_calls -= 1
            if _untimed_calls == 0:
                _CLOCK.value = _taken
