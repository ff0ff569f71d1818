"""The training loop of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from claw_plan.executor.job import Job
from claw_plan.executor.ranks import Rank


@dataclass
class Progress:
    """The step that runs, counted from 1; 0 before the first."""

    step: int = 0


def train(job: Job, rank: Rank, progress: Progress) -> None:
    """Trains."""
