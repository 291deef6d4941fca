"""Checks that stop training on non-finite numbers and on states without a legal action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ppo.model.observations import ACTION_MASK
from vecenv.ingraph import Rollout
from vecenv.spaces import leaves, pick

if TYPE_CHECKING:
    from ppo.model.agent import Agent


class TrainingDiverged(FloatingPointError):
    """A reward, an observation, a loss or a gradient is not finite; the message says which one."""


class NothingAllowed(ValueError):
    """An action mask forbids every action; the message names the env."""


def check_rollout(rollout: Rollout, agent: Agent, name: str) -> None:
    """Checks the numbers that the envs wrote, before the policy trains on them.

    Args:
        rollout: NumPy arrays `[T, N, ...]`.
        agent: The agent that reads the observations.
        name: The rollout's name in the error message.

    Raises:
        TrainingDiverged: If a reward or an observation is not finite as float32.
        NothingAllowed: If a mask forbids every action.
    """
    with np.errstate(over="ignore"):
        bad = _first(~np.isfinite(rollout.rewards.astype(np.float32)))
    if bad is not None:
        raise TrainingDiverged(f"{_where(bad, name, f'returned reward {rollout.rewards[bad]}')} {_FIX}")
    ended = np.logical_or(rollout.terminated, rollout.truncated)
    for path, leaf in leaves(agent.observations.space):
        if not np.issubdtype(leaf.dtype, np.inexact):
            continue
        # Step t writes row t + 1. Row 0 is the last row of the previous rollout, or the result of a reset.
        for field, values, wanted in (
            ("observation", pick(rollout.observations, path)[1:], None),
            ("final observation", pick(rollout.final_observations, path), ended),
            ("first observation", pick(rollout.observations, path)[:1], None),
        ):
            bad = _first(_not_finite(values) if wanted is None else _not_finite(values, wanted))
            if bad is not None:
                found = values[bad][~np.isfinite(values[bad])][0]
                at = f" at {list(path)}" if path else ""
                raise TrainingDiverged(f"{_where(bad, name, f'returned {found} in its {field}{at}')} {_FIX}")
    if agent.observations.has_mask:
        check_mask(agent.observations.mask(rollout.observations)[:-1], agent.distribution.mask_groups, name)


def check_mask(mask: np.ndarray, groups: Sequence[int], name: str) -> None:
    """Checks that the mask allows at least one action in each state.

    Args:
        mask: `bool[T, N, M]`.
        groups: Lengths of groups of mask entries, see `Distribution.mask_groups`.
        name: Name of the T steps in the error message.

    Raises:
        NothingAllowed: If a mask forbids every action.
    """
    if not groups:
        return
    starts = np.cumsum([0, *groups[:-1]])
    bad = _first((np.add.reduceat(mask, starts, axis=-1, dtype=np.int64) == 0).any(axis=-1))
    if bad is not None:
        raise NothingAllowed(
            f"{_where(bad, name, f'forbade every action by its {ACTION_MASK}')} A state without a legal action is the "
            "end of an episode: fix the env."
        )


def check_losses(losses: dict[str, float], env_steps: int) -> None:
    """Checks the metrics of an update.

    Raises:
        TrainingDiverged: If a loss, the gradient norm or the KL is not finite.
    """
    # Losses and gradient norms are means over the gradient steps, so they are NaN without any step.
    for name in ("policy_loss", "value_loss", "grad_norm", "kl") if losses["gradient_steps"] else ("kl",):
        if not np.isfinite(losses[name]):
            raise TrainingDiverged(
                f"{name} is {losses[name]} in the update after {env_steps} env-steps: training has diverged. "
                "The update was not saved. Start a new run with a lower --learning-rate or --max-grad-norm."
            )


_FIX = "Fix the env. The faulty rollout was not trained on or saved."


def _not_finite(values: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
    """Returns which entries of `[T, N, ...]` hold a non-finite number, `bool[T, N]`; only looks at those `wanted`."""
    finite = np.isfinite(values)
    if finite.all():
        return np.zeros(values.shape[:2], np.bool_)
    bad = ~finite.reshape(*values.shape[:2], -1).all(axis=-1)
    return bad if wanted is None else bad & wanted


def _first(bad: np.ndarray) -> tuple[int, int] | None:
    """Returns the time and the env of the first fault in `bool[T, N]`, or None."""
    return tuple(np.argwhere(bad)[0]) if bad.any() else None


def _where(at: tuple[int, int], name: str, did: str) -> str:
    return f"env {at[1]} {did} at step {at[0]} of {name}."
