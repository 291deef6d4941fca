"""Run_training: the training loop, read top to bottom: collect, learn, report, save."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

import vecenv
from ppo.algorithm.checks import check_losses, check_mask, check_rollout
from ppo.algorithm.overlap import Overlap
from ppo.algorithm.rollout import Collected, Collector
from ppo.algorithm.update import Learner, shuffled
from ppo.config import Config, ConfigError
from ppo.envs import EnvSource, evaluation_envs, sentence_of, training_envs
from ppo.footprint import check_memory
from ppo.model.agent import HOST, Agent
from ppo.results.evaluation import MAX_ENVS, Evaluation, evaluate
from ppo.results.video import VideoError, record
from ppo.run.callbacks import Callback, StopTraining
from ppo.run.checkpoint import Checkpoints
from ppo.run.folder import Run, RunError
from ppo.run.metrics import Clock, Episodes, MetricsWriter
from ppo.run.signals import stop_on_signal
from ppo.seeds import env_seeds, sampling_seed
from vecenv import AsyncVectorEnv, SyncVectorEnv, WorkerDied
from vecenv.ingraph import InGraphVectorEnv

MAX_STATES_S = 1.0
"""Seconds that it may take to get the states of the envs for a checkpoint while training goes on."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        path: The run folder.
        env_steps: Steps taken, those before an interruption included.
        evaluation: Of the final policy; None if the run was stopped before its end.
        signal: Number of the signal that stopped it, if one did.
    """

    path: Path
    env_steps: int
    evaluation: Evaluation | None
    signal: int | None = None

    @property
    def interrupted(self) -> bool:
        """Whether it was told to stop before the end."""
        return self.evaluation is None


def run_training(
    config: Config, run: Run, callback: Callback, *, envs: EnvSource = None, resume: bool = False
) -> Result:
    """Trains until `config.total_steps` and leaves everything in the run's folder.

    Args:
        config: All settings.
        run: The folder, new or (to resume) with a checkpoint.
        callback: Told about everything.
        envs: What to train on, if not on `config.env`.
        resume: Whether to go on from the newest checkpoint.

    Raises:
        vecenv.EnvError, vecenv.WorkerDied: If an env or a worker failed.
        TrainingDiverged: If a number is no longer finite.
        RunError: If the folder cannot be read or written.
        ConfigError: If the envs do not fit the config, or training would need more memory than there is.
    """
    if isinstance(envs, (AsyncVectorEnv, SyncVectorEnv)):
        for name in ("eval_interval", "video_interval"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} needs envs of its own: give functions that make envs, not a vector env")
    with run.locked(), training_envs(config, envs) as vector:
        check_memory(config, vector)
        trainer = Trainer(config, run, vector, callback, envs)
        if resume:
            run.check_spaces(vector.single_observation_space, vector.env_action_space, given=envs is not None)
            trainer.restore()
            if change := schedule_change(run.read_config(imports=()), config, trainer.env_steps // config.batch_size):
                callback.on_warning(change)
            run.write_config(config)
        else:
            run.write_spaces(vector.single_observation_space, vector.env_action_space, given=envs is not None)
        writing = MetricsWriter(run, config, trainer.env_steps)
        with closing(trainer), closing(writing) as writer, stop_on_signal() as stop:
            try:
                trainer.begin()
                callback.on_start(config, trainer.env_steps)
                while not trainer.finished and (trainer.collecting or not stop.is_set()):
                    _iterate(trainer, writer, callback, goes_on=not stop.is_set())
                if trainer.finished:
                    evaluation = trainer.evaluation or _evaluate(trainer, callback)
                    run.write_evaluation(
                        {"env_steps": trainer.env_steps, **evaluation.summary(), **evaluation.to_json()}
                    )
                    return Result(run.path, trainer.env_steps, evaluation)
            except StopTraining:
                pass
            except WorkerDied:
                if not stop.is_set():  # else the signal went to the whole process group, workers included
                    raise
            with suppress(StopTraining):
                trainer.save()
            return Result(run.path, trainer.env_steps, evaluation=None, signal=stop.number)


def _iterate(trainer: Trainer, writer: MetricsWriter, callback: Callback, *, goes_on: bool = True) -> None:
    """Makes one update, and all that is due after it.

    Order: what is said about an update is written before its checkpoint is: a resumed run drops later reports.
    """
    config, report = trainer.config, trainer.iterate(goes_on=goes_on)
    evaluation, reported = None, trainer.due(config.report_interval) or trainer.due(config.eval_interval)
    if reported:  # before the evaluation, so that what it takes is in the next report's speed
        trainer.clock.restart(trainer.env_steps)
    if trainer.due(config.eval_interval):
        try:
            evaluation = trainer.evaluate()
        except Exception:  # of envs of its own: what was learnt is sound
            trainer.save()
            raise
    if evaluation is not None:
        scores = evaluation.summary()
        report |= {"eval_return_mean": scores["return_mean"], "eval_return_std": scores["return_std"]}
    if reported:
        writer.write(report)
        callback.on_report(dict(report))
    if evaluation is not None:
        callback.on_evaluation(trainer.env_steps, evaluation)
    if trainer.due(config.video_interval) and (video := trainer.record()):
        writer.write_video(video, trainer.env_steps)
    if trainer.due(config.checkpoint_interval):
        if config.histograms:
            writer.write_histograms(trainer.weights, trainer.env_steps)
        trainer.save(periodic=not trainer.finished)
    callback.on_update(report)


def _evaluate(trainer: Trainer, callback: Callback) -> Evaluation:
    evaluation = trainer.evaluate()
    callback.on_evaluation(trainer.env_steps, evaluation)
    return evaluation


class Trainer:
    """All parts of a run, and how far it has come.

    Args:
        config: All settings.
        run: Where checkpoints go.
        vector: The envs to train on.
        callback: Told about evaluations, checkpoints and warnings.
        source: What the envs were made of, to make others for evaluations.
    """

    def __init__(
        self,
        config: Config,
        run: Run,
        vector: AsyncVectorEnv | SyncVectorEnv,
        callback: Callback,
        source: EnvSource = None,
    ):
        self.config = config
        self._run = run
        self._callback = callback
        self._source = source
        self._envs = InGraphVectorEnv(vector, num_steps=config.num_steps, timeout_s=config.step_timeout_s)
        self._agent = Agent(config, vector.single_observation_space, vector.env_action_space)
        self._learner = Learner(config, self._agent, self._envs)
        self._acting = self._agent
        if config.overlap or not self._agent.on_host:
            with tf.device(HOST):
                self._acting = Agent(config, vector.single_observation_space, vector.env_action_space)
        self._overlap = Overlap(self._agent, self._acting, self._envs) if config.overlap else None
        self._collector = self._overlap.collector if self._overlap else Collector(self._acting, self._envs)
        # Without the collector's agent: with an accelerator it is a second agent, otherwise the first one.
        collector = self._collector if self._overlap else tf.train.Checkpoint(state=self._collector.state)
        self._checkpoints = Checkpoints(run.checkpoints, agent=self._agent, learner=self._learner, collector=collector)
        self._episodes = Episodes()
        self._update = 0
        self._env_states: Any = None  # to go on from, of a run that is resumed
        self._why_fresh: str | None = None  # why there are none
        self._not_restorable: str | None = None  # why no checkpoint of this run will have any
        self._states_s = 0.0  # that it took to take them the last time
        self.evaluation: Evaluation | None = None  # of the policy as it is
        self._records = True  # until it is known that videos cannot be recorded here
        self._saved: int | None = None  # env_steps of the checkpoint that holds all there is
        self.clock = Clock(0.0, 0)

    @property
    def env_steps(self) -> int:
        """Steps taken so far, all envs together."""
        return self._update * self.config.batch_size

    @property
    def weights(self) -> list[tf.Variable]:
        """All variables that gradients change."""
        return self._agent.learned

    @property
    def finished(self) -> bool:
        """Whether all updates were made."""
        return self._update >= self.config.num_updates

    @property
    def collecting(self) -> bool:
        """Whether a rollout is under way, from which nothing was learnt yet."""
        return self._overlap is not None and self._overlap.under_way

    def due(self, interval: int | None) -> bool:
        """Returns whether the last update reached or passed a multiple of `interval` env-steps, or was the last."""
        return self._due(interval, self._update)

    def _due(self, interval: int | None, update: int) -> bool:
        if interval is None:
            return False
        after, size = update * self.config.batch_size, self.config.batch_size
        return update >= self.config.num_updates or after // interval > (after - size) // interval

    def begin(self) -> None:
        """Takes the envs to where the checkpoint had them, or else resets them, so that fresh episodes begin."""
        if not self._restore_envs():
            self._begin_fresh()
        self.clock = Clock(self.clock.wall_s, self.env_steps)

    def _restore_envs(self) -> bool:
        states, self._env_states = self._env_states, None
        if states is not None:
            try:
                self._envs.set_state(states)
                return True
            except WorkerDied:
                raise
            except Exception as error:  # env states are optional, as in `_states_of_envs`
                self._why_fresh = sentence_of(error)
        if self._why_fresh is not None:
            self._callback.on_warning(
                f"the envs begin fresh episodes, as their state cannot be put back: {self._why_fresh}"
            )
        return False

    def _begin_fresh(self) -> None:
        self._learner.rewards.begin()
        self._collector.begin()
        with self._envs.raising():
            # Other seeds after an interruption, or the episodes would repeat the first ones.
            self._envs.reset(seed=env_seeds(self.config.seed, self._envs.num_envs, env_steps=self.env_steps))

    def iterate(self, *, goes_on: bool = True) -> dict[str, Any]:
        """Collects a rollout, learns from it, and returns everything there is to say.

        Args:
            goes_on: Whether the next rollout may be begun before that.

        Raises:
            TrainingDiverged: If an observation, a reward or a loss is not finite. Nothing is saved after that.
        """
        config, update = self.config, self._update
        if update == 0 and self._learner.unseen:
            # Otherwise the first update would learn from unscaled, clipped features, which change right after it.
            collected = self._collect(0)
            self._admit()
            self._learner.observe(collected.rollout)
        with self.clock.spent_on("collect"):
            collected = self._collect(update + 1)
        self._admit()
        if self._overlap is not None and goes_on and not self._rests_after(update + 1):
            self._overlap.begin(self._seed(update + 2))
        rate = tf.constant(learning_rate_at(config, update), tf.float32)
        clip_range = tf.constant(clip_range_at(config, update), tf.float32)
        with self.clock.spent_on("learn"):
            order = tf.constant(shuffled(config, update))
            results = self._learner.update(collected, rate, clip_range, order)
            losses = {name: float(value) for name, value in results.items()}
        check_losses(losses, self.env_steps)
        # Owner: the slab is the envs' again from here on.
        self._update += 1
        self.evaluation = None
        return {
            "env_steps": self.env_steps,
            **self.clock.read(self.env_steps),
            **self._episodes.summary(),
            **losses,
        }

    def _admit(self) -> None:
        """Checks the last rollout, and records its episodes."""
        arrays, observations = self._envs.last_rollout(), self._agent.observations
        check_rollout(arrays, observations.space, self.env_steps)
        if observations.has_mask:
            mask = observations.mask(arrays.observations)[:-1]
            when = f"the rollout that began after {self.env_steps} env-steps"
            check_mask(mask, self._agent.distribution.mask_groups, when)
        self._episodes.add(arrays)

    def _collect(self, number: int) -> Collected:
        """Returns a rollout: update u learns from number u + 1, and number 0 initializes the normalizers."""
        try:
            with self._envs.raising():
                if self._overlap is None:
                    self._policy()
                    return self._collector.collect(self._seed(number))
                if not self._overlap.under_way:
                    self._overlap.begin(self._seed(number))
                return self._overlap.take()
        except vecenv.EnvError as error:
            error.add_note(
                f"That was step {self._envs.steps} of the rollout that began after {self.env_steps} env-steps."
            )
            raise

    def _policy(self) -> Agent:
        """Returns the agent as it is now, on the host."""
        if self._agent.on_host:
            return self._agent
        self._acting.become(self._agent)
        return self._acting

    def _seed(self, number: int) -> tf.Tensor:
        return tf.constant(sampling_seed(self.config.seed, number))

    def _rests_after(self, update: int) -> bool:
        """Returns whether something is due after an update for which the envs, and the policy, must be at rest."""
        intervals = (self.config.eval_interval, self.config.video_interval, self.config.checkpoint_interval)
        return any(self._due(interval, update) for interval in intervals)

    def close(self) -> None:
        """Waits until nobody steps the envs."""
        if self._overlap is not None:
            self._overlap.close()

    def evaluate(self) -> Evaluation:
        """Evaluates the policy as it is, on envs of its own."""
        config = self.config
        with evaluation_envs(config, self._source, min(config.eval_episodes, MAX_ENVS)) as envs:
            scores = evaluate(
                self._policy(), envs, config.eval_episodes, seed=config.seed, timeout_s=config.step_timeout_s
            )
        self.evaluation = scores
        return scores

    def record(self) -> Path | None:
        """Records an episode of the policy as it is, into the run's folder; returns None if that does not work here."""
        if self._records:
            self._run.check_exists()
            try:
                folder, name = self._run.path / "videos", f"step_{self.env_steps:012d}"
                (file,), _ = record(self._policy(), self.config, folder, 1, prefix=name, envs=self._source)
                return file
            except VideoError as error:
                self._records = False
                self._callback.on_warning(f"no videos are recorded: {error}")
        return None

    def save(self, *, periodic: bool = False) -> None:
        """Writes a checkpoint.

        Args:
            periodic: Whether it may do without the states of the envs, if to take them costs much.
        """
        if self._saved == self.env_steps:
            return
        self._run.check_exists()
        if self._overlap is not None:
            self._overlap.drop()
        fault: Exception | None = None
        try:
            states, why_fresh = self._states_of_envs(periodic)
        except (WorkerDied, vecenv.StateError, multiprocessing.TimeoutError) as error:
            states, why_fresh, fault = None, str(error), error
        progress = {"update": self._update, "wall_s": self.clock.wall_s, "episodes": self._episodes.state()}
        try:
            path = self._checkpoints.save(self.env_steps, {**progress, "why_fresh": why_fresh}, states)
        except RunError:
            raise
        except Exception as error:  # the env states cannot be written: save the learner without them
            if states is None:
                raise
            states = None
            self._forgo_states(error)
            path = self._checkpoints.save(self.env_steps, {**progress, "why_fresh": self._not_restorable})
        self._saved = self.env_steps if states is not None or not periodic else None
        self._callback.on_checkpoint(self.env_steps, path)
        if fault is not None and periodic:  # training cannot go on
            raise fault

    def _states_of_envs(self, periodic: bool) -> tuple[Any, str | None]:
        """Returns the states of the envs, or None and why there are none.

        Raises:
            WorkerDied, StateError, TimeoutError: If the vector env can no longer be used.
        """
        if self._not_restorable is None:
            if self._overlap is not None and self._overlap.dropped:
                return None, "a rollout was under way, from which nothing was learnt"
            if self._envs.steps:  # a worker died in the midst of a rollout, whose first steps a state would not have
                return None, f"{self._envs.steps} of {self._envs.num_steps} steps of a rollout were taken"
            if periodic and self._states_s > MAX_STATES_S:
                return None, f"to take their states took {self._states_s:.1f} s, so it was left to the end of the run"
            start = time.perf_counter()
            try:
                return self._envs.get_state(), None
            except (WorkerDied, vecenv.StateError, multiprocessing.TimeoutError):
                raise
            except Exception as error:  # env states are optional: an env's exception must not lose the learner's
                self._forgo_states(error)
            finally:
                self._states_s = time.perf_counter() - start
        return None, self._not_restorable

    def _forgo_states(self, error: Exception) -> None:
        """Warns that env states cannot be saved, and stops trying."""
        self._not_restorable = sentence_of(error)
        self._callback.on_warning(
            "checkpoints will not hold the states of the envs, so a resumed run begins fresh episodes: "
            f"{self._not_restorable}"
        )

    def restore(self) -> None:
        """Goes back to the newest checkpoint that is whole."""
        keys = ("update", "wall_s", "episodes", "why_fresh")
        progress = self._checkpoints.restore_newest(warn=self._callback.on_warning, keys=keys)
        self._update = progress["update"]
        self._episodes.load(progress["episodes"])
        self._env_states, self._why_fresh = progress.get("env_states"), progress["why_fresh"]
        self.clock = Clock(progress["wall_s"], self.env_steps)


def learning_rate_at(config: Config, update: int) -> float:
    """Returns the learning rate of an update: constant, or linear from the first one to 0 after the last."""
    return config.learning_rate * (_left(config, update) if config.lr_schedule == "linear" else 1.0)


def clip_range_at(config: Config, update: int) -> float:
    """Returns the clip range of an update: constant, or linear from the first one to 0 after the last."""
    return config.clip_range * (_left(config, update) if config.clip_schedule == "linear" else 1.0)


def schedule_change(before: Config, config: Config, update: int) -> str | None:
    """Describes how a new `total_steps` changes the linear schedules of a resumed run; None if it does not."""
    changes = [
        f"{name} continues at {now:.3g} instead of {then:.3g}"
        for name, schedule in (("learning_rate", learning_rate_at), ("clip_range", clip_range_at))
        if (now := schedule(config, update)) != (then := schedule(before, update))
    ]
    if not changes:
        return None
    totals = f"total_steps is {config.total_steps} instead of {before.total_steps}"
    return f"{totals}, so linear schedules change: {'; '.join(changes)}"


def _left(config: Config, update: int) -> float:
    return max(0.0, 1.0 - update / config.num_updates)
