"""A plan and a codec to the bandwidth below which the codec begins to pay, and what it computes.

The same step is simulated with the link that joins those who average gradients faster and slower,
with the codec and without, until both are through at once. All traffic on that link changes with
it, whatever it was measured at; latencies stay. Kernels of the codec are what is left to tell the
two steps apart where the link takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.placement import group_nodes, shard_nodes
from claw_plan.planner.problem import Problem
from claw_plan.planner.score import Scorer
from claw_plan.planner.search_space import Choice
from claw_plan.planner.stage_path import Cuts
from claw_plan.profiles.cluster import Cluster, Link, Node
from claw_plan.profiles.codecs import describe_codec
from claw_plan.profiles.cost import CollectiveCost, CostModel, OpCost
from claw_plan.profiles.work import CollectiveWork, OpWork

WIDEST = 4.0**6
"""Times faster or slower that a link is tried."""

FREE = 1e6
"""As often as fast, a link takes no time."""

MOST_PASSES = 200
"""Of stages and microbatches in a step that is simulated, some 40 times for an answer; longer ones
are played on idle links (`bound`), which takes a thirtieth."""

_HALVINGS = 8
"""From four times apart to half a per cent."""


class AveragingLink(NamedTuple):
    """The link over which a plan averages what a codec would carry; the rate of one device."""

    kind: str
    name: str
    bytes_per_s: float


def averaging_link(problem: Problem, candidate: Candidate) -> AveragingLink:
    """Between nodes where those who average lie on several, else inside one."""
    per_node, node = problem.devices_per_node, problem.cluster.nodes[0]
    is_shard = candidate.dp_replicate == 1
    nodes = (
        shard_nodes(candidate, per_node)
        if is_shard
        else group_nodes(candidate, "dp_replicate", per_node)
    )
    if nodes > 1:
        rate = min(each.nic_bytes_per_s_per_device for each in problem.cluster.nodes)
        return AveragingLink("inter", node.nic.name, rate)
    return AveragingLink("intra", node.intra.name, node.intra.bytes_per_s)


def break_even_bytes_per_s(scorer: Scorer, choice: Choice, codec: str) -> float:
    """The rate of the averaging link below which the codec pays in steps to the same loss.

    0 where it pays at none, infinity where at all. `choice` may have the codec or not.
    """
    link = averaging_link(scorer.problem, choice[0])
    penalty = max(1.0, describe_codec(codec).step_penalty)

    def pays(factor: float) -> bool:
        coded_ns, plain_ns = both_ns(scorer, choice, codec, factor)
        return coded_ns * penalty < plain_ns

    return link.bytes_per_s * _edge(pays)


def kernels_ns(scorer: Scorer, choice: Choice, codec: str) -> int:
    """What encoding and decoding add to a step that waits for no link."""
    coded_ns, plain_ns = both_ns(scorer, choice, codec, FREE)
    return max(0, coded_ns - plain_ns)


def both_ns(scorer: Scorer, choice: Choice, codec: str, factor: float) -> tuple[int, int]:
    """The step with the codec and without, on an averaging link so many times as fast."""
    candidate, cuts = choice
    faster = scorer
    if factor != 1.0:
        kind = averaging_link(scorer.problem, candidate).kind
        faster = Scorer(on_link(scorer.problem, kind, factor))
    coded, plain = with_codec(candidate, codec), with_codec(candidate, "none")
    return _step_ns(faster, coded, cuts), _step_ns(faster, plain, cuts)


def _step_ns(scorer: Scorer, candidate: Candidate, cuts: Cuts) -> int:
    count = candidate.num_microbatches(scorer.problem.training.global_batch)
    if len(cuts) * count <= MOST_PASSES:
        return scorer.step_time_ns(candidate, cuts)
    bounds = scorer.bounds
    return bounds.candidate_ns(candidate, bounds.path_of(candidate, cuts))


def with_codec(candidate: Candidate, codec: str) -> Candidate:
    """The candidate with another codec, and what goes with no or any codec."""
    if candidate.codec == codec:
        return candidate
    return replace(candidate, codec=codec, collective="auto", buckets=(), bucket_order=())


def _edge(pays: Callable[[float], bool]) -> float:
    """The factor at which what `pays` below begins not to."""
    step = 4.0 if pays(1.0) else 0.25
    low = high = 1.0
    while pays(high if step > 1 else low) == (step > 1):
        low, high = (high, high * step) if step > 1 else (low * step, low)
        if high > WIDEST:
            return float("inf")
        if low < 1.0 / WIDEST:
            return 0.0
    for _ in range(_HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return sqrt(low * high)


def on_link(problem: Problem, kind: str, factor: float) -> Problem:
    """The same with the links of a kind, 'intra' or 'inter', so many times as fast."""
    changed = {id(node): _faster(node, kind, factor) for node in problem.cluster.nodes}
    nodes = tuple(changed[id(node)] for node in problem.cluster.nodes)
    cluster = replace(problem.cluster, nodes=nodes)
    was = {id(changed[id(node)]): node for node in problem.cluster.nodes}
    known = problem.cost.assumptions
    cost = _Faster(cluster, known, problem.cost, kind, factor, was)
    return replace(problem, cluster=cluster, cost=cost)


def _faster(node: Node, kind: str, factor: float) -> Node:
    def change(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    if kind == "inter":
        return replace(node, nic=change(node.nic))
    pairs = {pair: change(link) for pair, link in node.pairs.items()}
    return replace(node, intra=change(node.intra), pairs=pairs)


@dataclass
class _Faster:
    """Costs of another model, collectives on the links of a kind so many times as fast.

    `was` has the nodes of the other model by the ids of those of the cluster.
    """

    cluster: Cluster
    assumptions: tuple[str, ...]
    model: CostModel
    kind: str
    factor: float
    was: Mapping[int, Node]

    def op(self, work: OpWork) -> OpCost:
        return self.model.op(work)

    def collective(self, work: CollectiveWork) -> CollectiveCost:
        cost = self.model.collective(work)
        if cost.link != self.kind:
            return cost
        return replace(cost, rate_cap_bytes_per_s=cost.rate_cap_bytes_per_s * self.factor)

    def among(self, nodes: Sequence[Node]) -> _Faster:
        return replace(self, model=self.model.among([self.was[id(node)] for node in nodes]))

    def quickest(self) -> _Faster:
        return replace(self, model=self.model.quickest())

    def step_overhead_ns(self) -> int:
        return self.model.step_overhead_ns()
