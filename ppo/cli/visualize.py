"""`ppo visualize RUN`: videos of a trained policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from ppo import cli as commands
from ppo.results.video import VideoOptions, record_run
from ppo.run.folder import Run


@dataclass(frozen=True, kw_only=True)
class Arguments(VideoOptions, commands.RunArguments):
    """Record episodes of the policy of a run as MP4 or GIF files. Needs no display."""

    outdir: Path = Path("videos")
    """Folder for the files RUN-episode-K.FORMAT. Existing files with the same names are replaced."""

    episodes: int = 3
    """Number of episodes. [1 or more]"""

    seed: int | None = None
    """Seed of the environment. None: the run's seed."""

    sample: bool = False
    """Sample the actions as in training, instead of taking the most likely ones."""


def command(argv: Sequence[str] | None = None) -> int:
    """Records videos of a run's policy and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="ppo visualize")
    options = VideoOptions(**{field.name: getattr(arguments, field.name) for field in fields(VideoOptions)})
    options.check()
    run = Run.open(arguments.run, trust_modules=arguments.trust_modules)
    commands.load_tensorflow()
    with commands.showing("recording", arguments.episodes) as tally:
        files, evaluation = record_run(
            run, arguments.outdir, arguments.episodes, checkpoint=arguments.checkpoint, seed=arguments.seed,
            deterministic=not arguments.sample, warn=commands.warn, tally=tally, **vars(options),
        )  # fmt: skip
    for file, score, length in zip(files, evaluation.returns, evaluation.lengths, strict=True):
        print(f"{file}: return {score:,.1f} in {length:,} steps ({evaluation.policy})")
    return 0
