"""Games: episodes of envs with several agents, and matches against opponents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from ppo.algorithm.checks import TrainingDiverged
from ppo.algorithm.self_play import Snapshots, elo
from ppo.model.agent import Agent
from ppo.model.observations import ACTION_MASK
from ppo.results.episodes import check_length, quotas_of
from ppo.results.policy import Policy
from ppo.run.status import Tally
from ppo.seeds import evaluation_seeds, match_rng
from vecenv.spaces import nest, pick

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


def mean_score(
    agent: Agent,
    opponent: Agent | None,
    envs: ParallelVectorEnv,
    episodes: int,
    *,
    seed: int,
    timeout_s: float | None,
    tally: Tally | None = None,
) -> float:
    """Returns the score of a policy in games against an opponent: 1 for a win, 0.5 for a draw, averaged.

    The policy plays its most likely actions, and the opponent samples its actions. In each env, they change seats after
    every game.

    Args:
        agent: The policy.
        opponent: Another policy for the same spaces; None for random choices among the allowed actions.
        envs: Envs of two agents in one group.
        episodes: Number of games.
        seed: See `ppo.results.evaluation.evaluate`.
        timeout_s: See `ppo.results.evaluation.evaluate`.
        tally: Counts the steps, for a display.
    """
    ((name, rows),) = envs.groups.items()
    tally = Tally(episodes) if tally is None else dataclasses.replace(tally, total=episodes, episodes=0)
    played = np.zeros(rows.num_envs // 2, int)  # games that have ended in each env
    mine, rng = most_likely({name: agent}), match_rng(seed)
    spaces = (rows.single_observation_space, rows.env_action_space)
    other = None if opponent is None else Policy(opponent, *spaces)
    if other is not None:
        other.seed(int(rng.integers(2**31)))

    def choose(_: str, observations: Any, goes_on: np.ndarray) -> Any:
        played[envs.over] += 1
        seats = _opponent_seats(np.arange(len(played)), played)
        theirs = (np.arange(2) == seats[:, None]).ravel()
        own = mine(name, observations, goes_on)
        playable = _playable(observations)
        if other is None:
            actions = _random_actions(rows.env_action_space, playable, rows.num_envs, rng)
        else:
            other.reset(~goes_on)
            actions = other(playable, deterministic=False)

        def leaf(path: tuple) -> np.ndarray:
            values = pick(own, path)
            return np.where(theirs.reshape(-1, *[1] * (values.ndim - 1)), pick(actions, path), values)

        return nest(rows.env_action_space, leaf)

    games = play_games(envs, choose, episodes, seed=seed, timeout_s=timeout_s, tally=tally)
    points, scored = [], [0] * len(played)
    for game in games:  # in the order in which each env played them
        seat = _opponent_seats(game.env, scored[game.env])
        scored[game.env] += 1
        difference = game.returns[name][1 - seat] - game.returns[name][seat]
        points.append(0.5 + 0.5 * float(np.sign(difference)))
    return float(np.mean(points))


def _opponent_seats(envs: Any, games: Any) -> Any:
    """Returns the seat of the opponent, 0 or 1, in the next game of envs that have finished a number of games.

    Args:
        envs: Index of an env, or an array of indices.
        games: How many games each of them has finished.
    """
    return (envs + games) % 2


def _playable(observations: Any) -> Any:
    """Returns the observations with every all-zero mask set to ones, because agents out of turn have such masks."""
    if not isinstance(observations, Mapping) or ACTION_MASK not in observations:
        return observations
    mask = np.array(observations[ACTION_MASK])
    mask[~mask.reshape(len(mask), -1).any(axis=1)] = 1
    return {**observations, ACTION_MASK: mask}


def _random_actions(space: gym.Space, observations: Any, count: int, rng: np.random.Generator) -> Any:
    """Returns random actions `[count, ...]`; of a Discrete space, only actions that the masks allow."""
    if isinstance(space, gym.spaces.Discrete) and isinstance(observations, Mapping) and ACTION_MASK in observations:
        keys = np.where(np.asarray(observations[ACTION_MASK]) != 0, rng.random((count, int(space.n))), -1.0)
        return (keys.argmax(axis=1) + space.start).astype(space.dtype)
    batched = batch_space(space, count)
    batched.seed(int(rng.integers(2**31)))
    return batched.sample()


def match_scores(
    agent: Agent,
    snapshots: Snapshots,
    envs: ParallelVectorEnv,
    games: int,
    *,
    env_steps: int,
    seed: int,
    timeout_s: float | None,
    tally: Tally | None = None,
) -> dict[str, float]:
    """Returns the scores of a policy against earlier versions of itself, as "score/NAME", and its Elo rating, as "elo".

    The opponents are "random"; the snapshots "first" and "newest", which is older than the policy itself; and "half",
    the snapshot taken nearest to half of the env-steps so far. Random play has a rating of 0, and a snapshot has the
    rating of the last evaluation before it was taken. Opponents without a rating do not count for the Elo rating.

    Args:
        agent: The policy.
        snapshots: The pool of a run with self-play.
        envs: See `mean_score`.
        games: Number of games against each opponent.
        env_steps: Env-steps of training so far.
        seed: See `ppo.results.evaluation.evaluate`.
        timeout_s: See `ppo.results.evaluation.evaluate`.
        tally: See `mean_score`.
    """
    opponent = agent.untrained_copy()
    how: dict[str, Any] = {"seed": seed, "timeout_s": timeout_s, "tally": tally}
    scores, ratings = {"random": mean_score(agent, None, envs, games, **how)}, {"random": 0.0}
    if len(snapshots):
        newest = max(0, int((snapshots.env_steps < env_steps).sum()) - 1)  # the policy itself may be in the pool
        for name, index in (("first", 0), ("half", snapshots.nearest(env_steps / 2)), ("newest", newest)):
            snapshots.load(index, opponent)
            scores[name], ratings[name] = mean_score(agent, opponent, envs, games, **how), snapshots.rating(index)
    rated = {name: rating for name, rating in ratings.items() if np.isfinite(rating)}
    matches = {f"score/{name}": score for name, score in scores.items()}
    rating = elo({name: scores[name] for name in rated}, rated, games)
    return {**matches, "elo": rating}
