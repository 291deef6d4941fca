"""Plays episodes on separate envs to score policies, with one agent or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from ppo.config import Config, ConfigError
from ppo.envs import EnvSource, distinct, evaluation_envs, mask_warning, spaces_of, time_limit_of
from ppo.errors import TrainingDiverged
from ppo.model.agent import Agent
from ppo.policies.policy import load_agent
from ppo.run import infos
from ppo.run.checkpoint import LATEST, number_in
from ppo.run.folder import Run, Spaces, space_to_json
from ppo.run.metrics import scored
from ppo.run.modules import config_to_load
from ppo.run.scores import Evaluation
from ppo.run.status import Tally
from ppo.seeds import evaluation_rng, evaluation_seeds, fresh_seed
from vecenv import AsyncVectorEnv, SyncVectorEnv, WorkerDied
from vecenv.tree import leaves

if TYPE_CHECKING:
    from vecenv.adapters.pettingzoo import ParallelVectorEnv

MIN_LIMIT = 10_000  # the fewest steps after which an evaluation cuts an episode off, except in short runs
ATTEMPTS = 3  # how often an evaluation is played if the death of a worker cuts its episodes off


class EvaluationStopped(Exception):
    """A stop was requested during an evaluation, which therefore has no result."""


class _Side:
    """A team's policy in all envs: what it sees, what it remembers, and what its agents have earned.

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
        """Takes the team's results of a step, and whether the episode of each env ended, `bool[M]`."""
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


@dataclass(frozen=True)
class Players:
    """Policies that play, and how.

    Attributes:
        agents: The policy of each team. The only team of envs with one agent is "".
        config: The settings, for the envs, the seed, the kind of actions and the timeout.
        limit: Number of steps after which an episode is cut off; see `limit_of`. A longer time limit of the env counts
            instead, up to `MIN_LIMIT` steps.
        warn: Called with the number of episodes that were cut off, if there are any.
        tally: Counts the episodes and steps, for a display.
        stopped: Whether to end the evaluation without a result; asked before every step.
    """

    agents: Mapping[str, Agent]
    config: Config
    limit: int
    warn: Callable[[str], None] = print
    tally: Tally = dataclasses.field(default_factory=Tally)
    stopped: Callable[[], bool] = lambda: False


def play(
    players: Players, envs: AsyncVectorEnv | SyncVectorEnv | ParallelVectorEnv, episodes: int, *, functions: int = 1
) -> Evaluation:
    """Plays episodes in a `ParallelVectorEnv`, or in another vector env of vecenv. The normalizers do not change.

    The number of episodes of each env is fixed in advance. Counting the first episodes to finish would bias the score
    towards short episodes. An episode that is cut off counts with its return and its infos so far. Its env plays no
    further episode. `functions` is the number of different functions that made the envs in turn.

    Raises:
        EvaluationStopped: If `players.stopped` says so.
        TrainingDiverged: If a reward is not finite.
        NothingAllowed: If the env has one agent, and its action mask forbids every action.
        multiprocessing.TimeoutError: If an env does not answer for `config.step_timeout_s` seconds.
    """
    config, tally, whole = players.config, players.tally, whole_envs(envs)
    limit = max(players.limit, min(MIN_LIMIT, time_limit_of(whole)))
    teams: dict[str, Any] = {"": envs} if whole is envs else envs.groups  # type: ignore[union-attr]
    quotas = episodes // whole.num_envs + (np.arange(whole.num_envs) < episodes % whole.num_envs)
    played: list[list[tuple[float, int, list[float], dict[str, np.ndarray], bool]]] = [[] for _ in quotas]
    left, unfinished = quotas.copy(), 0  # episodes of each env that have not ended; those that never will
    first, _ = reset_envs(envs, config.seed, config.step_timeout_s)
    rng = evaluation_rng(config.seed) if config.sample else None
    sides = {}
    for name, rows in teams.items():
        names = () if whole is envs else tuple(map(str, rows.group.agents))
        sides[name] = _Side(players.agents[name], rows, names, first[name], rng)
    while left.any():
        if players.stopped():
            raise EvaluationStopped
        results, over = _step(envs, {name: side.act() for name, side in sides.items()}, config.step_timeout_s)
        for name, side in sides.items():
            side.observe(results[name], over)
        tally.steps += whole.num_envs
        cut = ~over & (whole.episode_lengths >= limit)
        for i in np.flatnonzero((over | cut) & (left > 0)):
            infos_of = [values[i] for values in whole.infos_so_far.values()]
            earned = {name: (side.earned() if cut[i] else side.returns)[i] for name, side in sides.items()}
            played[i].append((whole.episode_returns[i], whole.episode_lengths[i], infos_of, earned, cut[i]))
            unfinished += left[i] if cut[i] else 0
            left[i] = 0 if cut[i] else left[i] - 1
            tally.episodes += 1
        for side in sides.values():
            side.returns = np.where(over[:, None], 0.0, side.returns)
    if unfinished:
        players.warn(
            f"{unfinished} of {episodes} episodes did not end: an env whose episode reaches {limit:,} steps is "
            "stopped, far beyond the episodes of training, and the episode counts with its return so far. Give the env "
            "a time limit: max_episode_steps when it is registered, or --env-kwargs max_episode_steps=N."
        )
    columns = zip(*(episode for of_env in played for episode in of_env), strict=True)
    totals, lengths, of_infos, returns, was_cut = columns
    of_agents: dict[str, np.ndarray] = {}
    for team, side in sides.items():
        values, members = np.array([one[team] for one in returns]), side.members
        for name in scored(team, members):
            of_agents[name] = values[:, members.index(name)] if name in members else values.mean(axis=1)
    counts = [len(of_env) if functions > 1 else 0 for of_env in played]
    return Evaluation(
        np.array(totals),
        np.array(lengths),
        {
            key: infos.with_absent_flags(values, np.array(was_cut))
            for key, values in zip(whole.info_keys, np.array(of_infos).T, strict=True)
        },
        of_agents,
        np.repeat(np.arange(len(played)) % functions, counts),
        not config.sample,
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

    Raises EvaluationStopped as `play` does, ConfigError if the policies cannot play in the envs, and WorkerDied if a
    worker died in each attempt.
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
            # The episodes that a restarted worker cut off would count with a part of their returns.
            if attempt < ATTEMPTS:
                players.warn("a worker died during the evaluation, which is therefore played again")
            tally.episodes = before
    raise WorkerDied(f"a worker died in each of {ATTEMPTS} attempts to evaluate: see the warnings above")


def _processes(envs: Any) -> list[Any]:
    """Returns the worker processes. A worker that is restarted has another process."""
    return getattr(whole_envs(envs), "processes", [])


def check_evaluation(run: Run, config: Config, source: EnvSource, warn: Callable[[str], None]) -> None:
    """Builds and resets an evaluation env of each function, so that a mistake ends the run before training.

    Warns if infos hold an action mask that no policy would see. A vector env passed by the user is not reset.

    Raises:
        ConfigError: If the spaces of an env differ from those of the training envs.
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


def whole_envs(envs: Any) -> AsyncVectorEnv | SyncVectorEnv:
    """Returns the vector env whose rows are envs: that of a `ParallelVectorEnv`, or `envs` itself."""
    return getattr(envs, "joint", envs)


def reset_envs(envs: Any, seed: int, timeout_s: float | None) -> tuple[dict[str, Any], Any]:
    """Resets evaluation envs; returns the observations of each team, and the infos."""
    whole = whole_envs(envs)
    seeds = evaluation_seeds(seed, whole.num_envs)
    if envs is not whole:
        observations, infos = envs.reset(seed=seeds, timeout=timeout_s)
        return envs.by_group(observations), infos
    if isinstance(envs, SyncVectorEnv):  # has no timeouts, because its envs are in this process
        observations, infos = envs.reset(seed=seeds)
    else:
        envs.reset_async(seed=seeds)
        observations, infos = envs.reset_wait(timeout_s)
    return {"": observations}, infos


def _step(envs: Any, actions: dict[str, Any], timeout_s: float | None) -> tuple[dict[str, tuple], np.ndarray]:
    """Steps all envs; returns the results of each team, and whether the episode of each env ended, `bool[M]`."""
    if envs is not whole_envs(envs):
        envs.step_async(envs.from_groups(actions))
        columns = [envs.by_group(column) for column in envs.step_wait(timeout_s)]
        return {name: tuple(column[name] for column in columns) for name in envs.groups}, envs.over
    if isinstance(envs, SyncVectorEnv):
        found = envs.step(actions[""])
    else:
        envs.step_async(actions[""])
        found = envs.step_wait(timeout_s)
    return {"": found}, found[2] | found[3]


def check_playable(agents: Mapping[str, Agent], teams: Mapping[str, Spaces]) -> None:
    """Raises ConfigError if the policies of teams cannot play in envs with the given spaces of teams.

    The leaves of the spaces may differ in their bounds, their precision and the order of their keys.
    """
    if agents.keys() != teams.keys():
        raise ConfigError(f"the policies are those of {list(agents)}, but the envs have the groups {list(teams)}")
    for name, spaces in teams.items():
        for trained, found in zip((agents[name].observations.space, agents[name].action_space), spaces, strict=True):
            if _kinds(trained) != _kinds(found):
                raise ConfigError(f"the policy was trained on {trained}, but the envs have {found}")


def _kinds(space: gym.Space) -> dict[tuple, dict[str, Any]]:
    """Returns what describes each leaf of a space, without the bounds and the precision of a Box."""

    def kind(values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "low": None, "high": None, "dtype": values.get("dtype", "").rstrip("0123456789")}

    return {path: kind(space_to_json(leaf)) for path, leaf in leaves(space)}


def evaluate_run(
    run: Run | Path | str, episodes: int, *, checkpoint: str | int = LATEST, seed: int | None = None,
    deterministic: bool = True, envs: EnvSource = None, warn: Callable[[str], None] = print, tally: Tally | None = None,
) -> Evaluation:  # fmt: skip
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
        ConfigError: If there are no episodes, no `envs` although the run was trained on envs passed to `ppo.train`, or
            the policy cannot play in the envs.
    """
    seed = fresh_seed() if seed is None else seed
    players = load_players(run, envs, episodes, checkpoint, warn, tally, seed=seed, sample=not deterministic)
    return evaluate(players, envs, episodes)


def load_players(
    run: Run | Path | str, envs: EnvSource, episodes: int, checkpoint: str | int, warn: Callable[[str], None],
    tally: Tally | None, **settings: Any,
) -> Players:  # fmt: skip
    """Returns the policies of a run, which play with the run's settings, apart from those given. See `evaluate_run`."""
    if episodes < 1:
        raise ConfigError(f"episodes {episodes} is out of range: it must be 1 or more")
    run = Run.open(run)
    config = config_to_load(run, env=envs is None)
    run.check_begun()
    run.check_given(envs is not None)
    # The agents are built with the run's spaces, because the weights follow the order of their keys.
    agents = {team: load_agent(run, warn, checkpoint=checkpoint, team=team) for team in run.read_spaces()}
    longest = number_in(run.checkpoints, checkpoint, "episodes", "longest")
    updates = number_in(run.checkpoints, checkpoint, "update") or 0
    limit = limit_of(longest, config.num_steps * updates)
    return Players(agents, dataclasses.replace(config, **settings), limit, warn, tally or Tally())
