"""PPO's training loop: collect a rollout, update the policy, report, save."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

import vecenv
from ppo.algorithm.checks import check_losses, check_mask, check_rollout
from ppo.algorithm.minibatches import shuffled
from ppo.algorithm.rollout import Collected, Rollouts
from ppo.algorithm.schedules import clip_range_at, learning_rate_at
from ppo.algorithm.update import Learner
from ppo.config import Config
from ppo.envs import Envs, EnvSource, evaluation_envs, training_envs
from ppo.footprint import check_memory
from ppo.model.agent import HOST, Agent
from ppo.results.evaluation import MAX_ENVS, Evaluation, evaluate
from ppo.results.video import VideoError, record
from ppo.run.callbacks import Callback, StopTraining
from ppo.run.folder import Run
from ppo.run.metrics import Clock, MetricsWriter
from ppo.run.resume import Progress, Saver
from ppo.run.signals import stop_on_signal
from ppo.seeds import env_seeds
from vecenv.ingraph import InGraphVectorEnv


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        path: The run folder.
        env_steps: Env-steps taken, including those before an interruption.
        evaluation: Evaluation of the final policy; None if the run was stopped early.
        signal: Number of the signal that stopped the run, if one did.
    """

    path: Path
    env_steps: int
    evaluation: Evaluation | None
    signal: int | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped early."""
        return self.evaluation is None


def run_training(
    config: Config, run: Run, callback: Callback, *, envs: EnvSource = None, resume: bool = False
) -> Result:
    """Trains for `config.total_steps` and writes everything to the run folder.

    Args:
        config: All settings.
        run: A new run folder, or a folder with a checkpoint if `resume` is set.
        callback: Receives reports, evaluations, checkpoints and warnings.
        envs: What to train on instead of `config.env`.
        resume: Whether to continue from the newest checkpoint.

    Raises:
        vecenv.EnvError, vecenv.WorkerDied: If an env or a worker failed.
        TrainingDiverged: If an observation, a reward or a loss is not finite.
        RunError: If the folder cannot be read or written.
        ConfigError: If the envs do not match the config, or training would need more memory than is available.
    """
    with run.locked(), training_envs(config, envs) as vector:
        check_memory(config, vector)
        check_or_write = run.check_spaces if resume else run.write_spaces
        check_or_write(vector.single_observation_space, vector.env_action_space, given=envs is not None)
        trainer = Trainer(config, run, vector, callback, envs)
        if resume:
            trainer.saver.resume(config)
        progress = trainer.progress
        writing = MetricsWriter(run, config, progress.env_steps)
        with closing(trainer), closing(writing) as writer, stop_on_signal() as stop:
            try:
                trainer.begin()
                callback.on_start(config, progress.env_steps)
                while not progress.finished and (trainer.rollouts.pending or not stop.is_set()):
                    report = trainer.iterate(prefetch=not stop.is_set())
                    _after_update(trainer, writer, callback, report)
                if progress.finished:
                    evaluation = trainer.evaluation
                    if evaluation is None:
                        evaluation = trainer.evaluate()
                        callback.on_evaluation(progress.env_steps, evaluation)
                    scores = {**evaluation.summary(), **evaluation.to_json()}
                    run.write_evaluation({"env_steps": progress.env_steps, **scores})
                    return Result(run.path, progress.env_steps, evaluation)
            except StopTraining:
                pass
            except vecenv.WorkerDied:
                if not stop.is_set():  # otherwise the signal went to the whole process group and killed the workers
                    raise
            with suppress(StopTraining):
                trainer.save()
            return Result(run.path, progress.env_steps, evaluation=None, signal=stop.number)


def _after_update(trainer: Trainer, writer: MetricsWriter, callback: Callback, report: dict[str, Any]) -> None:
    """Evaluates, reports, records and saves if these are due after an update.

    Order: the report of an update is written before its checkpoint, because a resumed run removes later reports.
    """
    config, progress = trainer.config, trainer.progress
    evaluation, reports = None, progress.due(config.report_interval) or progress.due(config.eval_interval)
    if reports:  # restarted here, so that the next report's speed includes the time of the evaluation
        progress.clock.restart(progress.env_steps)
    if progress.due(config.eval_interval):
        try:
            evaluation = trainer.evaluate()
        except Exception:  # from the evaluation envs: the learner is intact, so save it
            trainer.save()
            raise
        scores = evaluation.summary()
        report |= {"eval_return_mean": scores["return_mean"], "eval_return_std": scores["return_std"]}
    if reports:
        writer.write(report)
        callback.on_report(dict(report))
    if evaluation is not None:
        callback.on_evaluation(progress.env_steps, evaluation)
    if progress.due(config.video_interval) and (video := trainer.record()):
        writer.write_video(video, progress.env_steps)
    if progress.due(config.checkpoint_interval):
        if config.histograms:
            writer.write_histograms(trainer.agent.learned, progress.env_steps)
        trainer.save(periodic=not progress.finished)
    callback.on_update(report)


class Trainer:
    """The components of a run, and the steps of its loop.

    Args:
        config: All settings.
        run: Where checkpoints and videos are stored.
        vector: The envs to train on.
        callback: Receives checkpoints and warnings.
        source: What `vector` was made from. Envs for evaluations and videos are made from it, too.

    Attributes:
        envs: The training envs as graph operations.
        agent: The networks, normalizers and action distribution.
        learner: Updates the agent.
        rollouts: Collects rollouts with the agent.
        progress: How far the run has come.
        saver: Saves and restores the learner, the envs and the progress.
        evaluation: Evaluation of the current policy; None if it has not been evaluated.
    """

    def __init__(self, config: Config, run: Run, vector: Envs, callback: Callback, source: EnvSource = None):
        self.config, self._run, self._callback, self._source = config, run, callback, source
        self.envs = InGraphVectorEnv(vector, num_steps=config.num_steps, timeout_s=config.step_timeout_s)
        self.agent = actor = Agent(config, vector.single_observation_space, vector.env_action_space)
        if config.overlap or not self.agent.on_host:
            with tf.device(HOST):
                actor = Agent(config, vector.single_observation_space, vector.env_action_space)
        self.learner = Learner(config, self.agent, self.envs)
        self.rollouts = Rollouts(self.agent, actor, self.envs, overlap=config.overlap, seed=config.seed)
        self.progress = Progress(config)
        # The actor is not saved, because it is the agent or a copy of it.
        collector = tf.train.Checkpoint(state=self.rollouts.collector.state)
        modules = {"agent": self.agent, "learner": self.learner, "collector": collector}
        self.saver = Saver(run, self.progress, self.envs, callback, modules)
        self.evaluation: Evaluation | None = None
        self._records = True  # False once recording has failed

    def begin(self) -> None:
        """Restores the envs from the checkpoint; if that is not possible, resets them to begin fresh episodes."""
        progress = self.progress
        if not self.saver.restore_envs():
            self.learner.rewards.begin()
            self.rollouts.collector.begin()
            with self.envs.raising():
                # The seeds depend on env_steps, so that a resumed run does not repeat its first episodes.
                self.envs.reset(seed=env_seeds(self.config.seed, self.envs.num_envs, env_steps=progress.env_steps))
        progress.clock = Clock(progress.clock.wall_s, progress.env_steps)

    def iterate(self, *, prefetch: bool = True) -> dict[str, Any]:
        """Collects a rollout, updates the policy with it, and returns all metrics.

        Args:
            prefetch: Whether the next rollout may begin before the update; only matters with `config.overlap`.

        Raises:
            TrainingDiverged: If an observation, a reward or a loss is not finite. Do not save the run after this error.
        """
        collected = self._collect()
        if prefetch:
            self._prefetch()
        losses = self._update(collected)
        env_steps = self.progress.env_steps
        times = self.progress.clock.read(env_steps)
        return {"env_steps": env_steps, **times, **self.progress.episodes.summary(), **losses}

    def _collect(self) -> Collected:
        """Returns the rollout for the next update: update u trains on rollout u + 1."""
        progress = self.progress
        if progress.updates == 0 and self.learner.unseen:
            # Without statistics, the first update would train on unscaled, clipped features, which then change at once.
            # Rollout 0 therefore only initializes the normalizers.
            first = self._take(0)
            self._check_rollout()
            self.learner.observe(first)
        with progress.clock.spent_on("collect"):
            collected = self._take(progress.updates + 1)
        self._check_rollout()
        return collected

    def _take(self, number: int) -> Collected:
        try:
            with self.envs.raising():
                return self.rollouts.take(number)
        except vecenv.EnvError as error:
            error.add_note(f"This was step {self.envs.steps} of {self._rollout_name}.")
            raise

    def _check_rollout(self) -> None:
        """Checks that the last rollout is finite and its masks are valid, and counts its episodes."""
        arrays, observations = self.envs.last_rollout(), self.agent.observations
        check_rollout(arrays, observations.space, self._rollout_name)
        if observations.has_mask:
            mask = observations.mask(arrays.observations)[:-1]
            check_mask(mask, self.agent.distribution.mask_groups, self._rollout_name)
        self.progress.episodes.add(arrays)

    @property
    def _rollout_name(self) -> str:
        return f"the rollout that began after {self.progress.env_steps} env-steps"

    def _prefetch(self) -> None:
        """Begins the next rollout, unless an evaluation, a video or a checkpoint is due after this update.

        These need idle envs and the new policy.
        """
        intervals = (self.config.eval_interval, self.config.video_interval, self.config.checkpoint_interval)
        if not any(self.progress.due(interval, ahead=1) for interval in intervals):
            self.rollouts.begin(self.progress.updates + 2)

    def _update(self, collected: Collected) -> dict[str, float]:
        """Updates the agent and returns the metrics of the update."""
        config, progress = self.config, self.progress
        rate = tf.constant(learning_rate_at(config, progress.updates), tf.float32)
        clip_range = tf.constant(clip_range_at(config, progress.updates), tf.float32)
        with progress.clock.spent_on("learn"):
            order = tf.constant(shuffled(config, progress.updates))
            metrics = self.learner.update(collected, rate, clip_range, order)
            losses = {name: float(value) for name, value in metrics.items()}
        check_losses(losses, progress.env_steps)
        # Owner: the envs own the slab from here on.
        progress.updates += 1
        self.evaluation = None
        return losses

    def evaluate(self) -> Evaluation:
        """Evaluates the current policy on separate envs."""
        config, agent = self.config, self.rollouts.policy()
        with evaluation_envs(config, self._source, min(config.eval_episodes, MAX_ENVS)) as envs:
            self.evaluation = evaluate(
                agent, envs, config.eval_episodes, seed=config.seed, timeout_s=config.step_timeout_s
            )
        return self.evaluation

    def record(self) -> Path | None:
        """Records an episode of the current policy and returns the file, or None if recording does not work here."""
        if self._records:
            self._run.check_exists()
            try:
                folder, name = self._run.path / "videos", f"step_{self.progress.env_steps:012d}"
                agent = self.rollouts.policy()
                return record(agent, self.config, folder, 1, prefix=name, envs=self._source)[0][0]
            except VideoError as error:
                self._records = False
                self._callback.on_warning(f"no videos are recorded: {error}")
        return None

    def save(self, *, periodic: bool = False) -> None:
        """Writes a checkpoint unless nothing has changed since the last one, see `Saver.save`."""
        self.rollouts.drop()
        self.saver.save(periodic=periodic, dropped=self.rollouts.dropped)

    def close(self) -> None:
        """Waits until no thread steps the envs."""
        self.rollouts.close()
