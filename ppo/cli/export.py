"""`ppo export RUN`: a trained policy as a file that needs neither ppo nor vecenv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ppo import cli as commands


@dataclass(frozen=True, kw_only=True)
class Arguments(commands.RunArguments):
    """Export the deterministic policy of a run with its observation normalizer.

    The command checks that the exported policy returns the same actions as the checkpoint.
    """

    format: Literal["savedmodel", "tflite", "onnx"] = "savedmodel"
    """"savedmodel": a SavedModel folder for TensorFlow. "tflite": a file for LiteRT on phones and single-board
    computers. "onnx": a file for ONNX Runtime and other runtimes on robots."""

    group: str | None = None
    """The group of agents whose policy to export, if the run has several policies."""

    outdir: Path = Path("exports")
    """Folder for the export, RUN.FORMAT or RUN-GROUP.FORMAT. A "/" in GROUP becomes "%2F". An existing export with the
    same name is replaced."""


def command(argv: Sequence[str] | None = None) -> int:
    """Exports a run's policy and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="ppo export")
    run = arguments.open()
    from ppo.results.export import export, names_in

    with commands.stdout_for_results():
        path, difference = export(
            run, arguments.outdir, arguments.format, checkpoint=arguments.checkpoint, group=arguments.group,
            warn=commands.warn,
        )  # fmt: skip
        names = names_in(path)
    print(f"{path}: on random observations, its actions differ from the checkpoint's by at most {difference:.2g}")
    print(names)
    return 0
