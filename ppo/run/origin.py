"""`Origin`: the run from which a new run takes its initial networks and normalizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import tensorflow as tf

from ppo.config import SETTINGS, Config, ConfigError
from ppo.model.agent import Agent
from ppo.model.normalize import RunningMoments
from ppo.run.checkpoint import Checkpoints, name_of, only_reward_moments
from ppo.run.folder import Run, Spaces, write_atomically
from ppo.run.modules import config_to_load

MAY_DIFFER = {"policy_output_gain", "initial_log_std", "min_log_std"}
"""Settings of the networks that may differ between the two runs."""

NORMALIZERS = ("normalize_observations", "normalize_rewards")
"""Settings that determine the scale of the inputs and outputs on which the networks were trained."""


class Origin:
    """The run whose newest checkpoint gives another run its initial networks and normalizers.

    Args:
        run: The run to start from.
        config: The settings of the new run, which names a custom network itself.

    Raises:
        ConfigError: If a setting of the networks or normalizers differs. The message names the first one.
        RunError: If the run cannot be read or has no checkpoint, or if its folder contains the network.
    """

    def __init__(self, run: Run, config: Config):
        self._run = run
        before = run.read_config()
        networks = [name for name, setting in SETTINGS.items() if setting.group == "network" and name not in MAY_DIFFER]
        for name in (*networks, *NORMALIZERS):
            there, here = getattr(before, name), getattr(config, name)
            if there != here:
                raise ConfigError(
                    f"{run.path} was trained with {name}={there!r}, but the new run has {name}={here!r}: "
                    f"set {name}={there!r}, or omit init_from"
                )
        self._min_log_std = max(before.min_log_std, config.min_log_std)
        config_to_load(Run.open(run, trust_modules=True), env=False)  # refuses modules in its folder
        run.check_begun()

    def check_spaces(self, teams: Mapping[str, Spaces]) -> None:
        """Raises ConfigError if the run was trained on envs with other spaces or other teams."""
        self._run.check_spaces(teams)

    def restore(self, teams: Mapping[str, tuple[Agent, RunningMoments]], run: Run, warn: Callable[[str], None]) -> None:
        """Copies the networks and normalizers, and records in `origin.json` where they come from.

        Args:
            teams: For each team: the agent of the new run, which gets the networks and the normalizers of observations;
                and the statistics by which the new run divides rewards.
            run: The new run.
            warn: Called with a message for each damaged checkpoint.

        Raises:
            RunError: If no checkpoint can be read.
        """
        modules: dict[str, tf.Module] = {}
        for name, (agent, returns) in teams.items():
            modules[name_of("agent", name)] = agent
            modules[name_of("learner", name)] = only_reward_moments(returns)
        checkpoints = Checkpoints(self._run.checkpoints, **modules)
        values = checkpoints.restore(warn=warn, keys=("update",), partial=True)
        steps = values["update"] * self._run.read_config().batch_size
        for agent, _ in teams.values():
            agent.raise_log_std(self._min_log_std)
        origin = {"run": str(self._run.path.resolve()), "checkpoint": values["checkpoint"], "env_steps": steps}
        write_atomically(run.path / "origin.json", json.dumps(origin, indent=2) + "\n")
