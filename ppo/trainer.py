"""PPO's training loop: collect a rollout, update the policy, report, save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import tensorflow as tf

import vecenv
from ppo.algorithm.collector import Collected, Collector, Rollouts
from ppo.algorithm.teams import Team, config_of, team_of
from ppo.callbacks import Callbacks
from ppo.collectors import OnRay, collector_for
from ppo.config import Config
from ppo.envs import EnvSource
from ppo.footprint import check_mappings, check_memory
from ppo.graphs import graph_function
from ppo.model.agent import Agent, space_warnings
from ppo.model.checks import check_losses, check_rollout
from ppo.policies.best import Best
from ppo.policies.evaluation import EvaluationStopped, Players, check_evaluation, evaluate, limit_of
from ppo.policies.policy import Policy
from ppo.run.checkpoint import name_of, recorded_actions
from ppo.run.folder import Run
from ppo.run.metrics import Clock, MetricsWriter, with_means
from ppo.run.resume import Progress, Saver, start_from
from ppo.run.scores import Evaluation, Result
from ppo.run.signals import Stop, stop_on_signal
from ppo.run.status import Collecting, Status, Tally
from ppo.run.wrappers import agreed


def run_training(
    config: Config,
    run: Run,
    callback: Callbacks,
    *,
    envs: EnvSource = None,
    eval_envs: EnvSource = None,
    resume: bool = False,
    origin: Run | None = None,
    on_ray: OnRay | None = None,
) -> Result:
    """Trains for `config.total_steps` and writes everything to the run folder. See `ppo.train` for the errors.

    If an exception ends the run, the last finished update is saved, and a note added to the exception says where.

    Args:
        config: All settings.
        run: A new run folder, or a folder with a checkpoint if `resume` is set.
        callback: Receives reports, evaluations, checkpoints and warnings.
        envs, eval_envs: As for `ppo.train`.
        resume: Whether to continue from the newest checkpoint.
        origin: The run from which a new run takes its initial networks and normalizers.
        on_ray: The collectors on Ray that step the envs. None: this process and its workers step them.
    """
    status = Status("building the environments")
    callback.attach(config, run.path)
    callback.on_status(status)
    if resume:
        run.check_given(envs is not None)  # before `config.env` is made, which may not exist
    making = collector_for(config, envs, eval_envs, on_ray, callback.on_warning)
    with run.locked(callback.on_warning), making as collector:
        teams = collector.spaces
        check_mappings(len(teams))
        for name, spaces in teams.items():
            check_memory(config_of(config, collector.members[name]), spaces, held_bytes=collector.held_bytes)
        if resume:
            run.check_spaces(teams)
        else:
            for message in space_warnings(config, teams.values()):
                callback.on_warning(message)
            run.write_spaces(teams, given=envs is not None, wrappers=agreed(collector.wrappers))
        if origin is not None:
            origin.check_spaces(teams)
        evaluated = envs if eval_envs is None else eval_envs
        check_evaluation(run, config, evaluated, callback.on_warning)
        stop = Stop()
        trainer = Trainer(
            config, run, collector, callback, evaluated, resume=resume, status=status, stopped=stop.is_set
        )
        with closing(trainer), stop_on_signal(stop):
            if origin is not None:
                started = {team.name: (team.agent, team.learner.rewards.moments) for team in trainer.teams}
                start_from(origin, started, run, callback.on_warning)
            worker_died = False
            try:
                trainer.begin()
                while not trainer.progress.finished and not (stop.is_set() or callback.should_stop):
                    trainer.conclude(trainer.iterate())
                reason = trainer.reason(interrupted=stop.is_set() or callback.interrupted)
                if reason or (trainer.progress.finished and not callback.interrupted):
                    evaluation = trainer.finish(reason)
                    if evaluation is not None:
                        return Result(run.path, trainer.progress.env_steps, evaluation, stopped=reason)
            except BaseException as error:
                # A signal may go to the whole process group, whose workers it then kills.
                worker_died = stop.is_set() and isinstance(error, vecenv.WorkerDied)
                if not worker_died:
                    trainer.rescue(error)
                    raise
            trainer.save()
            return Result(run.path, trainer.progress.env_steps, evaluation=None, signal=stop.number)


def _live(team: Team) -> Policy:
    """Returns the policy of a team, with its current weights whenever it is called."""
    return Policy(team.actor, return_scale=lambda: float(team.learner.rewards.moments.deviation))


class Trainer:
    """A run's agent, learner and collector, and the steps of its loop. `run_training` documents the arguments.

    Attributes:
        teams: The policies with their learners: one if the envs have one agent.
        agent: The networks, normalizers and action distribution of the first team.
        learner: Updates this agent.
        collector: Steps the envs with the policies.
        progress: How far the run has come.
        evaluation: Evaluation of the current policy; None if it has not been evaluated.
    """

    def __init__(
        self, config: Config, run: Run, collector: Collector, callback: Callbacks, source: EnvSource = None, *,
        resume: bool = False, status: Status | None = None, stopped: Callable[[], bool] = lambda: False,
    ):  # fmt: skip
        self._status = Status("training") if status is None else status
        self.config, self._run, self._callback, self._source = config, run, callback, source
        self._stopped = stopped
        spaces = run.read_spaces() if resume else collector.spaces  # the bounds of observations may differ
        self.teams = [team_of(config, name, collector.members[name], spaces[name]) for name in collector.spaces]
        self.collector = collector
        collector.use([team.actor for team in self.teams])
        self.agent, self.learner = self.teams[0].agent, self.teams[0].learner
        self.progress = Progress(config, {team.name: team.members for team in self.teams if team.name})
        learning: list[tf.Module] = [module for team in self.teams for module in (team.agent, team.learner)]
        learned = {variable.ref(): variable for module in learning for variable in module.variables}
        self._learned = list(learned.values())
        self._values = graph_function(lambda: [variable.read_value() for variable in self._learned])
        self._ahead = False  # whether a rollout was collected from which no update has learned
        # The actors are not saved, because they are the agents or copies of them.
        modules: dict[str, Any] = {}
        for team in self.teams:
            modules |= {name_of("agent", team.name): team.agent, name_of("learner", team.name): team.learner}
        self._saver = Saver(run, self.progress, collector, callback, modules)
        if resume:
            self._saver.resume(config)
        self._best = Best(run, self._saver, config, source)
        self._writer = MetricsWriter(run, config, self.progress.env_steps)
        self.evaluation: Evaluation | None = None
        if self._writer.has_report:
            self.progress.unreported = None
        # Views of the last rollout's slab, which the envs do not overwrite before the next rollout is complete.
        self._observed: dict[str, Any] = {}

    def begin(self) -> None:
        """Restores the envs from the checkpoint; if that is not possible, resets them to begin fresh episodes."""
        self._status.activity = "resetting the environments"
        progress = self.progress
        if not self._saver.restore_envs():
            self.collector.begin(progress.env_steps)
        progress.clock = Clock(progress.clock.wall_s, progress.env_steps)
        self._status.activity = "training"
        self.policies()
        self._callback.attach_policies(lambda: {team.name: _live(team) for team in self.teams})
        self._callback.on_start(self.config, progress.env_steps)
        if progress.unreported is not None:
            self.report(progress.unreported)  # the run ended between a checkpoint and its report

    def iterate(self) -> dict[str, Any]:
        """Collects a rollout, updates the policies with it, and returns all metrics.

        Raises:
            TrainingDiverged: If an observation, a reward or a loss is not finite. The policy is then that of the
                previous update.
        """
        progress = self.progress
        if progress.updates == 0 and any(team.learner.unseen for team in self.teams):
            # Without statistics, the first update would train on unscaled, clipped features, which then change at once.
            # Rollout 0 therefore only initializes the normalizers.
            for team, part in zip(self.teams, self._collect(0).collected, strict=True):
                team.learner.observe(part)
        with progress.clock.spent_on("collect"):
            rollouts = self._collect(progress.updates + 1)
        with self._undone_on_error():
            losses = self._learn(rollouts.collected)
        self.policies()  # callbacks may use them
        progress.updates += 1
        self._ahead = False
        self._count_episodes(rollouts)
        # Owner: the envs own the slab from here on.
        self.evaluation = None
        times = progress.clock.read(progress.env_steps)
        return {"env_steps": progress.env_steps, **times, **progress.episodes.summary(), **losses}

    def _learn(self, collected: Sequence[Collected]) -> dict[str, float]:
        """Updates each team with its rollout, and returns the metrics."""
        progress = self.progress
        of_teams: dict[str, dict[str, float]] = {}
        for team, part in zip(self.teams, collected, strict=True):
            doing = self._status.doing("updating" if team.learner.compiled else "compiling the update")
            with doing, progress.clock.spent_on("learn"):
                of_teams[team.name] = team.learner.learn(part, progress.updates)
            check_losses(of_teams[team.name], progress.env_steps)
        return with_means(of_teams)

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Restores all agents and learners if the block raises, so that the previous update can be saved."""
        before = self._values()  # shares the variables' memory until they are written
        try:
            yield
        except BaseException:
            for variable, value in zip(self._learned, before, strict=True):
                variable.assign(value)
            raise

    def _collect(self, number: int) -> Rollouts:
        """Returns rollout `number` after checking it."""
        env_steps = self.progress.env_steps
        doing = "collecting" if number > 0 else "initializing the normalizers"
        self._ahead = True
        with self._status.doing(Collecting(self.collector, self.config.batch_size, doing)):
            self.policies()
            rollouts = self.collector.collect(number, env_steps)
        name = f"the rollout that began after {env_steps} env-steps"
        for team, arrays in zip(self.teams, rollouts.arrays, strict=True):
            check_rollout(arrays, team.agent.observations, team.agent.distribution.mask_groups, name, team.members)
            self._observed[team.name] = arrays.observations
        return rollouts

    def _count_episodes(self, rollouts: Rollouts) -> None:
        """Adds the episodes that ended in a rollout to the statistics.

        Only rollouts that an update has learned from count, as in `env_steps`: neither rollout 0, nor a rollout whose
        update failed.
        """
        episodes = self.progress.episodes
        for team, arrays in zip(self.teams, rollouts.arrays, strict=True):
            if team.name:
                episodes.add_team(team.name, arrays)
        episodes.add(rollouts.envs, warn=self._callback.on_warning)

    def policies(self) -> dict[str, Agent]:
        """Returns the current policy of each team on the host, by the name of the team."""
        return {team.name: team.policy() for team in self.teams}

    def conclude(self, metrics: dict[str, Any]) -> None:
        """Saves, evaluates and reports, each if it is due after an update, and calls `on_update`.

        Order: a checkpoint precedes an evaluation, which may take long, and every report. It holds the metrics, which a
        resumed run reports if this process did not get that far.
        """
        progress = self.progress
        progress.unreported = metrics
        if progress.due(self.config.checkpoint_interval) or progress.due(self.config.eval_interval):
            self.save(periodic=not progress.finished)
        self.report(metrics)
        self._callback.on_update(metrics)

    def reason(self, *, interrupted: bool) -> str | None:
        """Returns the reason that a callback passed to `stop`.

        It is None if there is none, if the run was interrupted, or if all updates have been made.
        """
        return None if interrupted or self.progress.finished else self._callback.reason or None

    def report(self, metrics: dict[str, Any], *, last: bool = False) -> None:
        """Evaluates and reports, each if it is due after an update. The last update is always reported.

        An evaluation that is cut short is not reported. A resumed run begins with it.
        """
        config, progress, callback = self.config, self.progress, self._callback
        evaluation, reports = None, last or progress.due(config.report_interval) or progress.due(config.eval_interval)
        if reports:  # restarted here, so that the next report's speed includes the time of the evaluation
            progress.clock.restart(progress.env_steps)
        if progress.due(config.eval_interval):
            evaluation = self.evaluate()
            if evaluation is None:
                return
            metrics |= evaluation.metrics()
        if reports:
            logged = callback.logged()
            self._writer.write(metrics, logged)
            progress.unreported = None
            callback.on_report({**metrics, **logged})
        if evaluation is not None:
            callback.on_evaluation(progress.env_steps, evaluation)

    def finish(self, reason: str | None) -> Evaluation | None:
        """Evaluates the final policy if it has not been evaluated yet, and writes its scores.

        With the reason why a callback finishes the run early, first saves and reports the last update if necessary.
        Returns None if the evaluation was cut short.
        """
        env_steps, evaluation, metrics = self.progress.env_steps, self.evaluation, self.progress.unreported
        if reason is not None:
            self.save()
            if metrics is not None:
                self.report(metrics, last=True)
        if evaluation is None:
            evaluation = self.evaluate()
            if evaluation is None:
                return None
            self._callback.on_evaluation(env_steps, evaluation)
        why = {} if reason is None else {"stopped": reason}
        self._run.write_evaluation({"env_steps": env_steps, **evaluation.summary(), **evaluation.to_json(), **why})
        return evaluation

    def evaluate(self) -> Evaluation | None:
        """Evaluates the current policy on separate envs. Returns None if a stop is requested meanwhile."""
        progress, tally = self.progress, Tally(self.config.eval_episodes)
        limit = limit_of(progress.episodes.longest, self.config.num_steps * progress.updates)
        players = Players(self.policies(), self.config, limit, self._callback.on_warning, tally, self._stopped)
        try:
            self._best.refresh(players, self._status)
            with self._status.doing(tally):
                self.evaluation = evaluate(players, self._source, self.config.eval_episodes)
        except EvaluationStopped:
            return None
        self._best.offer(self.evaluation, recorded_actions(self.policies(), self._observed))
        return self.evaluation

    def save(self, *, periodic: bool = False) -> None:
        """Writes a checkpoint unless nothing has changed since the last one; see `Saver.save`.

        Args:
            periodic: Whether training continues afterwards.
        """
        if self._saver.saved:
            return
        with self._status.doing("saving"):
            actions = recorded_actions(self.policies(), self._observed)
            self._saver.save(actions, periodic=periodic, dropped=self._ahead)

    def rescue(self, error: BaseException) -> None:
        """Saves the last finished update after an error, and adds a note to the error."""
        env_steps = self.progress.env_steps
        if env_steps == 0:
            return
        failure = None
        if not self._saver.written:
            try:
                self.save()
            except Exception as failed:  # also from a callback, after the checkpoint was written
                failure = failed
        if self._saver.written:
            error.add_note(
                f"Everything up to env-step {env_steps:,} is saved in {self._run.path}, which can be resumed."
            )
        else:
            error.add_note(f"The run could not be saved at env-step {env_steps:,}: {failure}")

    def close(self) -> None:
        """Closes the files."""
        self._writer.close()
