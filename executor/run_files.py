"""runs/<id>/: what a run leaves behind.

plan.yaml           the plan that ran, its model's path made to fit from here
steps.jsonl         loss and times of each step, written as they happen
timeline.json       the recorded steps of all ranks; a span names its `step`, counted from 1
measurements.profile  work and its times, as a profile that `learn` merges
result.json         losses, step time, memory, predicted against measured
rank<r>.log         what each rank printed
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.ranks import Rank
from claw_plan.executor.step_times import MET, STEADY, step_times
from claw_plan.executor.train import RankRecord
from claw_plan.planner.plan import Plan, load_plan, save_plan
from claw_plan.planner.traffic import (
    STEADY_STEP,
    Kind,
    Moved,
    Traffic,
    differences,
    rows_of,
    traffic_of,
)
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.gradient_times import GradientTimes
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import append_profile, link_device
from claw_plan.profiles.units import gib, ms_from_ns
from claw_plan.profiles.work import CollectiveWork, OpWork
from claw_plan.simulator.timeline import MEASURED, Span, Timeline

PLAN, RESULT, TIMELINE = "plan.yaml", "result.json", "timeline.json"
MEASUREMENTS = "measurements.profile"

SELECTED = "its selector tried other collectives than the plan's"
"""Why the steps of a run with `--selector` are not what the plan predicts."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run was like. Times are of the counted steps, the slowest rank's each.

    `unlike_plan` says why they are not what the plan predicts; '' where they are.
    `process_time_ms` is the CPU time of rank 0 in a median step: where wall time moved and it did
    not, the machine was disturbed. `checkpoint` is what was written at the end, empty for nothing.
    `parts_ms` are the parts of the median recorded step, on the
    rank that computed longest. `predicted_*` are None when the plan holds no prediction. `traffic`
    are the rows of `planner.traffic`, counted in the last step; `traffic_differences` says where
    they differ from the plan's. `algorithms` is what buckets of so many bytes went by at the end,
    where a selector chose.
    """

    losses: list[float]
    step_time_ms: dict[str, float]
    process_time_ms: float
    samples_per_s: float
    tokens_per_s: float | None
    predicted_step_time_ms: float | None
    peak_memory_bytes: list[int]
    predicted_memory_gib: list[float] | None
    parts_ms: dict[str, float]
    data: str
    run: str
    checkpoint: str = ""
    traffic: list[dict[str, Any]] = field(default_factory=list)
    traffic_differences: list[str] = field(default_factory=list)
    algorithms: dict[str, str] = field(default_factory=dict)
    unlike_plan: str = ""


def make_run_folder(runs: Path, plan_path: Path) -> Path:
    """A new folder named after the time and the plan; its model path is made to fit from there."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan_path.stem}"
    plan = load_plan(plan_path)
    for attempt in range(1000):
        folder = runs / (f"{name}-{attempt}" if attempt else name)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ExecutionError(
                f"cannot write the run to {folder}: {error.strerror}; choose another --runs"
            ) from None
        file = (plan_path.parent / plan.model.file).resolve()
        relative = os.path.relpath(file, folder.resolve())
        model = plan.model.model_copy(update={"file": relative})
        save_plan(plan.model_copy(update={"model": model}), folder / PLAN)
        return folder
    raise ExecutionError(f"{runs} has too many runs named {name}")


def write_run(folder: Path, records: Sequence[RankRecord], rank: Rank) -> RunResult:
    """Writes timeline, measurements and result from what all ranks saw."""
    plan = load_plan(folder / PLAN)
    timelines = timelines_of(records)
    write_atomic(folder / TIMELINE, json.dumps(_timeline_values(timelines)))
    found = measurements_of(plan, records, rank)
    if found:
        append_profile(folder / MEASUREMENTS, found, gradients=gradients_of(plan, records))
    result = result_of(plan, records, median_timeline(timelines), folder)
    write_atomic(folder / RESULT, json.dumps(dataclasses.asdict(result), indent=1))
    return result


def read_result(folder: Path) -> RunResult:
    """The result of a run that ended well."""
    return RunResult(**json.loads((folder / RESULT).read_text()))


def read_timelines(folder: Path) -> dict[int, Timeline]:
    """The recorded steps by number, from 1."""
    values = json.loads((folder / TIMELINE).read_text())
    spans: dict[int, list[Span]] = {}
    for value in values["spans"]:
        step = value.pop("step")
        spans.setdefault(step, []).append(Span(**(value | {"group": tuple(value["group"])})))
    return {
        step: Timeline(origin=values["origin"], spans=tuple(some)) for step, some in spans.items()
    }


def timelines_of(records: Sequence[RankRecord]) -> dict[int, Timeline]:
    """Each recorded step of all ranks; ranks leave the previous step together."""
    return {
        step: Timeline(
            origin=MEASURED,
            spans=tuple(
                sorted(
                    (span for record in records for span in record.spans[step]),
                    key=lambda span: span.start_ns,
                )
            ),
        )
        for step in records[0].spans
    }


def median_timeline(timelines: Mapping[int, Timeline]) -> Timeline:
    """The step of median length, the shorter of two; an empty one where none is recorded."""
    ordered = sorted(timelines.values(), key=lambda timeline: timeline.step_time_ns)
    return ordered[(len(ordered) - 1) // 2] if ordered else Timeline(origin=MEASURED, spans=())


def _timeline_values(timelines: Mapping[int, Timeline]) -> dict[str, Any]:
    spans = [
        span._asdict() | {"step": step}
        for step, timeline in timelines.items()
        for span in timeline.spans
    ]
    return {"origin": MEASURED, "spans": spans}


def measurements_of(plan: Plan, records: Sequence[RankRecord], rank: Rank) -> list[Measurement]:
    """Each piece of work once, the samples of all ranks together.

    A collective lasts until its slowest rank has it, so of each call that rank's time counts.
    """
    node = cluster_from_mapping(plan.cluster, "cluster").nodes[0]
    samples: dict[OpWork | CollectiveWork, list[list[int]]] = {}
    for record in records:
        for work, times in record.samples.items():
            samples.setdefault(work, []).append(times)
    found = []
    for work, by_rank in samples.items():
        device = node.device.name
        times = [time for times in by_rank for time in times]
        if isinstance(work, CollectiveWork):
            device = link_device(device, (node.intra if work.nodes == 1 else node.nic).name)
            times = _slowest(by_rank)
        found.append(
            Measurement(
                device=device,
                work=work,
                samples_ns=tuple(times),
                ranks_per_host=rank.local_world_size,
                provenance=_provenance(),
            )
        )
    return found


def gradients_of(plan: Plan, records: Sequence[RankRecord]) -> list[GradientTimes]:
    """When gradients were ready, the same on all ranks; none where no rank looked."""
    if not records[0].ready_ns:
        return []
    device = cluster_from_mapping(plan.cluster, "cluster").nodes[0].device.name
    size = plan.knobs().microbatch_size
    ready_ns = records[0].ready_ns
    return [GradientTimes(device=device, microbatch_size=size, ready_ns=ready_ns)]


def _slowest(by_rank: Sequence[Sequence[int]]) -> list[int]:
    """The largest of the ranks call by call; groups of other ranks may have called less often."""
    longest = max(len(times) for times in by_rank)
    return [
        max(times[index] for times in by_rank if index < len(times)) for index in range(longest)
    ]


def _provenance() -> dict[str, str]:
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "host": platform.machine(),
        "command": "claw-plan run",
    }


def result_of(
    plan: Plan, records: Sequence[RankRecord], timeline: Timeline, folder: Path
) -> RunResult:
    """The run in numbers."""
    first = records[0]
    walls_ns = [max(walls) for walls in zip(*(each.wall_ns for each in records), strict=True)]
    times = step_times(plan.knobs(), first.ways, first.phases, walls_ns)
    process_ns = [first.process_ns[index] for index in times.indices]
    training, prediction = plan.training, plan.prediction
    samples_per_s = training.global_batch / (times.typical_ns / 1e9)
    return RunResult(
        losses=first.losses,
        step_time_ms={
            "median": ms_from_ns(times.typical_ns),
            "min": ms_from_ns(min(times.steps_ns)),
            "max": ms_from_ns(max(times.steps_ns)),
        },
        process_time_ms=ms_from_ns(statistics.median(process_ns)),
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * training.seq_len if training.seq_len else None,
        predicted_step_time_ms=prediction.step_time_ms if prediction else None,
        peak_memory_bytes=[record.peak_memory_bytes for record in records],
        predicted_memory_gib=prediction.memory_gib if prediction else None,
        parts_ms=parts_ms(timeline),
        data=first.data,
        run=str(folder),
        checkpoint=first.checkpoint,
        traffic=[row.model_dump() for row in rows_of([record.traffic for record in records])],
        traffic_differences=_traffic_differences(plan, records),
        algorithms={str(size): name for size, name in first.algorithms.items()},
        unlike_plan=SELECTED if first.algorithms else times.unlike_plan,
    )


def _traffic_differences(plan: Plan, records: Sequence[RankRecord]) -> list[str]:
    """From what the plan predicts for steps like the last; none where it predicts nothing.

    Replicas that a run's options, or a warm-up, let do something else are left out.
    """
    rows = plan.prediction.traffic if plan.prediction else None
    if rows is None or len(records[0].losses) < STEADY_STEP:
        return []
    predicted, counted = traffic_of(rows, len(records)), [record.traffic for record in records]
    is_steady = records[0].phases[-1] in (STEADY, MET)
    if not (records[0].is_as_planned and is_steady):
        predicted, counted = _without_replicas(predicted), _without_replicas(counted)
    return differences(predicted, counted)


def _without_replicas(ranks: Sequence[Traffic]) -> list[dict[Kind, Moved]]:
    return [
        {kind: moved for kind, moved in traffic.items() if kind.axis != "dp_replicate"}
        for traffic in ranks
    ]


def parts_ms(timeline: Timeline) -> dict[str, float]:
    """Busy time by span kind on the rank that computes longest; empty without a recorded step."""
    if not timeline.spans:
        return {}
    compute = ("forward", "backward", "recompute")
    busiest = max(timeline.ranks, key=lambda r: timeline.busy_ns(r, compute))
    kinds = sorted({span.kind for span in timeline.spans if span.rank == busiest})
    return {kind: ms_from_ns(timeline.busy_ns(busiest, [kind])) for kind in kinds}


def memory_table(result: RunResult) -> list[tuple[int, float, float | None]]:
    """(rank, measured GiB, predicted GiB of its stage or None)."""
    predicted = result.predicted_memory_gib
    count = len(result.peak_memory_bytes)
    return [
        (rank, gib(size), predicted[rank * len(predicted) // count] if predicted else None)
        for rank, size in enumerate(result.peak_memory_bytes)
    ]
