"""`ppo visualize RUN`: videos of a trained policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from ppo import cli as commands
from ppo.results.video import VideoOptions, record
from ppo.run.scores import rounded


@dataclass(frozen=True, kw_only=True)
class Arguments(VideoOptions, commands.EpisodeArguments):
    """Record episodes of the policy of a run as MP4 or GIF files. Needs no display."""

    outdir: Path = Path("videos")
    """Folder for the files RUN-episode-K.FORMAT. Existing files with the same names are replaced."""

    episodes: int = 3
    """Number of episodes. [1 or more]"""


def command(argv: Sequence[str] | None = None) -> int:
    """Records videos of a run's policy and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="ppo visualize")
    options = VideoOptions(**{field.name: getattr(arguments, field.name) for field in fields(VideoOptions)})
    options.check()
    run = arguments.open()
    with commands.showing("recording", arguments.episodes) as tally:
        players = arguments.load_players(run, arguments.episodes, tally)
        files, evaluation = record(players, run.path.resolve().name, arguments.outdir, arguments.episodes, options)
    how = f"{evaluation.policy}, seed {players.config.seed}"
    for file, score, length in zip(files, evaluation.returns, evaluation.lengths, strict=True):
        print(f"{file}: return {rounded(score)} in {length:,} steps ({how})")
    return 0
