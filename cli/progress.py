"""A progress bar on stderr for work that lasts over a second, and nothing for shorter work.

The planner and the executor report (what they do, fraction done); only a terminal shows it.
"""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SHOW_AFTER_S = 1.0


class ProgressBar:
    """Call it with (what, fraction); used as a context manager around the work."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=1.0)
        self._timer = threading.Timer(SHOW_AFTER_S, self._bar.start)
        self._timer.daemon = True

    def __call__(self, what: str, fraction: float) -> None:
        """Says what is being done and how much of the whole is done, from 0 to 1."""
        self._bar.update(self._task, description=what, completed=min(max(fraction, 0.0), 1.0))

    def __enter__(self) -> ProgressBar:
        if self._console.is_terminal:
            self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()  # it may be starting the bar just now
        if self._bar.live.is_started:
            self._bar.stop()
