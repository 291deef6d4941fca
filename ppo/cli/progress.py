"""Progress of `ppo evaluate` and `ppo visualize` on stderr, because stdout holds results."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from ppo.run.status import Tally, ticking

INTERVAL_S = 10.0
"""Seconds between two lines if stderr is not a terminal."""


@contextmanager
def shown(doing: str, tally: Tally) -> Iterator[None]:
    """Shows the progress of the block: a bar in a terminal, which disappears at the end, or lines elsewhere.

    Args:
        doing: What the block does, such as "evaluating".
        tally: Counts the episodes and steps of the block.
    """
    console, start_s = Console(stderr=True), time.monotonic()

    def line() -> str:
        seconds = time.monotonic() - start_s
        speed = f", {tally.steps / seconds:,.0f} steps/s" if tally.steps else ""
        return f"{doing}: {tally}{speed}, {timedelta(seconds=round(seconds))}"

    def bar() -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=1.0, completed=tally.fraction, width=24), line())
        return grid

    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True, get_renderable=bar):
            yield
        return
    ended = threading.Event()
    thread = ticking(lambda: print(line(), file=sys.stderr, flush=True), ended, every_s=INTERVAL_S)
    try:
        yield
    finally:
        ended.set()
        thread.join()
