"""Checks that stop training on numbers that no network can read and on states without a legal action."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ppo.errors import FaultyEnv, NothingAllowed, TrainingDiverged
from ppo.model.observations import Observations, invalid
from vecenv.ingraph import Rollout
from vecenv.tree import leaves, pick
from vecenv.wrappers import ACTION_MASK


def check_rollout(
    rollout: Rollout, observed: Observations, groups: Sequence[slice], name: str, members: Sequence[str] = ()
) -> None:
    """Checks the numbers that the envs wrote, before the policy trains on them.

    Args:
        rollout: NumPy arrays `[T, N, ...]`.
        observed: The conversion of the observations.
        groups: Ranges of mask entries; see `Distribution.mask_groups`.
        name: The rollout's name in the error message.
        members: Names of the K agents of an env, in the order of its K rows; empty if each row is an env.

    Raises:
        FaultyEnv: If a reward is not finite as float32, or no network can read an observation; see `invalid`.
        NothingAllowed: If a mask forbids every action.
    """
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(rollout.rewards.astype(np.float32))
    _refuse(bad, rollout.rewards, "reward", name, members=members)
    ended = np.logical_or(rollout.terminated, rollout.truncated)
    for path, leaf in leaves(observed.space):
        if path in observed.mask_paths:
            continue
        at = f"observation at {list(path)}" if path else "observation"
        if not np.issubdtype(leaf.dtype, np.inexact):
            at += f", outside {leaf},"
        observations, final_observations = pick(rollout.observations, path), pick(rollout.final_observations, path)
        # Step t writes row t + 1. Row 0 is the last row of the previous rollout, or the result of a reset.
        if (bad := invalid(leaf, observations)) is not None:
            if rollout.valid is not None:
                bad = bad & rollout.valid.reshape([*rollout.valid.shape, *[1] * (bad.ndim - 2)])
            _refuse(bad[1:], observations[1:], at, name, members=members)
            _refuse(bad[:1], observations[:1], f"first {at}", name, members=members)
        if (bad := invalid(leaf, final_observations)) is not None:
            _refuse(bad, final_observations, f"final {at}", name, ended, members)
    # In a turn-based game, an agent's mask forbids every action while another agent moves.
    if observed.has_mask and rollout.valid is None:
        check_mask(observed.mask(rollout.observations)[:-1], groups, name)


def check_mask(mask: np.ndarray, groups: Sequence[slice], name: str) -> None:
    """Checks that the mask allows at least one action in each state.

    Args:
        mask: `bool[T, N, M]`.
        groups: Ranges of mask entries; see `Distribution.mask_groups`.
        name: Name of the T steps in the error message.

    Raises:
        NothingAllowed: If a mask forbids every action.
    """
    if not groups:
        return
    bad = _first(~np.all([mask[..., group].any(axis=-1) for group in groups], axis=0))
    if bad is not None:
        raise NothingAllowed(
            f"{_where(bad, name, f'forbade every action in its {ACTION_MASK}')} A state without a legal action must "
            "end the episode: fix the env."
        )


def check_losses(losses: dict[str, float], env_steps: int) -> None:
    """Checks the metrics of an update.

    Raises:
        TrainingDiverged: If a loss, the gradient norm or the KL is not finite.
    """
    # Losses and gradient norms are averages over the gradient steps, so they are NaN without any step.
    for name in ("policy_loss", "value_loss", "grad_norm", "kl") if losses["gradient_steps"] else ("kl",):
        if not np.isfinite(losses[name]):
            raise TrainingDiverged(
                f"{name} is {losses[name]} in the update after {env_steps} env-steps: training has diverged. "
                "The update was not saved. Start a new run with a lower --learning-rate or --max-grad-norm."
            )


def _refuse(
    bad: np.ndarray,
    values: np.ndarray,
    field: str,
    name: str,
    where: np.ndarray | None = None,
    members: Sequence[str] = (),
) -> None:
    """Raises FaultyEnv for the first of the values `[T, N, ...]` that is bad, `bool[T, N, ...]`.

    `field` is the name of the values. Only rows `where` the data is valid count, `bool[T, N]`; None for all rows.
    """
    rows = np.any(bad.reshape(*values.shape[:2], -1), axis=-1)
    if where is not None:
        rows &= where
    if (at := _first(rows)) is not None:
        found = np.ravel(values[at])[np.ravel(bad[at])][0]
        if found.dtype.kind == "f" and np.isfinite(found):
            found = f"{found}, beyond the range of float32,"
        did = f"returned reward {found}" if field == "reward" else f"returned {found} in its {field}"
        raise FaultyEnv(
            f"{_where(at, name, did, members)} Fix the env. The faulty rollout was not trained on or saved."
        )


def _first(bad: np.ndarray) -> tuple[int, int] | None:
    """Returns the step and the env of the first fault in `bool[T, N]`, or None."""
    return tuple(np.argwhere(bad)[0]) if bad.any() else None


def _where(at: tuple[int, int], name: str, did: str, members: Sequence[str] = ()) -> str:
    step, row = at
    return f"{owner_of(row, members)} {did} at step {step} of {name}."


def owner_of(row: int, members: Sequence[str]) -> str:
    """Returns the name of a row of a batch: its env, and its agent if the env has several, the `members` of a team."""
    return f"agent {members[row % len(members)]!r} of env {row // len(members)}" if members else f"env {row}"
