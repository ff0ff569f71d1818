"""Published runs predicted through the planner's own path, row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from claw_plan.planner.allocator import Shown, needed
from claw_plan.planner.errors import PlanError, TraceError
from claw_plan.planner.memory import MemoryModel
from claw_plan.planner.published_run import CostOf, PublishedRun, cost_without_launches, pose
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.step_time import StepTime, step_time
from claw_plan.profiles.fitted import ASSUMED, KNOWN, UNKNOWN, fitted
from claw_plan.profiles.trainer import Trainer
from claw_plan.profiles.training_row import TrainingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the planner says of one row; `not_expressed` is the reason when it says nothing.

    `low_ns` and `high_ns` hold the measured time with a probability of 90 %. `parts_ns` adds up
    to the step along its critical path. `memory_bytes` is of the kind the row asks for;
    `needed_bytes` what the fullest device must have.
    """

    row_id: str
    step_time_ns: int | None = None
    low_ns: int | None = None
    high_ns: int | None = None
    memory_bytes: int | None = None
    needed_bytes: int | None = None
    parts_ns: Mapping[str, float] = field(default_factory=dict)
    not_expressed: str = ""


def half_width(row: TrainingRow, trainers: Mapping[str, Trainer]) -> float:
    """Of the interval around a prediction of the row, as a share of it."""
    is_known = row.trainer in trainers and row.device_name in fitted().rates
    if not is_known:
        return UNKNOWN
    return KNOWN if row.complete else ASSUMED


def predict_rows(
    rows: Iterable[TrainingRow],
    trainers: Mapping[str, Trainer],
    cost_of: CostOf = cost_without_launches,
) -> Iterator[Prediction]:
    """Predicts each row with the constants of its trainer, 'torch' for those not known."""
    for row in rows:
        trainer = trainers.get(row.trainer) or trainers["torch"]
        try:
            run = pose(row, trainer, cost_of)
            found = predict_step(run)
            reading, need = predict_memory(run, row.memory_kind or "nvidia-smi")
        except (PlanError, TraceError) as error:
            yield Prediction(row_id=row.id, not_expressed=str(error))
            continue
        yield Prediction(
            row_id=row.id,
            step_time_ns=round(found.ns),
            low_ns=round(found.ns * (1 - half_width(row, trainers))),
            high_ns=round(found.ns * (1 + half_width(row, trainers))),
            memory_bytes=reading.expected_bytes,
            needed_bytes=need.expected_bytes,
            parts_ns=found.parts_ns,
        )


def predict_step(run: PublishedRun) -> StepTime:
    """The run's step time."""
    shards = ShardSizes(run.problem.graph)
    return step_time(run.problem, shards, run.candidate, run.cuts)


def predict_memory(run: PublishedRun, kind: str) -> tuple[Shown, Shown]:
    """A reading of that kind (`planner.allocator`) of the fullest rank, and what it needs."""
    memory = MemoryModel(run.problem, ShardSizes(run.problem.graph))
    allocated = memory.allocated_bytes(run.candidate, run.cuts)
    return memory.shown(run.candidate, run.cuts, kind), needed(allocated)
