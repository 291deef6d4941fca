"""ppo: a thin TensorFlow 2 PPO trainer on vecenv's shared memory; see README.md and docs/ppo.md.

TensorFlow is loaded when a name that needs it is first used, so that importing ppo stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ppo.api import train as train  # a function; the command of that name is ppo/commands/train.py

if TYPE_CHECKING:
    from ppo.callbacks import Callback as Callback
    from ppo.callbacks import StopTraining as StopTraining
    from ppo.checks import NothingAllowed as NothingAllowed
    from ppo.checks import TrainingDiverged as TrainingDiverged
    from ppo.config import Config as Config
    from ppo.config import ConfigError as ConfigError
    from ppo.envs import vector_options as vector_options
    from ppo.evaluation import Evaluation as Evaluation
    from ppo.loop import Result as Result
    from ppo.policy import Policy as Policy
    from ppo.policy import load_policy as load_policy
    from ppo.presets import preset as preset
    from ppo.run import RunError as RunError

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


if not TYPE_CHECKING:  # so that a type checker finds a name that is wrong

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'ppo' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
