"""Saving and resuming a run: its progress, its learner and, if possible, the states of its envs."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tensorflow as tf

import vecenv
from ppo.algorithm.collector import Collector
from ppo.algorithm.schedules import schedule_change
from ppo.callbacks import Callback
from ppo.config import NORMALIZERS, SETTINGS, Config, ConfigError
from ppo.errors import RunError, sentence_of
from ppo.model.agent import Agent
from ppo.model.normalize import RunningMoments
from ppo.run.checkpoint import Checkpoints, Recorded, name_of, only_reward_moments
from ppo.run.folder import Run, write_atomically
from ppo.run.metrics import Clock, Episodes
from ppo.run.modules import config_to_load

MAX_STATES_S, STATES_SHARE = 1.0, 0.01
"""If saving the states of the envs took more than `MAX_STATES_S` seconds, periodic checkpoints omit them as often as is
needed for saving them to take at most the share `STATES_SHARE` of the time."""

INITIAL = ("policy_output_gain", "initial_log_std")
"""Settings that concern only new networks, so they have no effect on a run that starts from another run."""

MAY_DIFFER = {*INITIAL, "min_log_std"}
"""Settings of the networks in which a run may differ from the run from which it starts."""

KEPT_ROLLOUTS = 10
"""Maximum weight of another run's statistics of observations, in rollouts.

With less weight, the first rollouts, which begin at resets, would shift the inputs of the policy too far.
"""

KEPT_REWARDS = 1e-6
"""Maximum weight of another run's statistics of rewards, in steps. With a weight of 0, no statistics would exist, and
the new run would spend a rollout on initializing them."""


class Progress:
    """The number of updates so far, the scores of recent episodes and the time spent on training, over all resumes."""

    def __init__(self, config: Config, teams: Mapping[str, Sequence[str]] = MappingProxyType({})):
        self.config = config
        self.updates = 0
        self.unreported: dict[str, Any] | None = None  # metrics of the last update, until they are reported
        self.episodes = Episodes(config.info_metrics, teams)
        self.clock = Clock(0.0, 0)

    @property
    def env_steps(self) -> int:
        """Env-steps taken so far, all envs together."""
        return self.updates * self.config.batch_size

    @property
    def finished(self) -> bool:
        """Whether all updates have been made."""
        return self.updates >= self.config.num_updates

    def due(self, interval: int | None) -> bool:
        """Returns whether the last update passed a multiple of `interval` env-steps, or ended the run; no for None."""
        if interval is None:
            return False
        updates, size = self.updates, self.config.batch_size
        return self.finished or updates * size // interval > (updates - 1) * size // interval

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values from which `load` restores the progress."""
        return {
            "update": self.updates,
            "wall_s": self.clock.wall_s,
            "episodes": self.episodes.state(),
            "unreported": self.unreported,
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Restores a result of `to_json`."""
        self.updates = values["update"]
        self.unreported = values.get("unreported")  # optional: older checkpoints follow their reports
        self.episodes.load(values["episodes"])
        self.clock = Clock(values["wall_s"], self.env_steps)


class Saver:
    """Saves a run and restores it.

    A checkpoint always holds the progress and the modules. It also holds the env states if these can be saved. A run
    that resumes without env states begins fresh episodes.
    """

    def __init__(
        self, run: Run, progress: Progress, collector: Collector, callback: Callback, modules: dict[str, tf.Module]
    ):
        self._run, self._progress, self._collector, self._callback = run, progress, collector, callback
        self._checkpoints = Checkpoints(run.checkpoints, **modules)
        self._env_states: Any = None  # from the restored checkpoint
        self._why_fresh: str | None = None  # why the restored checkpoint holds no env states
        self._warned: set[str] = set()  # the reasons for missing env states that were warned of
        self._states_s = 0.0  # how long saving env states took the last time
        self._stored_s = 0.0  # when it ended
        self._saved_steps: int | None = None  # env-steps of the last checkpoint
        self._complete = False  # whether it holds everything that a checkpoint of this run can hold

    def resume(self, config: Config) -> None:
        """Restores the newest valid checkpoint, and writes the settings for the rest of the run."""
        values = self._checkpoints.restore(warn=self._callback.on_warning)
        try:
            self._progress.load(values)
            self._env_states, self._why_fresh = values.get("env_states"), values["why_fresh"]
        except KeyError as error:
            path = self._run.checkpoints / values["checkpoint"]
            raise RunError(
                f"checkpoint {path} lacks {error}, so it comes from another version of ppo: use the version in "
                "versions.json, or train from scratch"
            ) from error
        self._saved_steps, self._complete = self._progress.env_steps, True  # nothing has changed since it was saved
        if change := schedule_change(self._run.read_config(), config, self._progress.updates):
            self._callback.on_warning(change)
        self._run.write_config(config)

    def restore_envs(self) -> bool:
        """Restores the env states of the checkpoint, if any, and returns whether this succeeded."""
        states, self._env_states = self._env_states, None
        if states is not None:
            try:
                self._collector.set_states(states)
                return True
            except vecenv.WorkerDied:
                raise
            except Exception as error:  # env states are optional
                self._why_fresh = sentence_of(error)
        if self._why_fresh is not None:
            self._callback.on_warning(
                f"the envs begin fresh episodes, because their states cannot be restored: {self._why_fresh}"
            )
        return False

    @property
    def written(self) -> bool:
        """Whether the last checkpoint holds the last update."""
        return self._saved_steps == self._progress.env_steps

    @property
    def saved(self) -> bool:
        """Whether the last checkpoint is complete, and nothing has changed since."""
        return self._complete and self.written

    def save(self, actions: Recorded, *, periodic: bool = False, dropped: bool = False) -> None:
        """Writes a checkpoint. Raises WorkerDied, StateError or TimeoutError if training cannot continue afterwards.

        Args:
            actions: See `recorded_actions`.
            periodic: Whether training continues afterwards, so that slow env states may be omitted.
            dropped: Whether the envs are ahead of the learner, because no update has learned from the last rollout.
        """
        self._run.check_exists()
        states, fault = None, None
        why_fresh = self._why_omitted(periodic, dropped)
        if why_fresh is None:
            if not self.written and not 0.0 < self._states_s <= MAX_STATES_S:
                # It is not known that saving the states takes less time than a batch system grants.
                self._write(actions, None, "the process ended while it saved them")
            states, why_fresh, fault = self._states_of_envs()
        path = self._write(actions, states, why_fresh)
        self._complete = states is not None or not periodic
        self._callback.on_checkpoint(self._progress.env_steps, path)
        if fault is not None and periodic:
            raise fault

    def _write(self, actions: Recorded, states: bytes | None, why_fresh: str | None) -> Path:
        """Writes a checkpoint and returns its folder."""
        steps = self._progress.env_steps
        path = self._checkpoints.save(steps, {**self._progress.to_json(), "why_fresh": why_fresh}, states, actions)
        self._saved_steps, self._complete = steps, False
        return path

    def save_best(self, values: Mapping[str, Any], actions: Recorded) -> None:
        """Writes the checkpoint "best" with these values. Nothing resumes from it, so it holds no env states."""
        self._run.check_exists()
        steps = self._progress.env_steps
        values = {**self._progress.to_json(), "env_steps": steps, **values}
        self._checkpoints.save(steps, values, actions=actions, best=True)

    def _why_omitted(self, periodic: bool, dropped: bool) -> str | None:
        """Returns the reason why a checkpoint omits the states of the envs, or None if it need not omit them."""
        if dropped:
            return "a rollout that was not trained on was in progress"
        waits = time.perf_counter() - self._stored_s < self._states_s / STATES_SHARE
        if periodic and self._states_s > MAX_STATES_S and waits:
            return f"saving them took {self._states_s:.1f} s, so this checkpoint omits them"
        return None

    def _states_of_envs(self) -> tuple[bytes | None, str | None, Exception | None]:
        """Returns the serialized states of the envs, or why there are none, and the error if the envs are broken."""
        start = time.perf_counter()
        try:
            states = vecenv.state.dumps(self._collector.get_states())
        except (vecenv.WorkerDied, vecenv.StateError, multiprocessing.TimeoutError) as error:
            return None, str(error), error
        except Exception as error:  # env states are optional: an env's exception must not lose the learner's state
            return None, self._omit_states(error), None
        self._stored_s = time.perf_counter()
        self._states_s = self._stored_s - start  # an attempt in which a worker was restarted says nothing
        return states, None, None

    def _omit_states(self, error: Exception) -> str:
        """Warns once of each reason why a checkpoint does not hold the env states, and returns the reason.

        The next checkpoint may hold them: a worker that was restarted, for example, has a state after its next step.
        """
        reason = sentence_of(error)
        # A resumed run has already said that its envs cannot be restored.
        if reason not in self._warned and (self._why_fresh is None or not isinstance(error, vecenv.NotRestorable)):
            self._callback.on_warning(
                "checkpoints will not hold the states of the envs until this changes, so a resumed run begins fresh "
                f"episodes: {reason}"
            )
        self._warned.add(reason)
        return reason


def check_origin(origin: Run, config: Config) -> None:
    """Raises ConfigError unless a new run can start from `origin`: a setting of the networks or normalizers differs.

    Raises RunError if `origin` cannot be read, has no checkpoint, or contains the module of the network.
    """
    before = origin.read_config()
    networks = [name for name, setting in SETTINGS.items() if setting.group == "network" and name not in MAY_DIFFER]
    for name in (*networks, *NORMALIZERS.values()):
        there, here = getattr(before, name), getattr(config, name)
        if there != here:
            raise ConfigError(
                f"{origin.path} was trained with {name}={there!r}, but the new run has {name}={here!r}: "
                f"set {name}={there!r}, or omit init_from"
            )
    config_to_load(Run.open(origin, trust_modules=True), env=False)  # refuses modules in its folder
    origin.check_begun()


def start_from(
    origin: Run, teams: Mapping[str, tuple[Agent, RunningMoments]], run: Run, warn: Callable[[str], None]
) -> None:
    """Copies the networks and normalizers of a run's newest checkpoint, and records their origin in `origin.json`.

    The new run may have other observations and rewards, so the copied statistics lose weight. Those of observations
    count like at most `KEPT_ROLLOUTS` rollouts. The first rollout replaces those of rewards: the value function
    predicts normalized rewards, so it remains correct if all rewards are multiplied by a number.

    Args:
        origin: The run to start from.
        teams: For each team: the agent of the new run, which gets the networks and the normalizers of observations; and
            the statistics by which the new run divides rewards.
        run: The new run.
        warn: Called with a message for each damaged checkpoint, and for settings that have no effect.
    """
    modules: dict[str, tf.Module] = {}
    for name, (agent, returns) in teams.items():
        modules[name_of("agent", name)] = agent
        modules[name_of("learner", name)] = only_reward_moments(returns)
    values = Checkpoints(origin.checkpoints, **modules).restore(warn=warn, partial=True)
    before, config = origin.read_config(), run.read_config()
    steps, kept = values["update"] * before.batch_size, KEPT_ROLLOUTS * config.batch_size
    for agent, returns in teams.values():
        agent.raise_log_std(max(before.min_log_std, config.min_log_std))
        agent.observations.weaken(kept / max(kept, steps))
        returns.count.assign(tf.minimum(returns.count, KEPT_REWARDS))
    if ignored := [
        f"{name}={getattr(config, name)}" for name in INITIAL if getattr(before, name) != getattr(config, name)
    ]:
        warn(
            f"{', '.join(ignored)} has no effect, because the policy starts as that of {origin.path}. To start with "
            "more noise, raise min_log_std."
        )
    record = {"run": str(origin.path.resolve()), "checkpoint": values["checkpoint"], "env_steps": steps}
    write_atomically(run.path / "origin.json", json.dumps(record, indent=2) + "\n")
