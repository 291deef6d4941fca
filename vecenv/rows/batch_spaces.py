"""The spaces of a vector env, combined from the spaces of its envs if they are compatible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.rows.protocol import EnvSpaces

ObservationMode = Literal["same", "different"] | tuple[Space, Space]


def check_observation_mode(mode: Any) -> None:
    """Raises if `mode` is neither "same", "different" nor a pair of spaces."""
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
    elif not isinstance(mode, str) or mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )


class BatchSpaces(NamedTuple):
    """Spaces of a vector env, named like its attributes."""

    single_observation_space: Space
    observation_space: Space
    single_action_space: Space


def combine_spaces(runs: Sequence[EnvSpaces], mode: ObservationMode, num_envs: int, name: str) -> BatchSpaces:
    """Returns the spaces of a vector env whose envs have these spaces.

    Args:
        runs: Spaces of env 0, and of every env whose spaces differ from those of the previous env.
        mode: "same": observation spaces must be equal. "different": they must have equal shapes and dtypes, and the
            batched space has the bounds of each env. A pair of spaces, the batched and the single one in either order,
            is used unchanged; the envs' spaces must have the same shapes and dtypes.
        num_envs: N.
        name: Name of the vector env class, for messages.

    Raises:
        RuntimeError: If the spaces are incompatible; the message names the first env whose space differs.
    """
    first = runs[0]
    single, batched = first.observation_space, None
    if not isinstance(mode, str):
        single, batched = _single_and_batched(mode, first)
    for run in runs:
        if mode == "same" and run.observation_space != single:
            raise RuntimeError(_not_equivalent(name, run, single))
        if mode != "same" and not _equivalent(run.observation_space, single):
            raise RuntimeError(
                f"{name}(..., observation_mode='different' or custom space) however the sub-environment's "
                "observation spaces do not share a common shape and dtype. "
                f"The first env that differs is env {run.env}: {run.observation_space} instead of {single}."
            )
        if run.action_space != first.action_space:
            raise RuntimeError(
                f"Some environments have an action space different from `{first.action_space}`. In order to batch "
                "actions, the action spaces from all environments must be equal. "
                f"The first env that differs is env {run.env}: {run.action_space}."
            )
    if batched is None:
        same = mode == "same"
        batched = batch_space(single, num_envs) if same else batch_differing_spaces(_of_every_env(runs, num_envs))
    return BatchSpaces(single, batched, first.action_space)


def _not_equivalent(name: str, run: EnvSpaces, single: Space) -> str:
    which = "the" if name == "SyncVectorEnv" else "some of the"  # the wording of Gymnasium's two classes
    return (
        f"{name}(..., observation_mode='same') however {which} sub-environments observation spaces are not "
        "equivalent. If this is intentional, use `observation_mode='different'` instead. "
        f"The first env that differs is env {run.env}: {run.observation_space} instead of {single}."
    )


def _single_and_batched(mode: tuple[Space, Space], first: EnvSpaces) -> tuple[Space, Space]:
    # Gymnasium documents (single, batched), but its code reads (batched, single). Only one of the two can have the
    # shape of an env's observations, so either order is accepted.
    batched, single = mode
    if _equivalent(first.observation_space, batched) and not _equivalent(first.observation_space, single):
        batched, single = single, batched
    return single, batched


def _equivalent(one: Space, other: Space) -> bool:
    try:
        return is_space_dtype_shape_equiv(one, other)
    except NotImplementedError:  # a custom space
        return one == other


def _of_every_env(runs: Sequence[EnvSpaces], num_envs: int) -> list[Space]:
    ends = [*(run.env for run in runs[1:]), num_envs]
    return [run.observation_space for run, end in zip(runs, ends, strict=True) for _ in range(run.env, end)]
