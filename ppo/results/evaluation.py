"""Scores of policies on separate envs, with one agent or several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.config import Config, ConfigError
from ppo.envs import EnvSource, evaluation_envs, parts_of, spaces_of
from ppo.model.agent import Agent
from ppo.model.checks import TrainingDiverged
from ppo.results.policy import load_agent
from ppo.run import infos
from ppo.run.checkpoint import LATEST, number_in
from ppo.run.folder import Run, Spaces
from ppo.run.metrics import scored
from ppo.run.modules import config_to_load
from ppo.run.spaces import to_json
from ppo.run.status import Tally
from ppo.seeds import evaluation_rng, evaluation_seeds, fresh_seed
from vecenv import AsyncVectorEnv, SyncVectorEnv, WorkerDied
from vecenv.spaces import leaves

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import ParallelVectorEnv

MIN_LIMIT = 10_000
"""Least number of steps after which an evaluation cuts an episode off, see `limit_of`."""

ATTEMPTS = 3
"""How often an evaluation is played if the death of a worker cuts its episodes off."""


@dataclass(frozen=True)
class Evaluation:
    """The scores of E episodes.

    Attributes:
        returns: Undiscounted sums of rewards, `float64[E]`.
        lengths: Numbers of steps, `int64[E]`.
        infos: For each of the config's `info_metrics`, the value of each episode, `float64[E]`; NaN where it has none.
        agents: With several agents: the return of each agent, `float64[E]`, and the mean of each group. `returns` are
            then the sums over all agents.
        functions: If several functions made the envs: the index of the function of each episode, `int64[E]`.
        deterministic: Whether the policy took the most likely actions. False: sampled ones, as in training.
    """

    returns: np.ndarray
    lengths: np.ndarray
    infos: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    agents: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    functions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    deterministic: bool = True

    @property
    def policy(self) -> str:
        """Which policy has these scores, for messages."""
        return "deterministic policy" if self.deterministic else "sampled policy"

    def summary(self) -> dict[str, float | int]:
        """Returns mean, standard deviation and range of the returns, the mean length, E and the kind of the policy.

        `info_KEY` is the mean over the episodes that have the info. It is omitted if there are none. With several
        agents or functions, `return_mean/NAME` and `return_mean/function_K` are their mean returns.
        """
        return {
            "return_mean": float(self.returns.mean()),
            "return_std": float(self.returns.std()),
            "return_min": float(self.returns.min()),
            "return_max": float(self.returns.max()),
            "length_mean": float(self.lengths.mean()),
            "episodes": len(self.returns),
            "deterministic": self.deterministic,
            **self._info_means(),
            **self._part_means(),
        }

    def metrics(self) -> dict[str, float]:
        """Returns the metrics for a report of a training run."""
        means = {"return_mean": float(self.returns.mean()), "return_std": float(self.returns.std())}
        return {f"eval_{name}": mean for name, mean in (means | self._info_means() | self._part_means()).items()}

    def to_json(self) -> dict[str, Any]:
        """Returns the score of each episode as plain numbers, with None for an info that the episode lacks."""
        return {
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "infos": {key: infos.to_json(values) for key, values in self.infos.items()},
            **({"agents": {name: values.tolist() for name, values in self.agents.items()}} if self.agents else {}),
            **({"functions": self.functions.tolist()} if self.functions.size else {}),
            "deterministic": self.deterministic,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Evaluation:
        """Returns the evaluation with the given result of `to_json`."""
        found = {key: np.array(infos.from_json(column)) for key, column in values["infos"].items()}
        agents = {name: np.array(column) for name, column in values.get("agents", {}).items()}
        functions = np.array(values.get("functions", ()), np.int64)
        returns, lengths = np.array(values["returns"]), np.array(values["lengths"])
        return cls(returns, lengths, found, agents, functions, values.get("deterministic", True))

    @classmethod
    def joined(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Returns the evaluation with the episodes of all parts, which have the same infos, agents and kind."""
        columns = [{**vars(part), "deterministic": ()} for part in parts]
        joined = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *columns)
        return cls(**{**joined, "deterministic": parts[0].deterministic})

    def _part_means(self) -> dict[str, float]:
        means = {f"return_mean/{name}": float(values.mean()) for name, values in self.agents.items()}
        for k in np.unique(self.functions).tolist():
            means[f"return_mean/function_{k}"] = float(self.returns[self.functions == k].mean())
        return means

    def _info_means(self) -> dict[str, float]:
        means = {infos.PREFIX + key: infos.mean_of(values) for key, values in self.infos.items()}
        return {name: mean for name, mean in means.items() if mean is not None}


class _Episode(NamedTuple):
    """One episode of an env.

    Attributes:
        total: Its return, summed over all agents.
        length: Number of steps.
        infos: The values of the env's `info_keys` at the last step.
        returns: The return of each of the K agents by team, `[K]`.
    """

    total: float
    length: int
    infos: list[float]
    returns: dict[str, np.ndarray]


class _Player:
    """A team's policy in all envs: what it sees, what it remembers, and what its agents have earned.

    Args:
        agent: The policy.
        rows: The rows of the team: a `AgentRows`, or the envs themselves if they have one agent.
        members: Names of the K agents of an env; empty if the envs have one agent.
        observations: The first observations, `[N, ...]`.
        rng: Makes the seeds of sampled actions. None: the most likely actions.

    Attributes:
        members: See above.
        returns: What each agent has earned in the current episode of its env, `float64[M, K]`; 0 until its own episode
            ends.
    """

    def __init__(
        self, agent: Agent, rows: Any, members: Sequence[str], observations: Any, rng: np.random.Generator | None
    ):
        self.members, agents = members, max(1, len(members))
        self.returns = np.zeros((rows.num_envs // agents, agents))
        self._agent, self._rows, self._rng = agent, rows, rng
        self._seen = observations
        self._state, self._alive = agent.initial_state(rows.num_envs), self._valid()

    def _valid(self) -> np.ndarray:
        return self._rows.valid if self.members else np.ones(self._rows.num_envs, np.bool_)

    def act(self) -> Any:
        """Returns an action for each row."""
        noise = {} if self._rng is None else {"seed": self._rng.integers(2**31, size=2, dtype=np.int32)}
        # In a turn-based game, an agent's mask forbids every action while another agent moves.
        actions, self._state = self._agent.act(self._seen, self._state, checked=not self.members, **noise)
        return actions

    def earned(self) -> np.ndarray:
        """Returns what each agent has earned in the current episode of its env so far, `float64[M, K]`."""
        return self.returns + np.where(self._alive, self._rows.episode_returns, 0.0).reshape(self.returns.shape)

    def observe(self, results: tuple, over: np.ndarray) -> None:
        """Takes the team's results of a step.

        Args:
            results: What `rows.step` returns.
            over: Whether the episode of each env ended, `bool[M]`.

        Raises:
            TrainingDiverged: If a reward is not finite.
        """
        observations, rewards, terminated, truncated, _ = results
        members = self.members
        for row in np.flatnonzero(~np.isfinite(rewards)).tolist():
            who = f"agent {members[row % len(members)]!r} of env {row // len(members)}" if members else f"env {row}"
            raise TrainingDiverged(f"{who} returned reward {rewards[row]} in an evaluation. Fix the env.")
        ended, began = (terminated | truncated) & self._alive, np.repeat(over, self.returns.shape[1])
        # An agent that enters again adds to its return.
        self.returns += np.where(ended, self._rows.episode_returns, 0.0).reshape(self.returns.shape)
        valid = self._valid()
        self._state[~(self._alive & valid) | began] = 0.0
        self._seen = observations
        self._alive = valid


def play(
    agents: Mapping[str, Agent],
    envs: AsyncVectorEnv | SyncVectorEnv | ParallelVectorEnv,
    episodes: int,
    *,
    seed: int,
    timeout_s: float | None,
    deterministic: bool = True,
    limit: int = MIN_LIMIT,
    functions: Sequence[int] = (),
    warn: Callable[[str], None] = print,
    tally: Tally | None = None,
) -> Evaluation:
    """Plays episodes. The normalizers do not change.

    The number of episodes of each env is fixed in advance. Counting the first episodes to finish would bias the score
    towards short episodes. An episode that has not ended after `limit` steps is cut off and counts with its return so
    far. Its env plays no further episode.

    Args:
        agents: The policy of each team. The only team of envs with one agent is "".
        envs: The envs: a `ParallelVectorEnv` with a group for each team, or any other vector env of vecenv.
        episodes: Number of episodes.
        seed: The run's seed, from which the seeds of the envs and of sampled actions are derived.
        timeout_s: Seconds to wait for a step; None to wait forever.
        deterministic: Whether to take the most likely action in each state, or a sampled one.
        limit: Maximum number of steps of an episode, see `limit_of`.
        functions: The index of the function that made each env; empty if there is only one function.
        warn: Called with the number of unfinished episodes, if there are any.
        tally: Counts the episodes and steps, for a display.

    Raises:
        TrainingDiverged: If a reward is not finite.
        NothingAllowed: If the env has one agent, and its action mask forbids every action.
        multiprocessing.TimeoutError: If an env does not answer for `timeout_s` seconds.
    """
    whole = whole_envs(envs)
    teams: dict[str, Any] = {"": envs} if whole is envs else envs.groups  # type: ignore[union-attr]
    quotas = episodes // whole.num_envs + (np.arange(whole.num_envs) < episodes % whole.num_envs)
    played: list[list[_Episode]] = [[] for _ in quotas]
    left, unfinished = quotas.copy(), 0  # episodes of each env that have not ended; those that never will
    tally = Tally(episodes) if tally is None else tally
    first = _reset(envs, evaluation_seeds(seed, whole.num_envs), timeout_s)
    rng = None if deterministic else evaluation_rng(seed)
    players = {
        name: _Player(agents[name], rows, () if whole is envs else tuple(map(str, rows.group.agents)), first[name], rng)
        for name, rows in teams.items()
    }
    while left.any():
        results, over = _step(envs, {name: player.act() for name, player in players.items()}, timeout_s)
        for name, player in players.items():
            player.observe(results[name], over)
        tally.steps += whole.num_envs
        cut = ~over & (whole.episode_lengths >= limit)
        for i in np.flatnonzero((over | cut) & (left > 0)):
            of_infos = [values[i] for values in whole.episode_infos.values()]
            returns = {name: (player.earned() if cut[i] else player.returns)[i] for name, player in players.items()}
            played[i].append(_Episode(whole.episode_returns[i], whole.episode_lengths[i], of_infos, returns))
            unfinished += left[i] if cut[i] else 0
            left[i] = 0 if cut[i] else left[i] - 1
            tally.episodes += 1
        for player in players.values():
            player.returns = np.where(over[:, None], 0.0, player.returns)
    if unfinished:
        warn(
            f"{unfinished} of {episodes} episodes did not end: an env whose episode reaches {limit:,} steps plays no "
            "further, and the episode counts with its return up to then. Give the env a time limit (max_episode_steps "
            "when it is registered)."
        )
    found = [episode for of_env in played for episode in of_env]
    infos_of = map(np.array, zip(*(episode.infos for episode in found), strict=True))
    of_agents: dict[str, np.ndarray] = {}
    for team, player in players.items():
        values, members = np.array([episode.returns[team] for episode in found]), player.members
        for name in scored(team, members):
            of_agents[name] = values[:, members.index(name)] if name in members else values.mean(axis=1)
    return Evaluation(
        np.array([episode.total for episode in found]),
        np.array([episode.length for episode in found]),
        dict(zip(whole.info_keys, infos_of, strict=True)),
        of_agents,
        np.repeat(np.array(functions, np.int64), [len(of_env) for of_env in played] if len(functions) else 0),
        deterministic,
    )


def limit_of(longest: float | None) -> int:
    """Returns the steps after which an evaluation cuts an episode off: ten times the longest training episode.

    It is at least `MIN_LIMIT`, also if `longest` is None.
    """
    return max(MIN_LIMIT, 10 * int(longest or 0))


def evaluate(
    agents: Mapping[str, Agent],
    config: Config,
    source: EnvSource,
    episodes: int,
    *,
    check: Callable[[Mapping[str, Spaces]], None],
    limit: int,
    warn: Callable[[str], None],
    tally: Tally | None = None,
) -> Evaluation:
    """Plays episodes in new envs. Functions that make envs take turns, and each plays at least one episode.

    Args:
        agents: The policy of each team.
        config: The settings, for the envs, the seed, the kind of actions and the timeout.
        source: As for `ppo.train`.
        episodes: Number of episodes. With more functions, it is the number of functions.
        check: Called with the spaces of the teams of the envs. Raises if the policies cannot play in them.
        limit: As for `play`.
        warn: As for `play`.
        tally: Counts the episodes and steps, for a display.

    Raises:
        WorkerDied: If a worker died in each of `ATTEMPTS` attempts.
    """
    found, parts = [], parts_of(config, source, episodes)
    tally = Tally(episodes) if tally is None else tally
    tally.total = sum(count for _, count, _ in parts)
    for part, count, indices in parts:
        with evaluation_envs(config, part, count) as envs:
            check(spaces_of(config, envs))
            makers = [indices[i % len(indices)] for i in range(whole_envs(envs).num_envs)] if indices else []
            how: dict[str, Any] = {"timeout_s": config.step_timeout_s, "limit": limit, "warn": warn, "tally": tally}
            how["deterministic"] = not config.sample
            for attempt in range(1, ATTEMPTS + 1):
                processes, before = _processes(envs), tally.episodes
                evaluation = play(agents, envs, count, seed=config.seed, functions=makers, **how)
                if _processes(envs) == processes:
                    break
                # The episodes that a restarted worker cut off would count with a part of their returns.
                if attempt == ATTEMPTS:
                    raise WorkerDied(
                        f"a worker died in each of {ATTEMPTS} attempts to evaluate: see the warnings above"
                    )
                warn("a worker died during the evaluation, which is therefore played again")
                tally.episodes = before
            found.append(evaluation)
    return Evaluation.joined(found)


def _processes(envs: Any) -> list[Any]:
    """Returns the worker processes. A worker that is restarted has another process."""
    return getattr(whole_envs(envs), "processes", [])


def whole_envs(envs: Any) -> AsyncVectorEnv | SyncVectorEnv:
    """Returns the vector env whose rows are envs: that of a `ParallelVectorEnv`, or `envs` itself."""
    return getattr(envs, "joint", envs)


def _reset(envs: Any, seeds: list[int], timeout_s: float | None) -> dict[str, Any]:
    """Resets all envs and returns the observations of each team."""
    if isinstance(envs, SyncVectorEnv):  # has no timeouts, because its envs are in this process
        return {"": envs.reset(seed=seeds)[0]}
    if isinstance(envs, AsyncVectorEnv):
        envs.reset_async(seed=seeds)
        return {"": envs.reset_wait(timeout_s)[0]}
    return envs.by_group(envs.reset(seed=seeds, timeout=timeout_s)[0])


def _step(envs: Any, actions: dict[str, Any], timeout_s: float | None) -> tuple[dict[str, tuple], np.ndarray]:
    """Steps all envs with the actions of each team.

    Returns:
        The results of each team, and whether the episode of each env ended, `bool[M]`.
    """
    if isinstance(envs, SyncVectorEnv):
        found = envs.step(actions[""])
        return {"": found}, found[2] | found[3]
    if isinstance(envs, AsyncVectorEnv):
        envs.step_async(actions[""])
        found = envs.step_wait(timeout_s)
        return {"": found}, found[2] | found[3]
    envs.step_async(envs.from_groups(actions))
    columns = [envs.by_group(column) for column in envs.step_wait(timeout_s)]
    return {name: tuple(column[name] for column in columns) for name in envs.groups}, envs.over


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


def _kinds(space: gym.Space) -> dict[tuple, dict[str, Any]]:
    """Returns what describes each leaf of a space, without the bounds and the precision of a Box."""
    described = {path: to_json(leaf) for path, leaf in leaves(space)}
    return {
        path: {**values, "low": None, "high": None, "dtype": values.get("dtype", "").rstrip("0123456789")}
        for path, values in described.items()
    }


def evaluate_run(
    run: Run | Path | str,
    episodes: int,
    *,
    checkpoint: str | int = LATEST,
    seed: int | None = None,
    deterministic: bool = True,
    envs: EnvSource = None,
    warn: Callable[[str], None] = print,
    tally: Tally | None = None,
) -> Evaluation:
    """Evaluates the policy of a run.

    Args:
        run: A run folder that `ppo.train` made. `Run.open(path, trust_modules=True)` allows the import of its modules.
        episodes: Number of episodes.
        checkpoint: As for `load_policy`.
        seed: Seed of the envs; None for a fresh one. The run's own seed repeats the episodes of its final evaluation.
        deterministic: True for the most likely actions; False for actions sampled as in training.
        envs: As for `ppo.train`, for a run that was not trained on its config's env.
        warn: Called with a message for each damaged checkpoint, and if episodes do not end.
        tally: Counts the episodes and steps, for a display.

    Raises:
        RunError: If the run has no checkpoint that can be read.
        ConfigError: If the policy cannot play in the envs, see `check_playable`.
    """
    run = Run.open(run)
    config = config_to_play(run, envs, fresh_seed() if seed is None else seed)
    config = dataclasses.replace(config, sample=not deterministic)
    # The agents are built with the run's spaces, because the weights follow the order of their keys.
    agents = {team: load_agent(run, warn, checkpoint=checkpoint, team=team) for team in run.read_spaces()}
    check = functools.partial(check_playable, agents)
    limit = limit_of(number_in(run.checkpoints, checkpoint, "episodes", "longest"))
    return evaluate(agents, config, envs, episodes, check=check, limit=limit, warn=warn, tally=tally)


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
