"""Published runs simulated under one set of constants after another, on all cores.

A run always goes to the same process, which has its trace from the round before.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Self

from claw_plan.planner.errors import PlanError, TraceError
from claw_plan.planner.trainer_fit import Costs, Simulated, Values, simulate_row
from claw_plan.planner.validation_pool import chunks_of
from claw_plan.profiles.trainer import Trainer
from claw_plan.profiles.trainers import DEFAULT
from claw_plan.profiles.training_row import TrainingRow

NOTHING = Simulated(error=0.0, shares={})
"""What stands for a run that cannot be expressed: it tells nothing of any constant."""


class FitPool:
    """Processes that simulate `rows`; a context manager that ends them."""

    def __init__(self, rows: Sequence[TrainingRow], trainers: Mapping[str, Trainer]) -> None:
        self._place = {row.id: index for index, row in enumerate(rows)}
        count = len(os.sched_getaffinity(0))
        shares: list[list[TrainingRow]] = [[] for _ in range(count)]
        for chunk in chunks_of(rows):
            min(shares, key=len).extend(chunk)
        self._shares = [share for share in shares if share]
        context = multiprocessing.get_context("spawn")
        self._workers = [
            ProcessPoolExecutor(
                1, mp_context=context, initializer=_keep, initargs=(share, trainers)
            )
            for share in self._shares
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.shutdown(cancel_futures=True)

    def simulate(self, values: Sequence[Values]) -> list[Simulated]:
        """Every run under its constants: one set for all, or one for each run in order."""
        found = [NOTHING] * len(self._place)
        waiting = []
        for worker, share in zip(self._workers, self._shares, strict=True):
            own = values
            if len(values) > 1:
                own = [values[self._place[row.id]] for row in share]
            waiting.append(worker.submit(_simulate, own))
        for share, future in zip(self._shares, waiting, strict=True):
            for row, one in zip(share, future.result(), strict=True):
                found[self._place[row.id]] = one
        return found


_KEPT: tuple[Sequence[TrainingRow], Mapping[str, Trainer]] = ((), {})


def _keep(rows: Sequence[TrainingRow], trainers: Mapping[str, Trainer]) -> None:
    """In the process: the runs it simulates."""
    import torch

    torch.set_num_threads(1)
    global _KEPT
    _KEPT = (rows, trainers)


def _simulate(values: Sequence[Values]) -> list[Simulated]:
    rows, trainers = _KEPT
    found = []
    costs = Costs(values[0])
    for index, row in enumerate(rows):
        if len(values) > 1 and costs.values is not values[index]:
            costs = Costs(values[index])
        trainer = trainers.get(row.trainer, trainers[DEFAULT])
        try:
            found.append(simulate_row(row, trainer, costs))
        except (PlanError, TraceError):
            found.append(NOTHING)
    return found
