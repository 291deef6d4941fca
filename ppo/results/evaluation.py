"""Scores of the deterministic policy on separate envs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from ppo.algorithm.checks import TrainingDiverged
from ppo.algorithm.self_play import Snapshots, elo
from ppo.config import Config
from ppo.envs import EnvSource, evaluation_envs, spaces_of
from ppo.model.agent import Agent
from ppo.model.frames import first_stacks, next_stacks
from ppo.model.observations import ACTION_MASK
from ppo.results.policy import Policy, load_agent
from ppo.run import infos
from ppo.run.checkpoint import Checkpoints
from ppo.run.folder import IMPORTED, Run, RunError
from ppo.run.metrics import scored
from ppo.run.status import Tally
from ppo.seeds import evaluation_seeds, match_rng
from vecenv import AsyncVectorEnv, SyncVectorEnv
from vecenv.spaces import nest, pick

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import ParallelVectorEnv

MAX_EPISODE_STEPS = 200_000
"""Number of steps after which an episode counts as endless."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of E episodes.

    Attributes:
        returns: Undiscounted sums of rewards, `float64[E]`.
        lengths: Numbers of steps, `int64[E]`.
        infos: For each of the config's `info_metrics`, the value at the last step, `float64[E]`; NaN where the info
            lacks the key.
        agents: With several agents: the return of each agent, `float64[E]`, and the mean of each group. `returns` are
            then the sums over all agents.
        matches: With self-play: the mean score against each opponent, as "score/NAME", and "elo", see `with_matches`.
    """

    returns: np.ndarray
    lengths: np.ndarray
    infos: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    agents: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    matches: dict[str, float] = dataclasses.field(default_factory=dict)

    def summary(self) -> dict[str, float | int]:
        """Returns mean, standard deviation and range of the returns, the mean length, and E, as plain numbers.

        `info_KEY` is the mean over the episodes that have the info. It is omitted if there are none.
        """
        return {
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "episodes": len(self.returns),
            **self._info_means(),
            **self._agent_means(),
            **self.matches,
        }

    def metrics(self) -> dict[str, float]:
        """Returns the metrics for a report of a training run."""
        means = {"return_mean": float(self.returns.mean()), "return_std": float(self.returns.std())}
        return {
            f"eval_{name}": mean
            for name, mean in {**means, **self._info_means(), **self._agent_means(), **self.matches}.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the score of each episode as plain numbers, with None for an info that the episode lacks."""
        return {
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "infos": {key: infos.to_json(values) for key, values in self.infos.items()},
            **({"agents": {name: values.tolist() for name, values in self.agents.items()}} if self.agents else {}),
            **({"matches": self.matches} if self.matches else {}),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Evaluation:
        """Returns the evaluation with the given result of `to_json`."""
        found = {key: np.array(infos.from_json(column)) for key, column in values["infos"].items()}
        agents = {name: np.array(column) for name, column in values.get("agents", {}).items()}
        matches = values.get("matches", {})
        return cls(np.array(values["returns"]), np.array(values["lengths"]), found, agents, matches)

    def _agent_means(self) -> dict[str, float]:
        return {f"return_mean/{name}": float(values.mean()) for name, values in self.agents.items()}

    def _info_means(self) -> dict[str, float]:
        means = {infos.PREFIX + key: infos.mean_of(values) for key, values in self.infos.items()}
        return {name: mean for name, mean in means.items() if mean is not None}


def evaluate(
    agent: Agent,
    envs: AsyncVectorEnv | SyncVectorEnv,
    episodes: int,
    *,
    seed: int,
    timeout_s: float | None,
    tally: Tally | None = None,
) -> Evaluation:
    """Plays episodes with the most likely action in each state. The normalizers do not change.

    The number of episodes per env is fixed in advance. Counting the first episodes to finish would bias the score
    towards short episodes.

    Args:
        agent: The agent to evaluate.
        envs: The envs to play in.
        episodes: Number of episodes.
        seed: The run's seed, from which the seeds of the envs are derived.
        timeout_s: Seconds to wait for a step; None to wait forever.
        tally: Counts the episodes and steps, for a display.

    Raises:
        RunError: If an episode does not end within `MAX_EPISODE_STEPS`.
        TrainingDiverged: If a reward is not finite.
        NothingAllowed: If an action mask forbids every action.
        multiprocessing.TimeoutError: If an env does not answer for `timeout_s` seconds.
    """
    quotas = np.full(envs.num_envs, episodes // envs.num_envs)
    quotas[: episodes % envs.num_envs] += 1
    scores: list[list[tuple[float, ...]]] = [[] for _ in quotas]
    reset, step = _calls(envs, timeout_s)
    tally = Tally(episodes) if tally is None else tally
    observations, state = reset(evaluation_seeds(seed, envs.num_envs))[0], agent.initial_state(envs.num_envs)
    seen = first_stacks(observations, agent.frame_stack)
    while any(len(of_env) < quota for of_env, quota in zip(scores, quotas, strict=True)):
        actions, state = agent.act(seen, state)
        observations, rewards, terminated, truncated, _ = step(actions)
        if not np.isfinite(rewards).all():
            env = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise TrainingDiverged(f"env {env} returned reward {rewards[env]} in an evaluation. Fix the env.")
        tally.steps += envs.num_envs
        tally.longest = int(envs.episode_lengths.max())
        if tally.longest > MAX_EPISODE_STEPS:
            raise RunError(
                f"an episode has not ended after {MAX_EPISODE_STEPS:,} steps, so it has no score. Give the env "
                "a time limit (max_episode_steps when it is registered)."
            )
        ended = np.flatnonzero(terminated | truncated)
        state[ended] = 0.0
        seen = next_stacks(seen, observations, terminated | truncated, agent.frame_stack)
        for i in ended:
            if len(scores[i]) < quotas[i]:
                of_infos = [values[i] for values in envs.episode_infos.values()]
                scores[i].append((envs.episode_returns[i], envs.episode_lengths[i], *of_infos))
                tally.episodes, tally.longest = tally.episodes + 1, 0
    returns, lengths, *columns = map(np.array, zip(*(episode for of_env in scores for episode in of_env), strict=True))
    return Evaluation(returns, lengths, dict(zip(envs.info_keys, columns, strict=True)))


class _Game(NamedTuple):
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


def _games(
    envs: ParallelVectorEnv, choose: Chooser, episodes: int, *, seed: int, timeout_s: float | None, tally: Tally
) -> list[_Game]:
    """Plays episodes of envs with several agents. The number of episodes per env is fixed in advance.

    Raises:
        RunError, TrainingDiverged, multiprocessing.TimeoutError: As `evaluate` does.
    """
    joint, groups = envs.joint, envs.groups
    quotas = np.full(joint.num_envs, episodes // joint.num_envs)
    quotas[: episodes % joint.num_envs] += 1
    games: list[list[_Game]] = [[] for _ in quotas]
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
                raise TrainingDiverged(f"an agent of group {name} returned a reward that is not finite. Fix the env.")
            ended = (terminated[name] | truncated[name]) & valid[name]
            shape = totals[name].shape
            # An agent that enters again adds to its return.
            totals[name] += np.where(ended, rows.episode_returns, 0.0).reshape(shape)
            goes_on[name] = valid[name] & rows.valid & ~np.repeat(over, shape[1])
            valid[name] = rows.valid
        tally.steps += joint.num_envs
        tally.longest = int(joint.episode_lengths.max())
        if tally.longest > MAX_EPISODE_STEPS:
            raise RunError(f"an episode has not ended after {MAX_EPISODE_STEPS:,} steps. Give the env a time limit.")
        for env in np.flatnonzero(over).tolist():
            if len(games[env]) < quotas[env]:
                returns = {name: values[env].copy() for name, values in totals.items()}
                total, length = float(joint.episode_returns[env]), int(joint.episode_lengths[env])
                games[env].append(_Game(env, total, length, returns))
                tally.episodes += 1
            for values in totals.values():
                values[env] = 0.0
    return [game for of_env in games for game in of_env]


def _most_likely(agents: Mapping[str, Agent]) -> Chooser:
    """Returns the function that chooses the most likely actions of each team's policy."""
    memories: dict[str, np.ndarray] = {}

    def choose(name: str, observations: Any, goes_on: np.ndarray) -> Any:
        before = memories.get(name, agents[name].initial_state(len(goes_on)))
        before = np.where(goes_on[:, None], before, np.float32(0))
        actions, memories[name] = agents[name].act(observations, before, checked=False)
        return actions

    return choose


def evaluate_teams(
    agents: Mapping[str, Agent],
    envs: ParallelVectorEnv,
    episodes: int,
    *,
    seed: int,
    timeout_s: float | None,
    tally: Tally | None = None,
) -> Evaluation:
    """Plays episodes of envs with several agents, each with the most likely action of its team's policy.

    Args:
        agents: The policy of each team.
        envs: The envs, which have a group for each team.
        episodes: Number of episodes.
        seed: See `evaluate`.
        timeout_s: See `evaluate`.
        tally: See `evaluate`.

    Raises:
        RunError, TrainingDiverged, multiprocessing.TimeoutError: As `evaluate` does.
    """
    tally = Tally(episodes) if tally is None else tally
    games = _games(envs, _most_likely(agents), episodes, seed=seed, timeout_s=timeout_s, tally=tally)
    of_agents: dict[str, np.ndarray] = {}
    for group, rows in envs.groups.items():
        returns = np.array([game.returns[group] for game in games])
        members = list(map(str, rows.group.agents))
        for name in scored(group, members):
            of_agents[name] = returns[:, members.index(name)] if name in members else returns.mean(axis=1)
    return Evaluation(
        np.array([game.total for game in games]), np.array([game.length for game in games]), agents=of_agents
    )


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
        seed: See `evaluate`.
        timeout_s: See `evaluate`.
        tally: Counts the steps, for a display.
    """
    ((name, rows),) = envs.groups.items()
    tally = Tally(episodes) if tally is None else dataclasses.replace(tally, total=episodes, episodes=0)
    begun = np.full(rows.num_envs // 2, -1)  # games begun in each env, less one
    mine, rng = _most_likely({name: agent}), match_rng(seed)
    spaces = (rows.single_observation_space, rows.env_action_space)
    other = None if opponent is None else Policy(opponent, *spaces)
    if other is not None:
        other.seed(int(rng.integers(2**31)))

    def choose(_: str, observations: Any, goes_on: np.ndarray) -> Any:
        begun[~goes_on.reshape(-1, 2).any(axis=1)] += 1
        seats = (np.arange(len(begun)) + begun) % 2  # the opponent's
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

    games = _games(envs, choose, episodes, seed=seed, timeout_s=timeout_s, tally=tally)
    points, played = [], dict.fromkeys(range(len(begun)), 0)
    for game in games:  # in the order in which each env played them
        seat = (game.env + played[game.env]) % 2  # the opponent's
        played[game.env] += 1
        difference = game.returns[name][1 - seat] - game.returns[name][seat]
        points.append(0.5 + 0.5 * float(np.sign(difference)))
    return float(np.mean(points))


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


def with_matches(
    evaluation: Evaluation,
    agent: Agent,
    snapshots: Snapshots,
    envs: ParallelVectorEnv,
    env_steps: int,
    *,
    seed: int,
    timeout_s: float | None,
    tally: Tally | None = None,
) -> Evaluation:
    """Returns an evaluation that also has the scores against earlier versions of the policy, and its Elo rating.

    The opponents are "random"; the snapshots "first" and "newest", which is older than the policy itself; and "half",
    the snapshot taken nearest to half of the env-steps so far. Random play has a rating of 0, and a snapshot has the
    rating of the last evaluation before it was taken. Opponents without a rating do not count for the Elo rating.

    Args:
        evaluation: The evaluation, whose number of episodes is the number of games against each opponent.
        agent: The policy.
        snapshots: The pool of a run with self-play.
        envs: See `mean_score`.
        env_steps: Env-steps of training so far.
        seed: See `evaluate`.
        timeout_s: See `evaluate`.
        tally: See `mean_score`.
    """
    games, opponent = len(evaluation.returns), agent.untrained_copy()
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
    return dataclasses.replace(evaluation, matches={**matches, "elo": rating})


def play(
    agents: Mapping[str, Agent],
    envs: Any,
    episodes: int,
    *,
    seed: int,
    timeout_s: float | None,
    tally: Tally | None = None,
) -> Evaluation:
    """Plays episodes with the policies of all teams, see `evaluate` and `evaluate_teams`."""
    how: dict[str, Any] = {"seed": seed, "timeout_s": timeout_s, "tally": tally}
    if "" in agents:
        return evaluate(agents[""], envs, episodes, **how)
    return evaluate_teams(agents, envs, episodes, **how)


def evaluate_run(
    run: Run,
    episodes: int,
    *,
    seed: int | None = None,
    envs: EnvSource = None,
    warn: Callable[[str], None] = print,
    tally: Tally | None = None,
) -> Evaluation:
    """Evaluates the newest checkpoint of a run.

    Args:
        run: A run folder that `ppo.train` made.
        episodes: Number of episodes.
        seed: Seed of the envs; None for the run's seed.
        envs: As for `ppo.train`, for a run that was not trained on its config's env.
        warn: Called with a message for each damaged checkpoint.
        tally: Counts the episodes and steps, for a display.

    Raises:
        RunError: If the run has no checkpoint that can be read.
    """
    config = config_to_play(run, envs, seed)
    with evaluation_envs(config, envs, episodes) as vector:
        agents = {
            name: load_agent(run, warn, spaces=spaces, team=name) for name, spaces in spaces_of(config, vector).items()
        }
        how: dict[str, Any] = {"seed": config.seed, "timeout_s": config.step_timeout_s, "tally": tally}
        found = play(agents, vector, episodes, **how)
        if config.self_play is None:
            return found
        (agent,) = agents.values()
        snapshots = Snapshots(config, agent)
        values = Checkpoints(run.checkpoints, snapshots=snapshots).restore_newest(warn=warn, partial=True)
        return with_matches(found, agent, snapshots, vector, values["update"] * config.batch_size, **how)


def config_to_play(run: Run, envs: EnvSource, seed: int | None) -> Config:
    """Returns the settings with which a run's policy plays. Takes the same arguments as `evaluate_run`.

    Raises:
        RunError: If there is no checkpoint yet, or the user has not consented to a required import.
        ConfigError: If the run was trained on envs passed to `ppo.train`, but `envs` is None.
    """
    config = run.read_config(imports=IMPORTED if envs is None else ("network",))
    run.check_begun()
    run.check_given(envs is not None)
    return config if seed is None else dataclasses.replace(config, seed=seed)


def _calls(envs: AsyncVectorEnv | SyncVectorEnv, timeout_s: float | None) -> tuple[Callable, Callable]:
    """Returns `reset(seeds)` and `step(actions)`, which time out if the envs are in workers."""
    if isinstance(envs, SyncVectorEnv):
        return lambda seeds: envs.reset(seed=seeds), envs.step

    def reset(seeds: list[int]) -> tuple:
        envs.reset_async(seed=seeds)
        return envs.reset_wait(timeout_s)

    def step(actions: np.ndarray) -> tuple:
        envs.step_async(actions)
        return envs.step_wait(timeout_s)

    return reset, step
