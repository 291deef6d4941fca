"""Numbers that must not be trained on, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import numpy as np

from ppo.model.observations import ACTION_MASK
from vecenv.ingraph import Rollout
from vecenv.spaces import leaves, pick


class TrainingDiverged(FloatingPointError):
    """A reward, an observation, a loss or a gradient is not finite; the message says where."""


class NothingAllowed(ValueError):
    """An env's mask forbids every action; the message says where."""


def check_rollout(rollout: Rollout, space: gym.Space, env_steps: int) -> None:
    """Checks the numbers that envs wrote before anything is learnt from them.

    Args:
        rollout: Numpy arrays `[T, N, ...]`.
        space: Of one observation.
        env_steps: Steps taken before this rollout.

    Raises:
        TrainingDiverged: If a reward or an observation is not finite, as float32.
    """
    when = f"the rollout that began after {env_steps} env-steps"
    with np.errstate(over="ignore"):
        bad = _first(~np.isfinite(rollout.rewards.astype(np.float32)))
    if bad is not None:
        raise TrainingDiverged(f"{_where(bad, when, f'returned reward {rollout.rewards[bad]}')} {_FIX}")
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
                raise TrainingDiverged(f"{_where(bad, when, f'returned {found} in its {name}{at}')} {_FIX}")


def check_mask(mask: np.ndarray, groups: Sequence[int], when: str) -> None:
    """Checks that in each state an action is allowed.

    Args:
        mask: `bool[T, N, M]`.
        groups: Of the distribution over actions, see `Distribution.mask_groups`.
        when: What the steps t are steps of, for the message.

    Raises:
        NothingAllowed: If in a state there is none.
    """
    if not groups:
        return
    starts = np.cumsum([0, *groups[:-1]])
    bad = _first((np.add.reduceat(mask, starts, axis=-1, dtype=np.int64) == 0).any(axis=-1))
    if bad is not None:
        raise NothingAllowed(
            f"{_where(bad, when, f'forbade every action by its {ACTION_MASK}')} A state without a legal action is the "
            "end of an episode: fix the env."
        )


def check_losses(losses: dict[str, float], env_steps: int) -> None:
    """Checks what an update returned.

    Raises:
        TrainingDiverged: If a loss or a gradient was not finite.
    """
    # Losses and gradients are means over the gradient steps, so without a step only the KL can be checked.
    for name in ("policy_loss", "value_loss", "grad_norm", "kl") if losses["gradient_steps"] else ("kl",):
        if not np.isfinite(losses[name]):
            raise TrainingDiverged(
                f"{name} is {losses[name]} in the update after {env_steps} env-steps: training has diverged. "
                "The update was not saved. Start a new run with a lower --learning-rate or --max-grad-norm."
            )


_FIX = "Fix the env. The faulty rollout was not trained on or saved."


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


def _where(at: tuple[int, int], when: str, did: str) -> str:
    return f"env {at[1]} {did} at step {at[0]} of {when}."
