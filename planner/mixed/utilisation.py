"""From a simulated step on several kinds of devices to where the speed of all devices went.

Utilisation is the batch over the sum of the devices' speeds, over the step. A device of speed s
could have computed s T samples in a step of T; weighted so, every nanosecond of every device is
either useful or lost to one of `LOSSES`, and all shares add up to one. Useful of a device is the
time that its share of the model's FLOPs would take at its own best. What its kernels take beyond
is lost to traffic beside them, to gradients that add up, and to smaller matrices: to tensor
parallelism what the same microbatch would not lose undivided, to the microbatch the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from claw_plan.planner.lower import Lowered
from claw_plan.planner.lower_data import ACCUMULATED
from claw_plan.planner.mixed.kinds import MixedProblem
from claw_plan.planner.mixed.lower import BETWEEN
from claw_plan.planner.mixed.plan import MixedCandidate, Pipeline
from claw_plan.planner.mixed.share_bound import ShareBounds
from claw_plan.planner.schedules import rank_of_stage
from claw_plan.planner.score import PART_OF_KIND
from claw_plan.profiles.units import NS_PER_S
from claw_plan.simulator.timeline import Span, Timeline

USEFUL, IDLE = "useful", "devices left out"
MICROBATCH, DIVIDED = "microbatches below the best size", "smaller matrices under tp"
BESIDE, ADDING = "kernels slowed by traffic beside them", "adding up gradients"
KINDS, WAITING = "sums between kinds", "waiting for the slower kind"
NAMES = {
    "recompute": "recomputation",
    "tp_comm_exposed": "tensor-parallel traffic",
    "dp_comm_exposed": "data-parallel traffic within a kind",
    "pp_comm_exposed": "pipeline messages",
    "pp_bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "overhead": "host and step overhead",
}
LOSSES = (MICROBATCH, DIVIDED, BESIDE, ADDING, *NAMES.values(), KINDS, WAITING, IDLE)
"""What speed is lost to. Waiting for the slower kind is what shares in whole samples and
microbatches leave uneven."""

SPECIAL = {BETWEEN: KINDS, ACCUMULATED: ADDING}
"""Spans with a loss of their own."""

PASSES = frozenset({"forward", "backward", "recompute"})


def shares_of_speed(
    problem: MixedProblem,
    bounds: Sequence[ShareBounds],
    mixed: MixedCandidate,
    lowered: Lowered,
    timeline: Timeline,
) -> dict[str, float]:
    """The share of all devices' speed that is useful, and that is lost to each of `LOSSES`.

    `timeline` is what simulating the tasks of `lowered` gave.
    """
    speeds = [own.samples_per_s for own in bounds]
    total = sum(k.num_devices * s for k, s in zip(problem.kinds, speeds, strict=True))
    found = dict.fromkeys((USEFUL, *LOSSES), 0.0)
    spans, beside_ns = _spans_of_ranks(timeline), _lost_beside(lowered)
    first, step_ns = 0, timeline.step_time_ns
    for pipeline in mixed.pipelines:
        last = first + len(pipeline.ranks)
        ends_ns = max(s.end_ns for r in range(first, last) for s in spans[r] if s.kind in PASSES)
        for index, rank in enumerate(pipeline.ranks):
            parts = _parts(spans[first + index], step_ns, ends_ns)
            parts[BESIDE] = beside_ns.get(first + index, 0)
            _divide_compute(parts, problem, bounds[rank.kind], pipeline, index)
            weight = rank.num_devices * speeds[rank.kind] / total / step_ns
            for name, ns in parts.items():
                found[name] += weight * ns
        first = last
    for kind, speed in enumerate(speeds):
        unused = problem.kinds[kind].num_devices - mixed.devices_of(kind)
        found[IDLE] += unused * speed / total
    return found


def _spans_of_ranks(timeline: Timeline) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in timeline.spans:
        found.setdefault(span.rank, []).append(span)
    return found


def _lost_beside(lowered: Lowered) -> dict[int, int]:
    """What the kernels of each rank lose to traffic."""
    graph, found = lowered.graph, dict[int, int]()
    for task, (_, lost_ns) in lowered.parts.items():
        rank = graph.ranks[graph.stream[task]]
        found[rank] = found.get(rank, 0) + lost_ns
    return found


def _parts(spans: Sequence[Span], step_ns: int, passes_end_ns: int) -> dict[str, float]:
    """One rank's whole step: what its compute stream did, and what it waited for.

    `passes_end_ns` is when the last pass of its pipeline ends: what is idle before is the
    pipeline's, what is idle after is due to other kinds.
    """
    parts: dict[str, float] = {"compute": 0.0}
    reached = 0
    beside = [s for s in spans if s.kind == "dp_comm" and not _computes(s)]
    for span in (s for s in spans if _computes(s)):
        for name, ns in _idle(reached, span.start_ns, beside, passes_end_ns):
            parts[name] = parts.get(name, 0) + ns
        name = SPECIAL.get(span.name) or _name(PART_OF_KIND[span.kind])
        parts[name] = parts.get(name, 0) + span.duration_ns
        reached = max(reached, span.end_ns)
    for name, ns in _idle(reached, step_ns, beside, passes_end_ns):
        parts[name] = parts.get(name, 0) + ns
    return parts


def _computes(span: Span) -> bool:
    return span.stream.endswith(" compute")


def _name(part: str) -> str:
    return NAMES.get(part, part)


def _idle(
    start: int, stop: int, beside: Sequence[Span], passes_end_ns: int
) -> Iterator[tuple[str, int]]:
    """An idle stretch cut where traffic begins or ends; sums between kinds count last."""
    if stop <= start:
        return
    within = [s for s in beside if s.end_ns > start and s.start_ns < stop]
    changes = {start, stop, passes_end_ns}.union(*((s.start_ns, s.end_ns) for s in within))
    edges = sorted(edge for edge in changes if start <= edge <= stop)
    for low, high in pairwise(edges):
        running = {s.name == BETWEEN for s in within if s.start_ns <= low and s.end_ns >= high}
        if False in running:
            yield NAMES["dp_comm_exposed"], high - low
        elif running:
            yield KINDS, high - low
        else:
            yield NAMES["pp_bubble"] if low < passes_end_ns else WAITING, high - low


def _divide_compute(
    parts: dict[str, float],
    problem: MixedProblem,
    bounds: ShareBounds,
    pipeline: Pipeline,
    index: int,
) -> None:
    """Puts what is useful and what smaller matrices cost in place of the kernels' time."""
    candidate = pipeline.ranks[index].candidate
    samples = pipeline.batch * _share_of_flops(problem, pipeline, index)
    samples /= candidate.dp * candidate.cp * candidate.tp
    parts[USEFUL] = samples * NS_PER_S / bounds.samples_per_s
    below = parts.pop("compute") - parts[USEFUL] - parts[BESIDE]
    parts[MICROBATCH] = below
    if candidate.tp > 1:
        undivided = samples * bounds.sample_ns(candidate.microbatch_size)
        parts[MICROBATCH] = undivided - parts[USEFUL]
        parts[DIVIDED] = below - parts[MICROBATCH]


def _share_of_flops(problem: MixedProblem, pipeline: Pipeline, index: int) -> float:
    """Of the model's, what the stages of a rank have."""
    graph, batch = problem.whole.graph, problem.whole.training.global_batch
    flops = [sum(graph.unit_flops(unit, batch)) for unit in range(len(graph.units))]
    first = pipeline.ranks[0].candidate
    own = sum(
        sum(flops[start:stop])
        for stage, (start, stop) in enumerate(pipeline.cuts)
        if rank_of_stage(first.schedule, stage, first.pp) == index
    )
    return own / sum(flops)


def in_tenths(shares: Mapping[str, float]) -> dict[str, float]:
    """Percentages to a tenth that add up to 100: the largest remainders are rounded up."""
    exact = {name: 1000 * share for name, share in shares.items()}
    whole = {name: int(value // 1) for name, value in exact.items()}
    missing = 1000 - sum(whole.values())
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[:missing]:
        whole[name] += 1
    return {name: value / 10 for name, value in whole.items()}
