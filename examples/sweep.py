"""A search for better settings with Optuna, which stops bad trials early.

    python -m examples.sweep --trials 20 --config cartpole --logdir runs
    python -m examples.sweep --trials 20 --env Hopper-v5 --num-envs 32 --total-steps 300000

It takes the settings of `ppo train` as flags; for custom envs, call `search(config, make_env)`. The function
`settings` defines the search space. Each trial is a complete run with its own run folder, so `ppo plot`, `ppo evaluate`
and TensorBoard work on it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import gymnasium as gym

import ppo
from ppo.cli import train

try:
    import optuna
except ImportError as error:
    raise SystemExit("Optuna is missing: `pip install -e '.[sweep]'`") from error


class Pruning(ppo.Callback):
    """Reports each evaluation to a trial, and ends the run if Optuna prunes the trial."""

    def __init__(self, trial: optuna.Trial):
        self._trial = trial

    def on_evaluation(self, env_steps: int, evaluation: ppo.Evaluation) -> None:
        self._trial.report(evaluation.returns.mean(), env_steps)
        if self._trial.should_prune():
            raise ppo.StopTraining


def settings(trial: optuna.Trial, base: ppo.Config) -> ppo.Config:
    """Returns the settings that Optuna suggests for a trial."""
    return dataclasses.replace(
        base,
        learning_rate=trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True),
        gamma=1 - trial.suggest_float("1 - gamma", 1e-3, 5e-2, log=True),
        final_gamma=None,  # some presets have one
        gae_lambda=trial.suggest_float("gae_lambda", 0.8, 1.0),
        clip_range=trial.suggest_categorical("clip_range", [0.1, 0.2, 0.3]),
        epochs=trial.suggest_int("epochs", 3, 20),
        eval_interval=max(base.total_steps // 5, 1),
    )


def search(
    config: ppo.Config | str,
    envs: Callable[[], gym.Env] | Sequence[Callable[[], gym.Env]] | None = None,
    *,
    trials: int = 20,
    total_steps: int | None = None,
    logdir: Path = Path("runs"),
) -> optuna.Study:
    """Searches for the settings that give the deterministic policy the highest score.

    Args:
        config: The initial settings, or the name of a preset.
        envs: As for `ppo.train`: functions that make the envs; None for `config.env`.
        trials: Number of trials.
        total_steps: Env-steps of each trial; None for `config.total_steps`.
        logdir: Folder for the run folders.
    """
    base = ppo.preset(config) if isinstance(config, str) else config
    base = dataclasses.replace(base, total_steps=total_steps or base.total_steps)

    def objective(trial: optuna.Trial) -> float:
        config = settings(trial, base)
        result = ppo.train(config, envs, callbacks=[Pruning(trial)], logdir=logdir, name=f"trial-{trial.number}")
        trial.set_user_attr("run", str(result.path))
        if result.signal is not None:  # Ctrl-C: the run has saved a checkpoint
            study.stop()
        if result.evaluation is None:
            raise optuna.TrialPruned
        return float(result.evaluation.returns.mean())

    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(
        direction="maximize", sampler=sampler, pruner=optuna.pruners.MedianPruner(n_startup_trials=3)
    )
    study.optimize(objective, n_trials=trials, catch=(ppo.TrainingDiverged,))
    if any(trial.state.name == "COMPLETE" for trial in study.trials):
        print(f"best: {study.best_value:,.1f} with {study.best_params}, in {study.best_trial.user_attrs['run']}")
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trials", type=int, default=20)
    own, flags = parser.parse_known_args()
    arguments, config = train.parse(flags)
    if arguments != train.Arguments(config=arguments.config, logdir=arguments.logdir):
        parser.error("a sweep takes --trials, --config, --logdir and the settings, but no other flag of `ppo train`")
    search(config, trials=own.trials, logdir=arguments.logdir)
