"""The command `python -m ppo.train`: trains a policy and says where it is."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

import ppo
import vecenv
from ppo import cli as commands
from ppo.cli.display import display_for
from ppo.cli.runs import consent
from ppo.cli.settings import grouped, settings_of
from ppo.config import Config, ConfigError
from ppo.halves import wants_halves
from ppo.presets import PRESETS, preset
from ppo.run.folder import Run


@dataclass(frozen=True)
class Arguments:
    """What the command line of `python -m ppo.train` says."""

    settings: Config
    config: str | None
    logdir: Path
    resume: Path | None


@dataclass(frozen=True)
class _Words:
    """The flags that are no settings."""

    config: str | None = None
    """Name of a preset to start from."""

    logdir: Path = Path("runs")
    """Folder for run folders; each gets a name of its own, TIME-NAME."""

    resume: Path | None = None
    """A run folder (or its name in --logdir) to go on with."""

    trust_modules: bool = False
    """With --resume: import every module that the run names. This executes their code: only for runs you trust."""


def parse(argv: Sequence[str]) -> Arguments:
    """Parses a command line; settings not given come from the run to resume, the preset, or the defaults.

    Raises:
        ConfigError, RunError: If preset, run or a setting is not usable.
    """
    # The defaults of the other flags depend on these, so they are read first.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--resume", type=Path)
    first.add_argument("--logdir", type=Path, default=Path("runs"))
    first.add_argument("--env")
    first.add_argument("--network")
    first.add_argument("--trust-modules", "--trust_modules", action="store_true")
    known, _ = first.parse_known_args(argv)
    run = None
    if known.resume is not None:
        named = {"env": known.env, "network": known.network}
        run = Run.open(known.resume, known.logdir, trust_modules=known.trust_modules, **named)
        if known.config is not None:
            raise ConfigError("--config and --resume exclude each other: a run has its settings already")
        base = run.read_config()
    else:
        base = Config() if known.config is None else preset(known.config)
    words, groups = _parse(argv, base)
    config = settings_of(groups)
    if run is not None:
        run.check_resumable(config)
    return Arguments(config, words.config, words.logdir, words.resume)


def _parse(argv: Sequence[str], base: Config) -> tuple[_Words, tuple]:
    groups = grouped(base)
    fields: list[tuple[str, Any, Any]] = [("command", Annotated[_Words, tyro.conf.arg(name="")], _Words())]
    fields += [(type(group).__name__, type(group), group) for group in groups]
    parsed: Any = tyro.cli(
        dataclasses.make_dataclass("Flags", fields, frozen=True),
        args=list(argv),
        config=(tyro.conf.OmitArgPrefixes,),
        prog="python -m ppo.train",
        description="Train PPO on a Gymnasium env and leave the run in a new folder of --logdir. "
        f"Presets: {', '.join(sorted(PRESETS))}.",
    )
    return parsed.command, tuple(getattr(parsed, type(group).__name__) for group in groups)


def command(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    config = arguments.settings
    # Not where a module must be imported for the env, which may import TensorFlow.
    if arguments.resume is None and ":" not in config.env:
        vecenv.warm_up(config.env, num_workers=config.num_workers, backend=config.backend)
    # Which takes seconds: not before the input is known to be right.
    commands.load_tensorflow(overlap=config.overlap, halves=wants_halves(config))
    with display_for(Console()) as display:
        result = ppo.train(
            config,
            callbacks=[display],
            logdir=arguments.logdir,
            name=arguments.config,
            resume=arguments.resume,
        )
    if result.evaluation is None:
        print(f"\nstopped after {result.env_steps:,} steps; everything is saved in {result.path}")
        print(f"to go on:    {commands.python()} -m ppo.train --resume {commands.quoted(result.path)}{consent(config)}")
        return 128 + (result.signal or signal.SIGINT)
    scores = result.evaluation.summary()
    print(f"\nrun folder:  {result.path}")
    print(
        f"final score: {scores['return_mean']:,.1f} +- {scores['return_std']:,.1f} "
        f"(mean return of the deterministic policy over {scores['episodes']} episodes)"
    )
    run = f"{commands.quoted(result.path)}{consent(config)}"
    print(f"next:        {commands.python()} -m ppo.evaluate {run} --episodes 20")
    print(f"             {commands.python()} -m tensorboard.main --logdir {commands.quoted(result.path.parent)}")
    return 0
