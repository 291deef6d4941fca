"""commands: what the commands share: quiet TensorFlow, errors as one clear sentence, and what must be installed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gymnasium.error import Error as GymnasiumError

from ppo.config import ConfigError
from ppo.halves import NEEDED_THREADS
from ppo.run.folder import RunError
from ppo.run.signals import exit_on_second_signal

NEEDED = ("tensorflow", "tyro", "rich", "tensorboard")
"""Packages of the extra `ppo`, without which `pip` installs the commands all the same."""

_came: list[int] = []  # signals, in the order in which they came

if _missing := [name for name in NEEDED if find_spec(name) is None]:
    print(f"error: ppo's commands need {', '.join(_missing)}: `pip install -e '.[ppo]'`", file=sys.stderr)
    sys.exit(2)


def main(command: Callable[[], int]) -> None:
    """Runs a command and exits: 0 if it did its work, 1 if an env or the training failed, 2 for anything else.

    Ctrl-C and SIGTERM raise an exception, so that what is half written is removed. TensorFlow's C++ makes other
    errors of it, or none: what counts is that the signal came. A second signal ends the process at once.
    """
    _came.clear()
    handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    for number in handled:  # and what is ignored, as a shell has it for what runs in its background, stays so
        signal.signal(number, _interrupt)
    # Gymnasium's words of warning before an env's error is raised: these commands print the error itself.
    warnings.filterwarnings("ignore", message=".*(Received the following error|Raising the last exception)")
    try:
        try:
            with exit_on_second_signal(handled):
                code, message = _outcome(command)
        finally:
            for number in handled:  # from here on another one ends the process at once
                signal.signal(number, signal.SIG_DFL)
    except BaseException:
        if not _came:
            raise
        code, message = 0, ""
    if _came:
        code, message = 128 + _came[0], "interrupted" if _came[0] == signal.SIGINT else "terminated"
    if message:
        print(message, file=sys.stderr)
    sys.exit(code)


def _interrupt(number: int, _: Any) -> None:
    _came.append(number)
    if len(_came) == 1:  # a repetition must not interrupt the cleanup
        raise KeyboardInterrupt


def _outcome(command: Callable[[], int]) -> tuple[int, str]:
    """Runs a command; returns its exit code, and what went wrong."""
    import vecenv

    try:
        return command(), ""
    # First, because what an env raised is also of the env's own exception type.
    except vecenv.VecEnvError as error:
        return 2 if isinstance(error, vecenv.UnsupportedSpace) else 1, _told(error)
    except (ConfigError, RunError, GymnasiumError) as error:
        return 2, _told(error)
    except (FloatingPointError, multiprocessing.TimeoutError) as error:
        return 1, _told(error)
    except BrokenPipeError:  # whoever read this wants no more of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE, ""
    except OSError as error:  # what cannot be read or written is a matter of the system
        return 2, _told(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, "interrupted"


def _told(error: Exception) -> str:
    return "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])


def warn(message: str) -> None:
    """Prints a warning where it does not mix with results."""
    print(f"warning: {message}", file=sys.stderr)


def check_episodes(episodes: int) -> None:
    """Raises ConfigError if there are none to play."""
    if episodes < 1:
        raise ConfigError(f"--episodes {episodes}: there must be 1 or more")


def python() -> str:
    """Returns how to call this interpreter from here, for messages that say what to type."""
    here = os.path.relpath(sys.executable)
    return "python" if here.startswith("..") else shlex.quote(here)


def quoted(path: Path) -> str:
    """Returns a path as it is typed, for the same messages."""
    return shlex.quote(str(path))


def load_tensorflow(*, overlap: bool = False, halves: bool = False) -> None:
    """Imports TensorFlow, with threads for a rollout's small steps, unless the environment says otherwise.

    Without its notes on how it was built and on GPUs that are not there. They go to the file descriptor before any
    setting of TensorFlow's is read; if the import fails, what it wrote is shown.

    Args:
        overlap: Whether envs are stepped while an update runs.
        halves: Whether two loops are to step envs at the same time.
    """
    import vecenv

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Measured, see docs/performance.md: operations of a rollout follow one another, and to pass them from one thread
    # to the next takes longer than most of them.
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", str(NEEDED_THREADS) if halves else "1")
    if overlap:  # or the threads of the update would wait for those that step envs, again and again
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(max(1, vecenv.available_cores() // 2)))
    with tempfile.TemporaryFile() as notes:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(notes.fileno(), 2)
        collected = gc.isenabled()
        gc.disable()  # a quarter of the time: what an import makes stays, and would be looked through again and again
        try:
            import tensorflow as tf

            tf.zeros([])  # makes it look for devices
        except Exception:
            notes.seek(0)
            os.write(stderr, notes.read())
            raise
        finally:
            gc.freeze()  # nor now, all at once
            if collected:
                gc.enable()
            os.dup2(stderr, 2)
            os.close(stderr)
    if _came:  # and was lost in the import
        raise KeyboardInterrupt
