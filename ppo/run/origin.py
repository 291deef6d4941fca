"""Starting a run from another run: from its networks and normalizers, but not from its steps."""

from __future__ import annotations

import json
from collections.abc import Callable

import tensorflow as tf

from ppo.algorithm.teams import Teams
from ppo.config import NORMALIZERS, SETTINGS, Config, ConfigError
from ppo.run.checkpoint import Checkpoints, module_name, only_reward_moments
from ppo.run.files import write_atomically
from ppo.run.folder import Run
from ppo.run.modules import config_to_load

INITIAL = ("policy_output_gain", "initial_log_std")
"""Settings that concern only new networks, so they have no effect on a run that starts from another run."""

MAY_DIFFER = {*INITIAL, "min_log_std"}
"""Settings of the networks in which a run may differ from the run from which it starts."""

KEPT_ROLLOUTS = 10
"""Maximum weight of another run's statistics of observations, in rollouts.

With less weight, the first rollouts, which begin at resets, would shift the inputs of the policy too far.
"""

KEPT_REWARDS = 1e-6
"""Maximum weight of another run's statistics of rewards, in steps. With a weight of 0, no statistics would exist, and
the new run would spend a rollout on initializing them."""


def check_origin(origin: Run, config: Config) -> None:
    """Raises ConfigError if a setting of the networks or normalizers differs, so a new run cannot start from `origin`.

    Raises RunError if `origin` cannot be read, has no checkpoint, or contains the module of the network.
    """
    before = origin.read_config()
    networks = [name for name, setting in SETTINGS.items() if setting.group == "network" and name not in MAY_DIFFER]
    for name in (*networks, *NORMALIZERS.values()):
        there, here = getattr(before, name), getattr(config, name)
        if there != here:
            raise ConfigError(
                f"{origin.path} was trained with {name}={there!r}, but the new run has {name}={here!r}: "
                f"set {name}={there!r}, or omit init_from"
            )
    config_to_load(Run.open(origin, trust_modules=True), env=False)  # refuses modules in its folder
    origin.check_begun()


def start_from(origin: Run, teams: Teams, run: Run, warn: Callable[[str], None]) -> None:
    """Copies the networks and normalizers of a run's newest checkpoint, and records their origin in `origin.json`.

    The new run may have other observations and rewards, so the copied statistics lose weight. The statistics of
    observations count as at most `KEPT_ROLLOUTS` rollouts. The first rollout replaces those of rewards: the value
    function predicts normalized rewards, so it remains correct if all rewards are multiplied by a number. The teams are
    those of the new run. Calls `warn` with a message for each damaged checkpoint, and for settings that have no effect.
    """
    modules: dict[str, tf.Module] = {}
    for team in teams:
        modules[module_name("agent", team.name)] = team.agent
        modules[module_name("learner", team.name)] = only_reward_moments(team.learner.rewards.moments)
    values = Checkpoints(origin.checkpoints, **modules).restore(warn=warn, partial=True)
    before, config = origin.read_config(), run.read_config()
    steps, kept = values["update"] * before.batch_size, KEPT_ROLLOUTS * config.batch_size
    for team in teams:
        team.agent.raise_log_std(max(before.min_log_std, config.min_log_std))
        team.agent.observations.weaken(kept / max(kept, steps))
        rewards = team.learner.rewards.moments
        rewards.count.assign(tf.minimum(rewards.count, KEPT_REWARDS))
    if ignored := [
        f"{name}={getattr(config, name)}" for name in INITIAL if getattr(before, name) != getattr(config, name)
    ]:
        warn(
            f"no effect, because the policy starts as that of {origin.path}: {', '.join(ignored)}. To start with more "
            "noise, raise min_log_std."
        )
    record = {"run": str(origin.path.resolve()), "checkpoint": values["checkpoint"], "env_steps": steps}
    write_atomically(run.path / "origin.json", json.dumps(record, indent=2) + "\n")
