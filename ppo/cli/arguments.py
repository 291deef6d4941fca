"""The arguments of the commands that load a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ppo.config import Config
from ppo.run.folder import Run
from ppo.run.modules import modules_of


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A run, and whether to trust it."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder."""

    checkpoint: str = "latest"
    """"latest"; "best": of the highest mean return of an evaluation; or the env-steps of a checkpoint that is kept."""

    trust_modules: bool = False
    """Import the modules that the run names. This executes their code, so use it only for runs that you trust."""

    def open(self) -> Run:
        """Opens the run.

        Raises:
            RunError: If the folder is not a run.
        """
        return Run.open(self.run, trust_modules=self.trust_modules)


def trust(config: Config) -> list[str]:
    """Returns the flag that commands need for a run with these settings, if they need one."""
    return ["--trust-modules"] if modules_of(config) else []
