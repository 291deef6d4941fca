"""`ppo train`: trains a policy and prints the run folder and the next commands."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shlex
import signal
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

import ppo
import vecenv
from ppo import cli as commands
from ppo.callbacks import Callback
from ppo.config import RESUMABLE, SETTINGS, TYPES, Config, ConfigError, described
from ppo.envs import env_options
from ppo.errors import RunError, is_resumable_after
from ppo.kwargs import Kwargs, to_words
from ppo.presets import PRESETS, preset
from ppo.run.display import Output, short
from ppo.run.folder import Run
from ppo.run.modules import config_to_load, modules_of
from vecenv.kwargs import from_words


def _integer(words: Sequence[str]) -> int:
    """Parses an integer, which may be written as 1e6. Raises ValueError for any other word."""
    with suppress(ValueError):
        return int(words[0])
    with suppress(ValueError):
        if (number := float(words[0])).is_integer():
            return int(number)
    raise ValueError(f"{words[0]!r} is not an integer")


def _integer_or_none(words: Sequence[str]) -> int | None:
    return None if words[0] == "None" else _integer(words)


def _parsed_by(parse: Callable[[Sequence[str]], Any]) -> PrimitiveConstructorSpec[Any]:
    """Returns how tyro parses and shows an integer setting."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, int | None),
        str_from_instance=lambda value: [str(value)],
    )


INTEGERS: dict[Any, Any] = {
    int: Annotated[int, _parsed_by(_integer)],
    int | None: Annotated[int | None, _parsed_by(_integer_or_none)],
    tuple[int, ...]: tuple[Annotated[int, _parsed_by(_integer)], ...],
}
"""The types of integer settings for tyro."""

METAVARS: dict[Any, str] = {
    INTEGERS[tuple[int, ...]]: "INT ...",
    tuple[str, ...]: "STR ...",
    float | None: "FLOAT",
    str | None: "STR",
}
"""What `--help` shows for types that tyro describes at length, such as "{None}|INT"."""


def _hint(default: str) -> str:
    """Returns how `--help` shows a default. Uninformative defaults are omitted to keep the help short."""
    return "" if default in ("", "None", "False") else f"(default: {default})"


@dataclass(frozen=True)
class Arguments:
    """The flags of `ppo train` that are not settings."""

    config: Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint=_hint)] = None
    """Preset to start from; flags override it."""

    logdir: Path = Path("runs")
    """Folder for run folders, TIME-NAME."""

    resume: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=_hint)] = None
    """Run folder, or its name in --logdir, to resume."""

    init_from: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=_hint)] = None
    """Run whose networks a new run starts with."""

    collectors: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_hint)] = None
    """Number of Ray actors among which the envs are divided. None: no Ray."""

    cluster: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint=_hint)] = None
    """Ray cluster of the collectors. None: RAY_ADDRESS, or this machine."""

    track: Annotated[
        tuple[Literal["wandb", "mlflow"], ...], tyro.conf.arg(metavar="wandb|mlflow", help_behavior_hint=_hint)
    ] = ()
    """Log to Weights & Biases or MLflow."""

    trust_modules: Annotated[bool, tyro.conf.arg(help_behavior_hint=_hint)] = False
    """With --resume: import the modules that the run names, and so execute their code."""


def parse(argv: Sequence[str]) -> tuple[Arguments, Config]:
    """Parses a command line. Settings without a flag come from the run to resume, the preset or the defaults."""
    if argv and not argv[0].startswith("-"):
        flag = "--config" if argv[0] in PRESETS else "--env"
        raise ConfigError(f"unexpected argument {argv[0]!r}: write {flag} {shlex.quote(argv[0])}")
    # The defaults of the settings depend on these flags, so they are parsed first.
    known, _ = tyro.cli(Arguments, args=list(argv), prog="ppo train", add_help=False, return_unknown_args=True)
    if known.resume is None:
        defaults = {name: getattr(Config, name) for name in SETTINGS}
        return _parse(argv, defaults if known.config is None else vars(preset(known.config)))
    run = Run.open(known.resume, known.logdir, trust_modules=known.trust_modules)
    if known.config is not None:
        raise ConfigError("--config cannot be combined with --resume: a resumed run keeps its own settings")
    arguments, config = _parse(argv, vars(config_to_load(run)))
    if arguments.init_from is not None:
        raise ConfigError("--init-from cannot be combined with --resume: a resumed run keeps its own networks")
    run.check_resumable(config)
    return arguments, config


def _parse(argv: Sequence[str], base: Mapping[str, Any]) -> tuple[Arguments, Config]:
    groups = grouped(base)
    fields: list[tuple[str, Any, Any]] = [("command", Annotated[Arguments, tyro.conf.arg(name="")], Arguments())]
    fields += [(type(group).__name__, type(group), group) for group in groups]
    parsed: Any = tyro.cli(
        dataclasses.make_dataclass("Flags", fields, frozen=True),
        args=list(argv),
        config=(tyro.conf.OmitArgPrefixes,),
        prog="ppo train",
        description="Train PPO on a Gymnasium env and save the run in a new folder of --logdir.\n"
        f"Presets: {', '.join(name for name in PRESETS if '/' not in name)}, paper/NAME.",
    )
    return parsed.command, settings_of([getattr(parsed, type(group).__name__) for group in groups])


def grouped(values: Mapping[str, Any]) -> list[Any]:
    """Returns the settings as one dataclass instance per help group, for tyro. `settings_of` is the inverse."""
    groups = []
    for group in dict.fromkeys(setting.group for setting in SETTINGS.values()):
        fields: list[tuple[str, Any, Any]] = []
        for name in (name for name, setting in SETTINGS.items() if setting.group == group):
            flag = tyro.conf.arg(help=described(name), metavar=METAVARS.get(_flag_type(name)), help_behavior_hint=_hint)
            fields.append((name, Annotated[_flag_type(name), flag], values[name]))
        groups.append(dataclasses.make_dataclass(group, fields, frozen=True, namespace={"__doc__": ""})())
    return groups


def _flag_type(name: str) -> Any:
    """Returns the type of a setting for tyro: derived settings may be None, and mappings are written as KEY=VALUE."""
    kind = TYPES[name] | None if SETTINGS[name].derived else TYPES[name]
    if typing.get_origin(kind) is not Mapping:
        return INTEGERS.get(kind, kind)
    words: PrimitiveConstructorSpec[Kwargs] = PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE|JSON ...]",
        instance_from_str=lambda words: Kwargs(from_words(words)),
        is_instance=lambda value: isinstance(value, Kwargs),
        str_from_instance=to_words,
    )
    return Annotated[kind, words]


def settings_of(groups: Sequence[Any]) -> Config:
    """Returns the Config whose settings are the fields of the groups."""
    return Config(**{name: value for group in groups for name, value in vars(group).items()})


def _trust(config: Config) -> list[str]:
    """Returns the flag that commands need for a run with these settings, if they need one."""
    return ["--trust-modules"] if modules_of(config) else []


def _resuming(run: str, arguments: Arguments, config: Config) -> list[str]:
    """Returns the words with which `ppo train` resumes a run, with the same collectors and trackers."""
    words = ["--resume", run, *_trust(config)]
    if arguments.collectors is not None:
        words += ["--collectors", str(arguments.collectors)]
    if arguments.cluster is not None:
        words += ["--cluster", arguments.cluster]
    if arguments.track:
        words += ["--track", *arguments.track]
    return words


def _command_to_resume(path: Path, arguments: Arguments, config: Config) -> str:
    return f"to resume:   {commands.program()} train {shlex.join(_resuming(short(path), arguments, config))}"


class _HowToResume(Callback):
    """Adds the command that resumes a run to the error that ended it, if the run has a checkpoint."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments

    def on_end(self, result: ppo.Result | None, error: BaseException | None) -> None:
        run = Run(self.run_path)
        if error is None or not is_resumable_after(error) or not run.exists:
            return
        try:
            run.check_begun()
        except RunError:
            error.add_note("The run ended before its first checkpoint, so nothing was saved.")
            return
        error.add_note(_command_to_resume(self.run_path, self._arguments, self.config))
        if isinstance(error, vecenv.WorkerDied) and self.config.on_worker_death == "raise":
            error.add_note("To restart workers that die instead of ending the run, add --on-worker-death restart.")
        if isinstance(error, multiprocessing.TimeoutError):
            error.add_note(
                "If a step may take longer, raise --step-timeout-s. If an env hangs, see docs/slow-simulators.md."
            )


def _trackers(arguments: Arguments) -> list[Callback]:
    """Returns the callbacks that log the run. Raises ConfigError if a package is missing."""
    try:
        return [getattr(ppo.callbacks, name)() for name in dict.fromkeys(arguments.track)]
    except ImportError as error:
        raise ConfigError(f"--track {' '.join(arguments.track)}: {error}") from error


def _train(arguments: Arguments, config: Config, callbacks: Sequence[Callback]) -> ppo.Result:
    """Trains a new run, or resumes one."""
    if arguments.resume is None:
        # A preset names the run only if it trains on the preset's own env.
        is_its_env = arguments.config is not None and config.env == preset(arguments.config).env
        return ppo.train(
            config, logdir=arguments.logdir, name=arguments.config if is_its_env else None, callbacks=callbacks,
            init_from=arguments.init_from, collectors=arguments.collectors, cluster=arguments.cluster,
        )  # fmt: skip
    run = Run.open(arguments.resume, arguments.logdir, trust_modules=arguments.trust_modules)
    settings = {name: getattr(config, name) for name in RESUMABLE}
    return ppo.resume(
        run, callbacks=callbacks, collectors=arguments.collectors, cluster=arguments.cluster, **settings
    )  # fmt: skip


def command(argv: Sequence[str] | None = None) -> int:
    """Trains and returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments, config = parse(words)
    callbacks = [*_trackers(arguments), _HowToResume(arguments)]
    # Start the workers' fork server while TensorFlow loads, unless the env has a module, which may import TensorFlow.
    if arguments.resume is None and arguments.collectors is None and ":" not in config.env:
        vecenv.warm_up(config.env, num_workers=config.num_workers, backend=config.backend, **env_options(config))
    # This takes seconds, so it follows all checks.
    commands.load_tensorflow()
    with redirect_stdout(Output(sys.stdout)):  # type: ignore[type-var]
        result = _train(arguments, config, callbacks)
        _print_results(result, arguments, config)
        sys.stdout.flush()
        return 0 if result.evaluation is not None else 128 + (result.signal or signal.SIGINT)


def _print_results(result: ppo.Result, arguments: Arguments, config: Config) -> None:
    """Prints the next commands, or how to resume a run that was interrupted."""
    if result.evaluation is None:
        print(_command_to_resume(result.path, arguments, config))
        return
    path, logdir = short(result.path), short(result.path.parent)
    evaluate = f"{commands.program()} evaluate {shlex.join([path, *_trust(config)])} --episodes 20"
    evaluate += "" if result.evaluation.deterministic else " --sample"
    print(f"next:        {evaluate}")
    if (result.path / "checkpoints" / "best").is_dir():
        print(f"             {evaluate} --checkpoint best")
    print(f"             {commands.python()} -m tensorboard.main --logdir {shlex.quote(logdir)}")
