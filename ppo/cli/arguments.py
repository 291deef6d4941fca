"""Arguments of the commands that read a run, and the user's consent to import the modules that a run names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ppo.config import Config
from ppo.run.folder import IMPORTED, Run
from ppo.run.modules import module_of


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A run and its network."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder."""

    network: str | None = None
    """The run's network, "module:function". Naming it again allows the import of its module."""

    trust_modules: bool = False
    """Import every module that the run names. This executes their code, so use it only for runs that you trust."""

    def open(self) -> Run:
        """Opens the run.

        Raises:
            RunError: If the folder is not a run.
        """
        env = getattr(self, "env", None)
        return Run.open(self.run, trust_modules=self.trust_modules, env=env, network=self.network)


@dataclass(frozen=True, kw_only=True)
class EnvArguments(RunArguments):
    """A run, its network and its environment."""

    env: str | None = None
    """The run's environment, "module:id". Naming it again allows the import of its module."""


def consent(config: Config) -> str:
    """Returns the flag that commands need for a run with these settings, or "" if they need none."""
    return " --trust-modules" if any(module_of(config, field) for field in IMPORTED) else ""
