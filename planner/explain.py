"""Why this plan and not another: sentences from the search's own bounds and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.asynchronous_search import asynchronous_said
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.compression import compression_said
from claw_plan.planner.errors import InfeasiblePlan
from claw_plan.planner.group_table import GroupTable
from claw_plan.planner.levers import levers
from claw_plan.planner.memory import StageMemory
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search import SearchReport
from claw_plan.planner.search_space import Choice, Searched
from claw_plan.planner.supported import RECOMPUTE
from claw_plan.profiles.rank_order import nested_order, node_costs
from claw_plan.profiles.units import format_bytes, format_ns

AXES: dict[str, Callable[[Candidate], bool]] = {
    "pipeline parallelism": lambda c: c.pp > 1,
    "tensor parallelism": lambda c: c.tp > 1,
    "sharding (FSDP)": lambda c: c.dp_shard > 1,
    "replication (DDP)": lambda c: c.dp_replicate > 1,
    "recompute": lambda c: c.recompute != "none",
}
GROUP_AXES: dict[str, Callable[[GroupTable], NDArray[np.bool_]]] = {
    "pipeline parallelism": lambda table: table.pp > 1,
    "tensor parallelism": lambda table: table.tp > 1,
    "recompute": lambda table: table.recompute != RECOMPUTE.index("none"),
}
"""Axes that a whole group shares, so that its bound speaks for them."""


def reasons(scorer: Scorer, found: Searched, best: Scored) -> Iterator[str]:
    """A sentence for each way of splitting that the best plan does not use, and what binds."""
    graph = scorer.problem.graph
    for axis, uses in AXES.items():
        if uses(best.candidate):
            continue
        if axis == "tensor parallelism" and graph.no_tensor_parallel:
            yield f"{axis}: not possible here: {graph.no_tensor_parallel}"
        elif axis == "pipeline parallelism" and len(graph.blocks) < 2:
            yield f"{axis}: not possible here: the model has no chain of blocks to cut"
        else:
            yield from _why_not(axis, uses, found, best)
    unused = scorer.problem.cluster.num_devices - best.candidate.num_devices
    if unused:
        yield (
            f"{unused} of {scorer.problem.cluster.num_devices} devices are not used: no plan "
            "on more of them is faster"
        )
    if left_out := found.space.left_out():
        yield f"{left_out}; {_closer(found, found.closer)}" if found.closer else left_out
    yield from _device_order(scorer.problem, best.candidate)
    yield from _other_cuts(found)
    yield from found.said
    yield from compression_said(scorer, best, found.space.codecs)
    yield from asynchronous_said(scorer, best)
    yield binds(best)


def _device_order(problem: Problem, candidate: Candidate) -> Iterator[str]:
    """In which order ranks are to take the devices of nodes whose pairs of devices differ."""
    node = problem.cluster.nodes[0]
    if not node.pairs or node.device.kind == "cpu":
        return
    sizes: list[int] = []
    inside = 1
    for axis in reversed(candidate.mesh_order):
        degree = getattr(candidate, axis)
        if node.device_count % (inside * degree):
            break
        sizes.append(degree)
        inside *= degree
    found = nested_order(node_costs(node), sizes)
    if inside > 1 and found.order != tuple(range(node.device_count)):
        inner = next(a for a in reversed(candidate.mesh_order) if getattr(candidate, a) > 1)
        yield (
            "pairs of devices differ inside a node: with CUDA_VISIBLE_DEVICES="
            f"{','.join(map(str, found.order))} on each, {inner} groups lie on the fast ones "
            "(all are reckoned alike)"
        )


def _other_cuts(found: Searched) -> Iterator[str]:
    """How far the proof reaches beyond stages that are cut as evenly as they can be."""
    cuts = found.report.cuts
    if cuts is None or not cuts.groups:
        return
    if not cuts.groups_left:
        yield (
            f"proven of all cuts of stages: of {cuts.groups:,} ways of computing that another cut "
            f"might have made faster, {cuts.cuts:,} cuts could have, and none beats the best"
        )
        return
    yield (
        "proven with stages cut as evenly as they can be; with another cut of "
        f"{cuts.groups_left:,} ways of computing none is over {cuts.gap:.1%} faster (bound)"
    )


def _closer(found: Searched, closer: SearchReport) -> str:
    pp, tp = found.ranked[0][0].pp, found.ranked[0][0].tp
    return f"with pp={pp} and tp={tp} all {closer.space:,} ways were, them included"


def _why_not(
    axis: str,
    uses: Callable[[Candidate], bool],
    found: Searched,
    best: Scored,
) -> Iterator[str]:
    closest = [(found.times_ns[candidate], candidate) for candidate, _ in found.ranked]
    closest += [(bound, candidate) for bound, (candidate, _) in found.looked_at]
    closest = [entry for entry in closest if uses(entry[1])]
    if closest:
        time_ns, candidate = min(closest)
        slower = time_ns / best.step_time_ns - 1
        yield f"{axis}: {slower:+.1%} at best ({format_ns(time_ns)} with {candidate.short()})"
        return
    if axis in GROUP_AXES:
        least = found.bounds.least(GROUP_AXES[axis](found.space.table))
        if least is None:
            return
        bound, base = least[0], found.space.group(least[1]).base
        if bound >= best.step_time_ns:
            yield (
                f"{axis}: cannot be faster than {format_ns(bound)} "
                f"(bound, pp={base.pp} tp={base.tp})"
            )
            return
    pruned = sum(uses(candidate) for candidate, _ in found.pruned)
    pruned += found.space.count(found.pruned_rows, uses)
    if pruned:
        yield f"{axis}: {pruned:,} candidates looked faster but do not fit in memory"
    else:
        yield f"{axis}: every candidate with it has a bound above {format_ns(best.step_time_ns)}"


def binds(best: Scored) -> str:
    """What holds the best plan back most."""
    fullest = max(best.memory, key=lambda stage: stage.peak_bytes / stage.capacity_bytes)
    part, time_ns = max(
        ((name, ns) for name, ns in best.parts_ns.items() if name != "compute"),
        key=lambda entry: entry[1],
    )
    share = time_ns / best.step_time_ns
    return (
        f"what binds: beside compute, {part.replace('_', ' ')} takes most ({share:.0%} of the "
        f"step); stage {fullest.stage} fills {fullest.peak_bytes / fullest.capacity_bytes:.0%} "
        "of the memory it may use"
    )


def infeasible(scorer: Scorer, found: Searched) -> InfeasiblePlan:
    """By how much nothing fits, where, and how far each lever gets."""
    message, candidate, stage = _closest(scorer, found)
    told = levers(scorer, candidate, stage)
    if told:
        message += "; of it alone, " + ", ".join(lever.text() for lever in told)
    return InfeasiblePlan(message, {lever.change: lever.missing_bytes for lever in told})


def infeasible_message(scorer: Scorer, found: Searched) -> str:
    """By how much nothing fits, where, and the smallest change that would do."""
    return _closest(scorer, found)[0]


def _closest(scorer: Scorer, found: Searched) -> tuple[str, Candidate, StageMemory]:
    """The candidate that lacks least, told; its fullest stage."""
    closest: dict[tuple[int, int], tuple[int, StageMemory, Choice]] = {}
    for choice in [*found.pruned, *_smallest_of_groups(scorer, found)]:
        missing, stage = _shortage(scorer, choice)
        split = choice[0].pp, choice[0].tp
        if split not in closest or missing < closest[split][0]:
            closest[split] = missing, stage, choice
    missing, stage, (candidate, _) = min(
        closest.values(), key=lambda entry: (entry[0], entry[1].stage)
    )
    parts = sorted(stage.parts.items(), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    message = (
        f"no plan fits: the closest ({candidate.short()}) needs {format_bytes(stage.peak_bytes)} "
        f"on stage {stage.stage} ({listed}) where {format_bytes(stage.capacity_bytes)} may be "
        f"used; {format_bytes(missing)} are missing"
    )
    change = _smallest_change(scorer, [e[2] for e in closest.values()], stage)
    return f"{message}; {change}", candidate, stage


def _smallest_of_groups(scorer: Scorer, found: Searched) -> Iterator[Choice]:
    """Of the groups that were pruned whole, those that need least under each pp and tp."""
    table, rows = found.space.table, np.array(found.pruned_rows, np.int64)
    keys = (
        table.recompute_blocks != 0, -table.sequence_parallel, -table.recompute,
        table.microbatch_size, -table.dp, table.tp, table.pp,
    )  # fmt: skip
    rows = rows[np.lexsort([key[rows] for key in keys])]
    split = table.pp[rows] * (int(table.tp.max()) + 1) + table.tp[rows]
    for row in rows[np.unique(split, return_index=True)[1]].tolist():
        members = found.space.members(found.space.group(row))
        smallest = max(members, key=lambda c: (c.dp_shard, c.zero, c.offload != "none"))
        path = scorer.bounds.stage_path(smallest)
        assert path is not None, "the group's bound came from this path"
        yield smallest, path.cuts


def _shortage(scorer: Scorer, choice: Choice) -> tuple[int, StageMemory]:
    worst = max(scorer.memory.stages(*choice), key=lambda s: s.peak_bytes - s.capacity_bytes)
    return worst.peak_bytes - worst.capacity_bytes, worst


def _smallest_change(scorer: Scorer, choices: list[Choice], stage: StageMemory) -> str:
    """The fewest devices over which sharding would do, else the memory each would need.

    `choices` holds the closest of every pp and tp: what is short by least may be least helped
    by shards, as a pipeline keeps its gradients whole.
    """
    usable = 1 - scorer.problem.training.memory_headroom
    memory = f"it would fit on devices of {format_bytes(stage.peak_bytes / usable)}"
    wider = [found for choice in choices if (found := _widened(scorer, choice)) is not None]
    if not wider:
        return memory
    least = min(wider, key=lambda candidate: (candidate.num_devices, candidate.pp, candidate.tp))
    return f"it would fit on {least.num_devices} such devices ({least.short()})"


def _widened(scorer: Scorer, choice: Choice) -> Candidate | None:
    """The candidate over as few more shards as make it fit, None if none of up to 64 times do."""
    candidate, cuts = choice
    batch = scorer.problem.training.global_batch
    for factor in range(2, 65):
        wider = replace(candidate, dp_shard=candidate.dp_shard * factor, microbatch_size=1)
        if batch % wider.dp:
            continue
        if all(stage.fits for stage in scorer.memory.stages(wider, cuts)):
            return wider
    return None
