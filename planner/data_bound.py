"""What data parallelism and the optimizer certainly add to a stage's step, on idle links.

Lower bounds of what `lower_data.Sharded` lays out: a gather before the first pass, reductions
after the last one, the whole of each stream. A trainer that keeps whole parameters
(`lower_zero.CopiedParameters`) and replicas without shards in fp32 (`lower_data.Whole`) count
with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower_data import (
    ACCUMULATE,
    ACCUMULATED_BYTES,
    GATHER_COPY,
    REDUCE_COPY,
    memory_work,
)
from claw_plan.planner.memory_states import COPIED, SHARDED, kind_of
from claw_plan.planner.offload import host_step_ns
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.problem import STORED_BYTES, Problem, optimizer_work
from claw_plan.planner.shards import ROOT, GroupSize, ShardSizes
from claw_plan.profiles.cost import CollectiveCost


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """Of one stage: `before_ns` its first pass, `after_ns` the end of its last.

    `last_ns` is what is reduced from the start of its last backward on. `gather_ns` and
    `reduce_ns` are all of the step's, each on a stream.
    """

    before_ns: int = 0
    after_ns: int = 0
    last_ns: int = 0
    gather_ns: int = 0
    reduce_ns: int = 0


def floor_ns(cost: CollectiveCost) -> int:
    """A collective alone, rounded down."""
    if not cost.bytes:
        return cost.latency_ns
    return cost.latency_ns + int(cost.bytes * 1e9 / cost.rate_cap_bytes_per_s * (1 - 1e-12))


@dataclass(frozen=True)
class DataBounds:
    """Of one problem, with what candidates share kept."""

    problem: Problem
    shards: ShardSizes
    _traffic: dict[tuple[object, ...], StageTraffic] = field(default_factory=dict)
    _optimizer: dict[tuple[object, ...], int] = field(default_factory=dict)
    _accumulate: dict[tuple[object, ...], int] = field(default_factory=dict)

    def traffic(self, candidate: Candidate, start: int, stop: int) -> StageTraffic:
        """Of the stage with these units."""
        if kind_of(self.problem, candidate) != SHARDED:
            return StageTraffic()
        per_node = self.problem.devices_per_node
        shard_nodes = group_nodes(candidate, "dp_shard", per_node)
        replica_nodes = group_nodes(candidate, "dp_replicate", per_node)
        count = candidate.num_microbatches(self.problem.training.global_batch)
        gathers = root_gathers = reduces = 1
        if candidate.pp == 1:
            reduces = count if candidate.zero > 1 else 1
        if candidate.zero == 3 and candidate.pp == 1:
            gathers, root_gathers = 2 * count, count
        elif candidate.zero == 3:  # blocks are cut after a forward, not after a backward
            gathers = count + 1
        key = (
            start, stop, candidate.tp, candidate.dp_shard, shard_nodes, candidate.dp_replicate,
            replica_nodes, gathers, root_gathers, reduces,
        )  # fmt: skip
        if key not in self._traffic:
            self._traffic[key] = self._stage_traffic(*key)
        return self._traffic[key]

    def _stage_traffic(
        self, start: int, stop: int, tp: int, shard: int, shard_nodes: int, replicate: int,
        replica_nodes: int, gathers: int, root_gathers: int, reduces: int,
    ) -> StageTraffic:  # fmt: skip
        groups = self.shards.groups(start, stop, tp, shard)
        alike: dict[GroupSize, tuple[int, int, int]] = {}
        for size in set(groups.values()):
            gather, reduce = self._sharded_ns(size, shard, shard_nodes)
            alike[size] = gather, reduce, self._replicated_ns(size, replicate, replica_nodes)
        costs = {group: alike[size] for group, size in groups.items() if group >= ROOT}
        root, first = costs[ROOT], costs.get(start, (0, 0, 0))
        blocks = [cost for group, cost in costs.items() if group != ROOT]
        gather = sum(cost[0] for cost in blocks)
        reduce = root[1] + sum(cost[1] for cost in blocks)
        replicated = root[2] + sum(cost[2] for cost in blocks)
        return StageTraffic(
            before_ns=root[0] + first[0],
            after_ns=root[1] + root[2] + first[1] + first[2],
            last_ns=reduce + replicated,
            gather_ns=root_gathers * root[0] + gathers * gather,
            reduce_ns=reduces * reduce + replicated,
        )

    def _sharded_ns(self, size: GroupSize, shard: int, nodes: int) -> tuple[int, int]:
        """The group's gather and its reduction over dp_shard."""
        if not size.whole or shard == 1:
            return 0, 0
        compute = self.problem.training.compute_bytes
        gather = self.problem.collective(
            "all_gather", compute * size.shard * shard, shard, nodes, by_data=True
        )
        cast_ns = self.problem.memory_op_ns((STORED_BYTES + compute) * size.shard)
        copy = memory_work(GATHER_COPY, 2 * compute * size.whole, "forward")
        gather_ns = floor_ns(gather) + cast_ns + self.problem.cost.op(copy).ns
        if not size.trainable_whole:
            return gather_ns, 0
        gradient = self.problem.trainer.gradient_bytes
        reduce = self.problem.collective(
            "reduce_scatter", gradient * size.trainable_shard * shard, shard, nodes, by_data=True
        )
        copy = memory_work(REDUCE_COPY, (compute + gradient) * size.trainable_whole, "backward")
        return gather_ns, floor_ns(reduce) + self.problem.cost.op(copy).ns

    def _replicated_ns(self, size: GroupSize, replicate: int, nodes: int) -> int:
        """The sum of the group's shards over dp_replicate, once a step."""
        moved = self.problem.trainer.gradient_bytes * size.trainable_shard
        if replicate == 1 or not moved:
            return 0
        cost = self.problem.collective("all_reduce", moved, replicate, nodes, by_data=True)
        return floor_ns(cost)

    def accumulate_ns(self, candidate: Candidate, start: int, stop: int) -> int:
        """What adding a microbatch's gradients to those before takes."""
        kind = kind_of(self.problem, candidate)
        if kind == COPIED:
            return 0
        whole = kind != SHARDED or candidate.pp > 1 or candidate.zero == 1
        shard = 1 if whole else candidate.dp_shard
        key = (start, stop, candidate.tp, shard)
        if key not in self._accumulate:
            groups = self.shards.groups(start, stop, candidate.tp, shard)
            size = ACCUMULATED_BYTES * sum(size.trainable_shard for size in groups.values())
            work = memory_work(ACCUMULATE, size, "backward")
            self._accumulate[key] = self.problem.cost.op(work).ns if size else 0
        return self._accumulate[key]

    def optimizer_ns(self, candidate: Candidate, start: int, stop: int) -> int:
        """The optimizer's step over what a rank owns of the stage."""
        if kind_of(self.problem, candidate) == COPIED:
            return 0
        optimizer = self.problem.training.optimizer
        key = (start, stop, candidate.tp, candidate.dp_shard, candidate.offload)
        if key not in self._optimizer:
            groups = self.shards.groups(start, stop, candidate.tp, candidate.dp_shard)
            elements = sum(group.trainable_shard for group in groups.values())
            work = optimizer_work(optimizer, elements)
            on_host = candidate.offload == "optimizer"
            step_ns = host_step_ns(self.problem, elements) if on_host else 0
            self._optimizer[key] = step_ns or (self.problem.cost.op(work).ns if elements else 0)
        return self._optimizer[key]
