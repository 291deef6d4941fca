"""`python -m ppo COMMAND` and the console script `ppo`.

Handles interrupts and crashes before importing anything else, because a command's imports take seconds.
"""

from __future__ import annotations

import difflib
import faulthandler
import functools
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

COMMANDS = {
    "train": "train a policy and save the run in a new folder",
    "evaluate": "score the policy of a run",
    "visualize": "record videos of the policy of a run",
    "plot": "plot the learning curves of one or more runs",
    "export": "export the deterministic policy of a run as a SavedModel, TFLite or ONNX file",
}
"""What each command does. The command `name` is `ppo.cli.name.command`."""

USAGE = """usage: ppo COMMAND [OPTIONS]

Train PPO on Gymnasium environments and use the trained policies.

commands:
{}

`ppo COMMAND --help` lists the options of a command."""

NEEDED = ("tensorflow", "tyro", "rich", "tensorboard")  # pip installs the commands even without this extra


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command, by default that of `sys.argv[1:]`, and exits. `ppo.cli.main` lists the exit codes."""
    name, *words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(
            USAGE.format("\n".join(f"  {name:<{max(map(len, COMMANDS))}}  {text}" for name, text in COMMANDS.items()))
        )
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"error: unknown command {name!r}: use one of {', '.join(COMMANDS)}.{hint}", file=sys.stderr)
        sys.exit(2)
    if missing := [package for package in NEEDED if find_spec(package) is None]:
        print(f"error: ppo's commands need {', '.join(missing)}: `pip install 'vecenv-ppo[ppo]'`", file=sys.stderr)
        sys.exit(2)
    try:
        here = os.getcwd()
    except OSError:
        print("error: the current folder has been deleted: change to another one", file=sys.stderr)
        sys.exit(2)
    for number in range(3):  # otherwise the next opened file could get a closed stream's descriptor and its output
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    faulthandler.enable(os.dup(2))  # a duplicate, because TensorFlow is imported with stderr redirected
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Python's KeyboardInterrupt is not enough: C extensions turn it into an ImportError during their import.
        signal.signal(signal.SIGINT, _exit)
    # `python -m` adds the current folder to the path, but a console script does not.
    if not sys.flags.safe_path and sys.path[0] != here:
        sys.path.insert(0, here)
    command = importlib.import_module(f"ppo.cli.{name}").command
    importlib.import_module("ppo.cli").main(functools.partial(command, words))


def _exit(number: int, _: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
