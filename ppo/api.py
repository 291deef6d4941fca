"""Train: a whole training run from Python."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppo.config import Config
    from ppo.envs import EnvSource
    from ppo.run.callbacks import Callback
    from ppo.trainer import Result


def train(
    config: Config,
    envs: EnvSource = None,
    *,
    callbacks: Callback | Iterable[Callback] = (),
    logdir: Path | str = "runs",
    name: str | None = None,
    resume: Path | str | None = None,
) -> Result:
    """Trains a policy and leaves everything in a new folder of `logdir`, as `python -m ppo.train` does.

    Args:
        config: All settings; `ppo.preset(name)` gives some, `dataclasses.replace` changes them.
        envs: What to train on, if not on `config.env`: a function that makes an env; a list of functions, one for
            each of `config.num_envs`; or a vector env that was made with `**ppo.vector_options(config)`, which is then
            also what the final policy is evaluated on.
        callbacks: Told about updates, evaluations and checkpoints.
        logdir: Folder for run folders.
        name: Of the run folder, after the time; None for the env's id.
        resume: A run folder to resume from its newest checkpoint, instead of a new one. The modules that `config`
            names are imported, unless they are in the run folder or its parent folder.

    Returns:
        The run folder, the steps taken, and the evaluation of the final policy.

    Raises:
        ConfigError, vecenv.UnsupportedSpace: If the settings, or the envs, do not fit.
        RunError: If the folder cannot be read or written.
        vecenv.EnvError, vecenv.WorkerDied: If an env or a worker failed.
        TrainingDiverged, NothingAllowed: If there are numbers that must not be trained on.
    """
    from ppo.run.callbacks import Callback, Callbacks
    from ppo.run.folder import IMPORTED, Run, check_modules
    from ppo.trainer import run_training

    imports = IMPORTED if envs is None else ("network",)
    if resume is not None:
        run = Run.open(resume, logdir, env=config.env, network=config.network)
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
