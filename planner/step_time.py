"""The step time of a candidate and what it consists of along its critical path.

A step of many microbatches repeats itself: once some periods have lasted exactly as long as each
other, the rest is extrapolated instead of simulated. A period is one microbatch, under an
interleaved schedule one round of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import Cuts, Lowered, lower
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import INTERLEAVED
from claw_plan.planner.shards import ShardSizes
from claw_plan.simulator.critical_path import critical_path
from claw_plan.simulator.engine import finish_times_ns

SLACK_NS = 1_000
"""Periods are equal when they differ by rounding: a few ns for each task on the way."""

OVERLAP = "overlap"
"""The part of a step that computation loses to traffic beside it."""

PART_OF_KIND = {"dp_comm": "dp", "pp_comm": "pp", "tp_comm": "tp"}
"""What a task on the critical path counts as where nothing else is said of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A simulated step; `parts_ns` add up to it along the critical path."""

    ns: float
    parts_ns: Mapping[str, float]


def step_time(problem: Problem, shards: ShardSizes, candidate: Candidate, cuts: Cuts) -> StepTime:
    """Simulates the step, or enough of it to know the rest."""
    count = candidate.num_microbatches(problem.training.global_batch)
    period = _period(candidate, count)
    warm_up = max(2, candidate.pp)
    known: dict[int, StepTime] = {}

    def of(microbatches: int) -> StepTime:
        if microbatches not in known:
            lowered = lower(problem, shards, candidate, cuts, (), microbatches)
            known[microbatches] = simulated(lowered)
        return known[microbatches]

    while True:
        first = count % period + -(-warm_up // period) * period
        if first + 3 * period >= count:
            return of(count)
        one, two, three = (of(first + i * period) for i in range(3))
        if abs((three.ns - two.ns) - (two.ns - one.ns)) <= SLACK_NS:
            break
        warm_up *= 2
    left = (count - first - 2 * period) // period
    names = {**two.parts_ns, **three.parts_ns}
    parts = {
        name: max(0.0, _line(two.parts_ns.get(name, 0.0), three.parts_ns.get(name, 0.0), left))
        for name in names
    }
    return StepTime(ns=_line(two.ns, three.ns, left), parts_ns=parts)


def _line(before: float, now: float, periods: int) -> float:
    return now + (now - before) * periods


def _period(candidate: Candidate, count: int) -> int:
    if candidate.schedule != INTERLEAVED:
        return 1
    return count // max(1, count // candidate.pp)


def simulated(lowered: Lowered) -> StepTime:
    """The step as it is lowered, its critical path told by part."""
    graph = lowered.graph
    start, finish = finish_times_ns(graph)
    parts: dict[str, float] = {}
    for task in critical_path(graph, start, finish):
        duration = float(finish[task] - start[task])
        own, lost = lowered.parts.get(task, ({}, 0))
        whole = sum(own.values()) + lost
        if not whole:
            kind = graph.kind[task]
            name = PART_OF_KIND.get(kind, kind)
            parts[name] = parts.get(name, 0.0) + duration
            continue
        for name, ns in (*own.items(), (OVERLAP, lost)):
            parts[name] = parts.get(name, 0.0) + ns * duration / whole
    return StepTime(ns=float(finish.max(initial=0)), parts_ns=parts)
