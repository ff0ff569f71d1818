"""What other hardware would buy: the same training planned anew on a cluster changed in one thing.

Nothing here is extrapolated: each line is a search of its own on the changed cluster, started from
the plan at hand, so its answer is never worse than that. The first line is the cluster as it is;
gains are counted from there, so that what planning anew brings is not taken for the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.mixed.alike import slowest_for_all
from claw_plan.planner.planned import Planned, on_cluster
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import search_space
from claw_plan.planner.space import Space
from claw_plan.profiles.cluster import Cluster, Link, Node
from claw_plan.profiles.profile import Profile

MORE_MEMORY_BYTES = 10 * 10**9
"""The memory that is added: 10 GB a device."""

AS_IT_IS = "the cluster as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The best plan on a changed cluster; `gap` is how much better another could still be.

    `candidate` is None where nothing fits.
    """

    change: str
    candidate: Candidate | None
    step_time_ns: int | None
    gap: float


def what_ifs(
    planned: Planned, profile: Profile | None, time_limit_s: float | None = None
) -> Iterator[WhatIf]:
    """Plans anew on the cluster as it is, then on each changed one."""
    for change, cluster in _changed_clusters(planned.cluster):
        yield _planned_anew(planned, change, cluster, profile, time_limit_s)


def _planned_anew(
    planned: Planned,
    change: str,
    cluster: Cluster,
    profile: Profile | None,
    time_limit_s: float | None,
) -> WhatIf:
    scorer = Scorer(slowest_for_all(on_cluster(planned.problem, cluster, profile)))
    own = (planned.candidate, planned.cuts)
    known = [own] if scorer.memory.fits(*own) else []
    try:
        found = search_space(
            scorer, Space(scorer.problem, {}), known=known, time_limit_s=time_limit_s
        )
    except PlanError:
        return WhatIf(change=change, candidate=None, step_time_ns=None, gap=0.0)
    if not found.ranked:
        return WhatIf(change=change, candidate=None, step_time_ns=None, gap=found.report.gap)
    best = found.ranked[0][0]
    return WhatIf(
        change=change,
        candidate=best,
        step_time_ns=found.times_ns[best],
        gap=found.report.gap,
    )


def _changed_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    yield AS_IT_IS, cluster
    last = cluster.nodes[-1]
    if len(cluster.nodes) > 1:
        yield "one more node", replace(cluster, nodes=(*cluster.nodes, last))
        yield "network links twice as fast", _on_nodes(cluster, _faster_nics)
    else:
        yield "one more device", _on_nodes(cluster, _one_more)
    if last.device_count > 1:
        yield f"{last.intra.name} twice as fast", _on_nodes(cluster, _faster_inside)
    yield "10 GB more memory a device", _on_nodes(cluster, _roomier)


def _on_nodes(cluster: Cluster, change: Callable[[Node], Node]) -> Cluster:
    """All nodes changed; equal ones stay one object."""
    changed = {id(node): change(node) for node in cluster.nodes}
    return replace(cluster, nodes=tuple(changed[id(node)] for node in cluster.nodes))


def _one_more(node: Node) -> Node:
    return replace(node, device_count=node.device_count + 1)


def _faster_nics(node: Node) -> Node:
    return replace(node, nic=_twice(node.nic))


def _faster_inside(node: Node) -> Node:
    pairs = {pair: _twice(link) for pair, link in node.pairs.items()}
    return replace(node, intra=_twice(node.intra), pairs=pairs)


def _twice(link: Link) -> Link:
    """The link at twice its rates, with the same latency.

    It has another name, so that no time measured on the old one is taken for it.
    """
    achieved = {op: 2 * rate for op, rate in link.achieved_bytes_per_s.items()}
    return replace(
        link,
        name=f"{link.name} x 2",
        bytes_per_s=2 * link.bytes_per_s,
        achieved_bytes_per_s=achieved,
    )


def _roomier(node: Node) -> Node:
    device = replace(node.device, memory_bytes=node.device.memory_bytes + MORE_MEMORY_BYTES)
    shared = node.shared_memory_bytes
    if shared:
        shared += MORE_MEMORY_BYTES * node.device_count
    return replace(node, device=device, shared_memory_bytes=shared)
