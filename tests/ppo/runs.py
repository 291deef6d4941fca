"""Run folders for tests that need a policy but no training, or a run that was interrupted."""

import json
import shutil
from pathlib import Path

from ppo.algorithm.normalize import RunningMoments
from ppo.config import Config
from ppo.model.agent import Agent
from ppo.run.checkpoint import Checkpoints, list_checkpoints, only_reward_moments
from ppo.run.folder import Run


def untrained_run(folder, observation_space, action_space, *, given=True, **settings) -> Run:
    """Returns a run whose only checkpoint holds the initial weights and altered normalization statistics."""
    config = Config(**settings)
    run = Run.create(folder, "untrained", config)
    run.write_spaces({"": (observation_space, action_space)}, given=given)
    agent = Agent(config, observation_space, action_space)
    for number, variable in enumerate(agent.variables):
        if variable.name.startswith(("mean", "variance")):
            variable.assign_add(0.1 * (number + 1) * (variable * 0 + 1))
    learner = only_reward_moments(RunningMoments((), name="moments"))
    Checkpoints(run.checkpoints, agent=agent, learner=learner).save(0, {"update": 0})
    return run


def with_reports(run: Run, reports: list[dict]) -> Run:
    """Writes reports to the run's metrics file, as training does, and returns the run."""
    run.metrics.write_text("".join(json.dumps(report) + "\n" for report in reports))
    return run


def rewound(run: Path, folder: Path) -> Path:
    """Copies a run folder without its last checkpoint, as if the run had been killed just before it; returns the copy.

    A run with the schedule of the whole run continues from the checkpoint before.
    """
    shutil.copytree(run, folder)
    _, *_, last = list_checkpoints(folder / "checkpoints")
    shutil.rmtree(last)
    return folder
