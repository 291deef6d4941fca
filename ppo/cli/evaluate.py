"""`ppo evaluate RUN`: the score of a trained policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from ppo import cli as commands
from ppo.run.folder import Run
from ppo.run.infos import shown
from ppo.seeds import fresh_seed


@dataclass(frozen=True, kw_only=True)
class Arguments(commands.RunArguments):
    """Score the policy of a run on fresh environments."""

    episodes: int = 20
    """Number of episodes. [1 or more]"""

    seed: int | None = None
    """Seed of the environments. None: a fresh seed, which is printed. The run's seed repeats the episodes of its final
    evaluation."""

    sample: bool = False
    """Sample the actions as in training, instead of taking the most likely ones."""

    json: bool = False
    """Print one JSON object and nothing else."""


def command(argv: Sequence[str] | None = None) -> int:
    """Prints the score of a run and returns the exit code."""
    arguments = tyro.cli(Arguments, args=argv, prog="ppo evaluate")
    run = Run.open(arguments.run, trust_modules=arguments.trust_modules)
    commands.load_tensorflow()
    from ppo.policies.evaluation import evaluate_run

    seed = fresh_seed() if arguments.seed is None else arguments.seed
    with commands.showing("evaluating", arguments.episodes) as tally:
        scores = evaluate_run(
            run, arguments.episodes, checkpoint=arguments.checkpoint, seed=seed, deterministic=not arguments.sample,
            warn=commands.warn, tally=tally,
        )  # fmt: skip
    summary = {**scores.summary(), "seed": seed}
    if arguments.json:
        print(json.dumps(summary))
    else:
        print(
            f"{scores.policy}: return {summary['return_mean']:,.1f} +- {summary['return_std']:,.1f} "
            f"(min {summary['return_min']:,.1f}, max {summary['return_max']:,.1f}), "
            f"length {summary['length_mean']:,.1f}, {summary['episodes']} episodes{shown(summary, ', ')}, seed {seed}"
        )
    return 0
