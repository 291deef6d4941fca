"""Saving and resuming a run: its progress, its learner and, if possible, the states of its envs."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

import vecenv
from ppo.algorithm.ranks import Ranks
from ppo.algorithm.schedules import schedule_change
from ppo.callbacks import Callback
from ppo.config import Config
from ppo.envs import sentence_of
from ppo.run.checkpoint import BEST, Checkpoints, number_in
from ppo.run.folder import Run, RunError
from ppo.run.metrics import AgentScores, Clock, Episodes
from vecenv.ingraph import InGraphVectorEnv

if TYPE_CHECKING:
    from ppo.results.evaluation import Evaluation

MAX_STATES_S = 1.0
"""Periodic checkpoints omit the states of the envs if saving them took longer than this, in seconds."""


class Progress:
    """The progress of a run, and what is due next.

    Attributes:
        updates: Number of updates so far, including updates before an interruption.
        episodes: Returns and lengths of the most recent training episodes.
        agents: Returns of the most recent training episodes of each agent; None if the env has one agent.
        clock: Time spent on training.
    """

    def __init__(self, config: Config, agents: AgentScores | None = None):
        self._config = config
        self.updates = 0
        self.episodes = Episodes(config.info_metrics)
        self.agents = agents
        self.clock = Clock(0.0, 0)

    @property
    def env_steps(self) -> int:
        """Env-steps taken so far, all envs together."""
        return self.updates * self._config.batch_size

    @property
    def finished(self) -> bool:
        """Whether all updates have been made."""
        return self.updates >= self._config.num_updates

    def due(self, interval: int | None) -> bool:
        """Returns whether the last update reached or passed a multiple of `interval` env-steps, or ended the run.

        Never if `interval` is None.
        """
        if interval is None:
            return False
        updates, size = self.updates, self._config.batch_size
        return self.finished or updates * size // interval > (updates - 1) * size // interval

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values from which `load` restores the progress."""
        values = {"update": self.updates, "wall_s": self.clock.wall_s, "episodes": self.episodes.state()}
        return values if self.agents is None else {**values, "agents": self.agents.state()}

    def load(self, values: Mapping[str, Any]) -> None:
        """Restores a result of `to_json`."""
        self.updates = values["update"]
        self.episodes.load(values["episodes"])
        if self.agents is not None:
            self.agents.load(values.get("agents", {}))
        self.clock = Clock(values["wall_s"], self.env_steps)


class Saver:
    """Saves a run and restores it.

    A checkpoint always holds the learner. It also holds the env states if these can be saved. A run that resumes
    without env states begins fresh episodes.

    Args:
        run: The run folder.
        progress: Saved with each checkpoint, and restored by `resume`.
        envs: The envs whose states are saved.
        callback: Receives checkpoints and warnings.
        modules: The modules to save, by name.
        ranks: The ranks of the run. Rank 0 writes checkpoints, with the env states of all ranks.
    """

    def __init__(
        self, run: Run, progress: Progress, envs: InGraphVectorEnv, callback: Callback, modules: dict[str, tf.Module],
        *, ranks: Ranks = Ranks(),  # noqa: B008
    ):  # fmt: skip
        self._run, self._progress, self._envs, self._callback, self._ranks = run, progress, envs, callback, ranks
        self._checkpoints = Checkpoints(run.checkpoints, **modules)
        self._env_states: Any = None  # from the restored checkpoint
        self._why_fresh: str | None = None  # why the restored checkpoint holds no env states
        self._not_restorable: str | None = None  # why no checkpoint of this run can hold env states
        self._states_s = 0.0  # duration of the last attempt to save env states
        self._saved_steps: int | None = None  # env-steps of the last checkpoint
        self._complete = False  # whether it holds everything that a checkpoint of this run can hold
        self._best = number_in(run.checkpoints, BEST, "return_mean")  # None: there is no best checkpoint yet

    def resume(self, config: Config) -> None:
        """Restores the newest valid checkpoint, and writes the settings for the rest of the run.

        Raises:
            RunError: If no checkpoint can be restored.
        """
        keys = ("update", "wall_s", "episodes", "why_fresh")
        values = self._checkpoints.restore(warn=self._callback.on_warning, keys=keys)
        self._progress.load(values)
        self._saved_steps = self._progress.env_steps
        self._env_states, self._why_fresh = values.get("env_states"), values["why_fresh"]
        if change := schedule_change(self._run.read_config(), config, self._progress.updates):
            self._callback.on_warning(change)
        self._run.write_config(config)

    def restore_envs(self) -> bool:
        """Restores the env states of the checkpoint, if any, and returns whether this succeeded on all ranks."""
        states, self._env_states = self._env_states, None
        if states is not None:
            try:
                self._envs.set_state(self._part(states))
            except vecenv.WorkerDied:
                raise
            except Exception as error:  # env states are optional
                self._why_fresh = sentence_of(error)
            reasons = self._ranks.texts(self._why_fresh or "")
            self._why_fresh = next(filter(None, reasons), None)
            if self._why_fresh is None:
                return True
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

    def _part(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the states of this rank's envs."""
        size, rest = divmod(len(states), self._ranks.count)
        if rest:
            raise ValueError(f"{self._ranks.count} ranks cannot share {len(states)} states equally")
        return states[self._ranks.number * size : (self._ranks.number + 1) * size]

    def save(
        self, actions: Mapping[str, np.ndarray], *, periodic: bool = False, dropped: bool = False, alone: bool = False
    ) -> None:
        """Writes a checkpoint.

        Args:
            actions: Actions of the policy, see `recorded_actions`.
            periodic: Whether training continues afterwards, so that slow env states may be omitted.
            dropped: Whether the envs are ahead of the learner, because no update has learned from the last rollout.
            alone: Whether the other ranks do not save now, so that the env states must be omitted.

        Raises:
            RunError: If the checkpoint cannot be written.
            WorkerDied, StateError, TimeoutError: If training cannot continue.
        """
        progress = self._progress
        self._run.check_exists()
        fault: Exception | None = None
        try:
            states, why_fresh = self._states_of_envs(periodic, dropped)
        except (vecenv.WorkerDied, vecenv.StateError, multiprocessing.TimeoutError) as error:
            states, why_fresh, fault = None, str(error), error
        if self._ranks.count > 1:
            if alone:
                states, why_fresh = None, "one rank saved the run because it failed"
            else:
                states, why_fresh = self._of_all_ranks(states, why_fresh)
        if self._ranks.number > 0:  # rank 0 does the rest
            self._saved_steps, self._complete = progress.env_steps, states is not None or not periodic
            if fault is not None and periodic:
                raise fault
            return
        values = progress.to_json()
        try:
            path = self._checkpoints.save(progress.env_steps, {**values, "why_fresh": why_fresh}, states, actions)
        except RunError:
            raise
        except Exception as error:  # the env states cannot be written: save the learner without them
            if states is None:
                raise
            states, why_fresh = None, self._omit_states(error)
            path = self._checkpoints.save(progress.env_steps, {**values, "why_fresh": why_fresh}, actions=actions)
        self._saved_steps, self._complete = progress.env_steps, states is not None or not periodic
        self._callback.on_checkpoint(progress.env_steps, path)
        if fault is not None and periodic:
            raise fault

    def save_best(self, evaluation: Evaluation, actions: Mapping[str, np.ndarray]) -> None:
        """Saves an evaluated policy as the checkpoint "best", unless an earlier one had a higher mean return.

        Nothing resumes from this checkpoint, so it holds no env states. Ranks other than 0 do not take part.

        Args:
            evaluation: The scores of the policy.
            actions: Actions of the policy, see `recorded_actions`.

        Raises:
            RunError: If the checkpoint cannot be written.
        """
        return_mean = float(evaluation.returns.mean())
        if self._best is None or return_mean >= self._best:
            self._run.check_exists()
            steps = self._progress.env_steps
            values = {**self._progress.to_json(), "env_steps": steps, "return_mean": return_mean}
            values["deterministic"] = evaluation.deterministic
            self._checkpoints.save(steps, values, actions=actions, best=True)
            self._best = return_mean

    def _states_of_envs(self, periodic: bool, dropped: bool) -> tuple[list[dict[str, Any]] | None, str | None]:
        """Returns the states of the envs, or None and the reason.

        Raises:
            WorkerDied, StateError, TimeoutError: If the vector env can no longer be used.
        """
        if self._not_restorable is not None:
            return None, self._not_restorable
        if dropped:
            return None, "a rollout that was not trained on was in progress"
        if self._envs.steps:  # a worker died mid-rollout: a resumed run would lack the rollout's first steps
            return None, f"{self._envs.steps} of {self._envs.num_steps} steps of a rollout had been taken"
        if periodic and self._states_s > MAX_STATES_S:
            return None, f"saving them took {self._states_s:.1f} s, so it was postponed to the end of the run"
        start = time.perf_counter()
        try:
            return self._envs.get_state(), None
        except (vecenv.WorkerDied, vecenv.StateError, multiprocessing.TimeoutError):
            raise
        except Exception as error:  # env states are optional: an env's exception must not lose the learner's state
            return None, self._omit_states(error)
        finally:
            self._states_s = time.perf_counter() - start

    def _of_all_ranks(
        self, states: list[dict[str, Any]] | None, why_fresh: str | None
    ) -> tuple[list[dict[str, Any]] | None, str | None]:
        """Returns the env states of all ranks, rank 0 first, or None and the reason of the first rank without."""
        content = b""
        if states is not None:
            try:
                content = vecenv.state.dumps(states)
            except TypeError as error:
                why_fresh = self._omit_states(error)
        reasons = self._ranks.texts(why_fresh or "")
        contents = self._ranks.messages(content)
        if why_fresh := next(filter(None, reasons), None):
            return None, why_fresh
        return [state for content in contents for state in vecenv.state.loads(content)], None

    def _omit_states(self, error: Exception) -> str:
        """Warns that checkpoints will not hold env states, stops trying to save them, and returns the reason."""
        self._not_restorable = sentence_of(error)
        if self._why_fresh is None or not isinstance(error, vecenv.NotRestorable):  # else it said so on resuming
            self._callback.on_warning(
                "checkpoints will not hold the states of the envs, so a resumed run begins fresh episodes: "
                f"{self._not_restorable}"
            )
        return self._not_restorable
