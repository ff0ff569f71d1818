"""`rank<r>.jsonl`: what one rank did and when, a JSON object a line.

Every line has `time` (seconds since 1970), `rank`, `step` and `event`; whoever searches a run of
many ranks reads them together with `sort`, `jq` or pandas.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO

STEP_EVERY_S = 1.0
"""Steps are logged no more often, or a long run fills the disk."""


class RunLog:
    """Appends events of one rank; whole lines, so that a kill leaves no half one behind."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = log_path(folder, rank), rank
        self._file: TextIO | None = None
        self._next_step_s = 0.0

    def event(self, event: str, step: int = 0, **values: Any) -> None:
        """Appends one."""
        if self._file is None:
            self._file = self._path.open("a", buffering=1, encoding="utf-8")
        line = {"time": time.time(), "rank": self._rank, "step": step, "event": event} | values
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def step(self, step: int) -> None:
        """The step begins; left out when another began just before."""
        now = time.monotonic()
        if now >= self._next_step_s:
            self._next_step_s = now + STEP_EVERY_S
            self.event("step", step)


def log_path(folder: Path, rank: int) -> Path:
    """Where the events of a rank are."""
    return folder / f"rank{rank}.jsonl"


def read_log(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The events of a rank; none when it left none."""
    path = log_path(folder, rank)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
