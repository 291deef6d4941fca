"""Saving and resuming a run: its progress, its learners and, if possible, the states of its envs."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

import vecenv
from ppo.algorithm.collector import Collector
from ppo.algorithm.schedules import schedule_change
from ppo.callbacks import Callback
from ppo.config import Config, ConfigError
from ppo.errors import RunError, is_from_env, is_resumable_after
from ppo.run.checkpoint import Checkpoints, Recorded
from ppo.run.folder import Run
from ppo.run.progress import Progress
from ppo.run.signals import Stop
from ppo.run.status import Status
from vecenv.errors import in_one_line

OVERDUE_S = 600.0  # seconds after which a checkpoint follows, however few env-steps the run has taken

MAX_STATES_S, STATES_SHARE = 1.0, 0.01
"""If saving the states of the envs took more than `MAX_STATES_S` seconds, periodic checkpoints omit them as often as is
needed for saving them to take at most the share `STATES_SHARE` of the time."""


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a run.

    Attributes:
        env_steps: Env-steps of the run that it holds.
        complete: Whether another checkpoint at these env-steps could not hold more: this one holds the states of the
            envs, they can never be saved, or it was the last attempt to save them.
        states: The states of the envs that a resumed run has read from it, or the error raised when reading them; None
            once the envs continue from them.
        why_fresh: Why it holds no states of the envs, for a run that resumes from it; None if it holds them.
    """

    env_steps: int
    complete: bool
    states: list[Any] | Exception | None = None
    why_fresh: str | None = None


@dataclass(frozen=True)
class SavedStates:
    """The states of the envs for a checkpoint, or why there are none.

    Attributes:
        content: The content of the file; None if there are no states.
        why_fresh: Why there are no states; None if there are.
        never: Whether they can never be saved.
        fault: The error after which the envs cannot be stepped any more, if there was one.
    """

    content: bytes | None = None
    why_fresh: str | None = None
    never: bool = False
    fault: Exception | None = None

    @property
    def settled(self) -> bool:
        """Whether another attempt could not find more."""
        return self.content is not None or self.never


class EnvStates:
    """Saves and restores the states of the envs, and warns once of each reason why it cannot.

    States that can never be saved, because a class does not define them, are requested once. After any other error,
    such as the death of a worker, the next checkpoint may hold them again.
    """

    def __init__(self, collector: Collector, warn: Callable[[str], None]):
        self._collector, self._warn = collector, warn
        self._warned: set[str] = set()  # the reasons that were warned of
        self._never: SavedStates | None = None  # the result of `save` if the states can never be saved
        self._took_s = self._ended_s = 0.0  # how long saving them took the last time, and when it ended

    @property
    def may_be_slow(self) -> bool:
        """Whether saving the states may take longer than `MAX_STATES_S`: it did the last time, or was never timed."""
        return not 0.0 < self._took_s <= MAX_STATES_S

    def omitted(self, *, periodic: bool) -> SavedStates | None:
        """Returns the result of `save` if it is known, or if a periodic checkpoint should not spend time on it."""
        too_soon = time.perf_counter() - self._ended_s < self._took_s / STATES_SHARE
        if periodic and self._took_s > MAX_STATES_S and too_soon:
            return SavedStates(why_fresh=f"saving them took {self._took_s:.1f} s, so this checkpoint omits them")
        return self._never

    def save(self) -> SavedStates:
        """Returns the states of all envs, or the reason why there are none."""
        start = time.perf_counter()
        try:
            content = vecenv.state.dumps(self._collector.get_states())
        except (vecenv.WorkerDied, vecenv.StateError, multiprocessing.TimeoutError) as error:
            return SavedStates(why_fresh=str(error), fault=error)
        except Exception as error:  # an env's exception must not prevent the checkpoint
            reason = in_one_line(error)
            self._warn_once(
                "for now, checkpoints do not hold the states of the envs, so a resumed run begins new episodes",
                reason,
            )
            never = isinstance(error, vecenv.NotRestorable) and not isinstance(error, vecenv.NotRestorableNow)
            states = SavedStates(why_fresh=reason, never=never)
            self._never = states if never else None
            return states
        self._ended_s = time.perf_counter()
        self._took_s = self._ended_s - start  # an attempt that failed says nothing
        return SavedStates(content)

    def restore(self, states: list[Any] | Exception | None, why_fresh: str | None) -> bool:
        """Restores the states of a checkpoint and returns True, or warns of the reason why it cannot.

        If the states are damaged, `states` is the error raised when reading them. If the checkpoint holds none,
        `why_fresh` is the reason.
        """
        cause = "the checkpoint was written without their states"
        if states is not None:
            try:
                if isinstance(states, Exception):
                    raise states
                self._collector.set_states(states)
                return True
            except vecenv.WorkerDied:
                raise
            except Exception as error:  # a run can continue without them
                cause, why_fresh = "their states cannot be restored", in_one_line(error)
        if why_fresh is not None:
            self._warn_once(f"the envs begin fresh episodes, because {cause}", why_fresh)
        return False

    def _warn_once(self, what: str, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn(f"{what}: {reason}")


class Saver:
    """Writes the checkpoints of a run, and restores the newest one.

    A checkpoint always holds the progress and the modules. It also holds the states of the envs if they can be saved. A
    run that resumes without them begins fresh episodes.

    Args:
        run: The run.
        progress: The progress to save and to restore.
        collector: Steps the envs.
        callback: Receives warnings, and the folder of each checkpoint.
        modules: The agents and learners, by their names in checkpoints.
        actions: Returns the actions to store with a checkpoint; see `recorded_actions`.
        status: Says when a checkpoint is being saved.

    Attributes:
        newest: The checkpoint that was last written or restored; None if there is none.
    """

    def __init__(
        self,
        run: Run,
        progress: Progress,
        collector: Collector,
        callback: Callback,
        modules: Mapping[str, tf.Module],
        *,
        actions: Callable[[], Recorded],
        status: Status,
    ):
        self._run, self._progress, self._callback = run, progress, callback
        self._actions, self._status = actions, status
        self._checkpoints = Checkpoints(run.checkpoints, **modules)
        self._states = EnvStates(collector, callback.on_warning)
        self.newest: Newest | None = None
        self._saved_s = time.monotonic()

    def resume(self, config: Config) -> None:
        """Restores the progress and the modules from the newest valid checkpoint; writes the new settings of the run.

        `restore_envs` then restores the states of the envs. Raises ConfigError if the run has taken more env-steps than
        the new settings allow.
        """
        values = self._checkpoints.restore(warn=self._callback.on_warning)
        if changed := self._run.changed_versions():
            self._callback.on_warning(f"the run began with {', '.join(changed)}: the envs and results may differ")
        try:
            self._progress.load(values)
            why_fresh = values["why_fresh"]
        except KeyError as error:
            path = self._run.checkpoints / values["checkpoint"]
            raise RunError(
                f"checkpoint {path} lacks {error}, so it comes from another version of ppo: use the version in "
                "versions.json, or train from scratch"
            ) from error
        taken = self._progress.env_steps
        if self._progress.updates > config.num_updates:
            raise ConfigError(
                f"total_steps={config.total_steps} is less than the {taken:,} env-steps that {self._run.path} has "
                "taken. It counts from the start of the run: to train for that many more, set total_steps to "
                f"{taken + config.total_steps}"
            )
        self.newest = Newest(taken, complete=True, states=values.get("env_states"), why_fresh=why_fresh)
        if change := schedule_change(self._run.read_config(), config, self._progress.updates):
            self._callback.on_warning(change)
        self._run.write_config(config)

    def restore_envs(self) -> bool:
        """Restores the states of the envs that `resume` has read, if any, and returns whether this succeeded."""
        if self.newest is None:
            return False
        states, self.newest = self.newest.states, dataclasses.replace(self.newest, states=None)
        return self._states.restore(states, self.newest.why_fresh)

    def save(self, *, periodic: bool = False) -> None:
        """Writes a checkpoint, unless the newest one already holds everything.

        Args:
            periodic: Whether training continues afterwards, so that slow states of the envs may be omitted.

        Raises:
            RunError: If the checkpoint cannot be written, or the run folder is gone.
            vecenv.WorkerDied, vecenv.StateError, multiprocessing.TimeoutError: If training should continue, but the
                envs cannot be stepped any more. The checkpoint was written.
        """
        self._run.check_exists()
        if self.newest is not None and self.newest.complete and self._holds_last_update:
            return
        with self._status.doing("saving"):
            actions, states = self._actions(), self._states.omitted(periodic=periodic)
            if self._progress.ahead:  # the states would be newer than the policies
                states = SavedStates(why_fresh="a rollout that was not trained on was in progress")
            if states is None:
                if self._states.may_be_slow and not self._holds_last_update:
                    # First without the states, because a batch system may kill this process while it saves them.
                    self._write(actions, SavedStates(why_fresh="the process ended while it saved them"))
                states = self._states.save()
            path = self._write(actions, states, complete=states.settled or not periodic)
            self._callback.on_checkpoint(self._progress.env_steps, path)
            self._saved_s = time.monotonic()
            if states.fault is not None and periodic:
                raise states.fault

    @property
    def overdue(self) -> bool:
        """Whether the last checkpoint was written, or this object created, at least `OVERDUE_S` seconds ago."""
        return time.monotonic() - self._saved_s >= OVERDUE_S

    def save_best(self, values: Mapping[str, Any]) -> None:
        """Writes the checkpoint "best" with these values. Nothing resumes from it, so it holds no env states."""
        self._run.check_exists()
        steps = self._progress.env_steps
        values = {**self._progress.to_json(), "env_steps": steps, **values}
        self._checkpoints.save(steps, values, actions=self._actions(), best=True)

    def kept(self) -> str | None:
        """Returns a clause that says which part of the run is saved, or None if nothing has been learned yet."""
        if self._progress.updates == 0:
            return None
        if self.newest is None:
            return "no checkpoint has been written yet"
        return f"the run is saved up to env-step {self.newest.env_steps:,} in {self._run.path}, and can be resumed"

    @contextmanager
    def rescuing(self, stop: Stop) -> Iterator[None]:
        """Saves the last finished update if the block raises, and adds a note to the error that says where it is.

        If `stop` explains the error, suppresses it. If an env raised it, saves the run, then warns.
        """
        try:
            yield
        except BaseException as error:
            if stop.explains(error):
                if is_from_env(error):
                    try:
                        self.save()
                    finally:
                        lines = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
                        self._callback.on_warning(f"an env failed while the run was stopping: {lines}")
                return
            if self._progress.updates > 0 and (note := self._rescued(error)):
                error.add_note(note)
            raise

    def _rescued(self, error: BaseException) -> str:
        """Saves the last finished update if no checkpoint holds it, and returns a note for the error, or "".

        The note says what is saved, unless the error itself does.
        """
        env_steps, failure = self._progress.env_steps, ""
        try:
            if not self._holds_last_update:
                self.save()
        except Exception as save_error:  # also from a callback, after the checkpoint was written
            failure = str(save_error)
        try:
            self._run.check_exists()
        except RunError as gone:
            return "" if str(gone) == str(error) else f"Also, {gone}"
        if self._holds_last_update:
            saved = f"The run is saved up to env-step {env_steps:,} in {self._run.path}"
            return f"{saved}, and can be resumed." if is_resumable_after(error) else f"{saved}."
        note = f"The run could not be saved at env-step {env_steps:,}"
        note += "." if failure == str(error) else f": {failure}"
        if self.newest is not None:
            note += f" Its last checkpoint is from env-step {self.newest.env_steps:,}."
        return note

    @property
    def _holds_last_update(self) -> bool:
        """Whether the newest checkpoint holds the last finished update."""
        return self.newest is not None and self.newest.env_steps == self._progress.env_steps

    def _write(self, actions: Recorded, states: SavedStates, *, complete: bool = False) -> Path:
        """Writes a checkpoint and returns its folder."""
        steps, values = self._progress.env_steps, {**self._progress.to_json(), "why_fresh": states.why_fresh}
        try:
            path = self._checkpoints.save(steps, values, states.content, actions)
        except RunError:
            self._run.check_exists()  # which explains the failure better if the folder is gone
            raise
        self.newest = Newest(steps, complete, why_fresh=states.why_fresh)
        return path
