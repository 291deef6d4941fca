"""display.py: how a run looks in a terminal: a live bar; plain lines where the output is no terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ppo.callbacks import Callback
from ppo.config import Config


class TerminalDisplay(Callback):
    """A progress bar with steps per second, return and time left.

    Args:
        console: Where to draw.
    """

    def __init__(self, console: Console):
        self._console = console
        self._progress = Progress(
            TextColumn("{task.fields[env]}"),
            BarColumn(bar_width=12),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.fields[speed]} steps/s"),
            TextColumn("return {task.fields[score]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
        )

    def __enter__(self) -> TerminalDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def on_start(self, config: Config, env_steps: int) -> None:
        """Draws the bar."""
        self._progress.start()
        total = config.num_updates * config.batch_size
        self._task = self._progress.add_task(
            "train", total=total, completed=env_steps, env=config.env, speed="...", score="..."
        )

    def on_report(self, report: dict[str, Any]) -> None:
        """Moves the bar."""
        self._progress.update(
            self._task,
            completed=report["env_steps"],
            speed=f"{report['steps_per_s']:,.0f}",
            score=_number(report["return_mean"]),
        )

    def on_warning(self, message: str) -> None:
        """Writes a line above the bar."""
        self._console.print(f"warning: {message}", markup=False, highlight=False)


class PlainDisplay(Callback):
    """One line for each report, for log files and pipes."""

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def on_start(self, config: Config, env_steps: int) -> None:
        """Remembers how far there is to go."""
        self._total = config.num_updates * config.batch_size
        print(f"training {config.env} for {self._total:,} steps", flush=True)

    def on_report(self, report: dict[str, Any]) -> None:
        """Writes a line."""
        left_s = (self._total - report["env_steps"]) / report["steps_per_s"]
        print(
            f"{report['env_steps']:>12,} steps  {report['steps_per_s']:>8,.0f} steps/s  "
            f"return {_number(report['return_mean']):>9}  {report['wall_s']:.0f} s, {left_s:.0f} s left",
            flush=True,
        )

    def on_warning(self, message: str) -> None:
        """Writes a line."""
        print(f"warning: {message}", flush=True)


def display_for(console: Console) -> TerminalDisplay | PlainDisplay:
    """Returns the bar for a terminal, and lines for anything else."""
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay()


def _number(value: float | None) -> str:
    return "..." if value is None else f"{value:,.1f}"
