"""Metrics of infos: their names, their means, and how commands show them. NaN marks an episode without the info."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

PREFIX = "info_"  # the metric `info_NAME` is the mean of the info NAME of episodes, as `info_metrics` names it


def mean_of(values: Iterable[float]) -> float | None:
    """Returns the mean over the episodes that have the info, or None if there are none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else None


def with_absent_flags(values: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """Returns the values of an info in each episode, with 0 for a flag that is missing because the episode was `cut`.

    Many envs set a flag such as is_success only at the end of an episode. A mean over the episodes that have it would
    ignore the failures that never end. An info is a flag if each of its values is 0 or 1.
    """
    known = values[~np.isnan(values)]
    return np.where(cut & np.isnan(values), 0.0, values) if known.size and np.isin(known, (0, 1)).all() else values


def to_json(values: Iterable[float]) -> list[float | None]:
    """Returns values for JSON, which has no NaN: None for an episode without the info. NumPy reads None as NaN."""
    return [None if math.isnan(value) else float(value) for value in values]


def shown(metrics: Mapping[str, Any], before: str) -> str:
    """Returns the means of infos in `metrics` as text, with `before` in front of each; "" if there are none."""
    means = {name: value for name, value in metrics.items() if name.startswith(PREFIX)}
    return "".join(f"{before}{name} {'...' if mean is None else f'{mean:,.4g}'}" for name, mean in means.items())
