"""PPO's training loop: collect a rollout, update the policies, save, evaluate, report."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from ppo.algorithm.collector import Collector, Rollouts
from ppo.algorithm.teams import Team, Teams
from ppo.callbacks import Callbacks
from ppo.collectors import OnRay, check_envs, collector_for
from ppo.config import Config
from ppo.envs import EnvSource
from ppo.model.checks import check_rollout
from ppo.policies.best import Evaluator
from ppo.policies.evaluation import Players, check_evaluation, limit_of
from ppo.policies.policy import Policy
from ppo.run.checkpoint import modules_in_checkpoints, recorded_actions
from ppo.run.folder import Run
from ppo.run.metrics import Clock, MetricsWriter, with_means
from ppo.run.origin import start_from
from ppo.run.progress import Progress
from ppo.run.resume import Saver
from ppo.run.scores import Evaluation, Result
from ppo.run.signals import Stop, stop_on_signal
from ppo.run.status import Collecting, Status, Tally
from ppo.runtime import compilation_cache


def run_training(
    config: Config, run: Run, callback: Callbacks, *, envs: EnvSource = None, eval_envs: EnvSource = None,
    resume: bool = False, origin: Run | None = None, on_ray: OnRay | None = None,
) -> Result:  # fmt: skip
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
    stop, warn = Stop(), callback.on_warning
    status = Status("building the environments", stop)
    callback.attach(config, run.path)
    callback.on_status(status)
    if resume:
        run.check_given(envs is not None)  # before `config.env` is made, which may not exist
    evaluated = envs if eval_envs is None else eval_envs
    with run.locked(warn), collector_for(config, envs, eval_envs, on_ray, warn) as collector:
        check_envs(collector, config, run, given=envs is not None, resume=resume, origin=origin, warn=warn)
        check_evaluation(run, config, evaluated, warn)
        trainer = Trainer(config, run, collector, callback, evaluated, resume=resume, status=status, stop=stop)
        with closing(trainer), stop_on_signal(stop):
            if origin is not None:
                start_from(origin, trainer.teams, run, warn)
            return trainer.train()


class Trainer:
    """The loop of a run. See `run_training` for `config`, `run`, `callback` and `resume`.

    Args:
        collector: Steps the envs.
        evaluated: What evaluations use; see `ppo.train`.
        status: Says what the run is doing.
        stop: Ends the run after the current update if it is set, or at once before the first update.

    Attributes:
        teams: The policies with their learners: one if the envs have one agent.
        collector: Steps the envs with the policies.
        progress: How far the run has come.
        saver: Writes the checkpoints.
        evaluation: Evaluation of the current policies; None if they have not been evaluated.
    """

    def __init__(
        self, config: Config, run: Run, collector: Collector, callback: Callbacks, evaluated: EnvSource = None, *,
        resume: bool = False, status: Status | None = None, stop: Stop | None = None,
    ):  # fmt: skip
        self.config, self.collector, self._run, self._callback = config, collector, run, callback
        self._status = Status("training") if status is None else status
        self._stop = Stop() if stop is None else stop
        spaces = run.read_spaces() if resume else collector.spaces  # the bounds of observations may differ
        self.teams = Teams(config, spaces, collector.members)
        collector.use(list(self.teams.actors.values()))
        self.progress = Progress(config, {team.name: team.members for team in self.teams if team.name})
        modules = modules_in_checkpoints(self.teams)
        self._observed: dict[str, Any] = {}
        self._restarts = self._reported_restarts = collector.restarts
        self.saver = Saver(
            run, self.progress, collector, callback, modules, status=self._status,
            actions=lambda: recorded_actions(self.teams.actors, self._observed),
        )  # fmt: skip
        self._stop.kept, self._stop.discard = self.saver.kept, run.discard_if_empty
        if resume:
            self.saver.resume(config)
        else:
            self._warn_of_idle_settings()
        self._evaluator = Evaluator(run, self.saver, config, evaluated, self._status)
        self._writer = MetricsWriter(run, config, self.progress.env_steps)
        if self._writer.has_report:
            self.progress.unreported = None  # the metrics of the checkpoint were reported before the run was resumed
        self.evaluation: Evaluation | None = None

    def _warn_of_idle_settings(self) -> None:
        """Warns of settings that were changed, but have no effect on these envs or with the other settings."""
        agents = [team.agent for team in self.teams]
        images = any(agent.observations.has_images for agent in agents)
        gaussians = any(agent.log_std is not None for agent in agents)
        for reason, names in self.config.without_effect(images=images, gaussians=gaussians).items():
            self._callback.on_warning(f"settings have no effect, because {reason}: {', '.join(names)}")

    def train(self) -> Result:
        """Trains until the last update, or until a callback or a signal ends the run, and saves the run."""
        config, progress, callback = self.config, self.progress, self._callback
        with self.saver.rescuing(self._stop):
            self.begin()
            while not (progress.finished or self._stop.is_set() or callback.should_stop):
                metrics = self.learn(self.collect())
                # Order: a checkpoint precedes the report and the evaluation, which may take a long time. It holds the
                # metrics, which a resumed run reports if this process does not get that far.
                if progress.due(config.checkpoint_interval, config.eval_interval) or self.saver.overdue:
                    self.saver.save(periodic=not progress.finished)
                self.report(metrics)
                callback.on_update(metrics)
            # A signal or `StopTraining` takes precedence over a callback's `stop`, which finishes the run early.
            reason = None if progress.finished or self._stop.is_set() else callback.reason
            if (progress.finished or reason) and not callback.interrupted:
                evaluation = self.finish(reason)
                if evaluation is not None:
                    return Result(self._run.path, progress.env_steps, evaluation, stopped=reason)
        self.saver.save()
        return Result(self._run.path, progress.env_steps, evaluation=None, signal=self._stop.number)

    def begin(self) -> None:
        """Restores the envs from the checkpoint; if that is not possible, resets them to begin fresh episodes."""
        self._status.activity = "resetting the environments"
        progress = self.progress
        if not self.saver.restore_envs():
            self.collector.begin(progress.env_steps)
        progress.clock = Clock(progress.clock.wall_s, progress.env_steps)
        self._status.activity = "training"
        self.teams.copy_to_actors()
        self._callback.attach_policies(lambda: {team.name: _live(team) for team in self.teams})
        self._callback.on_start(self.config, progress.env_steps)
        if progress.unreported is not None:
            self.report(progress.unreported)  # the run ended between a checkpoint and its report

    def collect(self) -> Rollouts:
        """Returns the next rollout of every team.

        Raises:
            TrainingDiverged, NothingAllowed: If an observation, a reward or an action mask is unusable.
        """
        if self.progress.updates == 0 and self.teams.lacks_statistics:
            # Without statistics, the first update would train on unscaled, clipped features, which then change at once.
            # Rollout 0 therefore only initializes the normalizers.
            self.teams.observe(self._rollouts(0, "initializing the normalizers").collected)
        with self.progress.clock.spent_on("collect"):
            return self._rollouts(self.progress.updates + 1, "collecting")

    def _rollouts(self, number: int, doing: str) -> Rollouts:
        """Returns rollout `number` of every team after checking it."""
        env_steps = self.progress.env_steps
        self.progress.ahead = True
        with self._status.doing(Collecting(self.collector, self.config.batch_size, doing)):
            rollouts = self.collector.collect(number, env_steps)
        name = f"the rollout that began after {env_steps} env-steps"
        for team, rollout in zip(self.teams, rollouts.arrays, strict=True):
            check_rollout(rollout, team.agent.observations, team.agent.distribution.mask_groups, name, team.members)
            # Owner: this process, until the next rollout is complete, which overwrites only the first observations.
            # Checkpoints record the actions of the policies in some of these observations.
            self._observed[team.name] = rollout.observations
        return rollouts

    def learn(self, rollouts: Rollouts) -> dict[str, Any]:
        """Updates the policies with a rollout, and returns all metrics.

        Raises:
            TrainingDiverged: If a loss is not finite. The policies do not change then.
        """
        progress, compiles = self.progress, not self.teams.compiled
        doing = "compiling the update" if compiles else "updating"
        with self._status.doing(doing), progress.clock.spent_on("learn"):
            losses = self.teams.update(rollouts.collected, progress.updates, progress.env_steps)
        if compiles:
            compilation_cache.publish()
        progress.count(rollouts, warn=self._callback.on_warning)
        self.evaluation = None
        times = progress.clock.read(progress.env_steps)
        metrics = {"env_steps": progress.env_steps, **times, **progress.episodes.summary(), **with_means(losses)}
        if self.config.on_worker_death == "restart":
            self._restarts = self.collector.restarts
            metrics["worker_restarts"] = self._restarts - self._reported_restarts
        progress.unreported = metrics
        return metrics

    def report(self, metrics: dict[str, Any], *, last: bool = False) -> None:
        """Reports the last update, including an evaluation, if either is due. The `last` report is always due.

        If a stop cuts the evaluation short, nothing is reported. A resumed run then begins with this report.
        """
        config, progress, callback, evaluation = self.config, self.progress, self._callback, None
        if not last and not progress.due(config.report_interval, config.eval_interval):
            return
        self._reported_restarts = self._restarts
        progress.clock.restart(progress.env_steps)  # here, so that the next speed includes the time of the evaluation
        if progress.due(config.eval_interval):
            evaluation = self.evaluate()
            if evaluation is None:
                return
            metrics |= evaluation.metrics()
        logged = callback.logged()
        self._writer.write(metrics, logged)
        progress.unreported = None
        callback.on_report({**metrics, **logged})
        if evaluation is not None:
            callback.on_evaluation(progress.env_steps, evaluation)

    def evaluate(self) -> Evaluation | None:
        """Evaluates the current policies on separate envs. Returns None if a stop is requested before it is done."""
        config, progress = self.config, self.progress
        limit = limit_of(progress.episodes.longest, config.num_steps * progress.updates)
        warn, tally = self._callback.on_warning, Tally(config.eval_episodes)
        self.evaluation = self._evaluator.evaluate(
            Players(self.teams.actors, config, limit, warn, tally, self._stop.is_set)
        )
        return self.evaluation

    def finish(self, reason: str | None) -> Evaluation | None:
        """Evaluates the final policies if they have not been evaluated yet, and writes their scores.

        With the reason why a callback finishes the run early, first saves and reports the last update if necessary.
        Returns None if the evaluation was cut short.
        """
        env_steps, metrics = self.progress.env_steps, self.progress.unreported
        if reason is not None:
            self.saver.save()
            if metrics is not None:
                self.report(metrics, last=True)
        evaluation = self.evaluation
        if evaluation is None:
            evaluation = self.evaluate()
            if evaluation is None:
                return None
            self._callback.on_evaluation(env_steps, evaluation)
        why = {} if reason is None else {"stopped": reason}
        self._run.write_evaluation({"env_steps": env_steps, **evaluation.summary(), **evaluation.to_json(), **why})
        return evaluation

    def close(self) -> None:
        """Closes the files."""
        self._writer.close()


def _live(team: Team) -> Policy:
    """Returns the policy of a team for callbacks. Each call uses the current weights."""
    return Policy(team.actor, return_scale=lambda: float(team.learner.rewards.moments.deviation))
