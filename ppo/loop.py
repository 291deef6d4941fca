"""loop.py: train: the training loop, read top to bottom: collect, learn, report, save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as stack:
        vector = stack.enter_context(training_envs(config))
        envs = InGraphVectorEnv(vector, num_steps=config.num_steps, timeout_s=config.step_timeout_s)
        agent = Agent(config, vector.single_observation_space, vector.single_action_space)
        learner = Learner(config, agent, envs)
        collector = Collector(agent, envs)
        checkpoints = Checkpoints(run.checkpoints, agent=agent, learner=learner)
        episodes = Episodes()
        update, wall_s = 0, 0.0
        if resume:
            progress = checkpoints.restore_newest(warn=display.warn)
            update, wall_s = progress["update"], progress["wall_s"]
            episodes.load(progress["episodes"])
        env_steps = update * config.batch_size
        writer = MetricsWriter(run, env_steps)
        stack.callback(writer.close)
        stop = stack.enter_context(_stop_on_signal())
        clock = _Clock(wall_s, env_steps)
        display.start(config, env_steps)

        def save() -> None:
            state = {"update": update, "wall_s": clock.wall_s, "episodes": episodes.state()}
            checkpoints.save(env_steps, state)

        def evaluation(count: int) -> Evaluation:
            with evaluation_envs(config, min(count, MAX_ENVS)) as own_envs:
                return evaluate(agent, own_envs, count, seed=config.seed)

        with envs.raising():
            # Fresh episodes after an interruption: other seeds, or they would repeat the first ones.
            envs.reset(seed=config.seed + env_steps)
        while update < config.num_updates and not stop.is_set():
            with envs.raising():
                rollout = collector.collect(tf.constant([config.seed, update], tf.int32))
            arrays = envs.last_rollout()
            _check_rewards(arrays, env_steps)
            episodes.add(arrays)
            learning_rate = learning_rate_at(config, update)
            losses = learner.update(
                rollout, tf.constant(learning_rate, tf.float32), tf.constant(shuffled(config, update))
            )
            # Owner: the slab is the envs' again from here on.
            update += 1
            env_steps += config.batch_size
            last = update == config.num_updates
            if last or _due(config.report_interval, env_steps, config.batch_size):
                report = {"env_steps": env_steps, **clock.read(env_steps), **episodes.summary()}
                report |= {name: float(value) for name, value in losses.items()} | {"learning_rate": learning_rate}
                _check_losses(report)
                if config.eval_interval and _due(config.eval_interval, env_steps, config.batch_size):
                    scores = evaluation(config.eval_episodes)
                    report["eval_return_mean"] = float(scores.returns.mean())
                    report["eval_return_std"] = float(scores.returns.std())
                writer.write(report)
                display.update(report)
            if last or _due(config.checkpoint_interval, env_steps, config.batch_size):
                save()
        if update < config.num_updates:
            save()
            return Result(env_steps, interrupted=True, evaluation=None)
        return Result(env_steps, interrupted=False, evaluation=evaluation(config.eval_episodes))


def learning_rate_at(config: Config, update: int) -> float:
    """Returns the learning rate of an update: constant, or linear from the first one to 0 after the last."""
    left = 1.0 - update / config.num_updates if config.lr_schedule == "linear" else 1.0
    return config.learning_rate * left


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


def _due(interval: int, env_steps: int, batch_size: int) -> bool:
    """Returns whether the last batch of steps has reached or passed a multiple of the interval."""
    return env_steps // interval > (env_steps - batch_size) // interval


def _check_rewards(rollout: Rollout, env_steps: int) -> None:
    if not np.isfinite(rollout.rewards).all():
        t, env = np.argwhere(~np.isfinite(rollout.rewards))[0]
        raise TrainingDiverged(
            f"env {env} returned reward {rollout.rewards[t, env]} at step {t} of the rollout that began after "
            f"{env_steps} env-steps. Mend the env; the last checkpoint is from before."
        )


def _check_losses(report: dict[str, Any]) -> None:
    for name in ("policy_loss", "value_loss", "grad_norm"):
        if not np.isfinite(report[name]):
            raise TrainingDiverged(
                f"{name} is {report[name]} after {report['env_steps']} env-steps: training has diverged. "
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
