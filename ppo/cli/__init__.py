"""What the commands share: arguments, exit codes, error messages, signals, and messages that say what to type."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from gymnasium.error import DeprecatedEnv, UnregisteredEnv
from gymnasium.error import Error as GymnasiumError

from ppo.config import ConfigError
from ppo.errors import NothingAllowed, RunError, is_from_env
from ppo.run.display import Display, Output, console_on
from ppo.run.folder import Run
from ppo.run.signals import exit_on_second_signal, on_first_signal
from ppo.run.status import Status, Tally
from ppo.runtime import startup

if TYPE_CHECKING:
    from ppo.policies.evaluation import Players

_received: list[int] = []  # signals, in order of arrival


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A run, and whether to trust it."""

    run: Annotated[Path, tyro.conf.Positional]
    """The run folder, or its name in "runs"."""

    checkpoint: str = "latest"
    """"latest"; "best": the one with the highest evaluation mean return; or the env-steps of a stored checkpoint."""

    trust_modules: bool = False
    """Import the modules that the run names. This executes their code, so use it only for runs that you trust."""

    def open(self) -> Run:
        """Opens the run, and then loads TensorFlow, which takes seconds."""
        run = Run.open(self.run, trust_modules=self.trust_modules)
        load_tensorflow()
        return run


@dataclass(frozen=True, kw_only=True)
class EpisodeArguments(RunArguments):
    """A run whose policy plays episodes."""

    seed: int | None = None
    """Seed of the environments. None: a fresh seed, which is printed. `ppo evaluate` with the run's own seed repeats
    its final evaluation."""

    sample: bool = False
    """Sample the actions as in training, instead of taking the most likely ones."""

    def load_players(self, run: Run, episodes: int, tally: Tally) -> Players:
        """Returns the policies of an open run, which play with the seed of these flags and update the tally."""
        from ppo.policies.evaluation import load_players

        players = load_players(
            run, episodes, checkpoint=self.checkpoint, seed=self.seed, deterministic=not self.sample, warn=warn
        )
        return dataclasses.replace(players, tally=tally)


def main(command: Callable[[], int]) -> None:
    """Runs a command and exits. An stderr that cannot be written does not fail the command.

    The exit code is 0 if the command succeeded, 1 if an env or the training failed, 128 + n after signal n, and 2 for
    any other expected error. An unexpected exception keeps its traceback. Ctrl-C and the other signals in
    `ppo.run.signals.STOPPING` raise an exception, so that partial files are removed. TensorFlow's C++ code may replace
    or swallow this exception, so the exit code depends only on the signal. A second Ctrl-C or SIGTERM ends the process
    at once.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may have characters that a terminal cannot show
    with redirect_stderr(Output(sys.stderr)):  # type: ignore[type-var]
        try:
            with on_first_signal(_interrupt), exit_on_second_signal():
                code, message = _outcome(command)
        except BaseException:
            if not _received:
                raise
            code, message = 0, ""
        if _received:
            code = 128 + _received[0]
            message = "interrupted" if _received[0] == signal.SIGINT else "terminated"
            _received.clear()
        if message:
            print(message, file=sys.stderr)
    sys.exit(code)


def _interrupt(number: int) -> None:
    _received.append(number)
    if len(_received) == 1:  # a repeated signal must not interrupt the cleanup
        raise KeyboardInterrupt


def _outcome(command: Callable[[], int]) -> tuple[int, str]:
    """Runs a command and returns its exit code and error message."""
    import vecenv

    try:
        return command(), ""
    # This clause is first, because an EnvError is also an instance of the env's own exception type.
    except vecenv.VecEnvError as error:
        return 2 if isinstance(error, vecenv.UnsupportedSpace | UnregisteredEnv | DeprecatedEnv) else 1, _text(error)
    except BrokenPipeError as error:
        if is_from_env(error):
            return 1, _text(error)
        # The reader of stdout has exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE, ""
    except (FloatingPointError, NothingAllowed, multiprocessing.TimeoutError, ConnectionError) as error:
        return 1, _text(error)
    except (ConfigError, RunError, GymnasiumError, OSError) as error:  # also if a file cannot be read or written
        return 1 if is_from_env(error) else 2, _text(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, "interrupted"


def _text(error: Exception) -> str:
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])


def warn(message: str) -> None:
    """Prints a warning to stderr, because stdout holds results."""
    print(f"warning: {message}", file=sys.stderr)


@contextmanager
def showing(doing: str, episodes: int) -> Iterator[Tally]:
    """Shows the progress of the block on stderr, because stdout holds results; yields the tally that it must update."""
    tally = Tally(episodes, doing)
    with stdout_for_results(), Display(console_on(sys.stderr)) as display:
        display.on_status(Status(tally))
        yield tally


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Sends what envs, networks and C libraries print in the block to stderr, including in processes started in it."""
    if sys.stdout is not None:  # None: its descriptor was closed before Python started
        sys.stdout.flush()
    stdout = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C libraries print, such as MuJoCo's warnings, may still be in a buffer
        os.dup2(stdout, 1)
        os.close(stdout)


def python() -> str:
    """Returns the command that runs this interpreter from the current folder, for messages that say what to type."""
    return _typed(sys.executable)


def program() -> str:
    """Returns the command that started this process, without its arguments: the console script, or `python -m ppo`."""
    script = sys.argv[0]
    # A file or a folder called "ppo" in the current folder hides the package from `python -m ppo`.
    return _typed(script) if os.path.basename(script) == "ppo" and os.path.isfile(script) else f"{python()} -m ppo"


def _typed(program: str) -> str:
    """Returns what to type to run a program: its name if the PATH finds it, else its path, relative if it is below."""
    name = os.path.basename(program)
    try:
        program, here = os.path.abspath(program), os.path.relpath(program)
        if (found := shutil.which(name)) and os.path.abspath(found) == program:
            return shlex.quote(name)
    except OSError:  # the current folder has been deleted
        here = program
    return shlex.quote(program if here.startswith("..") else os.path.join(".", here) if here == name else here)


def load_tensorflow() -> None:
    """Imports TensorFlow as `ppo.train` does. Raises KeyboardInterrupt for a signal, which the import swallows."""
    if "tensorflow" not in sys.modules:
        startup.load_tensorflow()
        gc.freeze()  # excludes the imported objects from later collections
    if _received:
        raise KeyboardInterrupt
