"""A thin TensorFlow 2 PPO trainer on vecenv's shared memory. See README.md and docs/ppo.md.

`import ppo` is cheap: it imports TensorFlow only when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo import callbacks as callbacks
    from ppo.callbacks import Callback as Callback
    from ppo.callbacks import StopTraining as StopTraining
    from ppo.config import Config as Config
    from ppo.config import ConfigError as ConfigError
    from ppo.envs import EnvSource
    from ppo.envs import vector_options as vector_options
    from ppo.errors import NothingAllowed as NothingAllowed
    from ppo.errors import RunError as RunError
    from ppo.errors import TrainingDiverged as TrainingDiverged
    from ppo.policies.evaluation import evaluate_run as evaluate_run
    from ppo.policies.policy import Policy as Policy
    from ppo.policies.policy import load_policy as load_policy
    from ppo.presets import preset as preset
    from ppo.results.export import export as export
    from ppo.results.video import record_run as record_run
    from ppo.run.folder import Run as Run
    from ppo.run.scores import Evaluation as Evaluation
    from ppo.run.scores import Result as Result

# By default, TensorFlow uses oneDNN only on CPUs with instructions for neural networks, such as AVX512_VNNI or AMX.
# oneDNN's convolutions are also much faster on CPUs with AVX2. No effect if TensorFlow is already imported.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# Otherwise, TensorFlow reserves all memory of each GPU, even if several runs share it. No effect on a GPU that
# TensorFlow already uses.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

_NAMES = {
    "ppo.callbacks": ("Callback", "StopTraining"),
    "ppo.config": ("Config", "ConfigError"),
    "ppo.envs": ("vector_options",),
    "ppo.errors": ("NothingAllowed", "RunError", "TrainingDiverged"),
    "ppo.policies.evaluation": ("evaluate_run",),
    "ppo.policies.policy": ("Policy", "load_policy"),
    "ppo.presets": ("preset",),
    "ppo.results.export": ("export",),
    "ppo.results.video": ("record_run",),
    "ppo.run.folder": ("Run",),
    "ppo.run.scores": ("Evaluation", "Result"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULES, "callbacks", "resume", "train"]


def train(
    config: Config,
    envs: EnvSource = None,
    *,
    eval_envs: EnvSource = None,
    callbacks: Callback | Iterable[Callback] = (),
    logdir: Path | str = "runs",
    name: str | None = None,
    init_from: Run | PathLike[str] | str | None = None,
    collectors: int | None = None,
    cluster: str | None = None,
    progress: bool = True,
) -> Result:
    """Trains a policy and saves the run in a new folder of `logdir`, as the command `ppo train` does.

    Returns the run folder, the number of steps, and the evaluation of the final policy, which is None if a signal or
    `StopTraining` interrupted the run. If an exception ends the run, the last finished update is saved, and a note
    added to the exception says where. TensorFlow's log is hidden, as by the command, unless the program has already
    imported TensorFlow.

    Args:
        config: All settings. `ppo.preset(name)` returns a tuned config; change it with `dataclasses.replace`.
        envs: What to train on instead of `config.env`: a function that makes an env, a list of `config.num_envs`
            such functions, or a vector env built with `**ppo.vector_options(config)`. The envs may differ only in the
            bounds of their observations. A vector env also evaluates the final policy, and the caller closes it.
            config.json names the env after `name` or the function, but keeps a `config.env` that contains no colon
            and is not registered.
        eval_envs: What evaluations use instead of `envs`, in one of the same forms: for example separate envs for a
            vector env that trains. A vector env may have any number of envs.
        callbacks: Called after updates, evaluations and checkpoints, and at the end.
        logdir: Folder for run folders.
        name: Name of the run folder after its timestamp. None: the env id, or "train" if `envs` is given.
        init_from: Run folder, its name in `logdir`, or the result of a run. Its newest checkpoint gives the initial
            networks and normalizers. The spaces, the settings of the networks, normalize_observations and
            normalize_rewards must match. Old statistics of observations have the weight of ten rollouts at most. The
            scale of rewards, the optimizer and the step count start from scratch.
        collectors: Number of collectors on Ray, among which the envs are divided (docs/cluster.md). None: this process
            and its workers step the envs.
        cluster: Address of the Ray cluster of the collectors, "host:port" or "auto". None: the variable RAY_ADDRESS, or
            Ray on this machine.
        progress: Whether to show progress on stdout, as the command does. If not, only warnings are shown, on stderr.

    Raises:
        TypeError: If `config` is not a `Config`, or a callback is not a `Callback`.
        ConfigError, vecenv.UnsupportedSpace: If the settings or the envs are invalid, or do not match `init_from`.
        RunError: If the run folder cannot be written, `init_from` cannot be read, or a module that `config` names is in
            `logdir`.
        vecenv.EnvError, vecenv.WorkerDied: If an env raised in a worker, or a worker died. Without workers, the env's
            own exception is raised. A non-finite observation counts as a ValueError of the env.
        TrainingDiverged, NothingAllowed: If a reward or a loss is not finite, a discrete observation is outside its
            space, or a mask forbids every action.
        KeyboardInterrupt: If a signal arrives before the first update has been learned.
    """
    from ppo.callbacks import checked
    from ppo.config import Config
    from ppo.envs import naming
    from ppo.run.folder import Run
    from ppo.run.modules import check_places, modules_of
    from ppo.runtime.startup import load_tensorflow

    if not isinstance(config, Config):
        raise TypeError(f"config={config!r} is not a ppo.Config: write, for example, ppo.Config(env='CartPole-v1')")
    callbacks = checked(callbacks)
    config = naming(config, envs, name)
    check_places(modules_of(config, env=envs is None), Path(logdir))  # no command could load the run
    load_tensorflow()
    from ppo.run.origin import check_origin

    origin = None if init_from is None else Run.open(init_from, logdir)
    if origin is not None:
        check_origin(origin, config)
    run = Run.create(logdir, name or (config.env if envs is None else "train"), config)
    try:
        return _train(config, run, envs, eval_envs, callbacks, progress, collectors, cluster, origin=origin)
    except BaseException:
        run.discard_if_empty()
        raise


def resume(
    run: Run | PathLike[str] | str,
    *,
    total_steps: int | None = None,
    envs: EnvSource = None,
    eval_envs: EnvSource = None,
    callbacks: Callback | Iterable[Callback] = (),
    trust_modules: bool = False,
    collectors: int | None = None,
    cluster: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result:
    """Continues a run from its newest checkpoint, in the same folder, as `ppo train --resume` does.

    Returns what `train` returns, and raises the same errors while training.

    Args:
        run: The run folder, its name in "runs", or what `train` returned.
        total_steps: New total of env-steps, including those already taken. None: unchanged.
        envs: The envs, if the run was trained on envs passed to `ppo.train`.
        eval_envs: As for `train`.
        callbacks: As for `train`.
        collectors: As for `train`. The run may have had other collectors, or none.
        cluster: As for `train`.
        progress: As for `train`.
        trust_modules: Whether to allow the import of the modules that the run names.
        **settings: New values of other settings that a resumed run may change (`ppo.config.RESUMABLE`).

    Raises:
        ConfigError: If a setting is invalid or may not change, or the envs do not match the run.
        RunError: If the folder is not a run, has no checkpoint that can be read, or names a module that may not be
            imported.

    Example:
        ppo.resume("runs/20260101-120000-cheetah", total_steps=2_000_000)
    """
    from dataclasses import replace

    from ppo.callbacks import checked
    from ppo.run.folder import Run
    from ppo.run.modules import config_to_load
    from ppo.runtime.startup import load_tensorflow

    callbacks = checked(callbacks)
    run = Run.open(run, trust_modules=trust_modules)
    if total_steps is not None:
        settings["total_steps"] = total_steps
    config = replace(config_to_load(run, env=envs is None), **settings)
    run.check_resumable(config)
    load_tensorflow()
    return _train(config, run, envs, eval_envs, callbacks, progress, collectors, cluster, resume=True)


def _train(
    config: Config,
    run: Run,
    envs: EnvSource,
    eval_envs: EnvSource,
    callbacks: Iterable[Callback],
    progress: bool,
    collectors: int | None,
    cluster: str | None,
    *,
    origin: Run | None = None,
    resume: bool = False,
) -> Result:
    """Trains in a run folder, shows progress, and calls `on_end` of all callbacks."""
    from ppo.callbacks import Callbacks
    from ppo.collectors import OnRay
    from ppo.config import ConfigError
    from ppo.run.display import display_for
    from ppo.trainer import run_training

    if cluster is not None and collectors is None:
        raise ConfigError("a cluster needs collectors: set their number (--collectors), or omit the cluster")
    on_ray = None if collectors is None else OnRay(collectors, cluster)
    with display_for(progress) as display:
        callback = Callbacks([display, *callbacks])
        try:
            result = run_training(
                config, run, callback, envs=envs, eval_envs=eval_envs, resume=resume, origin=origin, on_ray=on_ray
            )
        except BaseException as error:
            callback.on_end(None, error)
            raise
        callback.on_end(result, None)
        return result


if not TYPE_CHECKING:  # a type checker must report unknown names

    def __getattr__(name: str) -> Any:
        if name == "callbacks":
            return importlib.import_module("ppo.callbacks")
        if name not in _MODULES:
            raise AttributeError(f"module 'ppo' has no attribute {name!r}")
        if _MODULES[name].startswith(("ppo.policies.", "ppo.results.")):
            importlib.import_module("ppo.runtime.startup").load_tensorflow()
        return getattr(importlib.import_module(_MODULES[name]), name)
