"""How far a run has come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ppo.algorithm.collector import Rollouts
from ppo.config import Config
from ppo.run.metrics import Clock, Episodes


class Progress:
    """The number of updates so far, the scores of recent episodes and the time spent on training, over all resumes.

    Args:
        config: The settings of the run.
        teams: The agents of each team; empty if the env has one agent.

    Attributes:
        updates: Number of updates.
        ahead: Whether a rollout has begun from which no update has learned, so the envs are ahead of the policies.
        unreported: The metrics of the last update, until they are reported.
        episodes: The scores of the episodes.
        clock: Measures the time.
    """

    def __init__(self, config: Config, teams: Mapping[str, Sequence[str]] = MappingProxyType({})):
        self._config, self._teams = config, list(teams)
        self.updates = 0
        self.ahead = False
        self.unreported: dict[str, Any] | None = None
        self.episodes = Episodes(config.info_metrics, teams)
        self.clock = Clock(0.0, 0)

    @property
    def env_steps(self) -> int:
        """Env-steps from which the updates so far have learned, all envs together."""
        return self.updates * self._config.batch_size

    @property
    def finished(self) -> bool:
        """Whether all updates have been made."""
        return self.updates >= self._config.num_updates

    def count(self, rollouts: Rollouts, *, warn: Callable[[str], None]) -> None:
        """Counts an update, and the episodes that ended in the rollouts that it has learned from.

        Neither rollout 0 nor a rollout whose update failed counts.
        """
        self.updates += 1
        self.ahead = False
        for name, rollout in zip(self._teams, rollouts.arrays, strict=bool(self._teams)):
            self.episodes.add_team(name, rollout)
        self.episodes.add(rollouts.envs, warn=warn)

    def due(self, *intervals: int | None) -> bool:
        """Returns whether the last update passed a multiple of an interval, in env-steps, or ended the run.

        An interval that is None is never due.
        """
        size = self._config.batch_size
        before, now = (self.updates - 1) * size, self.updates * size
        return any(i is not None and (self.finished or now // i > before // i) for i in intervals)

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
        self.unreported = values["unreported"]
        self.episodes.load(values["episodes"])
        self.clock = Clock(values["wall_s"], self.env_steps)
