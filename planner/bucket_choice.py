"""A choice whose replicas meet during backward to the same with the best bucket boundaries.

When gradients are ready is read off the simulated step, what a bucket costs is what `averaging`
asks for it; `bucket_plan` finds the boundaries, and `Scorer` alone says whether they pay. The
gradients of one unit are ready together, so buckets end where units do: a cut inside one costs a
start more and lets nothing leave sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from claw_plan.planner.averaging import averaging
from claw_plan.planner.bucket_plan import Cost, Gradients, Int, plan_buckets
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.low_rank import is_low_rank
from claw_plan.planner.lower import lower
from claw_plan.planner.memory_states import WHOLE, kind_of
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import local_numel
from claw_plan.planner.stage_path import Cuts
from claw_plan.profiles.units import format_ns
from claw_plan.simulator.simulate import simulate

LEAST_GAIN = 0.01
"""Of a step, for which it is worth that a plan lists its buckets."""

Choice = tuple[Candidate, Cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChoice:
    """The choice, its own buckets where they pay, and the sentence for the report."""

    choice: Choice
    sentences: tuple[str, ...] = ()


def with_planned_buckets(scorer: Scorer, choice: Choice, fix: Mapping[str, Any]) -> BucketChoice:
    """The boundaries that finish first, if a step is shorter with them than without.

    A pinned `bucket_bytes` stays.
    """
    candidate, cuts = choice
    if "bucket_bytes" in fix or not _acts(scorer.problem, candidate):
        return BucketChoice(choice=choice)
    planned = replace(candidate, buckets=best_buckets(scorer, choice))
    before_ns = scorer.step_time_ns(candidate, cuts)
    after_ns = scorer.step_time_ns(planned, cuts)
    if after_ns > (1 - LEAST_GAIN) * before_ns:
        return BucketChoice(choice=choice)
    count = len(planned.buckets)
    sentence = (
        f"gradients leave in {count} bucket{'s' * (count > 1)} that end where it pays: "
        f"{format_ns(after_ns)} a step, with buckets filled to "
        f"{candidate.bucket_bytes / 1e6:g} MB {format_ns(before_ns)}"
    )
    return BucketChoice(choice=(planned, cuts), sentences=(sentence,))


def _acts(problem: Problem, candidate: Candidate) -> bool:
    """Whether anything runs beside the backward: else one bucket is best, and its size no knob."""
    if not candidate.reduces_in_backward or kind_of(problem, candidate) != WHOLE:
        return False
    if candidate.ep > 1:  # planned boundaries with experts left out are not proven
        return False
    if is_low_rank(candidate):  # what a bucket costs is told by shapes, not by elements
        return False
    return not averaging(problem, candidate, 1).is_waited_for


def best_buckets(scorer: Scorer, choice: Choice) -> tuple[int, ...]:
    """Numbers of parameters in each bucket, from the model's last to its first."""
    each = gradients_of(scorer, choice)
    together = [
        (ready_ns, [numel for _, numel in run])
        for ready_ns, run in groupby(
            zip(each.complete_ns, each.numels, strict=True), key=lambda entry: entry[0]
        )
    ]
    runs = Gradients(
        ready_ns=tuple(ready_ns for ready_ns, _ in together),
        numels=tuple(sum(numels) for _, numels in together),
    )
    counts = iter([len(numels) for _, numels in together])
    plan = plan_buckets(runs, cost_of(scorer.problem, choice[0]))
    return tuple(sum(next(counts) for _ in range(size)) for size in plan.sizes)


def gradients_of(scorer: Scorer, choice: Choice) -> Gradients:
    """Each gradient's elements on a rank, and when the simulated backward completes it."""
    candidate, cuts = choice
    trained = [p for p in reversed(scorer.problem.graph.parameters) if p.trainable]
    alone = replace(
        candidate, buckets=(len(trained),), bucket_order=()
    )  # so that nothing runs beside it
    timeline = simulate(lower(scorer.problem, scorer.shards, alone, cuts).graph)
    ends_ns = {
        int(span.name.rpartition(" ")[2]): span.end_ns
        for span in timeline.spans
        if span.kind == "backward" and " unit " in span.name
    }
    return Gradients(
        ready_ns=tuple(ends_ns[min(p.units, default=0)] for p in trained),
        numels=tuple(local_numel(p, candidate.tp) for p in trained),
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
