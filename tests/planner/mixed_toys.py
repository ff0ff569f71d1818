"""Toy clusters of several kinds, and all that can be done with them, for the mixed tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from claw_plan.planner.mixed.cut import arrangements
from claw_plan.planner.mixed.kinds import MixedProblem, kinds_of
from claw_plan.planner.mixed.plan import MixedCandidate
from claw_plan.planner.mixed.score import MixedScorer
from claw_plan.planner.mixed.space import RECOMPUTE, MixedSpace, Way
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.shards import ShardSizes
from claw_plan.profiles.cluster import Cluster, Network, Node
from claw_plan.profiles.cost import CollectiveCost, OpCost
from claw_plan.profiles.work import CollectiveWork, OpWork

CONTEXT_BYTES = 1_800_000_000
"""What a process takes of a device beside its tensors (planner.allocator)."""


class ToyKind(NamedTuple):
    """Nodes of one kind: a device takes 1 s for `flops_per_s` of the toy's operations."""

    nodes: int = 1
    devices: int = 2
    flops_per_s: float = 1e6
    tensor_bytes: int = 1 << 40
    nic_bytes_per_s: float = 1e5


@dataclass(frozen=True)
class ToyMixedCost:
    """Of several kinds the slowest counts, as in `profiles.cost_model`."""

    cluster: Cluster
    latency_ns: int = 5000
    assumptions: tuple[str, ...] = ()
    takes_quickest: bool = False

    def among(self, nodes: Sequence[Node]) -> ToyMixedCost:
        return replace(self, cluster=replace(self.cluster, nodes=tuple(nodes)))

    def quickest(self) -> ToyMixedCost:
        return replace(self, takes_quickest=True)

    def op(self, work: OpWork) -> OpCost:
        rates = [node.device.peak_flops_per_s["float32"] for node in self.cluster.nodes]
        rate = max(rates) if self.takes_quickest else min(rates)
        return OpCost(ns=round(1e9 * (work.flops + work.bytes / 1e4) / rate), source="analytic")

    def collective(self, work: CollectiveWork) -> CollectiveCost:
        costs = [self._on(node, work) for node in self.cluster.nodes]
        return min(costs, key=_alone) if self.takes_quickest else max(costs, key=_alone)

    def _on(self, node: Node, work: CollectiveWork) -> CollectiveCost:
        inside, several = work.nodes == 1, work.group_size > 1
        rate = node.intra.bytes_per_s if inside else node.nic_bytes_per_s_per_device
        return CollectiveCost(
            latency_ns=self.latency_ns * several,
            bytes=work.bytes * several,
            rate_cap_bytes_per_s=rate,
            link="intra" if inside else "inter",
            source="analytic",
        )

    def step_overhead_ns(self) -> int:
        return 0


def _alone(cost: CollectiveCost) -> int:
    return cost.alone_ns


def mixed_scorer(
    toys, kinds: Sequence[ToyKind], *, global_batch: int = 8, graph=None
) -> MixedScorer:
    """Scores the toy model on a cluster of these kinds."""
    graph = graph or toys.graph()
    nodes: list[Node] = []
    for number, kind in enumerate(kinds):
        memory = CONTEXT_BYTES + kind.tensor_bytes
        base = toys.cluster(devices=kind.devices, memory_bytes=memory).nodes[0]
        peaks = {"float32": kind.flops_per_s}
        device = replace(
            base.device, name=f"d{number}", peak_flops_per_s=peaks, achieved_flops_per_s=peaks
        )
        nic = replace(base.nic, bytes_per_s=kind.nic_bytes_per_s)
        nodes += [replace(base, type=f"k{number}", device=device, nic=nic)] * kind.nodes
    cluster = Cluster(name="mixed", nodes=tuple(nodes), network=Network(), text={"nodes": []})
    whole = Problem(
        graph=graph,
        cluster=cluster,
        cost=ToyMixedCost(cluster),
        training=Training(
            global_batch=global_batch,
            seq_len=8,
            precision="float32",
            optimizer="adamw",
            memory_headroom=0.0,
        ),
    )
    problem = MixedProblem(whole=whole, kinds=kinds_of(whole, ToyMixedCost))
    return MixedScorer(problem, ShardSizes(graph))


def every_pipeline(space: MixedSpace) -> Iterator[MixedCandidate]:
    """All orders, cuts and recomputations of all ways over several kinds, fitting or not."""
    for microbatch, divisions in space.rows()[0]:
        for sharing in space.sharings(divisions):
            way = Way(microbatch, divisions, sharing)
            for one in arrangements(space.chain(way, limited=False)):
                for again in product(range(len(RECOMPUTE)), repeat=len(one)):
                    chosen = (
                        run._replace(recompute=how) for run, how in zip(one, again, strict=True)
                    )
                    yield space.mixed(way, tuple(chosen))
