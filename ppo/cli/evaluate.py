"""`ppo evaluate RUN`: the score of a trained policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from ppo import cli as commands
from ppo.run.infos import shown
from ppo.run.scores import counted, rounded


@dataclass(frozen=True, kw_only=True)
class Arguments(commands.EpisodeArguments):
    """Score the policy of a run on fresh environments."""

    episodes: int = 20
    """Number of episodes. [1 or more]"""

    json: bool = False
    """Print one JSON object and nothing else."""


def command(argv: Sequence[str] | None = None) -> int:
    """Prints the score of a run and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="ppo evaluate")
    run = arguments.open()
    from ppo.policies.evaluation import evaluate

    with commands.showing("evaluating", arguments.episodes) as tally:
        players = arguments.load_players(run, arguments.episodes, tally)
        scores = evaluate(players, None, arguments.episodes)
    seed = players.config.seed
    summary = {**scores.summary(), "seed": seed}
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(
            f"{scores.policy}: return {rounded(summary['return_mean'])} +- {rounded(summary['return_std'])} "
            f"(min {rounded(summary['return_min'])}, max {rounded(summary['return_max'])}), "
            f"length {summary['length_mean']:,.1f}, {counted(summary['episodes'])}{shown(summary, ', ')}, seed {seed}"
        )
    return 0
