"""All devices divided alike though they are not: the slowest counts for all.

Tensor-parallel ranks meet several times in every block, so groups of devices whose speeds differ
by more than `MOST_UNLIKE` would make the fast ones wait. The degrees offered divide every node, so
that no group leaves its own; grouping nodes by `node_profile` lifts that within the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import gcd
from typing import Any

from typing_extensions import override

from claw_plan.planner.errors import PlanError
from claw_plan.planner.problem import Problem
from claw_plan.profiles.cluster import Node

MOST_UNLIKE = 0.30
"""How much faster than the slowest a device may be in a tensor-parallel group
(docs/mixed.md)."""


@dataclass(frozen=True, kw_only=True)
class SlowestProblem(Problem):
    """A Problem in which every rank is as slow as the slowest of the cluster, wherever it lies.

    Bounds of its plans are as close as on equal devices; where each rank counts with its own nodes
    they rest on the quickest, so that thousands of plans would have to be simulated.
    """

    @override
    def among(self, nodes: Sequence[int]) -> Problem:
        return self

    @cached_property
    @override
    def quickest(self) -> Problem:
        return self


def slowest_for_all(problem: Problem) -> Problem:
    """The same problem where the slowest counts for all."""
    if problem.is_uniform:
        return problem
    given = {each.name: getattr(problem, each.name) for each in fields(Problem) if each.init}
    return SlowestProblem(**given)


def kept_apart(problem: Problem, fix: Mapping[str, Any]) -> Problem:
    """The same problem without tensor-parallel groups over devices that are too unlike.

    Raises PlanError where such a degree is pinned.
    """
    slow, fast = _extremes(problem)
    unlike = _speed(fast, problem) / _speed(slow, problem) - 1
    if unlike <= MOST_UNLIKE:
        return problem
    inside = gcd(*(node.device_count for node in problem.cluster.nodes))
    if inside % (tp := fix.get("tp", 1)):
        raise PlanError(
            f"--fix tp={tp}: a group would hold {slow.device.name} and {fast.device.name}, which "
            f"is {unlike:.0%} faster; pin a tp that divides the {inside} devices of each node, or "
            "give all nodes one node_profile in the cluster file"
        )
    graph = problem.graph
    partial = {tp: rules for tp, rules in graph.partial.items() if inside % tp == 0}
    graph = replace(graph, tp_divides=gcd(graph.tp_divides, inside), partial=partial)
    return replace(problem, graph=graph)


def _extremes(problem: Problem) -> tuple[Node, Node]:
    """The slowest and the fastest node."""
    nodes = sorted(problem.cluster.nodes, key=lambda node: _speed(node, problem))
    return nodes[0], nodes[-1]


def _speed(node: Node, problem: Problem) -> float:
    """What large kernels sustain on a device of the node; 1 where nothing is known."""
    device, precision = node.device, problem.training.precision
    peak = device.peak_flops_per_s.get(precision, 1.0)
    return device.achieved_flops_per_s.get(precision, peak)
