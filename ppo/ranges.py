"""RANGES: which numbers each setting may be, for checks and for `--help`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, both included unless said otherwise.

    Attributes:
        least: The lowest legal number, or with `above` the one that all must be above.
        most: The highest; infinity itself is never legal.
        above: Whether `least` is excluded.
    """

    least: float
    most: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Returns whether a number is legal; NaN never is."""
        return (value > self.least if self.above else value >= self.least) and value <= self.most and value != math.inf

    def __str__(self) -> str:
        if self.most != math.inf:
            return f"{self.least:g} to {self.most:.10g}"
        return f"above {self.least:g}" if self.above else f"{self.least:g} or more"


AT_LEAST_0, AT_LEAST_1, POSITIVE, UNIT = Range(0), Range(1), Range(0, above=True), Range(0, 1)

RANGES: dict[str, Range] = {
    "total_steps": AT_LEAST_1,
    "num_envs": AT_LEAST_1,
    "num_workers": AT_LEAST_0,
    "num_steps": AT_LEAST_1,
    "step_timeout_s": POSITIVE,
    "epochs": AT_LEAST_1,
    "minibatch_size": AT_LEAST_1,
    "learning_rate": POSITIVE,
    "adam_epsilon": POSITIVE,
    "max_grad_norm": POSITIVE,
    "gamma": UNIT,
    "gae_lambda": UNIT,
    "clip_range": POSITIVE,
    "kl_target": POSITIVE,
    "kl_init_penalty": POSITIVE,
    "kl_cutoff_factor": AT_LEAST_0,
    "kl_cutoff_coef": AT_LEAST_0,
    "kl_stop": POSITIVE,
    "kl_limit": POSITIVE,
    "value_coef": AT_LEAST_0,
    "value_clip_range": POSITIVE,
    "entropy_coef": AT_LEAST_0,
    "observation_clip": POSITIVE,
    "reward_clip": POSITIVE,
    "policy_layers": AT_LEAST_1,
    "value_layers": AT_LEAST_1,
    "recurrent_units": AT_LEAST_1,
    "policy_output_gain": POSITIVE,
    "initial_log_std": Range(-10, 2),
    "seed": Range(0, 2**31 - 1),
    "report_interval": AT_LEAST_1,
    "checkpoint_interval": AT_LEAST_1,
    "eval_interval": AT_LEAST_1,
    "eval_episodes": AT_LEAST_1,
    "video_interval": AT_LEAST_1,
}
"""By name of the setting; of a tuple, each entry."""
