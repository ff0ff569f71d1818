"""When one rank fails, all end, and the reason is written down where the launcher looks."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from claw_plan.executor.job import Note
from claw_plan.executor.ranks import Rank


@dataclass
class Progress:
    """The step that runs, counted from 1; 0 before the first."""

    step: int = 0


@contextmanager
def end_together(folder: Path, rank: Rank) -> Iterator[Progress]:
    """Runs a rank's work; on any failure leaves a note and ends this process at once.

    An ordinary exit would wait for collectives that will never end; the other ranks notice the
    closed connections and end likewise.
    """
    progress = Progress()
    try:
        yield progress
    except BaseException as error:
        Note.of(error, rank.rank, progress.step).write(folder)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
