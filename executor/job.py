"""What a launcher hands to its ranks, and the note a failing rank leaves; both as JSON files.

When one rank fails all end, and the notes say which was first and why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_plan.executor.rendezvous import TIMEOUT_S
from claw_plan.executor.run_log import RunLog
from claw_plan.profiles.errors import ClawPlanError
from claw_plan.profiles.files import write_atomic

TRAIN, VERIFY = "train", "verify"

FAILED = 2
"""Exit code of a rank that failed, as that of every command."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One task for all ranks. `folder` is theirs to write to; paths are absolute.

    `device_type` is 'cpu' or 'cuda' (ROCm too). `data` is a text file to train on, empty for
    none. `timeout_s` is how long the ranks wait for each other; `preflight` says whether they
    look at themselves and at the network first, `nvtx` whether the parts of steps are named for
    profilers. Checkpoints go to `checkpoint_folder` (empty:
    none) every so many steps (0: at the end alone), and the newest `keep` stay (None: all);
    `resume` is the checkpoint to go on from, `init_from` what to take first weights from.
    `selector` are the options of what chooses collective algorithms, as they were typed, None
    where the plan does; `checks_buckets` says whether buckets of gradients have checksums.
    `keep_blocks` says for each plan to verify how many blocks are left of its model, None: all.
    """

    kind: str
    folder: Path
    plans: tuple[Path, ...]
    steps: int
    device_type: str = "cpu"
    data: str = ""
    timeout_s: float = TIMEOUT_S
    preflight: bool = False
    nvtx: bool = False
    selector: dict[str, str] | None = None
    checks_buckets: bool = False
    checkpoint_folder: str = ""
    checkpoint_every: int = 0
    keep: int | None = None
    resume: str = ""
    init_from: str = ""
    keep_blocks: tuple[int | None, ...] = ()

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
        values["keep_blocks"] = tuple(values["keep_blocks"])
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

    def text(self) -> str:
        """The note as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str) -> Note:
        """The note that `text` gave."""
        return cls(**json.loads(text))

    def write(self, folder: Path) -> None:
        """Leaves it where the launcher looks."""
        write_atomic(self.path(folder, self.rank), self.text())

    def told(self) -> str:
        """The error, with rank and step unless it is addressed to the user as it is."""
        if self.is_ours:
            return self.error
        when = f"at step {self.step}" if self.step else "before the first step"
        return f"rank {self.rank} failed {when}: {self.error}"

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """Where the note of a rank lies."""
        return folder / f"rank{rank}.error.json"

    @classmethod
    def read(cls, folder: Path, rank: int) -> Note | None:
        """The rank's note; None when it left none."""
        path = cls.path(folder, rank)
        return cls.parse(path.read_text()) if path.is_file() else None


def leave_done(folder: Path, rank: int) -> None:
    """Says that the rank has done all its work, so that how its process ends does not matter."""
    done_path(folder, rank).touch()


def done_path(folder: Path, rank: int) -> Path:
    """Where `leave_done` says so."""
    return folder / f"rank{rank}.done"


class Progress:
    """The step that runs, counted from 1; 0 before the first, when `phase` says what is done.

    Both go into the rank's log. `on_step` is called when a step begins. `explain` tells of an
    error whose fault it was, asking the other ranks; None: it cannot. `stopped_by` is the signal
    for which all ranks ended early, 0 for none.
    """

    def __init__(self, log: RunLog | None = None) -> None:
        self._step, self._phase = 0, "starting"
        self.log = log
        self.on_step: Callable[[], None] = lambda: None
        self.explain: Callable[[Note, BaseException], Note] | None = None
        self.stopped_by = 0

    @property
    def step(self) -> int:
        """The step that runs."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self.on_step()
        if self.log is not None:
            self.log.step(number)

    @property
    def phase(self) -> str:
        """What is done before the first step."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        if self.log is not None:
            self.log.event(phase, self._step)


@contextmanager
def end_together(folder: Path, rank: int) -> Iterator[Progress]:
    """Runs a rank's work; on any failure leaves a note and ends this process at once.

    An ordinary exit would wait for collectives that will never end; the other ranks notice the
    closed connections and end likewise.
    """
    progress = Progress(RunLog(folder, rank))
    try:
        yield progress
    except BaseException as error:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends anyway, once it has told why
        traceback.print_exc()
        note = Note.of(error, rank, progress.step)
        _leave_note(note, folder, progress)
        if progress.explain is not None:
            note = _explained(progress.explain, note, error)
        print(f"claw-plan: {note.told()}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)


def _leave_note(note: Note, folder: Path, progress: Progress) -> None:
    """Into the folder, if that still can be written to: a full disk must not hide the error."""
    with contextlib.suppress(OSError, ClawPlanError):
        note.write(folder)
        if progress.log is not None:
            progress.log.event("failed", note.step, error=note.error)


def _explained(
    explain: Callable[[Note, BaseException], Note], note: Note, error: BaseException
) -> Note:
    try:
        return explain(note, error)
    except RuntimeError:  # the store is gone as well
        return note
