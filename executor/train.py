"""The training loop of one rank, and what each rank reports at its end."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.batches import Source, TextSource, check_vocabulary, make_source, own_slice
from claw_plan.executor.benchmark_codecs import measure_codecs
from claw_plan.executor.benchmark_group import measure_replicas
from claw_plan.executor.bucket_times import record_gradients
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.communication.selector import Switch
from claw_plan.executor.gradients import local
from claw_plan.executor.host_memory import MemoryMeter
from claw_plan.executor.job import Job, Progress
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.pipeline import time_sends
from claw_plan.executor.ranges import name_ranges
from claw_plan.executor.ranks import Rank
from claw_plan.executor.recorder import StepRecorder
from claw_plan.executor.replica_exchange import options_of
from claw_plan.executor.run_checkpoints import RunCheckpoints
from claw_plan.executor.step_times import FRESH, PLAIN, STEADY, TIMELINE, WORK, ways_of
from claw_plan.executor.stopping import StopRequest
from claw_plan.executor.traffic import counting, traffic_counter
from claw_plan.planner.problem import optimizer_work
from claw_plan.planner.traffic import Kind, Moved
from claw_plan.profiles.units import ms_from_ns
from claw_plan.profiles.work import CollectiveWork, OpWork
from claw_plan.simulator.timeline import Span

STEPS_FILE = "steps.jsonl"

OnStep = Callable[[Mapping[str, Any]], None]
"""Called with each line of steps.jsonl: step, loss, step_time_ms, process_time_ms, way, phase
where it is not as planned, and `note` where something is to be said."""


@dataclass(kw_only=True)
class RankRecord:
    """What one rank saw. Lists have an entry a step; `spans` those of each recorded step, counted
    from 1; `samples` and `ready_ns`, when each parameter's gradient was complete, go into the
    profile.

    The run began after `first_step` steps of the training; `checkpoint` is what it wrote at its
    end, empty for nothing. `traffic` is that of the last step. `algorithms` is what buckets of so
    many bytes went by at the end where a selector chose; not `is_as_planned` are runs whose
    replicas do something beside what the plan says. `ways` and `phases` are those of `step_times`.
    """

    rank: int
    first_step: int = 0
    checkpoint: str = ""
    traffic: dict[Kind, Moved] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)
    process_ns: list[int] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peak_memory_bytes: int = 0
    spans: dict[int, list[Span]] = field(default_factory=dict)
    samples: dict[OpWork | CollectiveWork, list[int]] = field(default_factory=dict)
    ready_ns: dict[str, int] = field(default_factory=dict)
    data: str = ""
    algorithms: dict[int, str] = field(default_factory=dict)
    is_as_planned: bool = True


def train(
    job: Job, rank: Rank, progress: Progress, on_step: OnStep = lambda line: None
) -> list[RankRecord]:
    """Trains the job's plan; on rank 0 the records of all ranks, elsewhere nothing."""
    plan, loaded = open_plan(job.plans[0])
    memory = MemoryMeter(rank.device)
    exchange = options_of(job.selector, job.checks_buckets)
    compiled = compile_plan(plan, loaded, rank.device, exchange=exchange)
    if job.nvtx:
        compiled.ranges = name_ranges(compiled.stages, plan.blocks, rank.device)
    source = make_source(plan, loaded, Path(job.data) if job.data else None)
    if isinstance(source, TextSource):
        for stage in compiled.stages:
            check_vocabulary(stage)
    checkpoints = RunCheckpoints(job, compiled)
    memory.reset()
    record = RankRecord(
        rank=rank.rank,
        first_step=checkpoints.first_step,
        ways=ways_of(job.steps - checkpoints.first_step, waits=compiled.next_forward is not None),
        data=source.says,
        is_as_planned=not exchange,
    )
    stop = StopRequest()
    counter = traffic_counter(compiled)
    dist.barrier()
    with stop.listen(), counting(compiled, counter):
        told, notes = 0, list[str]()
        for way in record.ways:
            step = record.first_step + len(record.wall_ns)
            progress.step = step + 1
            stop.begin_step()
            counter.take()
            batch = _one_step(compiled, source, step, way, record, rank)
            _note_traffic(counter.take(), record, progress)
            switched = _exchange_ended(compiled, record, progress)
            progress.stopped_by = stop.agreed()
            ends = bool(progress.stopped_by) or step + 1 == job.steps
            note = checkpoints.after_step(step + 1, ends=ends)
            notes += filter(None, (switched, note))
            _take_losses(compiled, record)
            told = _tell_new(job.folder, record, told, notes, on_step) if rank.rank == 0 else 0
            if progress.stopped_by:
                break
    del record.ways[len(record.losses) :]
    record.checkpoint = checkpoints.last
    record.peak_memory_bytes = memory.peak_bytes()
    if WORK in record.ways and compiled.pipeline_stages:
        sends = time_sends(
            compiled.pipeline_stages, plan.schedule.name, compiled.mesh.group("pp"), rank
        )
        for work, samples in sends.items():
            record.samples[work] = samples
    if WORK in record.ways and rank.device.type == "cpu":
        _time_replicas(compiled, record, rank)
        record.ready_ns = record_gradients(compiled, compiled.microbatches_of(batch)[0])
    return _collect(record, rank)


def _time_replicas(compiled: ParallelModel, record: RankRecord, rank: Rank) -> None:
    """What replicas on several hosts could do instead, for predictions of plans that do."""
    group = compiled.mesh.group("dp_replicate")
    ranks = dist.get_process_group_ranks(group)
    if (nodes := rank.hosts(ranks)) > 1:
        for work, samples in measure_replicas(ranks, nodes, group).items():
            record.samples.setdefault(work, []).extend(samples)
        for kernel, times in measure_codecs(group).items():
            record.samples[kernel] = times


def _note_traffic(traffic: dict[Kind, Moved], record: RankRecord, progress: Progress) -> None:
    """Keeps what the step moved; the rank's log tells of each step unlike the one before."""
    if traffic != record.traffic and progress.log is not None:
        rows = [kind._asdict() | moved._asdict() for kind, moved in sorted(traffic.items())]
        progress.log.event("traffic", progress.step, moved=rows)
    record.traffic = traffic


def _exchange_ended(compiled: ParallelModel, record: RankRecord, progress: Progress) -> str:
    """Lets the replicas' exchange change what it uses; what to say of it, mostly nothing.

    Trials are for the rank's log alone.
    """
    exchange, said = compiled.exchange, []
    if compiled.waits_because and len(record.losses) == 1:
        said.append(f"the next forward waits for all buckets: {compiled.waits_because}")
    if exchange is None:
        return "; ".join(said)
    for event in exchange.step_ended(progress.step):
        values = dataclasses.asdict(event)
        del values["step"]  # of the selector, which counts from where the run began
        if progress.log is not None:
            name = "collective" if isinstance(event, Switch) else "links probed"
            progress.log.event(name, progress.step, **values)
        if isinstance(event, Switch) and not event.is_trial:
            said.append(
                f"all-reduces of {event.size_bytes} bytes go by {event.after} now: {event.reason}"
            )
    record.algorithms = exchange.algorithms()
    if record.phases[-1] == STEADY:
        record.phases[-1] = exchange.phase
    return "; ".join(said)


def _one_step(
    compiled: ParallelModel, source: Source, step: int, way: str, record: RankRecord, rank: Rank
) -> dict[str, torch.Tensor]:
    """Trains on the step's batch; this rank's slice of it."""
    ahead = compiled.next_forward
    if ahead is not None and way != PLAIN:
        ahead.settle()  # what the step before left is no part of a recorded one
    is_fresh = ahead is not None and not ahead.is_pending
    record.phases.append(FRESH if is_fresh else STEADY)
    start_ns, process_ns = time.perf_counter_ns(), time.process_time_ns()
    batch = own_slice(source.global_batch(step), compiled.mesh.data_index, compiled.knobs.dp)
    with _recording(compiled, rank, way, record):
        loss = compiled.train_step(_to(batch, rank.device))
    record.wall_ns.append(time.perf_counter_ns() - start_ns)
    record.process_ns.append(time.process_time_ns() - process_ns)
    if compiled.overlap is None:
        record.losses.append(loss)
    return batch


def _take_losses(compiled: ParallelModel, record: RankRecord) -> None:
    """Where steps overlap, a loss is known a step later, and the last ones when all is done."""
    if compiled.overlap is not None:
        record.losses += compiled.overlap.losses[len(record.losses) :]


def _to(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


@contextmanager
def _recording(
    compiled: ParallelModel, rank: Rank, way: str, record: RankRecord
) -> Iterator[None]:
    if way == PLAIN:
        yield
        return
    by_axis = compiled.mesh.groups(compiled.knobs.reshard_ranks)
    names = {str(group.group_name): axis for axis, group in by_axis.items()}
    if isinstance(compiled.module, Replicas):
        names[str(compiled.module.group.group_name)] = "dp_replicate"
    recorder = StepRecorder(
        rank.rank,
        rank.device,
        names,
        {axis: rank.hosts(dist.get_process_group_ranks(group)) for axis, group in by_axis.items()},
        times_work=way == WORK,
        meets=dist.group.WORLD if _are_alike(compiled) else None,
    )
    compiled.recorder, compiled.optimizer_work = recorder, own_optimizer_work(compiled)
    try:
        yield
    finally:
        compiled.recorder = None
    if way == TIMELINE:
        step = record.first_step + len(record.wall_ns) + 1
        record.spans[step] = sorted(recorder.spans, key=lambda span: span.start_ns)
    for work, samples in recorder.samples.items():
        record.samples.setdefault(work, []).extend(samples)


def _are_alike(compiled: ParallelModel) -> bool:
    """Whether all ranks make the same collectives in the same order, whatever their batch."""
    return compiled.knobs.pp == 1 and not compiled.unreached


def own_optimizer_work(compiled: ParallelModel) -> OpWork:
    """This rank's optimizer step as one piece of work, as the planner counts it."""
    elements = sum(local(parameter).numel() for parameter in compiled.trainable())
    return optimizer_work(compiled.plan.training.optimizer, elements)


def _tell_new(
    folder: Path, record: RankRecord, told: int, notes: list[str], on_step: OnStep
) -> int:
    """Tells each step whose loss is known now, the notes with the last; how many are told."""
    for index in range(told, len(record.losses)):
        is_last = index == len(record.losses) - 1
        on_step(_tell(folder, record, index, "; ".join(notes) if is_last else ""))
        if is_last:
            notes.clear()
    return len(record.losses)


def _tell(folder: Path, record: RankRecord, index: int, note: str) -> dict[str, object]:
    """Writes one line a step, which the launcher reads for its progress bar."""
    line: dict[str, object] = {
        "step": record.first_step + index + 1,
        "loss": record.losses[index],
        "step_time_ms": ms_from_ns(record.wall_ns[index]),
        "process_time_ms": ms_from_ns(record.process_ns[index]),
        "way": record.ways[index],
    }
    if record.phases[index] != STEADY:
        line["phase"] = record.phases[index]
    if note:
        line["note"] = note
    with (folder / STEPS_FILE).open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def _collect(record: RankRecord, rank: Rank) -> list[RankRecord]:
    gathered: list[RankRecord | None] | None = None
    if rank.rank == 0:
        gathered = [None] * rank.world_size
    dist.gather_object(record, gathered)
    return [found for found in gathered or [] if found is not None]
