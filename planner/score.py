"""The only score: lower a candidate, simulate it, and read off time, memory and their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from claw_plan.planner.bound import Bounds
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import lower
from claw_plan.planner.memory import MemoryModel, StageMemory
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.side_by_side import in_halves
from claw_plan.planner.stage_path import Cuts
from claw_plan.planner.steady_state import steady_step
from claw_plan.planner.zero_one import is_zero_one, mean_ns
from claw_plan.profiles.units import s_from_ns
from claw_plan.simulator.simulate import makespan_ns, simulate
from claw_plan.simulator.timeline import Timeline

PART_OF_KIND = {
    "forward": "compute",
    "backward": "compute",
    "recompute": "recompute",
    "tp_comm": "tp_comm_exposed",
    "dp_comm": "dp_comm_exposed",
    "pp_comm": "pp_comm_exposed",
    "optimizer": "optimizer",
    "other": "overhead",
}
"""What a span on the compute stream counts as."""

WORTH_A_PROCESS = 2_000
"""Passes of stages whose simulation takes longer than another process, some 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate with everything the report says about it.

    `parts_ns` add up to the step time of the busiest stage: what its compute stream did, and what
    it waited for (`dp_comm_exposed`, `pp_bubble`). `mfu` is model FLOPs (forward and backward of
    the whole model, recompute left out) over time, devices and peak. `sources` is the share of
    kernel time that rests on each kind of cost. Runners-up have no `timeline`; that of 0/1 Adam is
    of a step in which replicas meet, times are means over the steps to the next. Where steps
    overlap a run takes `fill_and_drain_ns` beside its steps.
    """

    candidate: Candidate
    cuts: Cuts
    step_time_ns: int
    memory: tuple[StageMemory, ...]
    parts_ns: Mapping[str, int]
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float | None
    compute_utilisation: float
    communication_share: float
    sources: Mapping[str, float]
    timeline: Timeline | None
    fill_and_drain_ns: int = 0

    @property
    def short(self) -> str:
        """The way in one line for people."""
        return self.candidate.short()

    @property
    def num_devices(self) -> int:
        """Devices used."""
        return self.candidate.num_devices

    @property
    def fits(self) -> bool:
        """Whether every stage fits in memory."""
        return all(stage.fits for stage in self.memory)


class Scorer:
    """Scores candidates of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.shards = ShardSizes(problem.graph)
        self.memory = MemoryModel(problem, self.shards)
        self.bounds = Bounds(problem.quickest, self.shards)

    def step_time_ns(self, candidate: Candidate, cuts: Cuts) -> int:
        """The simulated step time alone."""
        if candidate.schedule in ASYNCHRONOUS:
            return steady_step(self.problem, self.shards, candidate, cuts).period_ns
        step_ns = makespan_ns(lower(self.problem, self.shards, candidate, cuts).graph)
        if is_zero_one(candidate):
            return mean_ns(candidate, step_ns, self.apart(candidate, cuts).step_time_ns)
        return step_ns

    def apart(self, candidate: Candidate, cuts: Cuts) -> Timeline:
        """A simulated step in which replicas of 0/1 Adam do not meet."""
        return simulate(lower(self.problem.apart, self.shards, candidate, cuts).graph)

    def score(self, candidate: Candidate, cuts: Cuts) -> Scored:
        """The candidate in full, with its timeline."""
        held = [self.memory.held(candidate, start, stop) for start, stop in cuts]
        fill_and_drain_ns = 0
        if candidate.schedule in ASYNCHRONOUS:
            steady = steady_step(self.problem, self.shards, candidate, cuts, held)
            timeline, fill_and_drain_ns = steady.timeline, steady.fill_and_drain_ns
        else:
            timeline = simulate(lower(self.problem, self.shards, candidate, cuts, held).graph)
        training, graph = self.problem.training, self.problem.graph
        step_ns, parts = timeline.step_time_ns, parts_of(timeline, candidate.pp)
        if is_zero_one(candidate):
            apart = self.apart(candidate, cuts)
            step_ns = mean_ns(candidate, step_ns, apart.step_time_ns)
            alone = parts_of(apart, candidate.pp)
            parts = {name: mean_ns(candidate, ns, alone[name]) for name, ns in parts.items()}
        samples_per_s = training.global_batch / s_from_ns(step_ns)
        busy = sum(parts[name] for name in ("compute", "recompute"))
        comm = sum(ns for name, ns in parts.items() if name.endswith("_comm_exposed"))
        return Scored(
            candidate=candidate,
            cuts=cuts,
            step_time_ns=step_ns,
            fill_and_drain_ns=fill_and_drain_ns,
            memory=self.memory.stages(candidate, cuts),
            parts_ns=parts,
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * graph.seq_len if graph.seq_len else None,
            mfu=self._mfu(candidate, step_ns),
            compute_utilisation=busy / step_ns,
            communication_share=comm / step_ns,
            sources=sources_of(timeline),
            timeline=timeline,
        )

    def _mfu(self, candidate: Candidate, step_ns: int) -> float | None:
        training = self.problem.training
        peak = self.problem.device.peak_flops_per_s.get(training.precision)
        if not peak:
            return None
        graph = self.problem.graph
        flops = graph.cp * sum(graph.flops(training.global_batch))
        return flops / (s_from_ns(step_ns) * peak * candidate.num_devices)


def score_others(choices: Sequence[tuple[Scorer, tuple[Candidate, Cuts]]]) -> list[Scored]:
    """Candidates without their timelines, on two cores where there are and it takes long."""

    def lean(some: Sequence[tuple[Scorer, tuple[Candidate, Cuts]]]) -> list[Scored]:
        return [replace(scorer.score(*choice), timeline=None) for scorer, choice in some]

    passes = sum(
        c.pp * c.stages_per_rank * c.num_microbatches(scorer.problem.training.global_batch)
        for scorer, (c, _) in choices
    )
    return in_halves(lean, choices, takes_long=passes >= WORTH_A_PROCESS)


def parts_of(timeline: Timeline, stages: int) -> dict[str, int]:
    """Time by part on the stage that computes most; idle time by what was waited for."""
    streams = {f"stage {stage} compute": stage for stage in range(stages)}
    spans = [span for span in timeline.spans if span.stream in streams]
    busy = [0] * stages
    for span in spans:
        busy[streams[span.stream]] += span.duration_ns
    chosen = max(range(stages), key=lambda stage: (busy[stage], -stage))
    parts = dict.fromkeys([*dict.fromkeys(PART_OF_KIND.values()), "pp_bubble"], 0)
    reached = 0
    own = sorted((s for s in spans if streams[s.stream] == chosen), key=lambda s: s.start_ns)
    data = sorted(
        (s.start_ns, s.end_ns)
        for s in timeline.spans
        if s.rank == chosen and s.kind == "dp_comm" and s.stream not in streams
    )
    for span in own:
        _add_idle(parts, reached, span.start_ns, data)
        parts[PART_OF_KIND[span.kind]] += span.duration_ns
        reached = max(reached, span.end_ns)
    _add_idle(parts, reached, timeline.step_time_ns, data)
    return parts


def _add_idle(parts: dict[str, int], start: int, stop: int, data: list[tuple[int, int]]) -> None:
    """An idle stretch counts as data-parallel traffic where such traffic runs, else as bubble."""
    if stop <= start:
        return
    covered = reached = 0
    for begin, end in data:
        begin, end = max(begin, start, reached), min(end, stop)
        if end > begin:
            covered += end - begin
            reached = end
    parts["dp_comm_exposed"] += covered
    parts["pp_bubble"] += stop - start - covered


def sources_of(timeline: Timeline) -> dict[str, float]:
    """The share of kernel time that rests on each kind of cost."""
    total: dict[str, int] = {}
    for span in timeline.spans:
        if span.cost_source:
            total[span.cost_source] = total.get(span.cost_source, 0) + span.duration_ns
    whole = sum(total.values()) or 1
    return {source: ns / whole for source, ns in sorted(total.items())}
