"""What a launcher hands to its ranks, and the note a failing rank leaves; both as JSON files.

When one rank fails all end, and the notes say which was first and why.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_plan.profiles.errors import ClawPlanError
from claw_plan.profiles.files import write_atomic

TRAIN, VERIFY = "train", "verify"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One task for all ranks. `folder` is theirs to write to; paths are absolute.

    `device_type` is 'cpu' or 'cuda' (ROCm too). `data` is a text file to
    train on, empty for none.
    """

    kind: str
    folder: Path
    plans: tuple[Path, ...]
    steps: int
    device_type: str = "cpu"
    data: str = ""

    def save(self) -> Path:
        """Writes job.json into the folder and answers with its path."""
        values = dataclasses.asdict(self)
        values |= {"folder": str(self.folder), "plans": [str(plan) for plan in self.plans]}
        path = self.folder / "job.json"
        write_atomic(path, json.dumps(values, indent=1))
        return path

    @classmethod
    def load(cls, path: Path) -> Job:
        """The job that `save` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        values["folder"] = Path(values["folder"])
        values["plans"] = tuple(Path(plan) for plan in values["plans"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class Note:
    """Why a rank stopped. `is_ours` tells errors addressed to the user from others."""

    rank: int
    step: int
    error: str
    is_ours: bool
    time_ns: int

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int) -> Note:
        """The note for what was raised, one line of it."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        is_ours = isinstance(error, ClawPlanError)
        text = lines[0] if lines else ""
        if error.__cause__ is not None and not is_ours:
            # torch's pipeline runtime wraps what the model raised in pages of shapes.
            return cls.of(error.__cause__, rank, step)
        if not is_ours:
            text = f"{type(error).__name__}: {text}".removesuffix(": ")
        return cls(rank=rank, step=step, error=text, is_ours=is_ours, time_ns=time.time_ns())

    def write(self, folder: Path) -> None:
        """Leaves it where the launcher looks."""
        write_atomic(self.path(folder, self.rank), json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """Where the note of a rank lies."""
        return folder / f"rank{rank}.error.json"

    @classmethod
    def read(cls, folder: Path, rank: int) -> Note | None:
        """The rank's note; None when it left none."""
        path = cls.path(folder, rank)
        return cls(**json.loads(path.read_text())) if path.is_file() else None


def leave_done(folder: Path, rank: int) -> None:
    """Says that the rank has done all its work, so that how its process ends does not matter."""
    done_path(folder, rank).touch()


def done_path(folder: Path, rank: int) -> Path:
    """Where `leave_done` says so."""
    return folder / f"rank{rank}.done"


@dataclass
class Progress:
    """The step that runs, counted from 1; 0 before the first."""

    step: int = 0


@contextmanager
def end_together(folder: Path, rank: int) -> Iterator[Progress]:
    """Runs a rank's work; on any failure leaves a note and ends this process at once.

    An ordinary exit would wait for collectives that will never end; the other ranks notice the
    closed connections and end likewise.
    """
    progress = Progress()
    try:
        yield progress
    except BaseException as error:
        Note.of(error, rank, progress.step).write(folder)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
