"""The command `python -m ppo.visualize RUN`: videos of a trained policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ppo import cli as commands
from ppo.cli.runs import EnvArguments


@dataclass(frozen=True, kw_only=True)
class Arguments(EnvArguments):
    """Record episodes of the deterministic policy of a run as MP4 files; needs no display."""

    outdir: Path = Path("videos")
    """Folder for the files RUN-episode-K.mp4; those of that name that are there are replaced."""

    episodes: int = 3
    """How many. [1 or more]"""

    seed: int | None = None
    """Seed of the env; None for the run's own."""


def command(argv: Sequence[str] | None = None) -> int:
    """Records, and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="python -m ppo.visualize")
    commands.check_episodes(arguments.episodes)
    run = arguments.open()
    commands.load_tensorflow()
    from ppo.results.video import record_run

    files, evaluation = record_run(
        run,
        arguments.outdir,
        arguments.episodes,
        seed=arguments.seed,
        warn=commands.warn,
    )
    for file, score, length in zip(files, evaluation.returns, evaluation.lengths, strict=True):
        print(f"{file}: return {score:,.1f} in {length:,} steps")
    return 0
