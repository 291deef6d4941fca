"""Observations from training and the policy's actions for them, stored with each checkpoint.

A loaded policy is built from the files of a run folder. If it does not repeat these actions, one of the files, or the
code that reads them, is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from ppo.model.agent import Agent
from vecenv.spaces import leaves, name_of, nest, pick

NUM_ROWS = 16
RELATIVE, FLIPPED = 1e-3, 0.1
"""Limits of the error of continuous actions, relative to their size, and of the fraction of discrete actions that
differ. Rounding errors are far below both limits, and a policy that mixes up its inputs is far above."""

Recorded = dict[str, np.ndarray]
"""Batches of the leaves of observations and actions. A name is the team, the field and the path, as JSON."""


def record(agents: Mapping[str, Agent], rollouts: Mapping[str, Any]) -> Recorded:
    """Returns some observations of the last rollout, with the most likely actions at the start of an episode.

    Args:
        agents: The policy of each team.
        rollouts: The observations of each team's last rollout, `[T + 1, N, ...]`; empty if there is none.
    """
    recorded: Recorded = {}
    for team, rollout in rollouts.items():
        agent, space = agents[team], agents[team].observations.space
        rows = _some_rows(rollout, space)
        if not all(np.isfinite(pick(rows, path)).all() for path, _ in leaves(space)):
            return {}  # these observations have ended the run
        actions, _ = agent.act(rows, agent.initial_state(NUM_ROWS), checked=False)
        for field, of_field, values in (("observation", space, rows), ("action", agent.action_space, actions)):
            recorded |= {_name(team, field, path): np.asarray(pick(values, path)) for path, _ in leaves(of_field)}
    return recorded


def check(file: Path, agent: Agent, team: str) -> None:
    """Checks that a loaded policy takes the actions that `record` returned in training.

    Args:
        file: The recorded actions. Checkpoints of earlier versions have none, and are not checked.
        agent: The policy.
        team: Its team.

    Raises:
        ValueError: If an action differs, or the file is damaged.
    """
    if not file.exists():
        return

    def read(field: str, space: gym.Space) -> Any:
        return nest(space, lambda path: recorded[_name(team, field, path)])

    try:
        with np.load(file, allow_pickle=False) as recorded:
            observations, actions = read("observation", agent.observations.space), read("action", agent.action_space)
    except Exception as error:  # a damaged file can raise any exception
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    found, _ = agent.act(observations, agent.initial_state(NUM_ROWS), checked=False)
    for path, space in leaves(agent.action_space):
        before, after = pick(actions, path), pick(found, path)
        if np.issubdtype(space.dtype, np.floating):
            difference, most = np.abs(before - after).max(), 1e-5 + RELATIVE * np.abs(before).max()
        else:
            difference, most = (before != after).mean(), FLIPPED
        if not difference <= most:  # this form also rejects NaN
            raise ValueError(
                f"the loaded policy acts differently from the policy in training: {name_of('action', path)} differs by "
                f"{difference:.2g}. Restore the files of the run, and use the network and the version that trained it."
            )


def _some_rows(rollout: Any, space: gym.Space) -> Any:
    """Returns `[NUM_ROWS, ...]`, spread over a rollout of observations `[T + 1, N, ...]`."""

    def leaf(path: tuple) -> np.ndarray:
        values = pick(rollout, path)
        num_states, num_envs = values.shape[:2]
        return values[divmod(np.linspace(0, num_states * num_envs - 1, NUM_ROWS).astype(int), num_envs)]

    return nest(space, leaf)


def _name(team: str, field: str, path: tuple) -> str:
    return json.dumps([team, field, *path])
