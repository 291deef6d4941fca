"""Envs with several agents: groups of agents, and the fields of memory that hold the results of each agent.

A multi-agent env is one row of memory, like any other env. Its observations and actions are Dicts with one entry per
group, in which each leaf has a leading axis for the K agents of the group: `[S, M, K, ...]` for M envs. In memory, this
is the same as `[S, M * K, ...]`, so the agents of a group are the rows of a vector env without any copy.

Each group has the fields `(AGENT, group, name)`, where `name` is one of the constants below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from vecenv.memory import layout
from vecenv.spaces import Path

OBSERVED, VALID = "observation", "valid"
"""Keys of a group's entry in the observation: the agents' observations, and whether each agent is alive."""

REWARD, TERMINATED, TRUNCATED, EPISODE_RETURN, EPISODE_LENGTH = (
    str(path[0])
    for path in (layout.REWARD, layout.TERMINATED, layout.TRUNCATED, layout.EPISODE_RETURN, layout.EPISODE_LENGTH)
)
"""Names of each agent's results, which are the field names of an env with one agent."""

GROUPS = "vecenv_groups"
"""Key of an env's metadata: a tuple of `AgentGroup`s."""

_DTYPES = {
    REWARD: np.float64,
    TERMINATED: np.bool_,
    TRUNCATED: np.bool_,
    EPISODE_RETURN: np.float64,
    EPISODE_LENGTH: np.int64,
}


@dataclass(frozen=True)
class AgentGroup:
    """Agents with equal spaces.

    Attributes:
        name: Name of the group.
        agents: Names of its K agents.
        observation_space: The observation space of one agent.
        action_space: The action space of one agent.
    """

    name: str
    agents: tuple[str, ...]
    observation_space: gym.Space
    action_space: gym.Space


class MultiAgentEnv(Protocol):
    """An env with several agents.

    Attributes:
        agent_fields: The results of the last reset or step for each agent, `[K]`, by path.
        some_ended: Whether the episode of an agent ended in the last step.
    """

    agent_fields: dict[Path, np.ndarray]
    some_ended: bool


def check_groups(first: Mapping[str, Any] | None, other: Mapping[str, Any] | None, env: int) -> None:
    """Raises ValueError if the metadata of an env lists other agents than that of the first env."""
    expected, found = ((metadata or {}).get(GROUPS) for metadata in (first, other))
    if expected != found:
        lists = [[list(group.agents) for group in groups or ()] for groups in (expected, found)]
        raise ValueError(
            f"env {env} has the agents {lists[1]}, by group, but the first env has {lists[0]}: all envs need the same "
            "agents in the same order, with the same spaces"
        )


def new_fields(groups: Iterable[AgentGroup]) -> dict[Path, np.ndarray]:
    """Returns the fields of one env, filled with zeros."""
    return {
        (layout.AGENT, group.name, name): np.zeros(len(group.agents), dtype)
        for group in groups
        for name, dtype in _DTYPES.items()
    }


def report_cut(at: Mapping[Path, np.ndarray], last: Mapping[Path, np.ndarray], row: int, *, begins: bool) -> None:
    """Writes the agents' results in the step that reports a cut episode: the agents that were alive are truncated.

    Args:
        at: The slot of this step.
        last: The slot with the row's last good observation, which may be the same slot.
        row: The row of the env.
        begins: Whether the next episode begins in the same step. If not, no agent is left.
    """
    for group in [path[1] for path in at if path[0] == layout.AGENT and path[2] == REWARD]:
        valid = (layout.OBSERVATION, group, VALID)
        alive = last[valid][row].astype(np.bool_)
        # With SAME_STEP, the last slot may hold the totals of the episode that ended there.
        ended = last[(layout.AGENT, group, TERMINATED)][row] | last[(layout.AGENT, group, TRUNCATED)][row]
        for name in (EPISODE_RETURN, EPISODE_LENGTH):
            path = (layout.AGENT, group, name)
            at[path][row] = np.where(alive & ~ended, last[path][row], 0)
        for name, value in ((REWARD, 0.0), (TERMINATED, False), (TRUNCATED, alive)):
            at[(layout.AGENT, group, name)][row] = value
        if not begins:
            at[valid][row] = 0
