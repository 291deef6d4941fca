"""Games: episodes of envs with several agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppo.model.agent import Agent
from ppo.model.checks import TrainingDiverged
from ppo.results.episodes import check_length, quotas_of
from ppo.run.status import Tally
from ppo.seeds import evaluation_seeds

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import ParallelVectorEnv


class Game(NamedTuple):
    """One episode of an env with several agents.

    Attributes:
        env: Index of the env.
        total: Sum of the returns of all agents.
        length: Number of steps.
        returns: The return of each agent by the name of its group, `[K]`.
    """

    env: int
    total: float
    length: int
    returns: dict[str, np.ndarray]


Chooser = Callable[[str, Any, np.ndarray], Any]
"""Returns the actions `[N, ...]` of a group, given its name, its observations and which rows continue an episode."""


def play_games(
    envs: ParallelVectorEnv, choose: Chooser, episodes: int, *, seed: int, timeout_s: float | None, tally: Tally
) -> list[Game]:
    """Plays episodes of envs with several agents. The number of episodes per env is fixed in advance.

    Raises:
        RunError, TrainingDiverged, multiprocessing.TimeoutError: As `ppo.results.evaluation.evaluate` does.
    """
    joint, groups = envs.joint, envs.groups
    quotas = quotas_of(episodes, joint.num_envs)
    games: list[list[Game]] = [[] for _ in quotas]
    totals = {name: np.zeros((joint.num_envs, len(rows.group.agents))) for name, rows in groups.items()}
    observations = envs.by_group(envs.reset(seed=evaluation_seeds(seed, joint.num_envs), timeout=timeout_s)[0])
    valid = {name: rows.valid for name, rows in groups.items()}
    goes_on = {name: np.zeros(rows.num_envs, np.bool_) for name, rows in groups.items()}
    while any(len(of_env) < quota for of_env, quota in zip(games, quotas, strict=True)):
        actions = {name: choose(name, observations[name], goes_on[name]) for name in groups}
        envs.step_async(envs.from_groups(actions))
        observations, rewards, terminated, truncated, _ = map(envs.by_group, envs.step_wait(timeout_s))
        over = envs.over
        for name, rows in groups.items():
            if not np.isfinite(rewards[name]).all():
                raise TrainingDiverged(f"group {name!r} got a non-finite reward in an evaluation. Fix the env.")
            ended = (terminated[name] | truncated[name]) & valid[name]
            shape = totals[name].shape
            # An agent that enters again adds to its return.
            totals[name] += np.where(ended, rows.episode_returns, 0.0).reshape(shape)
            goes_on[name] = valid[name] & rows.valid & ~np.repeat(over, shape[1])
            valid[name] = rows.valid
        tally.steps += joint.num_envs
        check_length(int(joint.episode_lengths.max()))
        for env in np.flatnonzero(over).tolist():
            if len(games[env]) < quotas[env]:
                returns = {name: values[env].copy() for name, values in totals.items()}
                total, length = float(joint.episode_returns[env]), int(joint.episode_lengths[env])
                games[env].append(Game(env, total, length, returns))
                tally.episodes += 1
            for values in totals.values():
                values[env] = 0.0
    return [game for of_env in games for game in of_env]


def most_likely(agents: Mapping[str, Agent]) -> Chooser:
    """Returns the function that chooses the most likely actions of each team's policy."""
    memories: dict[str, np.ndarray] = {}

    def choose(name: str, observations: Any, goes_on: np.ndarray) -> Any:
        before = memories.get(name, agents[name].initial_state(len(goes_on)))
        before = np.where(goes_on[:, None], before, np.float32(0))
        actions, memories[name] = agents[name].act(observations, before, checked=False)
        return actions

    return choose
