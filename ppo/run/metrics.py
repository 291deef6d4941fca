"""The metrics of a run: their meanings, their measurement, and the files to which they are written."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams  # documented as `hparams.api`, which also imports Keras

from ppo.config import Config
from ppo.errors import RunError
from ppo.run import infos
from ppo.run.files import write_atomically
from ppo.run.folder import Run
from vecenv.ingraph import Rollout

WINDOW = 100  # episodes over which returns and lengths are averaged
ENOUGH = 20  # episodes after which an info that none of them has is a warning

GROUPS: dict[str | None, tuple[str, ...]] = {
    None: ("env_steps",),  # TensorBoard's horizontal axis
    "speed": ("wall_s", "steps_per_s", "collect_steps_per_s", "learn_steps_per_s"),
    "returns": ("episodes", "return_mean", "length_mean", "eval_return_mean", "eval_return_std"),
    "losses": ("policy_loss", "value_loss", "entropy", "action_std", "explained_variance"),
    "kl": ("kl", "approx_kl", "clip_fraction", "kl_penalty"),
    "optimizer": ("learning_rate", "grad_norm", "gradient_steps"),
    "normalizer": ("return_scale",),
    "workers": ("worker_restarts",),
}
"""The metrics of envs with one agent, by their group in TensorBoard. docs/ppo.md explains each."""

METRICS = {name: group for group, names in GROUPS.items() for name in names}
"""The group of each of these metrics, by its name in metrics.jsonl. `group_of` lists the names of other metrics."""

TIMES = GROUPS["speed"]  # metrics that differ between two runs with the same seed


def group_of(name: str) -> str | None:
    """Returns the group of a metric in TensorBoard; None for `env_steps`, which is TensorBoard's horizontal axis.

    Apart from `METRICS`, a run may report `info_KEY`; `return_mean/NAME` of an agent, a group of agents or a function;
    the same with the prefix `eval_`; and, with several teams, `TEAM/NAME` for each metric of an update.

    Raises:
        ValueError: If no metric has this name.
    """
    if name in METRICS:
        return METRICS[name]
    if name.removeprefix("eval_").startswith(infos.PREFIX):
        return "infos"
    if name.removeprefix("eval_").startswith("return_mean/"):
        return "returns"
    team, _, metric = name.rpartition("/")
    if not team or metric not in METRICS:
        raise ValueError(f"the metric {name!r} is not declared: add it to ppo.run.metrics.GROUPS")
    return f"{METRICS[metric]}/{team}"


def with_means(of_teams: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of each team into the metrics of an update: means over the teams that have a metric.

    With several teams, the result also holds each team's own metrics, as `TEAM/NAME`.
    """
    names = dict.fromkeys(name for metrics in of_teams.values() for name in metrics)
    values = {name: [metrics[name] for metrics in of_teams.values() if name in metrics] for name in names}
    means = {name: sum(found) / len(found) for name, found in values.items()}
    if len(of_teams) == 1:
        return means
    return {f"{team}/{name}": value for team, metrics in of_teams.items() for name, value in metrics.items()} | means


class Clock:
    """Measures seconds of training, including those of earlier processes, and speeds since the last report."""

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
        """Returns the metrics of the group "speed": env-steps per second since the last `restart`.

        The overall speed counts all time. The speeds of collecting and learning count only the time spent on each.
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


def scored(team: str, agents: Sequence[str]) -> list[str]:
    """Returns the names under which a team's returns are reported: of each agent, and of the team if it has several."""
    return [*agents, *([team] if len(agents) > 1 and team not in agents else [])]


class Episodes:
    """The number of finished training episodes, the longest one, and the scores of the last `WINDOW` episodes.

    Args:
        info_keys: Names of infos whose values of each episode are kept; NaN where there is no value.
        teams: The agents of each team, whose returns are kept as well; empty if the env has one agent.
    """

    def __init__(self, info_keys: Iterable[str] = (), teams: Mapping[str, Sequence[str]] = MappingProxyType({})):
        self.count = self.longest = 0
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)
        self.infos: dict[str, deque[float]] = {key: deque(maxlen=WINDOW) for key in info_keys}
        self._teams = teams
        self._of_agents = {agent: deque[float](maxlen=WINDOW) for agents in teams.values() for agent in agents}
        self._missing: set[str] = set()  # keys that `warn` was called for

    def add(self, rollout: Rollout, *, warn: Callable[[str], None]) -> None:
        """Records the episodes that ended in a rollout of NumPy arrays, in order of their ends.

        Calls `warn` once for each info that none of the last episodes has, if there are `ENOUGH`.
        """
        ended = np.logical_or(rollout.terminated, rollout.truncated)
        self.count += int(ended.sum())
        self.returns.extend(rollout.episode_returns[ended].tolist())
        lengths = rollout.episode_lengths[ended].tolist()
        self.lengths.extend(lengths)
        self.longest = max(self.longest, *lengths, 0)
        for key, values in self.infos.items():
            values.extend(rollout.episode_infos[key][ended].tolist())
            if key not in self._missing and len(values) >= ENOUGH and np.isnan(values).all():
                self._missing.add(key)
                warn(
                    f"the last {len(values)} episodes ended without the info {key!r}, which --info-metrics names. "
                    "Check its spelling: the env must return the key at the last step of an episode, or in any step "
                    "for a sum or a mean."
                )

    def add_team(self, team: str, rollout: Rollout) -> None:
        """Records the returns of a team's agents in a rollout of the team, `[T, M * K]`, as NumPy arrays."""
        agents = self._teams[team]
        ended = (rollout.terminated | rollout.truncated) & rollout.valid[:-1]
        for k, agent in enumerate(agents):
            rows = np.s_[:, k :: len(agents)]
            self._of_agents[agent].extend(rollout.episode_returns[rows][ended[rows]].tolist())

    def summary(self) -> dict[str, float | int | None]:
        """Returns the count and the means. A mean is None if none of the last `WINDOW` episodes has a value."""
        means = {agent: infos.mean_of(values) for agent, values in self._of_agents.items()}
        for team, agents in self._teams.items():
            known = [mean for agent in agents if (mean := means[agent]) is not None]
            means |= {name: infos.mean_of(known) for name in scored(team, agents) if name not in means}
        return {
            "episodes": self.count,
            "return_mean": infos.mean_of(self.returns),
            "length_mean": infos.mean_of(self.lengths),
            **{infos.PREFIX + key: infos.mean_of(values) for key, values in self.infos.items()},
            **{f"return_mean/{name}": mean for name, mean in means.items()},
        }

    def state(self) -> dict[str, Any]:
        """Returns JSON values that `load` restores."""
        return {
            "count": self.count,
            "longest": self.longest,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "infos": {key: infos.to_json(values) for key, values in self.infos.items()},
            "agents": {agent: list(values) for agent, values in self._of_agents.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `state`, which may be of other infos."""
        self.count, self.longest = state["count"], state["longest"]
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        for key, values in self.infos.items():
            values.extend(np.array(state["infos"].get(key, ()), np.float64).tolist())
        for agent, values in self._of_agents.items():
            values.extend(state["agents"][agent])


class MetricsWriter:
    """Appends reports to `metrics.jsonl` and to TensorBoard's event file.

    Existing reports of steps after `env_steps` are removed, because an interruption lost that part of the run, and it
    is trained again. Every method raises RunError if a file cannot be written, for example because the disk is full.

    Attributes:
        has_report: Whether the files already hold a report of `env_steps`.
    """

    def __init__(self, run: Run, config: Config, env_steps: int):
        self._run = run
        self.has_report = False
        with self._raising():
            if run.metrics.exists():
                lines = run.metrics.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _is_until(line, env_steps)]
                last = json.loads(kept[-1])["env_steps"] if kept else 0
                self.has_report = last == env_steps > 0
                # This also replaces a hard link with a file of the run.
                write_atomically(run.metrics, "".join(line + "\n" for line in kept))
                _trim_events(run, last)
            self._file = open(run.metrics, "ab", buffering=0)  # noqa: SIM115  closed by `close`
            # TensorFlow's own file names can be guessed, and TensorFlow would follow a link with such a name.
            suffix = f".{secrets.token_hex(8)}.v2"
            self._events = tf.summary.create_file_writer(str(run.path), filename_suffix=suffix)
            settings = dataclasses.asdict(config).items()
            plain = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in settings}
            with self._events.as_default(step=0):
                hparams.hparams(plain, trial_id=run.path.name)

    def write(self, report: Mapping[str, Any], logged: Mapping[str, float] = MappingProxyType({})) -> None:
        """Writes a report, and values that callbacks log, which are TensorBoard's group "custom". NaN becomes null.

        Raises ValueError if a metric is not declared, or a callback uses its name.
        """
        if taken := sorted(logged.keys() & (METRICS.keys() | report.keys())):
            raise ValueError(f"a callback logs {taken}, which are metrics of ppo: choose other names")
        groups = {name: group_of(name) for name in report} | dict.fromkeys(logged, "custom")
        plain: dict[str, Any] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in {**report, **logged}.items()
        }
        line = (json.dumps(plain) + "\n").encode()
        self._run.check_exists()  # writing to a deleted file would lose the data without an error
        with self._raising():
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with self._events.as_default(step=report["env_steps"]):
                for name, value in plain.items():
                    if value is not None and groups[name] is not None:
                        # `tf.summary.scalar` would write a tensor, which some readers do not show.
                        scalar = Summary.Value(tag=f"{groups[name]}/{name}", simple_value=value)
                        tf.summary.experimental.write_raw_pb(Summary(value=[scalar]).SerializeToString())
            self._events.flush()  # a process that is killed loses no report

    def close(self) -> None:
        """Flushes and closes both files."""
        self._file.close()
        with self._raising():
            self._events.close()

    @contextmanager
    def _raising(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            raise RunError(
                f"cannot write metrics into {self._run.path}: {error}. The checkpoints are intact."
            ) from error


def _trim_events(run: Run, env_steps: int) -> None:
    """Removes the events of later steps from the event files that earlier processes have written."""
    for file in run.path.glob(f"events.out.tfevents.*.{'[0-9a-f]' * 16}.v2"):  # callbacks write files with other names
        records = list(RawEventFileLoader(str(file)).Load())  # ends before a record that is incomplete
        kept = [record for record in records if Event.FromString(record).step <= env_steps]
        if len(kept) < len(records):
            draft = run.path / f".part-{secrets.token_hex(8)}"
            with tf.io.TFRecordWriter(str(draft)) as writer:
                for record in kept:
                    writer.write(record)
            os.replace(draft, file)


def _is_until(line: str, env_steps: int) -> bool:
    try:
        return json.loads(line)["env_steps"] <= env_steps
    except (ValueError, KeyError, TypeError):
        return False  # the incomplete last line of a killed run
