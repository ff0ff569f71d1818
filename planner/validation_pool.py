"""Predictions of many published runs, spread over the cores of this machine.

Runs that share a model and a division of it share a trace, so they go to one process together.
`cli.validate_command` and `bench/accuracy.py` predict whole files through here.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from claw_plan.planner.validation import Prediction, predict_rows
from claw_plan.profiles.trainer import Trainer
from claw_plan.profiles.training_row import TrainingRow

LONGEST_CHUNK = 24
"""Runs a process predicts before it asks for more: the last chunks end at about the same time."""

LEAST_ROWS = 12
"""Fewer runs are predicted before a second process has started."""

Progress = Callable[[str, float], None]


def predict_all(
    rows: Sequence[TrainingRow],
    trainers: Mapping[str, Trainer],
    progress: Progress,
    processes: int | None = None,
) -> dict[str, Prediction]:
    """The prediction of each run, by its id.

    Args:
        rows: Runs; their ids are unique.
        trainers: Constants by the trainer's name.
        progress: Told what is done and which fraction of it.
        processes: How many predict; one for each core of this machine without it.
    """
    count = processes or len(os.sched_getaffinity(0))
    if count == 1 or len(rows) < LEAST_ROWS:
        return _here(rows, trainers, progress)
    pool = ProcessPoolExecutor(
        max_workers=count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_one_thread,
    )
    try:
        return _spread(pool, chunks_of(rows), trainers, progress, len(rows))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _here(
    rows: Sequence[TrainingRow], trainers: Mapping[str, Trainer], progress: Progress
) -> dict[str, Prediction]:
    found: dict[str, Prediction] = {}
    for prediction in predict_rows(rows, trainers):
        found[prediction.row_id] = prediction
        progress("predicting", len(found) / len(rows))
    return found


def _spread(
    pool: ProcessPoolExecutor,
    chunks: Iterable[Sequence[TrainingRow]],
    trainers: Mapping[str, Trainer],
    progress: Progress,
    total: int,
) -> dict[str, Prediction]:
    waiting: set[Future[list[Prediction]]] = {
        pool.submit(_predict, chunk, trainers) for chunk in chunks
    }
    found: dict[str, Prediction] = {}
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            found |= {prediction.row_id: prediction for prediction in future.result()}
        progress("predicting", len(found) / total)
    return found


def _predict(rows: Sequence[TrainingRow], trainers: Mapping[str, Trainer]) -> list[Prediction]:
    return list(predict_rows(rows, trainers))


def _one_thread() -> None:
    """The processes share the cores; what they compute is small."""
    import torch

    torch.set_num_threads(1)


def chunks_of(rows: Iterable[TrainingRow]) -> list[list[TrainingRow]]:
    """Runs that share a trace side by side, the largest groups first."""
    groups: dict[Hashable, list[TrainingRow]] = defaultdict(list)
    for row in rows:
        groups[_shared(row)].append(row)
    chunks = []
    for group in groups.values():
        group.sort(key=_division)
        chunks += [
            group[start : start + LONGEST_CHUNK] for start in range(0, len(group), LONGEST_CHUNK)
        ]
    return sorted(chunks, key=len, reverse=True)


def _shared(row: TrainingRow) -> Hashable:
    return row.dimensions, row.trainer


def _division(row: TrainingRow) -> tuple[int | str, ...]:
    plan = row.plan
    return (plan.tp, plan.cp, plan.ep, plan.etp, plan.dtype, plan.linear_dtype, row.device_name)
