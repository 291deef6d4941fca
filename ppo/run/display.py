"""Progress of a run on stdout: two live lines in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ppo.callbacks import Callback
from ppo.config import Config
from ppo.run.infos import shown
from ppo.run.status import Status, ticking

if TYPE_CHECKING:
    from ppo.results.evaluation import Evaluation
    from ppo.trainer import Result


SILENCE_S = 10.0
"""Seconds after which a display reports what training is doing, even if nothing has happened."""


class TerminalDisplay(Callback):
    """A progress bar with return, speed and remaining time, above a line with KL, entropy, speeds and current activity.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console):
        self._console = console
        self._progress = Progress(
            TextColumn("{task.fields[env]}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("return {task.fields[score]}"),
            TextColumn("{task.fields[speed]} steps/s"),
            TextColumn("{task.fields[left]} left"),
            console=console,
        )
        self._status: Status | None = None
        self._started_s = time.monotonic()
        self._env_steps = 0
        self._details = ""
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._rendered)

    def on_status(self, status: Status) -> None:
        """Shows what training is doing: in the last line or, before `on_start`, in separate lines."""
        self._status = status
        ticking(self._break_silence, status.ended, every_s=SILENCE_S)

    def on_start(self, config: Config, env_steps: int) -> None:
        """Starts the progress bar."""
        self._total, self._env_steps = config.num_updates * config.batch_size, env_steps
        self._task = self._progress.add_task(
            "train", total=self._total, completed=env_steps, env=config.env, speed="...", score="...", left="..."
        )
        self._live.start()

    def on_update(self, report: dict[str, Any]) -> None:
        """Advances the bar."""
        self._env_steps = report["env_steps"]

    def on_report(self, report: dict[str, Any]) -> None:
        """Shows the report."""
        self._env_steps, self._details = report["env_steps"], _details(report)
        self._progress.update(
            self._task,
            speed=f"{report['steps_per_s']:,.0f}",
            score=_number(report["return_mean"]),
            left=_remaining(self._total, report),
        )

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        """Prints the score above the bar."""
        self._write(_scores(env_steps, evaluation))

    def on_warning(self, message: str) -> None:
        """Prints a line above the bar."""
        self._write(f"warning: {message}")

    def _rendered(self) -> RenderableType:
        """Returns what to draw. Rich calls this from a thread four times per second, even during a slow rollout."""
        status, tasks = self._status, self._progress.tasks
        if not tasks:
            return ""
        steps = self._env_steps + (0 if status is None else status.env_steps)
        # Includes the steps of the rollout in progress, which `on_update` reports only after the update.
        self._progress.update(tasks[0].id, completed=max(tasks[0].completed, steps))
        activity = "" if status is None or status.ended.is_set() else str(status)
        return Group(self._progress, Text("  ".join(filter(None, (self._details, activity))), style="dim"))

    def _break_silence(self) -> None:
        if self._status is not None and not self._live.is_started and not self._status.ended.is_set():
            self._write(f"{self._status}, {_duration(time.monotonic() - self._started_s)}")

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Stops redrawing, and leaves the last state on the screen."""
        self._live.stop()

    def _write(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)


class PlainDisplay(Callback):
    """One line per report, and one after `SILENCE_S` seconds without a line, for log files and pipes."""

    def __init__(self) -> None:
        self._writable = True  # False after a failed write
        self._printing = threading.Lock()
        self._started_s = self._printed_s = time.monotonic()
        self._env_steps = self._shown_steps = 0
        self._status: Status | None = None

    def on_status(self, status: Status) -> None:
        """Starts to print what training is doing whenever nothing has been printed for `SILENCE_S` seconds."""
        self._status = status
        ticking(self._break_silence, status.ended, every_s=SILENCE_S / 10)

    def on_start(self, config: Config, env_steps: int) -> None:
        """Prints the env and the number of steps."""
        self._total, self._env_steps = config.num_updates * config.batch_size, env_steps
        self._print(f"training {config.env} for {self._total:,} steps")

    def on_update(self, report: dict[str, Any]) -> None:
        """Counts the steps."""
        self._env_steps = report["env_steps"]

    def on_report(self, report: dict[str, Any]) -> None:
        """Prints a line."""
        self._print(
            f"{report['env_steps']:>12,} steps  {report['steps_per_s']:>8,.0f} steps/s  "
            f"return {_number(report['return_mean']):>9}  {_details(report)}  "
            f"{_duration(report['wall_s'])}, {_remaining(self._total, report)} left"
        )

    def on_evaluation(self, env_steps: int, evaluation: Evaluation) -> None:
        """Prints the score."""
        self._print(_scores(env_steps, evaluation))

    def on_warning(self, message: str) -> None:
        """Prints a line."""
        self._print(f"warning: {message}")

    def _break_silence(self) -> None:
        """Prints what training is doing if nothing has been printed for a while. Called by a thread."""
        status, now = self._status, time.monotonic()
        if status is not None and now - self._printed_s >= SILENCE_S and not status.ended.is_set():
            # Includes the steps of the rollout in progress, which `on_update` reports only after the update.
            self._shown_steps = max(self._shown_steps, self._env_steps + status.env_steps)
            self._print(f"{self._shown_steps:>12,} steps  {status}, {_duration(now - self._started_s)}")

    def _print(self, line: str) -> None:
        """Prints a line. A full disk or a closed pipe ends the output, but not the training."""
        with self._printing:
            self._printed_s = time.monotonic()
            if self._writable:
                try:
                    print(line, flush=True)
                except OSError as error:
                    self._writable = False
                    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  for everything printed from now on
                    with suppress(OSError):
                        print(f"warning: output stops here ({error}); training continues", file=sys.stderr)


def display_for(console: Console, progress: bool | None = True) -> Callback:
    """Returns the display for a console: live in a terminal, and in a notebook with ipywidgets; plain lines elsewhere.

    Args:
        console: Where to show progress.
        progress: Whether to show it. None: only in a terminal or a notebook.
    """
    if progress is None:
        progress = console.is_terminal or console.is_jupyter
    if not progress:
        return Callback()
    live = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
    return TerminalDisplay(console) if live else PlainDisplay()


def _remaining(total: int, report: dict[str, Any]) -> str:
    return _duration((total - report["env_steps"]) / report["steps_per_s"])


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _details(report: dict[str, Any]) -> str:
    return (
        f"KL {report['kl']:.4f}  entropy {report['entropy']:.2f}  "
        f"collect {report['collect_steps_per_s']:,.0f}/s, learn {report['learn_steps_per_s']:,.0f}/s"
        f"{shown(report, '  ')}"
    )


def _scores(env_steps: int, evaluation: Evaluation) -> str:
    scores = evaluation.summary()
    return (
        f"{env_steps:>12,} steps  deterministic policy: return {_number(scores['return_mean'])} "
        f"+- {_number(scores['return_std'])} over {scores['episodes']} episodes{shown(scores, ', ')}"
    )


def _number(value: float | None) -> str:
    return "..." if value is None else f"{value:,.1f}"
