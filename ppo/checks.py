"""checks.py: numbers that must not be trained on, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from ppo.observations import ACTION_MASK
from ppo.spaces import leaves, pick
from vecenv.ingraph import Rollout


class TrainingDiverged(FloatingPointError):
    """A reward, an observation, a loss or a gradient is not finite; the message says where."""


class NothingAllowed(ValueError):
    """An env's mask forbids every action; the message says where."""


def check_rollout(rollout: Rollout, space: gym.Space, mask_groups: Sequence[int], env_steps: int) -> None:
    """Checks all that envs wrote before anything is learnt from it.

    Args:
        rollout: Numpy arrays `[T, N, ...]`.
        space: Of one observation.
        mask_groups: Of the distribution over actions; empty if there is no mask.
        env_steps: Steps taken before this rollout.

    Raises:
        TrainingDiverged: If a reward or an observation is not finite.
        NothingAllowed: If a mask forbids all actions.
    """
    bad = _first(~np.isfinite(rollout.rewards))
    if bad is not None:
        raise TrainingDiverged(f"{_where(bad, env_steps, f'returned reward {rollout.rewards[bad]}')} {_MEND}")
    ended = np.logical_or(rollout.terminated, rollout.truncated)
    for path, leaf in leaves(space):
        if not np.issubdtype(leaf.dtype, np.inexact):
            continue
        # Row t + 1 is what step t returned; row 0 was checked with the rollout before, or came of a reset.
        for name, values, wanted in (
            ("observation", pick(rollout.observations, path)[1:], None),
            ("final observation", pick(rollout.final_observations, path), ended),
            ("first observation", pick(rollout.observations, path)[:1], None),
        ):
            bad = _first(_not_finite(values) if wanted is None else _not_finite(values, wanted))
            if bad is not None:
                found = values[bad][~np.isfinite(values[bad])][0]
                at = f" at {list(path)}" if path else ""
                raise TrainingDiverged(f"{_where(bad, env_steps, f'returned {found} in its {name}{at}')} {_MEND}")
    if mask_groups:
        _check_mask(rollout.observations[ACTION_MASK][:-1], mask_groups, env_steps)


def check_losses(losses: dict[str, float], env_steps: int) -> None:
    """Checks what an update returned.

    Raises:
        TrainingDiverged: If a loss or a gradient was not finite.
    """
    for name in ("policy_loss", "value_loss", "grad_norm", "kl"):
        if not np.isfinite(losses[name]):
            raise TrainingDiverged(
                f"{name} is {losses[name]} in the update after {env_steps} env-steps: training has diverged. "
                "Lower --learning-rate or --max-grad-norm; the last checkpoint is from before."
            )


_MEND = "Mend the env; the last checkpoint is from before."


def _check_mask(mask: Any, groups: Sequence[int], env_steps: int) -> None:
    starts = np.cumsum([0, *groups[:-1]])
    allowed = np.add.reduceat(mask.reshape(*mask.shape[:2], -1) != 0, starts, axis=-1, dtype=np.int64)
    bad = _first((allowed == 0).any(axis=-1))
    if bad is not None:
        raise NothingAllowed(
            f"{_where(bad, env_steps, f'forbade every action by its {ACTION_MASK}')} A state without a legal action is "
            "the end of an episode: mend the env; the last checkpoint is from before."
        )


def _not_finite(values: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
    """Returns which of `[T, N, ...]` hold a number that is not finite, among those wanted: bool[T, N]."""
    finite = np.isfinite(values)
    if finite.all():
        return np.zeros(values.shape[:2], np.bool_)
    bad = ~finite.reshape(*values.shape[:2], -1).all(axis=-1)
    return bad if wanted is None else bad & wanted


def _first(bad: np.ndarray) -> tuple[int, int] | None:
    """Returns time and env of the first fault in `bool[T, N]`, None if there is none."""
    return tuple(np.argwhere(bad)[0]) if bad.any() else None


def _where(at: tuple[int, int], env_steps: int, did: str) -> str:
    return f"env {at[1]} {did} at step {at[0]} of the rollout that began after {env_steps} env-steps."
