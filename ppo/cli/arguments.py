"""Arguments of the commands that read a run, and the user's consent to import the modules that a run names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ppo.config import Config
from ppo.run.folder import IMPORTED, Run
from ppo.run.modules import modules_of


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
        named: dict[str, Any] = {name: getattr(self, name, None) for name in ("env", "wrappers")}
        return Run.open(self.run, trust_modules=self.trust_modules, network=self.network, **named)


@dataclass(frozen=True, kw_only=True)
class EnvArguments(RunArguments):
    """A run, its network, its environment and its wrappers."""

    env: str | None = None
    """The run's environment, "module:id". Naming it again allows the import of its module."""

    wrappers: tuple[str, ...] | None = None
    """The run's wrappers. Naming them again allows the import of their modules."""


def consent(config: Config) -> str:
    """Returns the flag that commands need for a run with these settings, or "" if they need none."""
    return " --trust-modules" if any(modules_of(config, field) for field in IMPORTED) else ""
