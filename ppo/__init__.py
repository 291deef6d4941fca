"""ppo: a thin TensorFlow 2 PPO trainer on vecenv's shared memory; see README.md and docs/ppo.md.

TensorFlow is loaded when a name that needs it is first used, so that importing ppo stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ppo.api import train as train  # a function; the command of that name is ppo/cli/train.py

if TYPE_CHECKING:
    from ppo.algorithm.checks import NothingAllowed as NothingAllowed
    from ppo.algorithm.checks import TrainingDiverged as TrainingDiverged
    from ppo.config import Config as Config
    from ppo.config import ConfigError as ConfigError
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


if not TYPE_CHECKING:  # so that a type checker finds a name that is wrong

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'ppo' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
