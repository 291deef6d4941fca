"""Scores of the deterministic policy on separate envs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from ppo.algorithm.checks import TrainingDiverged
from ppo.algorithm.self_play import Snapshots
from ppo.config import Config, ConfigError
from ppo.envs import EnvSource, evaluation_envs, spaces_of
from ppo.model.agent import Agent
from ppo.model.frames import first_stacks, next_stacks
from ppo.results.episodes import check_length, quotas_of
from ppo.results.games import match_scores, most_likely, play_games
from ppo.results.policy import load_agent
from ppo.run import infos
from ppo.run.checkpoint import Checkpoints
from ppo.run.folder import Run
from ppo.run.metrics import scored
from ppo.run.modules import config_to_load
from ppo.run.spaces import to_json
from ppo.run.status import Tally
from ppo.seeds import evaluation_seeds
from vecenv import AsyncVectorEnv, SyncVectorEnv
from vecenv.spaces import Path, leaves

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import ParallelVectorEnv


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
        matches: With self-play: the mean score against each opponent, as "score/NAME", and "elo", see
            `games.match_scores`.
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

    The number of episodes per env is fixed in advance, see `quotas_of`.

    Args:
        agent: The agent to evaluate.
        envs: The envs to play in.
        episodes: Number of episodes.
        seed: The run's seed, from which the seeds of the envs are derived.
        timeout_s: Seconds to wait for a step; None to wait forever.
        tally: Counts the episodes and steps, for a display.

    Raises:
        RunError: If an episode does not end within `episodes.MAX_EPISODE_STEPS`.
        TrainingDiverged: If a reward is not finite.
        NothingAllowed: If an action mask forbids every action.
        multiprocessing.TimeoutError: If an env does not answer for `timeout_s` seconds.
    """
    quotas = quotas_of(episodes, envs.num_envs)
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
        check_length(tally.longest)
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
    games = play_games(envs, most_likely(agents), episodes, seed=seed, timeout_s=timeout_s, tally=tally)
    of_agents: dict[str, np.ndarray] = {}
    for group, rows in envs.groups.items():
        returns = np.array([game.returns[group] for game in games])
        members = list(map(str, rows.group.agents))
        for name in scored(group, members):
            of_agents[name] = returns[:, members.index(name)] if name in members else returns.mean(axis=1)
    return Evaluation(
        np.array([game.total for game in games]), np.array([game.length for game in games]), agents=of_agents
    )


def with_matches(
    evaluation: Evaluation,
    agent: Agent,
    snapshots: Snapshots,
    envs: ParallelVectorEnv,
    env_steps: int,
    **how: Any,
) -> Evaluation:
    """Returns an evaluation that also has the scores of as many games against each opponent, see `match_scores`."""
    games = len(evaluation.returns)
    matches = match_scores(agent, snapshots, envs, games, env_steps=env_steps, **how)
    return dataclasses.replace(evaluation, matches=matches)


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


def check_playable(agents: Mapping[str, Agent], teams: Mapping[str, tuple[gym.Space, gym.Space]]) -> None:
    """Checks that policies can play in envs with the given spaces. Bounds, precision and the order of keys may differ.

    Args:
        agents: The policy of each team.
        teams: The spaces of one observation and of one action, for each team of the envs.

    Raises:
        ConfigError: If a leaf of a space differs in more than its bounds and precision, or the teams differ.
    """
    if agents.keys() != teams.keys():
        raise ConfigError(f"the policies are those of {list(agents)}, but the envs have the groups {list(teams)}")
    for name, spaces in teams.items():
        for trained, found in zip((agents[name].observations.space, agents[name].action_space), spaces, strict=True):
            if _kinds(trained) != _kinds(found):
                raise ConfigError(f"the policy was trained on {trained}, but the envs have {found}")


def _kinds(space: gym.Space) -> dict[Path, dict[str, Any]]:
    """Returns what describes each leaf of a space, without the bounds and the precision of a Box."""
    described = {path: to_json(leaf) for path, leaf in leaves(space)}
    return {
        path: {**values, "low": None, "high": None, "dtype": values.get("dtype", "").rstrip("0123456789")}
        for path, values in described.items()
    }


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
        ConfigError: If the policy cannot play in the envs, see `check_playable`.
    """
    config = config_to_play(run, envs, seed)
    with evaluation_envs(config, envs, episodes) as vector:
        # The agents are built with the run's spaces, because the weights follow the order of their keys.
        agents = {team: load_agent(run, warn, team=team) for team in run.read_spaces()}
        check_playable(agents, spaces_of(config, vector))
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
        RunError: If there is no checkpoint yet, or a module may not be imported.
        ConfigError: If the run was trained on envs passed to `ppo.train`, but `envs` is None.
    """
    config = config_to_load(run, env=envs is None)
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
