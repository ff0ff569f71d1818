"""A choice whose replicas meet during backward to the same with the best bucket boundaries.

When gradients are ready is read off the simulated step, what a bucket costs is what `averaging`
asks for it; `bucket_plan` finds the boundaries, `bucket_order` those with an order in which the
next forward need not wait for all, and `Scorer` alone says whether they pay. The gradients of one
unit are ready together, so buckets end where units do, unless a run has recorded when each is
(`gradient_times`): then they may end inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from typing import Any

import numpy as np

from claw_plan.planner.averaging import averaging
from claw_plan.planner.bucket_order import (
    SEPARABLE,
    NextStep,
    order_refusals,
    ordered_buckets,
)
from claw_plan.planner.bucket_plan import Cost, Gradients, Int, plan_buckets
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.gradient_times import completing_unit
from claw_plan.planner.graph import Parameter
from claw_plan.planner.low_rank import is_low_rank
from claw_plan.planner.lower import lower
from claw_plan.planner.memory_states import WHOLE, kind_of
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import local_numel
from claw_plan.planner.stage_path import Cuts
from claw_plan.profiles.units import format_ns
from claw_plan.simulator.simulate import simulate
from claw_plan.simulator.timeline import Timeline

LEAST_GAIN = 0.01
"""Of a step, for which it is worth that a plan lists its buckets."""

Choice = tuple[Candidate, Cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChoice:
    """The choice, its own buckets where they pay, and the sentence for the report."""

    choice: Choice
    sentences: tuple[str, ...] = ()


def with_planned_buckets(
    scorer: Scorer, choice: Choice, fix: Mapping[str, Any], *, own_optimizer: bool = False
) -> BucketChoice:
    """The boundaries that finish first, if a step is shorter with them than without; with an
    order if it is shorter still.

    A pinned `bucket_bytes` stays. Nobody knows what a model file's `own_optimizer` needs at once.
    """
    candidate, cuts = choice
    if "bucket_bytes" in fix or not _acts(scorer.problem, candidate):
        return BucketChoice(choice=choice)
    runs = runs_of_gradients(scorer, choice)
    cost = cost_of(scorer.problem, candidate)
    planned = replace(candidate, buckets=runs.counts(plan_buckets(runs.gradients, cost).sizes))
    before_ns = scorer.step_time_ns(candidate, cuts)
    after_ns = scorer.step_time_ns(planned, cuts)
    alike = candidate if "collective" in fix else replace(candidate, collective="auto")
    if _may_order(scorer.problem, alike, own_optimizer=own_optimizer):
        found = ordered_buckets(runs.gradients, runs.following, cost_of(scorer.problem, alike))
        sizes = runs.counts(found.sizes)
        ordered = replace(alike, buckets=sizes, bucket_order=found.order)
        ordered_ns = scorer.step_time_ns(ordered, cuts)
        if ordered_ns <= (1 - LEAST_GAIN) * min(before_ns, after_ns):
            said = _said_of_order(len(sizes), ordered_ns, min(before_ns, after_ns))
            return BucketChoice(choice=(ordered, cuts), sentences=(said,))
    if after_ns > (1 - LEAST_GAIN) * before_ns:
        return BucketChoice(choice=choice)
    count = len(planned.buckets)
    sentence = (
        f"gradients leave in {count} bucket{'s' * (count > 1)} that end where it pays: "
        f"{format_ns(after_ns)} a step, with buckets filled to "
        f"{candidate.bucket_bytes / 1e6:g} MB {format_ns(before_ns)}"
    )
    return BucketChoice(choice=(planned, cuts), sentences=(sentence,))


def _said_of_order(count: int, ordered_ns: int, waiting_ns: int) -> str:
    return (
        f"the next forward waits for each of {count} buckets where it needs it, in the order of "
        f"bucket_order: {format_ns(ordered_ns)} a step, waiting for all {format_ns(waiting_ns)}"
    )


def _acts(problem: Problem, candidate: Candidate) -> bool:
    """Whether anything runs beside the backward: else one bucket is best, and its size no knob."""
    if not candidate.reduces_in_backward or kind_of(problem, candidate) != WHOLE:
        return False
    if candidate.ep > 1:  # planned boundaries with experts left out are not proven
        return False
    if is_low_rank(candidate):  # what a bucket costs is told by shapes, not by elements
        return False
    return not averaging(problem, candidate, 1).is_waited_for


def _may_order(problem: Problem, candidate: Candidate, *, own_optimizer: bool) -> bool:
    """Whether a run would wait in its next forward (`executor.next_forward.why_not`)."""
    graph, training = problem.graph, problem.training
    if own_optimizer or training.optimizer not in SEPARABLE:
        return False
    if graph.may_miss or any(p.is_expert for p in graph.parameters):
        return False
    return not any(order_refusals(candidate, training.clip_norm))


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Neighbouring gradients that are ready together, as if each run were one of them.

    `numbers` are how many gradients lie in each; `following` is what comes after the backward.
    """

    gradients: Gradients
    following: NextStep
    numbers: tuple[int, ...]

    def counts(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Numbers of gradients in buckets of so many runs."""
        numbers = iter(self.numbers)
        return tuple(sum(islice(numbers, size)) for size in sizes)


def runs_of_gradients(scorer: Scorer, choice: Choice) -> Runs:
    """The model's gradients, its last parameter's first, as a simulated step has and needs them.

    Those of a unit are ready together, unless a run has recorded when each is.
    """
    candidate, cuts = choice
    problem = scorer.problem
    trained = [p for p in reversed(problem.graph.parameters) if p.trainable]
    alone = replace(candidate, buckets=(len(trained),), bucket_order=(0,))  # nothing runs beside
    timeline = simulate(lower(problem, scorer.shards, alone, cuts).graph)
    ready, needed = _ready(problem, timeline, trained), _needed(timeline, trained)
    numels = [local_numel(p, candidate.tp) for p in trained]
    numbers, gathered = [], []
    whole_ns = sum(span.duration_ns for span in timeline.spans if span.kind == "optimizer")
    for _, run in groupby(range(len(trained)), list(accumulate(ready, max)).__getitem__):
        own = list(run)
        count = sum(numels[place] for place in own)
        update_ns = whole_ns * count // sum(numels)
        gathered.append((ready[own[0]], count, min(needed[p] for p in own), update_ns))
        numbers.append(len(own))
    ready_ns, elements, needed_ns, updates_ns = zip(*gathered, strict=True)
    forward = _by_unit(timeline, "forward").values()
    lasts_ns = max(end for _, end in forward) - min(start for start, _ in forward)
    return Runs(
        gradients=Gradients(ready_ns=ready_ns, numels=elements),
        following=NextStep(
            needed_ns=needed_ns,
            update_ns=updates_ns,
            forward_ns=_between_ns(timeline) + lasts_ns,
        ),
        numbers=tuple(numbers),
    )


def _ready(problem: Problem, timeline: Timeline, trained: Sequence[Parameter]) -> list[int]:
    """When the last backward completes each gradient."""
    spans, shares = _by_unit(timeline, "backward"), problem.graph.ready_shares
    found = []
    for parameter in trained:
        start_ns, end_ns = spans[completing_unit(parameter)]
        lasts_ns = end_ns - start_ns
        found.append(start_ns + round(shares.get(parameter.name, 1.0) * lasts_ns))
    return found


def _needed(timeline: Timeline, trained: Sequence[Parameter]) -> list[int]:
    """How long after the backward the forward needs each parameter, updates left out."""
    spans = _by_unit(timeline, "forward")
    begins_ns = min(start for start, _ in spans.values())
    between_ns = _between_ns(timeline)
    return [between_ns + spans[completing_unit(p)][0] - begins_ns for p in trained]


def _by_unit(timeline: Timeline, kind: str) -> dict[int, tuple[int, int]]:
    """Start and end of each unit's pass, where passes are seen unit by unit."""
    return {
        int(span.name.rpartition(" ")[2]): (span.start_ns, span.end_ns)
        for span in timeline.spans
        if span.kind == kind and " unit " in span.name
    }


def _between_ns(timeline: Timeline) -> int:
    """What the computation does after a backward that is no pass and no update."""
    passes = {"forward", "backward", "recompute", "optimizer"}
    return sum(
        span.duration_ns
        for span in timeline.spans
        if span.stream.endswith(" compute") and span.kind not in passes
    )


def cost_of(problem: Problem, candidate: Candidate) -> Cost:
    """What averaging a bucket takes alone, by the same rules as in a step."""
    known: dict[int, int] = {}

    def one(elements: int) -> int:
        if elements not in known:
            mean = averaging(problem, candidate, elements)
            phases = sum(kernels_ns + cost.alone_ns for kernels_ns, cost in mean.phases)
            known[elements] = phases + mean.last_ns
        return known[elements]

    def cost(elements: Int) -> Int:
        return np.array([one(count) for count in elements.tolist()], dtype=np.int64)

    return cost
