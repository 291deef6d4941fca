"""presets.py: named settings, after the configs of the 2017 project."""

from __future__ import annotations

import difflib

from ppo.config import Config, ConfigError

PRESETS: dict[str, Config] = {
    "pendulum": Config(env="Pendulum-v1", total_steps=200_000, gamma=0.9, learning_rate=1e-3),
    "cartpole": Config(env="CartPole-v1", total_steps=200_000, learning_rate=1e-3),
    "cheetah": Config(env="HalfCheetah-v5", total_steps=1_000_000),
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
