"""What a person asked of a run's checkpoints, checked before any rank starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_plan.executor.checkpoint_folder import (
    CHECKPOINTS,
    LATEST,
    check_files,
    checkpoints_in,
    find_checkpoint,
    read_header,
)
from claw_plan.profiles.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """`every` is in optimizer steps; with `folder` alone a checkpoint is written at the end.

    `folder` is the run's own by default. `keep` is how many of the newest stay, None: all.
    `resume` is 'latest' or a folder, `init_from` whose weights to begin with.
    """

    every: int | None = None
    folder: Path | None = None
    keep: int | None = 2
    resume: str | None = None
    init_from: Path | None = None

    def checked(self, steps: int, runs: Path) -> CheckpointOptions:
        """With the checkpoint that `resume` means; InputError for what cannot be done."""
        for name, value in (("--checkpoint-every", self.every), ("--keep", self.keep)):
            if value is not None and value < 1:
                raise InputError(f"{name} is at least 1, but got {value}")
        if self.resume is None:
            self._check_first_run()
            return self
        if self.init_from is not None:
            raise InputError(
                "--resume takes the weights of its checkpoint and --init-from those of a file; "
                "give one of them"
            )
        found = find_checkpoint(self.resume, self._places(runs))
        header = read_header(found)
        check_files(found, header)
        if header.step >= steps:
            raise InputError(
                f"{found} is of step {header.step} already; --steps counts from the beginning of "
                f"the training: give more than {header.step}, but got {steps}"
            )
        return dataclasses.replace(self, resume=str(found.resolve()))

    def _places(self, runs: Path) -> Sequence[Path]:
        if self.folder is not None:
            return [self.folder]
        return sorted(runs.glob(f"*/{CHECKPOINTS}"))

    def _check_first_run(self) -> None:
        """Two trainings in one folder would take each other's checkpoints for their own."""
        there = checkpoints_in(self.folder) if self.folder is not None else []
        if there:
            raise InputError(
                f"{self.folder} holds checkpoints of another run, up to {there[-1].name}; go on "
                f"from them with --resume {LATEST}, or give another --checkpoint-dir"
            )
        if self.init_from is not None and not self.init_from.exists():
            raise InputError(f"--init-from {self.init_from} is not there; check the path")

    def job_fields(self, run_folder: Path) -> dict[str, Any]:
        """The part of the job that says it."""
        writes = self.every is not None or self.folder is not None
        folder = self.folder or run_folder / CHECKPOINTS
        return {
            "checkpoint_folder": str(folder.resolve()) if writes else "",
            "checkpoint_every": self.every or 0,
            "keep": self.keep,
            "resume": self.resume or "",
            "init_from": str(self.init_from.resolve()) if self.init_from else "",
        }
