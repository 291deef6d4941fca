"""presets.py: named settings, after the configs of the 2017 project."""

from __future__ import annotations

import difflib

from ppo.config import Config, ConfigError

PRESETS: dict[str, Config] = {
    "pendulum": Config(
        env="Pendulum-v1",
        total_steps=600_000,
        num_steps=64,
        minibatch_size=256,
        learning_rate=1e-3,
        gamma=0.98,
        value_coef=0.5,
        initial_log_std=0.0,
        recompute_advantages=False,
    ),
    "cartpole": Config(
        env="CartPole-v1",
        total_steps=120_000,
        learning_rate=1e-3,
        value_coef=0.5,
        recompute_advantages=False,
        # Once every pole stands, all advantages are noise. To scale noise up to deviation 1, as is usual,
        # makes the policy wander until it falls; left as it is, it is small and the policy stays.
        normalize_advantages=False,
    ),
    "reacher": Config(env="Reacher-v5", gamma=0.9),  # its goal is near in time; gamma as in the SB3 zoo
    "cheetah": Config(env="HalfCheetah-v5"),
    "walker": Config(env="Walker2d-v5"),
    "hopper": Config(env="Hopper-v5"),
    "ant": Config(env="Ant-v5"),
}


def preset(name: str) -> Config:
    """Returns the settings of that name.

    Raises:
        ConfigError: If there is none; the message names the nearest.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(sorted(PRESETS))}.{hint}")
    return PRESETS[name]
