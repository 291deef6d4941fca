"""Evaluations during training, and the checkpoint `best`: the policy with the highest mean return in an evaluation."""

from __future__ import annotations

import dataclasses

from ppo.config import Config
from ppo.envs import EnvSource
from ppo.errors import RunError
from ppo.policies.evaluation import EvaluationStopped, Players, evaluate
from ppo.policies.policy import load_agent
from ppo.run.checkpoint import BEST, number_in
from ppo.run.folder import Run
from ppo.run.resume import Saver
from ppo.run.scores import Evaluation
from ppo.run.status import Status, Tally


class Evaluator:
    """Evaluates the policies of a run during training on `source`; see `ppo.train`. Keeps the checkpoint `best`."""

    def __init__(self, run: Run, saver: Saver, config: Config, source: EnvSource, status: Status):
        self._run, self._saver, self._config, self._source, self._status = run, saver, config, source, status
        self._return_mean = number_in(run.checkpoints, BEST, "return_mean")
        self._is_stale = self._return_mean is not None  # an earlier process may have evaluated it in other envs

    def evaluate(self, players: Players) -> Evaluation | None:
        """Returns the scores of the current policies, which become the checkpoint `best` if none were higher before.

        Returns None if a stop is requested meanwhile.
        """
        try:
            if self._is_stale:
                self._refresh(players)
            with self._status.doing(players.tally):
                evaluation = evaluate(players, self._source, self._config.eval_episodes)
        except EvaluationStopped:
            return None
        return_mean = float(evaluation.returns.mean())
        if self._return_mean is None or return_mean >= self._return_mean:
            self._saver.save_best({"return_mean": return_mean, "deterministic": evaluation.deterministic})
            self._return_mean = return_mean
        return evaluation

    def _refresh(self, players: Players) -> None:
        """Evaluates the checkpoint again, in the envs of this process.

        Otherwise a score from easier envs would prevent later policies from becoming the best.
        """
        before, warn, tally = self._return_mean, players.warn, Tally(doing="evaluating the best checkpoint")
        try:
            agents = {team: load_agent(self._run, warn, checkpoint=BEST, team=team) for team in players.agents}
            best = dataclasses.replace(players, agents=agents, tally=tally)
            with self._status.doing(tally):
                scores = evaluate(best, self._source, self._config.eval_episodes)
            self._return_mean = now = float(scores.returns.mean())
            if now != before:
                warn(f"the checkpoint best, whose mean return was {before:,.1f}, has {now:,.1f} in the evaluation envs")
        except RunError:
            self._return_mean = None  # it is damaged, as `warn` has said
        self._is_stale = False
