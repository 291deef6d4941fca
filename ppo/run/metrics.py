"""The metrics of a run: their meanings, their measurement, and the files to which they are written."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.config import Config
from ppo.run import infos
from ppo.run.folder import Run, RunError, write_atomically
from ppo.run.tensorboard import TensorBoardWriter
from vecenv.ingraph import Rollout

WINDOW = 100  # episodes over which returns and lengths are averaged


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric.

    Attributes:
        group: The metric's group in TensorBoard. None for `env_steps`, which is TensorBoard's horizontal axis.
        meaning: What the metric measures, with its unit.
    """

    group: str | None
    meaning: str


METRICS: dict[str, Metric] = {
    "env_steps": Metric(None, "environment steps so far, summed over all environments"),
    "wall_s": Metric("speed", "seconds of training so far, including those before the run was resumed"),
    "steps_per_s": Metric("speed", "env-steps per second since the last report, including evaluations and checkpoints"),
    "collect_steps_per_s": Metric("speed", "env-steps per second spent collecting since the last report"),
    "learn_steps_per_s": Metric("speed", "env-steps per second spent learning since the last report"),
    "episodes": Metric("returns", "training episodes finished so far"),
    "return_mean": Metric("returns", f"mean return of the last {WINDOW} training episodes, with sampled actions"),
    "length_mean": Metric("returns", f"mean length of the last {WINDOW} training episodes, in steps"),
    "eval_return_mean": Metric("returns", "mean return of an evaluation, with sampled actions if `sample` is set"),
    "eval_return_std": Metric("returns", "standard deviation of the returns of an evaluation"),
    "policy_loss": Metric("losses", "policy loss, averaged over the gradient steps of the update"),
    "value_loss": Metric("losses", "value loss, averaged over the gradient steps of the update"),
    "entropy": Metric("losses", "entropy of the policy in nats, averaged over the gradient steps of the update"),
    "action_std": Metric("losses", "mean standard deviation of the Gaussians of Box actions after the update"),
    "explained_variance": Metric("losses", "fraction of the variance of the value targets that the values explain"),
    "kl": Metric("kl", "KL divergence from the policy before the update to the policy after it, in nats"),
    "approx_kl": Metric("kl", "estimated KL divergence in nats, averaged over the gradient steps of the update"),
    "clip_fraction": Metric("kl", "fraction of samples whose probability ratio differs from 1 by more than clip_range"),
    "kl_penalty": Metric("kl", "weight of the KL penalty, with objective kl_penalty"),
    "learning_rate": Metric("optimizer", "learning rate of the update"),
    "grad_norm": Metric("optimizer", "global norm of the gradient before clipping, averaged over the gradient steps"),
    "gradient_steps": Metric("optimizer", "gradient steps of the update"),
    "return_scale": Metric("normalizer", "divisor of the rewards: the running deviation of the discounted return"),
}
"""Every metric that any run may report, by its name in metrics.jsonl."""

TIMES = tuple(name for name, metric in METRICS.items() if metric.group == "speed")
"""Metrics that differ between two runs with the same seed."""


OF_LEARNERS = tuple(
    name for name, metric in METRICS.items() if metric.group in ("losses", "kl", "optimizer", "normalizer")
)
"""Metrics of an update. With several teams, each has its own, under the name "TEAM/METRIC"."""


def metrics_of(
    config: Config, teams: Mapping[str, Sequence[str]] = MappingProxyType({}), functions: int = 0
) -> dict[str, Metric]:
    """Returns every metric that a run with these settings may report.

    Args:
        config: The settings, which name the metrics of infos.
        teams: The agents of each team; empty if the env has one agent.
        functions: Number of different functions that make the envs; 0 if there is only one.
    """
    metrics = dict(METRICS)
    for team, agents in teams.items():
        if len(teams) > 1:
            for name in OF_LEARNERS:
                metrics[f"{team}/{name}"] = Metric(f"{METRICS[name].group}/{team}", METRICS[name].meaning)
        for name in scored(team, agents):
            whose = f"of agent {name}" if name in agents else f"per agent of group {team}"
            metrics[f"return_mean/{name}"] = Metric(
                "returns", f"mean return {whose} over the last {WINDOW} training episodes, with sampled actions"
            )
            metrics[f"eval_return_mean/{name}"] = Metric(
                "returns", f"mean return {whose} in an evaluation, see eval_return_mean"
            )
    for k in range(functions):
        metrics[f"eval_return_mean/function_{k}"] = Metric(
            "returns", f"mean return in the evaluation envs of function {k}, see eval_return_mean"
        )
    for key in config.info_metrics:
        name, meaning = infos.PREFIX + key, f"mean of the info {key!r}"
        metrics[name] = Metric("infos", f"{meaning} over those of the last {WINDOW} training episodes that have it")
        metrics[f"eval_{name}"] = Metric("infos", f"{meaning} over the episodes of an evaluation that have it")
    return metrics


class Clock:
    """Measures seconds of training, and speeds since the last report.

    Args:
        wall_s: Seconds of training before this process started.
        env_steps: Env-steps taken before this process started.
    """

    def __init__(self, wall_s: float, env_steps: int):
        self._start = time.perf_counter() - wall_s
        self.restart(env_steps)

    @property
    def wall_s(self) -> float:
        """Seconds of training."""
        return time.perf_counter() - self._start

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """Counts the time of the block as time spent on `part`, which is "collect" or "learn"."""
        start = time.perf_counter()
        yield
        self._spent_s[part] += time.perf_counter() - start

    def read(self, env_steps: int) -> dict[str, float]:
        """Returns the metrics of the group "speed".

        Speeds are env-steps per second since the last `restart`. The overall speed counts all time, including
        evaluations, videos and checkpoints. The speeds of collecting and of learning count only the time spent on each.
        """
        now, (then, steps_then) = time.perf_counter(), self._last
        steps = env_steps - steps_then
        return {
            "wall_s": now - self._start,
            "steps_per_s": steps / (now - then),
            **{f"{part}_steps_per_s": steps / seconds for part, seconds in self._spent_s.items()},
        }

    def restart(self, env_steps: int) -> None:
        """Starts a new measurement of the speeds."""
        self._last = (time.perf_counter(), env_steps)
        self._spent_s = {"collect": 0.0, "learn": 0.0}


class Episodes:
    """The number of finished training episodes, and the scores of the last `WINDOW` episodes.

    Args:
        info_keys: Names of infos whose values of each episode are kept; NaN where there is no value.

    Attributes:
        longest: Length of the longest episode so far.
    """

    def __init__(self, info_keys: Iterable[str] = ()) -> None:
        self.count = self.longest = 0
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)
        self.infos: dict[str, deque[float]] = {key: deque(maxlen=WINDOW) for key in info_keys}
        self._missing: set[str] = set()  # keys that `warn` was called for

    def add(self, rollout: Rollout, *, warn: Callable[[str], None]) -> None:
        """Records the episodes that ended in a rollout of NumPy arrays, in order of their ends.

        Args:
            rollout: The rollout.
            warn: Called once for each info that none of the last `WINDOW` episodes has.
        """
        ended = np.logical_or(rollout.terminated, rollout.truncated)
        self.count += int(ended.sum())
        self.returns.extend(rollout.episode_returns[ended].tolist())
        lengths = rollout.episode_lengths[ended].tolist()
        self.lengths.extend(lengths)
        self.longest = max(self.longest, *lengths, 0)
        for key, values in self.infos.items():
            values.extend(rollout.episode_infos[key][ended].tolist())
            if key not in self._missing and len(values) == WINDOW and np.isnan(values).all():
                self._missing.add(key)
                warn(
                    f"the last {WINDOW} episodes ended without the info {key!r}, which --info-metrics names. Check its "
                    "spelling: the env must return the key at the last step of an episode, or in any step for a sum or "
                    "a mean."
                )

    def summary(self) -> dict[str, float | int | None]:
        """Returns the count and the means. A mean is None if none of the last `WINDOW` episodes has a value."""
        return {
            "episodes": self.count,
            "return_mean": float(np.mean(self.returns)) if self.returns else None,
            "length_mean": float(np.mean(self.lengths)) if self.lengths else None,
            **{infos.PREFIX + key: infos.mean_of(values) for key, values in self.infos.items()},
        }

    def state(self) -> dict[str, Any]:
        """Returns JSON values that `load` restores."""
        return {
            "count": self.count,
            "longest": self.longest,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "infos": {key: infos.to_json(values) for key, values in self.infos.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `state`."""
        self.count, self.longest = state["count"], state.get("longest", 0)
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        saved = state.get("infos", {})  # absent in checkpoints of earlier versions
        for key, values in self.infos.items():
            values.extend(infos.from_json(saved.get(key, ())))


def scored(team: str, agents: Sequence[str]) -> list[str]:
    """Returns the names under which a team's returns are reported: of each agent, and of the team if it has several."""
    return [*agents, *([team] if len(agents) > 1 and team not in agents else [])]


class AgentScores:
    """The returns of the last `WINDOW` training episodes of each agent.

    Args:
        teams: The agents of each team.
    """

    def __init__(self, teams: Mapping[str, Sequence[str]]):
        self._teams = teams
        self._returns = {agent: deque[float](maxlen=WINDOW) for agents in teams.values() for agent in agents}

    def add(self, team: str, rollout: Rollout) -> None:
        """Records the episodes that ended in a rollout of a team, `[T, M * K]`, as NumPy arrays."""
        agents = self._teams[team]
        ended = (rollout.terminated | rollout.truncated) & rollout.valid[:-1]
        for k, agent in enumerate(agents):
            self._returns[agent].extend(
                rollout.episode_returns[:, k :: len(agents)][ended[:, k :: len(agents)]].tolist()
            )

    def summary(self) -> dict[str, float | None]:
        """Returns the mean return of each agent, and of the agents of each group; None without episodes."""
        means = {agent: float(np.mean(values)) if values else None for agent, values in self._returns.items()}
        found: dict[str, float | None] = {}
        for team, agents in self._teams.items():
            known = [mean for agent in agents if (mean := means[agent]) is not None]
            for name in scored(team, agents):
                found[f"return_mean/{name}"] = (
                    means[name] if name in means else float(np.mean(known)) if known else None
                )
        return found

    def state(self) -> dict[str, list[float]]:
        """Returns JSON values that `load` restores."""
        return {agent: list(values) for agent, values in self._returns.items()}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restores a result of `state`."""
        for agent, values in self._returns.items():
            values.extend(state.get(agent, ()))


class MetricsWriter:
    """Appends reports to `metrics.jsonl` and to TensorBoard's event file.

    Args:
        run: The run to write to.
        config: The run's settings.
        teams, functions: As for `metrics_of`.
        env_steps: Env-steps of the run. Existing reports of later steps are removed, because an interruption lost that
            part of the run, and it is trained again.

    Raises:
        RunError: If a file cannot be written, for example because the disk is full. Every method may raise it.
    """

    def __init__(
        self, run: Run, config: Config, env_steps: int, teams: Mapping[str, Sequence[str]] = MappingProxyType({}),
        functions: int = 0,
    ):  # fmt: skip
        self._run = run
        self._metrics = metrics_of(config, teams, functions)
        with self._raising():
            if run.metrics.exists():
                lines = run.metrics.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _is_until(line, env_steps)]
                # This also replaces a hard link with a file of the run.
                write_atomically(run.metrics, "".join(line + "\n" for line in kept))
            self._file = open(run.metrics, "ab", buffering=0)  # noqa: SIM115  closed by `close`
            self._tensorboard = TensorBoardWriter(run.path, config)

    def write(self, report: Mapping[str, Any], logged: Mapping[str, float] = MappingProxyType({})) -> None:
        """Writes one report. Values that are not finite become null.

        Args:
            report: The metrics.
            logged: Values of callbacks, which TensorBoard shows in the group "custom".

        Raises:
            ValueError: If a metric is not declared, or a callback uses its name.
        """
        if taken := sorted(logged.keys() & self._metrics.keys()):
            raise ValueError(f"a callback logs {taken}, which are metrics of ppo: choose other names")
        if undeclared := sorted(report.keys() - self._metrics.keys()):
            raise ValueError(f"the metrics {undeclared} are not declared: add them to ppo.run.metrics.METRICS")
        plain: dict[str, Any] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in {**report, **logged}.items()
        }
        line = (json.dumps(plain) + "\n").encode()
        self._run.check_exists()  # writing to a deleted file would lose the data without an error
        with self._raising():
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            groups = {name: self._metrics[name].group if name in self._metrics else "custom" for name in plain}
            scalars = {
                f"{groups[name]}/{name}": value
                for name, value in plain.items()
                if value is not None and groups[name] is not None
            }
            self._tensorboard.scalars(scalars, report["env_steps"])

    def write_video(self, file: Path, env_steps: int) -> None:
        """Shows a video in TensorBoard."""
        self._run.check_exists()
        with self._raising():
            self._tensorboard.video(file, env_steps)

    def close(self) -> None:
        """Flushes and closes both files."""
        self._file.close()
        with self._raising():
            self._tensorboard.close()

    @contextmanager
    def _raising(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise RunError(
                f"cannot write metrics into {self._run.path}: {error}. The checkpoints are intact."
            ) from error


def _is_until(line: str, env_steps: int) -> bool:
    try:
        return json.loads(line)["env_steps"] <= env_steps
    except (ValueError, KeyError, TypeError):
        return False  # the incomplete last line of a killed run
