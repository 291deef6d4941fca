"""A thin TensorFlow 2 PPO trainer on vecenv's shared memory. See README.md and docs/ppo.md.

`import ppo` is cheap: it imports TensorFlow only when a name that needs it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo.algorithm.checks import NothingAllowed as NothingAllowed
    from ppo.algorithm.checks import TrainingDiverged as TrainingDiverged
    from ppo.config import Config as Config
    from ppo.config import ConfigError as ConfigError
    from ppo.envs import EnvSource
    from ppo.envs import vector_options as vector_options
    from ppo.presets import preset as preset
    from ppo.results.evaluation import Evaluation as Evaluation
    from ppo.results.policy import Policy as Policy
    from ppo.results.policy import load_policy as load_policy
    from ppo.run.callbacks import Callback as Callback
    from ppo.run.callbacks import StopTraining as StopTraining
    from ppo.run.folder import RunError as RunError
    from ppo.trainer import Result as Result

_HOMES = {
    "Callback": "ppo.run.callbacks",
    "Config": "ppo.config",
    "ConfigError": "ppo.config",
    "Evaluation": "ppo.results.evaluation",
    "NothingAllowed": "ppo.algorithm.checks",
    "Policy": "ppo.results.policy",
    "Result": "ppo.trainer",
    "RunError": "ppo.run.folder",
    "StopTraining": "ppo.run.callbacks",
    "TrainingDiverged": "ppo.algorithm.checks",
    "load_policy": "ppo.results.policy",
    "preset": "ppo.presets",
    "vector_options": "ppo.envs",
}

__all__ = [*_HOMES, "train"]


def train(
    config: Config,
    envs: EnvSource = None,
    *,
    callbacks: Callback | Iterable[Callback] = (),
    logdir: Path | str = "runs",
    name: str | None = None,
    resume: Path | str | None = None,
) -> Result:
    """Trains a policy and saves the run in a new folder of `logdir`, as the command `ppo train` does.

    Args:
        config: All settings. `ppo.preset(name)` returns tuned ones; change them with `dataclasses.replace`.
        envs: What to train on instead of `config.env`: a function that makes an env, a list of `config.num_envs`
            such functions, or a vector env built with `**ppo.vector_options(config)`. A vector env also evaluates the
            final policy, and the caller closes it.
        callbacks: Called after updates, evaluations and checkpoints.
        logdir: Folder for run folders.
        name: Name of the run folder after its timestamp. None: the env id, or "train" if `envs` is given.
        resume: Run folder to resume from its newest checkpoint; None to start a new run. Modules named in `config` are
            imported, unless they are in the run folder or its parent folder.

    Returns:
        The run folder, the number of steps, and the evaluation of the final policy.

    Raises:
        ConfigError, vecenv.UnsupportedSpace: If the settings or the envs are invalid.
        RunError: If the run folder cannot be read or written.
        vecenv.EnvError, vecenv.WorkerDied: If an env raised or a worker died.
        TrainingDiverged, NothingAllowed: If an observation, reward, loss or action mask is unusable.
    """
    from ppo.run.callbacks import Callback, Callbacks
    from ppo.run.folder import IMPORTED, Run, check_modules
    from ppo.trainer import run_training

    imports = IMPORTED if envs is None else ("network",)
    if resume is not None:
        run = Run.open(resume, logdir, env=config.env, network=config.network, wrappers=config.wrappers)
        run.check_resumable(config)
        run.read_config(imports=imports)  # refuses modules in the run folder
    else:
        check_modules(config, logdir, imports)
        run = Run.create(logdir, name or (config.env if envs is None else "train"), config)
    try:
        callback = Callbacks([callbacks] if isinstance(callbacks, Callback) else callbacks)
        return run_training(config, run, callback, envs=envs, resume=resume is not None)
    except BaseException:
        if resume is None:
            run.discard_if_empty()
        raise


if not TYPE_CHECKING:  # a type checker must report unknown names

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'ppo' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
