"""runs.py: the run folder on a command line, and which of its modules the user agrees to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ppo.config import Config
from ppo.modules import module_of
from ppo.run import IMPORTED, Run

TRUST = " --trust-modules"


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A run and its network."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder."""

    network: str | None = None
    """The run's network, "module:function": name it again to agree that its module is imported."""

    trust_modules: bool = False
    """Import every module that the run names, which runs its code. Only for runs that you trust."""

    def open(self) -> Run:
        """Opens the run.

        Raises:
            RunError: If there is none.
        """
        env = getattr(self, "env", None)
        return Run.open(self.run, trust_modules=self.trust_modules, env=env, network=self.network)


@dataclass(frozen=True, kw_only=True)
class EnvArguments(RunArguments):
    """A run, its network and its env."""

    env: str | None = None
    """The run's env, "module:id": name it again to agree that its module is imported."""


def consent(config: Config) -> str:
    """Returns the flag without which no command uses a run with these settings; "" if it needs none."""
    return TRUST if any(module_of(config, field) for field in IMPORTED) else ""
