"""Run folders for tests: trained, untrained, with given reports, or interrupted."""

import importlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

from ppo import Config, Run
from ppo.algorithm import update
from ppo.model.agent import Agent
from ppo.model.normalize import RunningMoments
from ppo.run.checkpoint import Checkpoints, list_checkpoints, only_reward_moments
from ppo.run.metrics import TIMES

QUICKLY_COMPILED = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
"""Environment variables with which other processes compile updates in half the time, for tests of other things."""


def compile_updates(enabled: bool) -> None:
    """Lets XLA compile the updates of later learners, and TensorFlow optimize the graphs that run, as users do."""
    update.compiles_updates = enabled
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not enabled})


def command(name: str, words: Iterable[object]) -> int:
    """Runs a command of `ppo` in this process, and returns its exit code. Its errors are exceptions."""
    return importlib.import_module(f"ppo.cli.{name}").command([*map(str, words)])


def train(*words: object, logdir: Path) -> Run:
    """Runs `ppo train` in this process, and returns the only run in the log folder."""
    assert command("train", [*words, "--logdir", logdir]) == 0
    return only_run(logdir)


def only_run(logdir: Path) -> Run:
    """Returns the only run in a log folder."""
    (folder,) = logdir.iterdir()
    return Run.open(folder)


def reports(run: Run | Path, *, times: bool = True) -> list[dict]:
    """Returns the reports in a run's metrics file. Without `times`, two equal runs have equal reports."""
    rows = [json.loads(line) for line in (Run.open(run).path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if times or name not in TIMES} for row in rows]


def parsed(*words: object) -> Config:
    """Returns the settings of `ppo train` with these flags."""
    from ppo.cli.train import parse

    return parse([*map(str, words)])[1]


def checkpoints(run: Run | Path) -> list[Path]:
    """Returns the folders of a run's checkpoints, oldest first."""
    return list_checkpoints(Run.open(run).checkpoints)


def variables(run: Run | Path) -> dict[str, np.ndarray]:
    """Returns all variables in the newest checkpoint: networks, normalization, optimizer, recurrent state."""
    reader = tf.train.load_checkpoint(str(checkpoints(run)[-1] / "state"))
    names = [name for name in reader.get_variable_to_shape_map() if "VARIABLE_VALUE" in name]
    return {name: reader.get_tensor(name) for name in names}


def untrained_run(folder, observation_space, action_space, *, given=True, log_std=None, **settings) -> Run:
    """Returns a run whose only checkpoint holds the initial weights and altered normalization statistics.

    Args:
        folder: The folder for the run folder.
        observation_space: Space of one observation.
        action_space: Space of one action.
        given: Whether the envs were passed as objects.
        log_std: Log standard deviations of the policy instead of the initial ones.
        settings: Settings of the run.
    """
    config = Config(**settings)
    run = Run.create(folder, "untrained", config)
    run.write_spaces({"": (observation_space, action_space)}, given=given)
    agent = Agent(config, observation_space, action_space)
    for number, variable in enumerate(agent.variables):
        if variable.name.startswith(("mean", "variance")):
            variable.assign_add(0.1 * (number + 1) * (variable * 0 + 1))
    if log_std is not None:
        agent.log_std.assign(np.full(agent.log_std.shape, log_std))
    learner = only_reward_moments(RunningMoments((), name="moments"))
    Checkpoints(run.checkpoints, agent=agent, learner=learner).save(0, {"update": 0})
    return run


def with_reports(run: Run, reports: list[dict]) -> Run:
    """Writes reports to the run's metrics file, as training does, and returns the run."""
    run.metrics.write_text("".join(json.dumps(report) + "\n" for report in reports))
    return run


def rewound(run: Path, folder: Path, checkpoints: int = 1) -> Path:
    """Copies a run folder as it was when its last checkpoints had not been written yet; returns the copy.

    The copy keeps the settings of the whole run, so a resumed run follows the same schedules.

    Args:
        run: The folder of a finished run.
        folder: The copy.
        checkpoints: How many checkpoints are missing in the copy.
    """
    shutil.copytree(run, folder)
    (folder / "evaluation.json").unlink()
    *_, newest = kept = list_checkpoints(folder / "checkpoints")[:-checkpoints]
    for path in set(list_checkpoints(folder / "checkpoints")) - set(kept):
        shutil.rmtree(path)
    metrics, env_steps = folder / "metrics.jsonl", int(newest.name.removeprefix("step_"))
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["env_steps"] <= env_steps))
    return folder
