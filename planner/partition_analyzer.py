"""What each pipeline stage of a model computes, holds and sends, with a cluster or without one.

`partition_analyzer(model).report()` cuts the chain of blocks into `pp` stages of equal work. Work
is floating-point operations where no cluster is given, and time where one is. Figures are of one
rank and one microbatch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import PLAIN, TENSOR, Exchange, ModelGraph, Op
from claw_plan.planner.model_source import load_model
from claw_plan.planner.objective import imbalance
from claw_plan.planner.posing import costs_of
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import local_numel
from claw_plan.planner.stage_cut import cut_chain
from claw_plan.planner.stage_path import Cuts
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.work import DTYPE_BYTES, PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage of one rank. `flops` are forward and backward of a microbatch.

    `kept_bytes` are kept from its forward to its backward, `sent_bytes` are activations given to
    the next stage, `exchanged_bytes` the buffers of tensor-parallel collectives. `time_ns` and
    `peak_bytes` (all microbatches in flight, states included) are None without a cluster.
    """

    stage: int
    units: tuple[str, ...]
    parameters: int
    flops: int
    kept_bytes: int
    sent_bytes: int
    exchanged_bytes: int
    time_ns: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """All stages and how uneven they are, by time where it is known, else by operations.

    `imbalance` is the largest over the mean, less 1; `variation` the standard deviation over it.
    """

    name: str
    pp: int
    tp: int
    microbatch_size: int
    stages: tuple[StageReport, ...]
    imbalance: float
    variation: float
    critical_stage: int


@dataclass(frozen=True, kw_only=True)
class PartitionAnalyzer:
    """A traced model and how it is to be divided; `scorer` is None without a cluster."""

    graph: ModelGraph
    candidate: Candidate
    scorer: Scorer | None = None

    def report(self) -> PartitionReport:
        """Cuts the stages and adds up what each does. Raises PlanError where it cannot be cut."""
        cuts, candidate = self._cuts(), self.candidate
        times = self._times(cuts)
        stages = tuple(
            self._stage(index, start, stop, None if times is None else times[index])
            for index, (start, stop) in enumerate(cuts)
        )
        work = times or [stage.flops for stage in stages]
        mean = statistics.mean(work)
        return PartitionReport(
            name=self.graph.name,
            pp=candidate.pp,
            tp=candidate.tp,
            microbatch_size=candidate.microbatch_size,
            stages=stages,
            imbalance=imbalance(work),
            variation=statistics.pstdev(work) / mean if mean else 0.0,
            critical_stage=max(range(len(work)), key=lambda stage: (work[stage], -stage)),
        )

    def _cuts(self) -> Cuts:
        graph, stages = self.graph, self.candidate.pp
        if self.scorer is not None:
            path = self.scorer.bounds.stage_path(self.candidate)
            cuts = path.cuts if path is not None else None
        else:
            last = len(graph.units) - 1
            may_start = [unit for unit in range(2, last) if unit not in graph.cut_refused]
            work = [self._flops(unit) for unit in range(last + 1)]
            cuts = cut_chain(work, stages, may_start)
        if cuts is None:
            blocks = len(graph.blocks)
            raise PlanError(f"pp={stages}: the model's {blocks} blocks make no {stages} stages")
        return cuts

    @property
    def _variant(self) -> str:
        return PLAIN if self.candidate.tp == 1 else TENSOR

    def _items(self, unit: int) -> Iterator[Op | Exchange]:
        cost = self.graph.cost(unit, self._variant, self.candidate.tp)
        yield from cost.forward
        yield from cost.backward

    def _flops(self, unit: int) -> int:
        batch, tp = self.candidate.microbatch_size, self.candidate.tp
        return sum(i.flops.at(batch, tp) for i in self._items(unit) if isinstance(i, Op))

    def _exchanged(self, unit: int) -> int:
        batch, tp = self.candidate.microbatch_size, self.candidate.tp
        return sum(i.bytes.at(batch, tp) for i in self._items(unit) if isinstance(i, Exchange))

    def _times(self, cuts: Cuts) -> list[int] | None:
        if self.scorer is None:
            return None
        units = [forward + whole for forward, whole, *_ in
                 self.scorer.bounds.unit_times(self.candidate)]  # fmt: skip
        return [sum(units[start:stop]) for start, stop in cuts]

    def _stage(self, index: int, start: int, stop: int, time_ns: int | None) -> StageReport:
        graph, batch, tp = self.graph, self.candidate.microbatch_size, self.candidate.tp
        units = range(start, stop)
        costs = [graph.cost(unit, self._variant, self.candidate.tp) for unit in units]
        is_last = stop == len(graph.units)
        peak = None
        if self.scorer is not None:
            peak = self.scorer.memory.stage(self.candidate, index, start, stop).peak_bytes
        return StageReport(
            stage=index,
            units=tuple(graph.units[unit].name for unit in units),
            parameters=sum(
                local_numel(p, tp) for p in graph.parameters if set(p.units) & set(units)
            ),
            flops=sum(self._flops(unit) for unit in units),
            kept_bytes=sum(cost.saved_bytes.at(batch, tp) for cost in costs),
            sent_bytes=0 if is_last else costs[-1].output_bytes.at(batch, tp),
            exchanged_bytes=sum(self._exchanged(unit) for unit in units),
            time_ns=time_ns,
            peak_bytes=peak,
        )


def partition_analyzer(
    model: str | Path,
    *,
    pp: int = 1,
    tp: int = 1,
    microbatch_size: int = 1,
    num_microbatches: int | None = None,
    seq_len: int | None = None,
    precision: str = "bf16",
    cluster: str | None = None,
    build: str | None = None,
    inputs: str | None = None,
) -> PartitionAnalyzer:
    """Traces a model file for analysis.

    `num_microbatches` (4 a stage where it is None) are in flight as under 1F1B, which only the
    peak of memory depends on. Raises InputError, TraceError or PlanError.
    """
    loaded = load_model(Path(model), build=build, inputs=inputs)
    dtype = PRECISIONS.get(precision, precision)
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"precision is one of {', '.join(PRECISIONS)}, but got {precision!r}")
    graph = trace(loaded, seq_len=seq_len or loaded.seq_len(), dtype=dtype)
    if tp > 1 and (graph.no_tensor_parallel or not graph.takes_tp(tp)):
        why = graph.no_tensor_parallel or f"its heads divide by {graph.tp_divides} only"
        raise PlanError(f"tp={tp}: not possible for this model: {why}")
    candidate = Candidate(pp=pp, tp=tp, microbatch_size=microbatch_size)
    if cluster is None:
        return PartitionAnalyzer(graph=graph, candidate=candidate)
    machines = load_cluster(cluster)
    if candidate.num_devices > machines.num_devices:
        raise PlanError(
            f"pp={pp} x tp={tp} takes {pp * tp} devices; {machines.name} has "
            f"{machines.num_devices}"
        )
    training = Training(
        global_batch=microbatch_size * (num_microbatches or 4 * pp),
        seq_len=graph.seq_len,
        precision=dtype,
        optimizer="adamw",
        memory_headroom=0.0,
    )
    problem = Problem(graph=graph, cluster=machines, training=training, **costs_of(machines, None))
    return PartitionAnalyzer(graph=graph, candidate=candidate, scorer=Scorer(problem))


def unit_ranges(names: Sequence[str]) -> str:
    """'prologue to h.5' for the units of a stage."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
