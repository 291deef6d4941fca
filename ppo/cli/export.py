"""The command `python -m ppo.export RUN`: the policy as a file that needs none of this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ppo import cli as commands
from ppo.cli.runs import RunArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(RunArguments):
    """Write the deterministic policy of a run, normaliser included, and check that it acts as the checkpoint does."""

    format: Literal["savedmodel", "tflite"] = "savedmodel"
    """A SavedModel folder for TensorFlow, or a TFLite file for LiteRT on phones and robots."""

    outdir: Path = Path("exports")
    """Folder for the file or folder RUN.FORMAT; one of that name that is there is replaced."""


def command(argv: Sequence[str] | None = None) -> int:
    """Exports, and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ppo.export")
    run = arguments.open()
    commands.load_tensorflow()
    from ppo.results.export import export

    path, difference = export(run, arguments.outdir, arguments.format, warn=commands.warn)
    print(f"{path}: on random observations its actions differ from the checkpoint's by at most {difference:.2g}")
    return 0
