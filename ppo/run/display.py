"""Progress of training and of evaluations: a line per report, and what is being done in between."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ppo.callbacks import Callback
from ppo.config import Config
from ppo.run.infos import shown
from ppo.run.scores import Evaluation, Result, counted, rounded
from ppo.run.status import Status

SILENCE_S = 10.0  # seconds without a line after which a display prints what is being done, unless it has a live bar
LOOK_S = 0.2  # seconds between two looks at whether a run was told to stop


class Output:
    """A text stream to stdout or stderr that never raises, because output must not end a run.

    Characters that the stream cannot encode are escaped. After an error, such as a closed pipe or a full disk, stderr
    says so once, and nothing more is written. The stream is None if its descriptor was closed before Python started.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._try("write", text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *text: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, method)(*text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            broken, self._stream = self._stream, None
            # What the stream still holds goes to the null device, or Python would fail to flush it at exit.
            with suppress(OSError, ValueError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), broken.fileno())
            with suppress(OSError, ValueError):
                print(f"warning: output stops here ({error}); training continues", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Display(Callback):
    """Prints a line per report, evaluation and warning, and shows what is being done.

    A terminal has a live bar below the lines. Elsewhere, a line follows each silence of `SILENCE_S` seconds. The bar
    and these lines appear only inside the context. A signal handler cannot print safely, so a thread says that a run
    was told to stop.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("starting")
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=12),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            console=console,
            refresh_per_second=4,
            transient=True,
            disable=not console.is_interactive,
        )
        self._task = self._bar.add_task("", total=None, status=self._status)
        self._started_s = self._printed_s = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="display", daemon=True)
        self._said_stopping = False

    def __enter__(self) -> Display:
        self._bar.start()
        self._thread.start()
        if not self._bar.disable:
            self._console.show_cursor()  # rich hides it, and a process that is killed could not show it again
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._bar.stop()
        self._thread.join()

    def on_status(self, status: Status) -> None:
        self._status = status
        self._bar.update(self._task, status=status)

    def on_start(self, config: Config, env_steps: int) -> None:
        self._total = config.num_updates * config.batch_size
        self._bar.update(self._task, description=config.env, total=self._total, completed=env_steps)
        if env_steps == 0:
            env = "the given envs" if config.env == "given" else config.env
            self._print(f"training {env} for {self._total:,} steps")
        else:
            self._print(f"resuming {config.env} at {env_steps:,} of {self._total:,} steps")
        for name, policy in vars(self).get("policies", {}).items():
            self._print(f"network{name and f' of {name}'}: {policy.description}")

    def on_update(self, report: dict[str, Any]) -> None:
        self._bar.update(self._task, completed=report["env_steps"])

    def on_report(self, report: dict[str, Any]) -> None:
        left_s = (self._total - report["env_steps"]) / report["steps_per_s"]
        self._print(
            f"{report['env_steps']:>12,} steps  return {_number(report['return_mean']):>9}{shown(report, '  ')}  "
            f"KL {report['kl']:.4f}  entropy {report['entropy']:.2f}  rate {report['learning_rate']:.1e}  "
            f"{report['steps_per_s']:,.0f} steps/s (collect {report['collect_steps_per_s']:,.0f}, "
            f"learn {report['learn_steps_per_s']:,.0f})  {_duration(report['wall_s'])}, {_duration(left_s)} left"
        )

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        scores = evaluation.summary()
        self._print(
            f"{env_steps:>12,} steps  {evaluation.policy}: return {_number(scores['return_mean'])} "
            f"+- {_number(scores['return_std'])} over {counted(scores['episodes'])}{shown(scores, ', ')}"
        )

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        if result is None:
            self._say_stopping()
            return
        self._said_stopping = True  # it has stopped
        if result.evaluation is None:
            self._print(f"\nstopped after {result.env_steps:,} steps; everything is saved in {short(result.path)}")
            return
        from ppo.run.checkpoint import BEST, number_in  # loads TensorFlow

        scores, of = result.evaluation.summary(), result.evaluation.policy
        if result.stopped is not None:
            self._print(f"\nstopped by a callback after {result.env_steps:,} steps: {result.stopped}")
        self._print(f"\nrun folder:  {short(result.path)}")
        self._print(
            f"final score: {rounded(scores['return_mean'])} +- {rounded(scores['return_std'])} "
            f"(mean return of the {of} over {counted(scores['episodes'])})"
        )
        best, steps = (number_in(result.path / "checkpoints", BEST, key) for key in ("return_mean", "env_steps"))
        if best is not None and steps is not None:
            self._print(f"best score:  {rounded(best)} (highest mean return of the {of}, at step {steps:,.0f})")

    def on_warning(self, message: str) -> None:
        self._print(f"warning: {message}")

    def _print(self, line: str) -> None:
        self._printed_s = time.monotonic()
        self._console.print(Text(line), soft_wrap=True)

    def _say_stopping(self) -> None:
        """Says once how the run ends, if it was told to stop."""
        if not self._said_stopping and (stopping := self._status.stopping) is not None:
            self._said_stopping = True
            self._print(stopping)

    def _watch(self) -> None:
        while not self._closed.wait(min(LOOK_S, SILENCE_S / 10)):
            self._say_stopping()
            now = time.monotonic()
            if self._bar.disable and now - self._printed_s >= SILENCE_S:
                self._print(f"{self._status}, {_duration(now - self._started_s)}")


def console_on(stream: Any) -> Console:
    """Returns a console on stdout or stderr that never raises. In a notebook, it prints plain lines."""
    return Console(file=Output(stream), force_jupyter=False)  # type: ignore[arg-type]


def display_for(progress: bool) -> AbstractContextManager[Callback]:
    """Returns the display of a run on stdout, or a callback that prints only warnings, on stderr."""
    return Display(console_on(sys.stdout)) if progress else nullcontext(_Warnings())


class _Warnings(Callback):
    def on_warning(self, message: str) -> None:
        print(f"warning: {message}", file=Output(sys.stderr), flush=True)  # type: ignore[call-overload]


def short(path: Path) -> str:
    """Returns a path for messages. A path below the current folder becomes relative to it."""
    below = str(path)
    with suppress(OSError, ValueError):  # the current folder is gone, or the path is elsewhere
        below = str(path.relative_to(Path.cwd()))
    return f"./{below}" if below.startswith("-") else below


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _number(value: float | None) -> str:
    return "..." if value is None else rounded(value)
