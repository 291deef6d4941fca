"""ppo: a thin TensorFlow 2 PPO trainer on vecenv's shared memory; see README.md and docs/ppo.md.

TensorFlow is loaded when a name that needs it is first used, so that importing ppo stays quick.
"""

from __future__ import annotations

import importlib
from typing import Any

from ppo.api import train as train  # a function; the command of that name is ppo/commands/train.py

_HOMES = {
    "Callback": "ppo.callbacks",
    "Config": "ppo.config",
    "ConfigError": "ppo.config",
    "Evaluation": "ppo.evaluation",
    "NothingAllowed": "ppo.checks",
    "Policy": "ppo.policy",
    "Result": "ppo.loop",
    "RunError": "ppo.run",
    "StopTraining": "ppo.callbacks",
    "TrainingDiverged": "ppo.checks",
    "load_policy": "ppo.policy",
    "preset": "ppo.presets",
    "vector_options": "ppo.envs",
}

__all__ = [*_HOMES, "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ppo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
