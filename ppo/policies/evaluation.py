"""Plays episodes on separate envs to score policies, with one agent or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from ppo.config import Config, ConfigError
from ppo.envs import EnvSource, distinct, evaluation_envs, mask_warning, spaces_of, time_limit_of
from ppo.errors import FaultyEnv
from ppo.model.agent import Agent
from ppo.model.checks import owner_of
from ppo.policies.policy import load_agent
from ppo.run import infos
from ppo.run.checkpoint import LATEST, number_in
from ppo.run.folder import Run, SpacePair
from ppo.run.metrics import scored
from ppo.run.modules import config_to_load
from ppo.run.scores import Evaluation
from ppo.run.spaces import space_to_json
from ppo.run.status import Tally
from ppo.seeds import evaluation_rng, evaluation_seeds, fresh_seed
from vecenv import AsyncVectorEnv, SyncVectorEnv
from vecenv.tree import leaves

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import AgentRows, ParallelVectorEnv

    EvaluationEnvs = AsyncVectorEnv | SyncVectorEnv | ParallelVectorEnv

StepResult = tuple[Any, np.ndarray, np.ndarray, np.ndarray, Any]
"""Observations, rewards, terminated, truncated and infos of a team, as a vector env returns them."""

MIN_LIMIT = 10_000  # the fewest steps after which an evaluation cuts an episode off, except in short runs
ATTEMPTS = 3  # how many times an evaluation is played if the death of a worker cuts its episodes off


class EvaluationStopped(Exception):
    """A stop was requested during an evaluation, which therefore has no result."""


class _Player:
    """The policy of one team while it plays in all envs: what it sees and remembers, and what its agents have earned.

    Args:
        agent: The policy.
        rows: The rows of the team: an `AgentRows`, or the envs themselves if they have one agent.
        members: Names of the K agents of an env; empty if the envs have one agent.
        observations: The first observations, `[N, ...]`.
        rng: Makes the seeds of sampled actions. None: the most likely actions.

    Attributes:
        returns: What each agent has earned in its env's episode, `float64[M, K]`; 0 until its own episode ends.
    """

    def __init__(
        self, agent: Agent, rows: EvaluationEnvs | AgentRows, members: Sequence[str], observations: Any,
        rng: np.random.Generator | None,
    ):  # fmt: skip
        self.members, agents = members, max(1, len(members))
        self.returns = np.zeros((rows.num_envs // agents, agents))
        self._agent, self._rows, self._rng = agent, rows, rng
        self._observations, self._alive = observations, self._valid()
        self._memory = agent.initial_state(rows.num_envs)

    def _valid(self) -> np.ndarray:
        """Returns whether the agent of each row takes part, `bool[N]`. A single agent always does."""
        return self._rows.valid if self.members else np.ones(self._rows.num_envs, np.bool_)  # type: ignore[union-attr]

    def act(self) -> Any:
        """Returns an action for each row."""
        noise = {} if self._rng is None else {"seed": self._rng.integers(2**31, size=2, dtype=np.int32)}
        # In a turn-based game, an agent's mask forbids every action while another agent moves.
        actions, self._memory = self._agent.act(self._observations, self._memory, checked=not self.members, **noise)
        return actions

    def observe(self, results: StepResult, over: np.ndarray) -> None:
        """Takes the team's results of a step, and whether the episode of each env ended, `bool[M]`."""
        observations, rewards, terminated, truncated, _ = results
        for row in np.flatnonzero(~np.isfinite(rewards)).tolist():
            who = owner_of(row, self.members)
            raise FaultyEnv(f"{who} returned reward {rewards[row]} in an evaluation. Fix the env.")
        ended, began = (terminated | truncated) & self._alive, np.repeat(over, self.returns.shape[1])
        self.returns += self._earned(ended)  # an agent that enters again adds to its return
        valid = self._valid()
        self._memory[~(self._alive & valid) | began] = 0.0
        self._observations, self._alive = observations, valid

    def returns_of(self, env: int, *, cut: bool) -> np.ndarray:
        """Returns what each agent has earned in an episode that has ended or is `cut` off, `float64[K]`, a copy."""
        return (self.returns + self._earned(self._alive) if cut else self.returns)[env].copy()

    def _earned(self, rows: np.ndarray) -> np.ndarray:
        """Returns the returns of the agents' own episodes in some rows, `float64[M, K]`; 0 in the other rows."""
        return np.where(rows, self._rows.episode_returns, 0.0).reshape(self.returns.shape)


@dataclass(frozen=True)
class _Episode:
    """An episode that counts, because it ended or was cut off."""

    env: int
    total: float  # the return, summed over all agents
    length: int
    infos: list[float]  # the values of the vector env's `info_keys`; NaN where the episode has none
    returns: dict[str, np.ndarray]  # of the agents of each team, `float64[K]`
    was_cut: bool


@dataclass(frozen=True)
class Players:
    """The policies of an evaluation, and how they play.

    Attributes:
        agents: The policy of each team. The only team of envs with one agent is "".
        config: The settings, for the envs, the seed, the kind of actions and the timeout.
        limit: Number of steps after which an episode is cut off; see `limit_of`. A longer time limit of the env counts
            instead, up to `MIN_LIMIT` steps.
        warn: Called with a message if episodes were cut off or a worker died.
        tally: Counts the episodes and steps, for a display.
        stopped: Whether to end the evaluation without a result; asked before every step.
    """

    agents: Mapping[str, Agent]
    config: Config
    limit: int
    warn: Callable[[str], None] = print
    tally: Tally = dataclasses.field(default_factory=Tally)
    stopped: Callable[[], bool] = lambda: False


def play(players: Players, envs: EvaluationEnvs, episodes: int, *, functions: int = 1) -> Evaluation:
    """Plays episodes. The normalizers do not change.

    The number of episodes of each env is fixed in advance. Counting the first episodes to finish would bias the score
    towards short episodes. An episode that is cut off counts with its return and its infos so far. Its env plays no
    further episode. `functions` is the number of different functions that made the envs in turn.

    Raises:
        EvaluationStopped: If `players.stopped` says so.
        FaultyEnv: If a reward is not finite.
        NothingAllowed: If the env has one agent, and its action mask forbids every action.
        multiprocessing.TimeoutError: If an env does not answer for `config.step_timeout_s` seconds.
    """
    config, tally, whole = players.config, players.tally, whole_envs(envs)
    limit = max(players.limit, min(MIN_LIMIT, time_limit_of(whole)))
    remaining = episodes // whole.num_envs + (np.arange(whole.num_envs) < episodes % whole.num_envs)  # of each env
    unfinished = 0  # episodes that will never end
    played: list[_Episode] = []
    playing = _begin(players, envs)
    while remaining.any():
        if players.stopped():
            raise EvaluationStopped
        results, over = _step(envs, {team: player.act() for team, player in playing.items()}, config.step_timeout_s)
        for team, player in playing.items():
            player.observe(results[team], over)
        tally.steps += whole.num_envs
        cut = ~over & (whole.episode_lengths >= limit)
        for i in np.flatnonzero((over | cut) & (remaining > 0)).tolist():
            total, length = whole.episode_returns[i], whole.episode_lengths[i]
            infos_so_far = [values[i] for values in whole.infos_so_far.values()]
            returns = {team: player.returns_of(i, cut=cut[i]) for team, player in playing.items()}
            played.append(_Episode(i, total, length, infos_so_far, returns, cut[i]))
            tally.episodes += 1
            if cut[i]:
                unfinished += remaining[i]
                remaining[i] = 0
            else:
                remaining[i] -= 1
        for player in playing.values():
            player.returns[over] = 0.0
    if unfinished:
        players.warn(
            f"{unfinished} of {episodes} episodes were cut off or never began: an env whose episode reaches {limit:,} "
            "steps, far more than in training, plays no further episode, and this one counts with its return so far. "
            "Give the env a time limit: max_episode_steps when it is registered, or --env-kwargs max_episode_steps=N."
        )
    played.sort(key=lambda episode: episode.env)  # stable: the episodes of an env stay in order
    return _scores(played, playing, whole.info_keys, functions, deterministic=not config.sample)


def _begin(players: Players, envs: EvaluationEnvs) -> dict[str, _Player]:
    """Resets the envs and returns a player for each team. The only team of envs with one agent is ""."""
    config = players.config
    observations, _ = reset_envs(envs, config.seed, config.step_timeout_s)
    rng = evaluation_rng(config.seed) if config.sample else None
    if whole_envs(envs) is envs:
        return {"": _Player(players.agents[""], envs, (), observations[""], rng)}
    return {
        team: _Player(players.agents[team], rows, tuple(map(str, rows.group.agents)), observations[team], rng)
        for team, rows in envs.groups.items()  # type: ignore[union-attr]
    }


def _scores(
    played: Sequence[_Episode], playing: Mapping[str, _Player], info_keys: Sequence[str], functions: int,
    *, deterministic: bool,
) -> Evaluation:  # fmt: skip
    """Returns the scores of episodes as columns."""
    was_cut = np.array([episode.was_cut for episode in played])
    of_infos = np.array([episode.infos for episode in played]).T
    of_agents: dict[str, np.ndarray] = {}
    for team, player in playing.items():
        values, members = np.array([episode.returns[team] for episode in played]), player.members
        for name in scored(team, members):
            of_agents[name] = values[:, members.index(name)] if name in members else values.mean(axis=1)
    return Evaluation(
        np.array([episode.total for episode in played]),
        np.array([episode.length for episode in played]),
        {key: infos.with_absent_flags(values, was_cut) for key, values in zip(info_keys, of_infos, strict=True)},
        of_agents,
        np.array([episode.env % functions for episode in played if functions > 1], np.int64),
        deterministic,
    )


def limit_of(longest: float | None, steps: float | None = None) -> int:
    """Returns the number of steps after which an evaluation cuts an episode off, for `Players.limit`.

    It is `MIN_LIMIT` steps or, if this is more, ten times the length of the longest training episode (`longest`). If
    training has taken fewer than `MIN_LIMIT / 10` steps in each env (`steps`), ten times this number replaces
    `MIN_LIMIT`, so that a short run on an env that never ends does not wait for long episodes.
    """
    usual = min(MIN_LIMIT, 10 * int(steps)) if steps else MIN_LIMIT
    return max(usual, 10 * int(longest or 0))


def evaluate(players: Players, source: EnvSource, episodes: int) -> Evaluation:
    """Plays episodes in new envs of a source; see `ppo.train`. Functions take turns. Each plays at least one episode.

    If a worker dies, all episodes are played again, because those that its death cut off would count with only a part
    of their returns. After the last attempt, they do count, with a warning.

    Raises EvaluationStopped as `play` does, and ConfigError if the policies cannot play in the envs.
    """
    functions, tally = len(distinct(source)), players.tally
    episodes = tally.total = max(episodes, functions)
    if players.stopped():  # before envs are made, which may take long
        raise EvaluationStopped
    with evaluation_envs(players.config, source, episodes) as envs:
        check_playable(players.agents, spaces_of(players.config, envs))
        for attempt in range(1, ATTEMPTS + 1):
            processes, before = _processes(envs), tally.episodes
            evaluation = play(players, envs, episodes, functions=max(1, functions))
            if _processes(envs) == processes:
                return evaluation
            if attempt < ATTEMPTS:
                players.warn("a worker died during the evaluation, which is therefore played again")
                tally.episodes = before
    players.warn(
        f"a worker died in each of {ATTEMPTS} attempts to evaluate: episodes that the last death cut off count with "
        "their returns so far"
    )
    return evaluation


def _processes(envs: EvaluationEnvs) -> list[Any]:
    """Returns the worker processes. A worker that is restarted has another process."""
    return getattr(whole_envs(envs), "processes", [])


def check_evaluation(run: Run, config: Config, source: EnvSource, warn: Callable[[str], None]) -> None:
    """Builds and resets an evaluation env of each function, so that a mistake ends the run before training.

    Warns if infos hold an action mask that no policy would see. A vector env passed by the user is not reset.

    Raises:
        ConfigError: If the spaces of an env differ from the spaces of the training envs.
        Exception: Whatever an env raises, with a note that names `eval_env_kwargs`.
    """
    count, infos, warning = max(1, len(distinct(source))), None, None
    try:
        with evaluation_envs(config, source, count, infos=True) as envs:
            run.check_spaces(spaces_of(config, envs))
            if isinstance(source, gym.vector.VectorEnv):
                return
            with suppress(Exception):  # it may be about infos, which evaluations discard
                _, infos = reset_envs(envs, config.seed, config.step_timeout_s)
                warning = mask_warning(config, envs, infos)
        if warning is not None:
            warn(warning)
        if infos is None:
            with evaluation_envs(config, source, count) as envs:
                reset_envs(envs, config.seed, config.step_timeout_s)
    except Exception as error:
        kwargs = f", with eval_env_kwargs={dict(config.eval_env_kwargs)}" if config.eval_env_kwargs else ""
        error.add_note(f"This error is about an evaluation env, which is built once before training{kwargs}.")
        raise


def whole_envs(envs: EvaluationEnvs) -> AsyncVectorEnv | SyncVectorEnv:
    """Returns the vector env whose rows are envs: the one inside a `ParallelVectorEnv`, or `envs` itself."""
    return envs if isinstance(envs, AsyncVectorEnv | SyncVectorEnv) else envs.joint


def reset_envs(envs: EvaluationEnvs, seed: int, timeout_s: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Resets evaluation envs; returns the observations of each team, and the infos."""
    seeds = evaluation_seeds(seed, whole_envs(envs).num_envs)
    if isinstance(envs, SyncVectorEnv):  # has no timeouts, because its envs are in this process
        observations, infos = envs.reset(seed=seeds)
    elif isinstance(envs, AsyncVectorEnv):
        envs.reset_async(seed=seeds)
        observations, infos = envs.reset_wait(timeout_s)
    else:
        observations, infos = envs.reset(seed=seeds, timeout=timeout_s)
        return envs.by_group(observations), infos
    return {"": observations}, infos


def _step(
    envs: EvaluationEnvs, actions: dict[str, Any], timeout_s: float | None
) -> tuple[dict[str, StepResult], np.ndarray]:
    """Steps all envs; returns the results of each team, and whether the episode of each env ended, `bool[M]`."""
    if isinstance(envs, SyncVectorEnv):
        results: StepResult = envs.step(actions[""])
    elif isinstance(envs, AsyncVectorEnv):
        envs.step_async(actions[""])
        results = envs.step_wait(timeout_s)
    else:
        envs.step_async(envs.from_groups(actions))
        columns = [envs.by_group(column) for column in envs.step_wait(timeout_s)]
        return {name: tuple(column[name] for column in columns) for name in envs.groups}, envs.over  # type: ignore[misc]
    return {"": results}, results[2] | results[3]


def check_playable(agents: Mapping[str, Agent], teams: Mapping[str, SpacePair]) -> None:
    """Raises ConfigError if the policies of teams cannot play in envs with the given spaces of teams.

    The leaves of the spaces may differ in their bounds, their precision and the order of their keys.
    """
    if agents.keys() != teams.keys():
        raise ConfigError(
            f"the policies are those of {list(agents)}, but the envs have the groups {list(teams)}: use envs with the "
            "groups of the policies"
        )
    for name, spaces in teams.items():
        for trained, found in zip((agents[name].observations.space, agents[name].action_space), spaces, strict=True):
            if _kinds(trained) != _kinds(found):
                raise ConfigError(
                    f"the policy was trained on {trained}, but the envs have {found}: use envs with the former space"
                )


def _kinds(space: gym.Space) -> dict[tuple, dict[str, Any]]:
    """Returns what describes each leaf of a space, without the bounds and the precision of a Box."""

    def kind(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "low": None, "high": None, "dtype": values.get("dtype", "").rstrip("0123456789")}

    return {path: kind(space_to_json(leaf)) for path, leaf in leaves(space)}


def evaluate_run(
    run: Run | PathLike[str] | str, episodes: int, *, checkpoint: str | int = LATEST, seed: int | None = None,
    deterministic: bool = True, envs: EnvSource = None, trust_modules: bool = False,
    warn: Callable[[str], None] = print,
) -> Evaluation:  # fmt: skip
    """Returns the scores of a run's policy in new episodes.

    Args:
        run: As for `load_policy`.
        episodes: Number of episodes.
        checkpoint: As for `load_policy`.
        seed: Seed of the envs; None for a fresh one. The run's own seed repeats the episodes of its final evaluation.
        deterministic: True for the most likely actions; False for actions sampled as in training.
        envs: As for `ppo.train`, for a run that was not trained on its config's env.
        trust_modules: Whether to allow the import of the modules that the run names.
        warn: Called with a message for each damaged checkpoint, and if episodes do not end.

    Raises:
        RunError: If the run has no checkpoint that can be read, or names a module that may not be imported.
        ConfigError: If there are no episodes, no `envs` although the run was trained on envs passed to `ppo.train`, or
            the policy cannot play in the envs.
    """
    players = load_players(
        run,
        episodes,
        trust_modules=trust_modules,
        checkpoint=checkpoint,
        seed=seed,
        deterministic=deterministic,
        envs=envs,
        warn=warn,
    )
    return evaluate(players, envs, episodes)


def load_players(
    run: Run | PathLike[str] | str, episodes: int, *, checkpoint: str | int = LATEST, seed: int | None = None,
    deterministic: bool = True, envs: EnvSource = None, trust_modules: bool = False,
    warn: Callable[[str], None] = print,
) -> Players:  # fmt: skip
    """Returns the policies of a run, ready to play with the run's settings.

    Every command and function that evaluates a finished run begins here. See `evaluate_run` for the arguments.
    `Players.config` has the seed.
    """
    if episodes < 1:
        raise ConfigError(f"episodes {episodes} is out of range: it must be 1 or more")
    run = Run.open(run, trust_modules=trust_modules)
    config = config_to_load(run, env=envs is None)
    run.check_begun()
    run.check_given(envs is not None)
    seed = fresh_seed() if seed is None else seed
    config = dataclasses.replace(config, seed=seed, sample=not deterministic)
    # The agents are built with the run's spaces, because the weights follow the order of their keys.
    agents = {team: load_agent(run, warn, checkpoint=checkpoint, team=team) for team in run.read_spaces()}
    longest = number_in(run.checkpoints, checkpoint, "episodes", "longest")
    updates = number_in(run.checkpoints, checkpoint, "update") or 0
    return Players(agents, config, limit_of(longest, config.num_steps * updates), warn)
