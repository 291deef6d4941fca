"""`ppo train --ranks K`: starts K ranks on this machine, each on its share of the cores, and waits for them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ppo import cli as commands
from ppo.run.ranks import COPIES
from ppo.run.signals import STOPPING

LAUNCHED = "PPO_LAUNCHED"  # variable with the file in which rank 0 records the path of its run
UNUSABLE = 2  # exit code of a command that would fail again, because its settings or files are unusable
LOST = 3  # exit code of a rank that cannot continue because another rank has ended or does not answer
POLL_S = 0.05  # seconds between two polls of the ranks
GRACE_S = 5.0  # seconds within which the other ranks must exit after one rank has exited


def launch(
    words: Sequence[str], count: int, *, restarts: int = 0, resuming: Callable[[str], list[str]] | None = None
) -> int:
    """Runs `ppo train` with these words in each of `count` processes; returns the exit code of the run.

    Only rank 0 writes to the terminal. If a rank fails, the output of that rank follows, and the others are killed. All
    ranks are then started again up to `restarts` times, and resume from the last checkpoint. `resuming` maps the path
    of a new run to the words that resume it. It is None if `words` already resume a run.
    """
    with tempfile.TemporaryDirectory(prefix="ppo-") as folder:
        note, command, resumes, restart = Path(folder) / "run", list(words), resuming is None, 0
        while True:
            code, failed = _run(command, count, note)
            if not failed:
                return code
            restart += 1
            if resuming is not None and note.exists():
                command, resumes = resuming(note.read_text()), True
            if code == UNUSABLE or restart > restarts or commands.received():
                if note.exists() or (resumes and code != UNUSABLE):
                    print(f"to resume:   {commands.program()} train {shlex.join(command)}", file=sys.stderr)
                elif code != UNUSABLE:
                    print("The run has no checkpoint yet: fix the cause and start it again.", file=sys.stderr)
                return code
            how = "from the last checkpoint" if resumes else "from the start, because there is no checkpoint yet"
            print(f"restart {restart} of {restarts}: {how}", file=sys.stderr)


def _run(words: Sequence[str], count: int, note: Path) -> tuple[int, bool]:
    """Runs the ranks once; returns the exit code and whether a rank failed."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    with ExitStack() as stack:
        copies = stack.enter_context(tempfile.TemporaryDirectory(dir=note.parent))  # a killed rank leaves its copy
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        ranks: list[subprocess.Popen[bytes]] = []
        if shares := _shares(count):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        for number in range(count):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(task), LAUNCHED: str(note), COPIES: copies}
            output = None if number == 0 else outputs[number]
            if shares:
                os.sched_setaffinity(0, shares[number])  # of this thread, which the child inherits
            rank = subprocess.Popen(
                [sys.executable, "-m", "ppo", "train", *words], env=environment, stdin=subprocess.PIPE,
                stdout=output, stderr=None if output is None else subprocess.STDOUT,
            )  # fmt: skip
            stack.callback(_end, rank)
            ranks.append(rank)
        failed = _wait(ranks)
        codes = [rank.poll() for rank in ranks]
        if failed is None:
            return codes[0] or 0, False
        code = codes[failed] or 0
        _end(ranks[0])  # its remaining output precedes the message
        if failed:
            outputs[failed].seek(0)
            print(outputs[failed].read().decode(errors="replace").rstrip(), file=sys.stderr)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        who = f"rank {failed} of {count} ({addresses[failed]}, process {ranks[failed].pid})"
        print(f"error: {who} {how}, so all ranks were stopped", file=sys.stderr)
        return 1 if code < 0 or code == LOST else code, True


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all ranks have ended with the same code; returns the number of the first that fails, or None."""
    polls_left = GRACE_S / POLL_S  # not a clock, which also runs while launcher and ranks are suspended
    while True:
        try:
            codes = [rank.poll() for rank in ranks]
            stopped = (0, *(128 + number for number in STOPPING))
            if codes[0] in stopped and len(set(codes)) == 1:
                return None
            failed = [number for number, code in enumerate(codes) if code is not None and code not in stopped]
            # A killed rank is the cause if others have already failed, too. A rank that has lost another rank is not.
            if causes := [number for number in failed if codes[number] != LOST]:
                return min(causes, key=lambda number: (codes[number] or 0) > 0)
            if any(code is not None for code in codes):
                polls_left -= 1
                if polls_left < 0:
                    others = (number for number, code in enumerate(codes) if code != codes[0] or code is None)
                    return failed[0] if failed else next(others)
            time.sleep(POLL_S)
        except KeyboardInterrupt:  # each rank stops after its current update
            for rank in ranks:
                rank.send_signal(commands.received()[-1])


def _end(rank: subprocess.Popen[bytes]) -> None:
    if rank.poll() is None:
        rank.kill()
    rank.wait()
    if rank.stdin is not None:
        with suppress(OSError):
            rank.stdin.close()


def _shares(count: int) -> list[set[int]]:
    """Returns the cores of each rank: equal shares, or one core each if there are too few. Empty if unsupported."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        return [{cores[number % len(cores)]} for number in range(count)]
    size = len(cores) // count
    return [set(cores[number * size : (number + 1) * size]) for number in range(count)]


def free_ports(count: int) -> list[int]:
    """Returns ports that nothing on this machine uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def exit_with_launcher() -> Path | None:
    """Returns the file for the run folder if this process is a launched rank, which from now on ends with its launcher.

    The standard input of a launched rank ends when the launcher does.
    """
    note = os.environ.get(LAUNCHED)
    if not note:
        return None
    threading.Thread(target=_watch, daemon=True).start()
    return Path(note)


def _watch() -> None:
    with suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(1)
