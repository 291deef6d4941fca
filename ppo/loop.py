"""loop.py: train: the training loop, read top to bottom: collect, learn, report, save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from ppo.agent import Agent
from ppo.checkpoint import Checkpoints
from ppo.config import Config
from ppo.envs import evaluation_envs, training_envs
from ppo.evaluation import MAX_ENVS, Evaluation, evaluate
from ppo.learner import Learner, shuffled
from ppo.metrics import Episodes, MetricsWriter
from ppo.rollout import Collector
from ppo.run import Run
from vecenv import AsyncVectorEnv, WorkerDied
from vecenv.ingraph import InGraphVectorEnv, Rollout


class Display(Protocol):
    """Shows how a run goes on."""

    def start(self, config: Config, env_steps: int) -> None: ...

    def update(self, report: dict[str, Any]) -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        env_steps: Steps taken, those before an interruption included.
        interrupted: Whether it was told to stop before the end.
        evaluation: Of the final policy; None if interrupted.
    """

    env_steps: int
    interrupted: bool
    evaluation: Evaluation | None


class TrainingDiverged(FloatingPointError):
    """A reward, a loss or a gradient is not finite; the message says where."""


def train(config: Config, run: Run, display: Display, *, resume: bool = False) -> Result:
    """Trains until `config.total_steps` and leaves everything in the run's folder.

    Args:
        config: All settings.
        run: The folder, new or (to resume) with a checkpoint.
        display: Told about every report.
        resume: Whether to go on from the newest checkpoint, with fresh episodes.

    Raises:
        vecenv.EnvError, vecenv.WorkerDied: If an env or a worker failed.
        TrainingDiverged: If a number is no longer finite.
        RunError: If the folder cannot be read or written.
    """
    with run.locked(), training_envs(config) as vector:
        trainer = Trainer(config, run, vector)
        if resume:
            trainer.restore(display.warn)
            run.write_config(config)
        display.start(config, trainer.env_steps)
        with closing(MetricsWriter(run, trainer.env_steps)) as writer, _stop_on_signal() as stop:
            trainer.begin()
            while not trainer.finished and not stop.is_set():
                try:
                    losses = trainer.iterate()
                except WorkerDied:
                    if not stop.is_set():  # else the signal went to the whole process group, workers included
                        raise
                    break
                if trainer.due(config.report_interval):
                    report = trainer.report(losses)
                    writer.write(report)
                    display.update(report)
                if trainer.due(config.checkpoint_interval):
                    trainer.save()
            if not trainer.finished:
                trainer.save()
                return Result(trainer.env_steps, interrupted=True, evaluation=None)
        return Result(trainer.env_steps, interrupted=False, evaluation=trainer.evaluate())


class Trainer:
    """All parts of a run, and how far it has come.

    Args:
        config: All settings.
        run: Where checkpoints go.
        vector: The envs to train on.
    """

    def __init__(self, config: Config, run: Run, vector: AsyncVectorEnv):
        self._config = config
        self._envs = InGraphVectorEnv(vector, num_steps=config.num_steps, timeout_s=config.step_timeout_s)
        self._agent = Agent(config, vector.single_observation_space, vector.single_action_space)
        self._learner = Learner(config, self._agent, self._envs)
        self._collector = Collector(self._agent, self._envs)
        self._checkpoints = Checkpoints(run.checkpoints, agent=self._agent, learner=self._learner)
        self._episodes = Episodes()
        self._update = 0
        self._clock = _Clock(0.0, 0)

    @property
    def env_steps(self) -> int:
        """Steps taken so far, all envs together."""
        return self._update * self._config.batch_size

    @property
    def finished(self) -> bool:
        """Whether all updates were made."""
        return self._update >= self._config.num_updates

    def due(self, interval: int | None) -> bool:
        """Returns whether the last update reached or passed a multiple of `interval` env-steps, or was the last."""
        if interval is None:
            return False
        return self.finished or self.env_steps // interval > (self.env_steps - self._config.batch_size) // interval

    def begin(self) -> None:
        """Resets the envs, so that fresh episodes begin."""
        self._learner.rewards.begin()
        with self._envs.raising():
            # Other seeds after an interruption, or the episodes would repeat the first ones.
            self._envs.reset(seed=self._config.seed + self.env_steps)
        self._clock = _Clock(self._clock.wall_s, self.env_steps)

    def iterate(self) -> dict[str, float]:
        """Collects a rollout, learns from it, and returns the losses.

        Raises:
            TrainingDiverged: If a reward or a loss is not finite. Nothing is saved after that.
        """
        config, update = self._config, self._update
        with self._envs.raising():
            rollout = self._collector.collect(tf.constant([config.seed, update], tf.int32))
        arrays = self._envs.last_rollout()
        _check_rewards(arrays, self.env_steps)
        self._episodes.add(arrays)
        rate = tf.constant(learning_rate_at(config, update), tf.float32)
        clip_range = tf.constant(clip_range_at(config, update), tf.float32)
        results = self._learner.update(rollout, rate, clip_range, tf.constant(shuffled(config, update)))
        losses = {name: float(value) for name, value in results.items()}
        _check_losses(losses, self.env_steps)
        # Owner: the slab is the envs' again from here on.
        self._update += 1
        return losses

    def report(self, losses: dict[str, float]) -> dict[str, Any]:
        """Returns everything there is to say after an update, evaluating first if that is due."""
        report = {"env_steps": self.env_steps, **self._clock.read(self.env_steps), **self._episodes.summary()}
        report |= losses
        if self.due(self._config.eval_interval):
            scores = self.evaluate().summary()
            report["eval_return_mean"], report["eval_return_std"] = scores["return_mean"], scores["return_std"]
        return report

    def evaluate(self) -> Evaluation:
        """Evaluates the policy as it is, on envs of its own."""
        episodes = self._config.eval_episodes
        with evaluation_envs(self._config, min(episodes, MAX_ENVS)) as envs:
            return evaluate(self._agent, envs, episodes, seed=self._config.seed, timeout_s=self._config.step_timeout_s)

    def save(self) -> None:
        """Writes a checkpoint."""
        progress = {"update": self._update, "wall_s": self._clock.wall_s, "episodes": self._episodes.state()}
        self._checkpoints.save(self.env_steps, progress)

    def restore(self, warn: Callable[[str], None]) -> None:
        """Goes back to the newest checkpoint that is whole."""
        progress = self._checkpoints.restore_newest(warn=warn, keys=("update", "wall_s", "episodes"))
        self._update = progress["update"]
        self._episodes.load(progress["episodes"])
        self._clock = _Clock(progress["wall_s"], self.env_steps)


def learning_rate_at(config: Config, update: int) -> float:
    """Returns the learning rate of an update: constant, or linear from the first one to 0 after the last."""
    return config.learning_rate * (_left(config, update) if config.lr_schedule == "linear" else 1.0)


def clip_range_at(config: Config, update: int) -> float:
    """Returns the clip range of an update: constant, or linear from the first one to 0 after the last."""
    return config.clip_range * (_left(config, update) if config.clip_schedule == "linear" else 1.0)


def _left(config: Config, update: int) -> float:
    return 1.0 - update / config.num_updates


class _Clock:
    """Seconds of training, and steps per second since the last reading."""

    def __init__(self, wall_s: float, env_steps: int):
        self._start = time.perf_counter() - wall_s
        self._last = (time.perf_counter(), env_steps)

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._start

    def read(self, env_steps: int) -> dict[str, float]:
        now = time.perf_counter()
        (then, steps_then), self._last = self._last, (now, env_steps)
        return {"wall_s": now - self._start, "steps_per_s": (env_steps - steps_then) / (now - then)}


def _check_rewards(rollout: Rollout, env_steps: int) -> None:
    if not np.isfinite(rollout.rewards).all():
        t, env = np.argwhere(~np.isfinite(rollout.rewards))[0]
        raise TrainingDiverged(
            f"env {env} returned reward {rollout.rewards[t, env]} at step {t} of the rollout that began after "
            f"{env_steps} env-steps. Mend the env; the last checkpoint is from before."
        )


def _check_losses(losses: dict[str, float], env_steps: int) -> None:
    for name in ("policy_loss", "value_loss", "grad_norm", "kl"):
        if not np.isfinite(losses[name]):
            raise TrainingDiverged(
                f"{name} is {losses[name]} in the update after {env_steps} env-steps: training has diverged. "
                "Lower --learning-rate or --max-grad-norm; the last checkpoint is from before."
            )


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """Gives an event that SIGINT or SIGTERM sets, so that a run ends between two updates.

    A second signal does what it did before this run.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous: dict[int, Callable | int | None] = {}

    def handle(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, previous[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.getsignal(number)
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
