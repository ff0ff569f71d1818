"""When the gradients of replicas are averaged at the earliest, on idle links.

Lower bounds of what `lower_whole.Whole` lays out, and `lower_end` of pipelines and of codes
between replicas of shards: beside the last backward a bucket is ready no earlier than the passes
of the units after its own take to the end; what is waited for adds to the step. Shards that meet
without a codec, and through one without replicas, are `data_bound`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from claw_plan.planner.averaging import AXIS, at_end, averaging
from claw_plan.planner.averaging_buckets import AFTER_ALL, buckets_of
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import averaged_ns, floor_ns
from claw_plan.planner.graph import Parameter
from claw_plan.planner.lower_end import bucket_sizes, filled, flags_cost
from claw_plan.planner.memory_states import SHARDED, WHOLE, kind_of
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.problem import Problem
from claw_plan.planner.shards import ShardSizes, local_numel, shard_numel
from claw_plan.planner.zero_one import is_zero_one, mean_ns

Cuts = tuple[tuple[int, int], ...]


class Averaged(NamedTuple):
    """What averaging a bucket takes once the backward of `unit` has run, beside others or not."""

    unit: int
    ns: int
    is_beside: bool


@dataclass(frozen=True)
class AveragingBounds:
    """Of one problem, with what candidates share kept."""

    problem: Problem
    shards: ShardSizes
    _buckets: dict[tuple[object, ...], list[Averaged]] = field(default_factory=dict)

    def end_ns(
        self,
        candidate: Candidate,
        cuts: Cuts,
        ends_ns: int,
        left_ns: Callable[[int], int],
    ) -> int:
        """When a rank with these stages, whose last pass ends then, has its mean gradients.

        `left_ns` is what it runs after the backward of a unit.
        """
        buckets = self.buckets(candidate, cuts)
        if not any(bucket.is_beside for bucket in buckets):
            return ends_ns + sum(bucket.ns for bucket in buckets)
        reached = 0
        for unit, bucket_ns, _ in buckets:
            after_ns = 0 if unit == AFTER_ALL else left_ns(unit)
            reached = max(reached, ends_ns - after_ns) + bucket_ns
        return max(ends_ns, reached)

    def buckets(self, candidate: Candidate, cuts: Cuts) -> Sequence[Averaged]:
        """In the order in which they are averaged."""
        kind = kind_of(self.problem, candidate)
        is_late = candidate.codec != "none" and kind == SHARDED
        if candidate.dp_replicate == 1 or not (kind == WHOLE or is_late):
            return ()
        nodes = group_nodes(candidate, AXIS, self.problem.devices_per_node)
        key = (
            cuts, candidate.pp > 1, candidate.tp, candidate.dp_replicate, nodes,
            candidate.shard_ranks, candidate.bucket_bytes, candidate.buckets,
            candidate.collective, candidate.codec,
        )  # fmt: skip
        if key not in self._buckets:
            find = self._late if candidate.pp > 1 or is_late else self._beside
            self._buckets[key] = find(candidate, cuts)
        return self._buckets[key]

    def _held(self, candidate: Candidate, cuts: Cuts) -> dict[str, int]:
        """Elements of the trained parameters of the stages on a rank, in the model's order."""
        own = {p.name for cut in cuts for _, p in self.shards.stage_parameters(*cut)}
        return {
            parameter.name: local_numel(parameter, candidate.tp)
            for parameter in self.problem.graph.parameters
            if parameter.trainable and parameter.name in own and parameter.shared_by == 1
        }

    def _beside(self, candidate: Candidate, cuts: Cuts) -> list[Averaged]:
        sizes = self._held(candidate, cuts)
        held = [(p, sizes[p.name]) for p in self.problem.graph.parameters if p.name in sizes]
        optimizer, found = self.problem.training.optimizer, []
        for bucket in buckets_of(held, range(*cuts[0]), candidate, optimizer):
            mean = averaging(self.problem, candidate, bucket.elements, bucket.shapes)
            bucket_ns = averaged_ns(mean)
            if is_zero_one(candidate):
                alone = averaging(self.problem.apart, candidate, bucket.elements)
                bucket_ns = mean_ns(candidate, bucket_ns, averaged_ns(alone))
            found.append(Averaged(bucket.unit, bucket_ns, not mean.is_waited_for))
        return found

    def _late(self, candidate: Candidate, cuts: Cuts) -> list[Averaged]:
        """At the step's end, as `lower_end` has it."""
        sizes = self._owned(candidate, cuts)
        if candidate.codec != "none":
            means = [
                averaged_ns(at_end(self.problem, candidate, elements))
                for elements, _ in filled(sizes, candidate.bucket_bytes)
            ]
            flags_ns = floor_ns(flags_cost(self.problem, candidate, len(sizes)))
            return [Averaged(AFTER_ALL, ns, is_beside=False) for ns in (flags_ns, *means)]
        ranks = candidate.dp_replicate
        nodes = group_nodes(candidate, AXIS, self.problem.devices_per_node)
        costs = (
            self.problem.collective("all_reduce", size, ranks, nodes, by_data=True)
            for size in bucket_sizes(sizes, candidate.bucket_bytes)
        )
        return [Averaged(AFTER_ALL, floor_ns(cost), is_beside=False) for cost in costs]

    def _owned(self, candidate: Candidate, cuts: Cuts) -> list[int]:
        """Elements of the gradients that a rank averages at a step's end, stage by stage."""
        in_shards = kind_of(self.problem, candidate) == SHARDED
        found: dict[str, int] = {}
        for cut in cuts:
            held = [parameter for _, parameter in self.shards.stage_parameters(*cut)]
            for parameter in sorted(held, key=lambda own: self._places[own.name]):
                if parameter.trainable and (in_shards or parameter.shared_by == 1):
                    found.setdefault(parameter.name, self._elements(candidate, parameter))
        return list(found.values())

    def _elements(self, candidate: Candidate, parameter: Parameter) -> int:
        if kind_of(self.problem, candidate) == SHARDED:
            return shard_numel(parameter, candidate.tp, candidate.shard_ranks)
        return local_numel(parameter, candidate.tp)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {p.name: place for place, p in enumerate(self.problem.graph.parameters)}
