"""Scores: what an evaluation found, and how a run ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ppo.run import infos


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The scores of E episodes. Two evaluations are equal if all their values are.

    Attributes:
        returns: Undiscounted sums of rewards, `float64[E]`.
        lengths: Numbers of steps, `int64[E]`.
        infos: For each of the config's `info_metrics`, the value of each episode, `float64[E]`; NaN where it has none.
        agents: With several agents: the return of each agent, `float64[E]`, and the mean of each group. `returns` are
            then the sums over all agents.
        functions: If several functions made the envs: the index of the function of each episode, `int64[E]`.
        deterministic: Whether the policy took the most likely actions. False: sampled ones, as in training.
    """

    returns: np.ndarray
    lengths: np.ndarray
    infos: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    agents: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    functions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    deterministic: bool = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Evaluation) and self.to_json() == other.to_json()

    @property
    def policy(self) -> str:
        """Which policy has these scores, for messages."""
        return "deterministic policy" if self.deterministic else "sampled policy"

    def summary(self) -> dict[str, float | int]:
        """Returns mean, standard deviation and range of the returns, the mean length, E and the kind of the policy.

        `info_KEY` is the mean over the episodes that have the info. It is omitted if there are none. With several
        agents or functions, `return_mean/NAME` and `return_mean/function_K` are their mean returns.
        """
        return {
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "episodes": len(self.returns),
            "deterministic": self.deterministic,
            **self._means(),
        }

    def metrics(self) -> dict[str, float]:
        """Returns the metrics for a report of a training run."""
        means = {"return_mean": float(self.returns.mean()), "return_std": float(self.returns.std())}
        return {f"eval_{name}": mean for name, mean in (means | self._means()).items()}

    def to_json(self) -> dict[str, Any]:
        """Returns the score of each episode as plain numbers, with None for an info that the episode lacks."""
        return {
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "infos": {key: infos.to_json(values) for key, values in self.infos.items()},
            "agents": {name: values.tolist() for name, values in self.agents.items()},
            "functions": self.functions.tolist(),
            "deterministic": self.deterministic,
        }

    def _means(self) -> dict[str, float]:
        """Returns the means of infos, agents and functions."""
        means = {infos.PREFIX + key: infos.mean_of(values) for key, values in self.infos.items()}
        means |= {f"return_mean/{name}": float(values.mean()) for name, values in self.agents.items()}
        for k in np.unique(self.functions).tolist():
            means[f"return_mean/function_{k}"] = float(self.returns[self.functions == k].mean())
        return {name: mean for name, mean in means.items() if mean is not None}


def rounded(value: float) -> str:
    """Returns a number with one decimal, or with three significant digits if it is small, such as a KL divergence."""
    return f"{value:.3g}" if 1e-6 <= abs(value) < 1 else f"{value:,.1f}"


def counted(episodes: float) -> str:
    """Returns "1 episode", "20 episodes" and so on."""
    return f"{episodes:,} episode" + "s" * (episodes != 1)


@dataclass(frozen=True)
class Result:
    """How a run ended. The functions that read a run accept it in place of the run's path.

    Attributes:
        path: The run folder.
        env_steps: Env-steps taken, including those before an interruption.
        evaluation: Evaluation of the final policy; None if a signal or `StopTraining` interrupted the run.
        signal: Number of the signal that interrupted the run, or None.
        stopped: The reason for which a callback finished the run before `total_steps`, or None.
    """

    path: Path
    env_steps: int
    evaluation: Evaluation | None
    signal: int | None = None
    stopped: str | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def interrupted(self) -> bool:
        """Whether a signal or `StopTraining` ended the run. `ppo.resume` continues it."""
        return self.evaluation is None
