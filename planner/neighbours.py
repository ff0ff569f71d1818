"""One knob changed alone: what every neighbour of a candidate would take, or lack.

Degrees share the devices, so a change of tp, pp or dp_replicate is paid by dp_shard (by
dp_replicate where nothing is sharded; a tp that these cannot pay, by pp) and the devices stay
the same. Every neighbour is scored in
full, with its best stage cut; a knob that cannot be changed says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from claw_plan.planner.averaging_choices import BUCKETS, encodes_anywhere, training_refusal
from claw_plan.planner.bucket_order import order_refusals
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.members import ORDERS, divisors
from claw_plan.planner.memory_states import WHOLE, kind_of
from claw_plan.planner.placement import group_nodes, outcome
from claw_plan.planner.schedules import SCHEDULES, schedule_of, schedule_refusal
from claw_plan.planner.score import Scorer
from claw_plan.planner.supported import (
    ALGORITHMS,
    CODECS,
    OFFLOAD,
    RECOMPUTE,
    nodes_refusal,
    refusal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A candidate that differs in `knob` alone, and what follows from it.

    `step_time_ns` is None where `refused` says why it cannot run, or nobody asked.
    `missing_bytes` is what the fullest stage lacks; 0 when it fits.
    """

    knob: str
    value: Any
    candidate: Candidate
    step_time_ns: int | None = None
    missing_bytes: int = 0
    stage: int = 0
    refused: str = ""

    @property
    def change(self) -> str:
        """As `--fix` takes it: 'tp=2', 'mesh_order=dp_replicate/pp/…'."""
        value = "/".join(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.knob}={value}"

    @property
    def fits(self) -> bool:
        """Whether it could be the plan."""
        return not self.refused and not self.missing_bytes


def neighbours(scorer: Scorer, candidate: Candidate, *, timed: bool = True) -> list[Neighbour]:
    """Every neighbour, by knob; their memory alone where they are not to be `timed`."""
    return [
        _judged(scorer, knob, value, _changed(candidate, knob, value), timed)
        for knob, value in _changes(scorer, candidate)
    ]


def _changes(scorer: Scorer, candidate: Candidate) -> Iterator[tuple[str, Any]]:
    problem = scorer.problem
    graph, ranks = problem.graph, candidate.num_devices // candidate.cp
    partial = () if candidate.sequence_parallel else graph.partial
    degrees = [1] if graph.no_tensor_parallel else sorted({*divisors(graph.tp_divides), *partial})
    yield from (("tp", d) for d in degrees if d != candidate.tp and ranks % d == 0)
    most = len(graph.blocks)
    yield from (
        ("pp", d)
        for d in divisors(ranks // candidate.tp)
        if d != candidate.pp and d <= most and d in (1, candidate.pp * 2, candidate.pp // 2)
    )
    dp = candidate.dp
    yield from (("dp_replicate", d) for d in divisors(dp) if d != candidate.dp_replicate)
    if candidate.dp_shard > 1:
        yield from (("zero", stage) for stage in (1, 2, 3) if stage != candidate.zero)
    size = candidate.microbatch_size
    yield from (("microbatch_size", s) for s in (size // 2, size * 2) if s)
    yield from (("recompute", mode) for mode in RECOMPUTE if mode != candidate.recompute)
    is_whole = candidate.tp > 1 and candidate.tp not in graph.partial
    if is_whole and not graph.no_sequence_parallel:
        yield "sequence_parallel", not candidate.sequence_parallel
    if candidate.pp > 1:
        yield from (("schedule", name) for name in SCHEDULES if name != candidate.schedule)
        more = candidate.stages_per_rank + 1
        if schedule_of(candidate.schedule).most_stages != candidate.stages_per_rank:
            yield "stages_per_rank", more
    if problem.device.kind != "cpu":
        yield from (("offload", mode) for mode in OFFLOAD if mode != candidate.offload)
    yield from _averagings(scorer, candidate)
    yield from _orders(scorer, candidate)


def _averagings(scorer: Scorer, candidate: Candidate) -> Iterator[tuple[str, Any]]:
    """Codecs where gradients are averaged, and more where whole replicas meet in backward."""
    problem = scorer.problem
    is_beside = candidate.reduces_in_backward and kind_of(problem, candidate) == WHOLE
    # What a threshold sends is not known before it is seen.
    named = [n for n in CODECS if n != "threshold" and (is_beside or encodes_anywhere(problem, n))]
    named = [name for name in named if not training_refusal(problem.training, name)]
    codecs = ("none", *named) if candidate.dp > 1 else ()
    yield from (("codec", name) for name in codecs if name != candidate.codec)
    if not is_beside:
        return
    names = ("auto", *ALGORITHMS)
    yield from (("collective", name) for name in names if name != candidate.collective)
    yield from (("bucket_bytes", n) for n in sorted(BUCKETS) if n != candidate.bucket_bytes)


def _orders(scorer: Scorer, candidate: Candidate) -> Iterator[tuple[str, Any]]:
    """Orders of the mesh's axes with which ranks lie otherwise."""
    problem = scorer.problem
    known: set[tuple[object, ...]] = set()
    by_host = problem.cluster.backend == "gloo" or not problem.is_uniform
    for order in (candidate.mesh_order, *ORDERS):
        laid = replace(candidate, mesh_order=order)
        found = outcome(laid, problem.devices_per_node, by_host=by_host)
        if known and found not in known:
            yield "mesh_order", order
        known.add(found)


def _changed(candidate: Candidate, knob: str, value: Any) -> Candidate:
    """The candidate with the knob changed, and what it forces."""
    changed = replace(candidate, **{knob: value})
    if knob in ("codec", "bucket_bytes") or (knob == "collective" and value != "auto"):
        changed = replace(changed, buckets=(), bucket_order=())
    if knob == "codec" and refusal(changed):
        changed = replace(changed, collective="auto")
    if knob == "tp":
        ranks = candidate.num_devices // candidate.cp
        changed = replace(changed, pp=gcd(candidate.pp, ranks // value))
    if knob in ("tp", "pp", "dp_replicate"):
        dp = candidate.num_devices // (changed.tp * changed.pp * changed.cp)
        is_sharded = candidate.dp_shard > 1 or candidate.dp == 1 or knob == "dp_replicate"
        copies = changed.dp_replicate if is_sharded and dp % changed.dp_replicate == 0 else 1
        shard = dp // copies if is_sharded else 1
        changed = replace(changed, dp_shard=shard, dp_replicate=dp // shard)
    if changed.tp == 1:
        changed = replace(changed, sequence_parallel=False)
    if knob == "schedule":
        changed = replace(changed, stages_per_rank=schedule_of(value).fewest_stages)
    if changed.pp == 1:
        changed = replace(changed, schedule="1F1B", stages_per_rank=1)
    elif changed.zero == 2 and knob != "zero":
        changed = replace(changed, zero=1)  # under a pipeline gradients are reduced once a step
    return _settled(changed)


def _settled(candidate: Candidate) -> Candidate:
    """Knobs that have nothing left to act on, at their neutral values."""
    neutral = Candidate()
    if candidate.dp_shard == 1:
        candidate = replace(candidate, zero=neutral.zero, blocks_per_group=1)
    if candidate.zero != neutral.zero or candidate.dp_shard <= max(1, candidate.reshard_ranks):
        candidate = replace(candidate, reshard_ranks=0)
    if candidate.recompute == "none":
        candidate = replace(candidate, recompute_blocks=0)
    if not candidate.reduces_in_backward:
        candidate = replace(candidate, collective="auto", buckets=(), bucket_order=())
        if refusal(candidate) and not refusal(replace(candidate, codec=neutral.codec)):
            candidate = replace(candidate, codec=neutral.codec)
    if candidate.bucket_order and any(order_refusals(candidate, None)):
        candidate = replace(candidate, bucket_order=())
    return candidate


def _judged(scorer: Scorer, knob: str, value: Any, candidate: Candidate, timed: bool) -> Neighbour:
    neighbour = Neighbour(knob=knob, value=value, candidate=candidate)
    nodes = group_nodes(candidate, "dp_replicate", scorer.problem.devices_per_node)
    why = refusal(candidate) or nodes_refusal(candidate, nodes) or _cannot_run(scorer, candidate)
    if why:
        return replace(neighbour, refused=why)
    path = scorer.bounds.stage_path(candidate)
    if path is None:
        return replace(neighbour, refused="the model cannot be cut into so many stages")
    worst = max(
        scorer.memory.stages(candidate, path.cuts), key=lambda s: s.peak_bytes - s.capacity_bytes
    )
    return replace(
        neighbour,
        step_time_ns=scorer.step_time_ns(candidate, path.cuts) if timed else None,
        missing_bytes=max(0, worst.peak_bytes - worst.capacity_bytes),
        stage=worst.stage,
    )


def _cannot_run(scorer: Scorer, candidate: Candidate) -> str:
    try:
        count = candidate.num_microbatches(scorer.problem.training.global_batch)
    except PlanError as error:
        return str(error)
    if candidate.pp == 1:
        return ""
    return schedule_refusal(candidate.schedule, candidate.pp, count, candidate.stages_per_rank)
