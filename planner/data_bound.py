"""What data parallelism and the optimizer certainly add to a stage's step, on idle links.

Lower bounds of what `lower_data.Sharded` lays out: a gather before the first pass, reductions
after the last one, the whole of each stream. What replicas without shards average is
`averaging_bound`'s; a trainer that keeps whole parameters (`lower_zero.CopiedParameters`) counts
with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.averaging import Averaging, scattering, scatters_codes
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
from claw_plan.planner.placement import group_nodes, near_nodes, shard_nodes
from claw_plan.planner.problem import STORED_BYTES, Problem, optimizer_work
from claw_plan.planner.schedule_bound import Traffic
from claw_plan.planner.shards import ROOT, GroupSize, ShardSizes, joined, runs_of
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.simulator.task_graph import Int

Cuts = tuple[tuple[int, int], ...]

_Ranks = tuple[int, int]
"""Ranks of a group, and the nodes that they are on."""

_ALONE: _Ranks = (1, 1)

_Among = tuple[_Ranks, _Ranks, _Ranks, int, str]
"""dp_shard, dp_replicate, what `reshard_ranks` makes of dp_shard, blocks gathered together, and
the codec over dp_shard, if any. Codes between replicas are `averaging_bound`'s."""


class GroupTraffic(NamedTuple):
    """Of one group: as `schedule_bound.Traffic` has it."""

    gather_ns: int = 0
    gather_alone_ns: int = 0
    cast_ns: int = 0
    reduce_ns: int = 0
    sum_ns: int = 0
    reduce_alone_ns: int = 0
    near_ns: int = 0
    near_alone_ns: int = 0
    keep_ns: int = 0


NOTHING = GroupTraffic()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTraffic:
    """Of one stage: its groups of units, its root, and all of the step's traffic on a stream."""

    units: Sequence[GroupTraffic] = ()
    root: GroupTraffic = NOTHING
    gather_ns: int = 0
    reduce_ns: int = 0


def _times(candidate: Candidate, count: int) -> tuple[int, int, int, int]:
    """How often a stage gathers a group of blocks, from all or near, its root, and reduces."""
    if candidate.pp == 1:
        reduces = count if candidate.zero > 1 else 1
        if candidate.zero < 3:
            return 1, 0, 1, reduces
        nears = count if candidate.reshard_ranks else 0
        return 2 * count - nears, nears, count, reduces
    if candidate.zero < 3:
        return 1, 0, 1, 1
    # Blocks are cut after a forward, not after a backward, and whole only before the first.
    nears = count if candidate.reshard_ranks else 0
    return count + 1 - nears, nears, 1, 1


def floor_ns(cost: CollectiveCost) -> int:
    """A collective alone, rounded down."""
    if not cost.bytes:
        return cost.latency_ns
    return cost.latency_ns + int(cost.bytes * 1e9 / cost.rate_cap_bytes_per_s * (1 - 1e-12))


def averaged_ns(mean: Averaging) -> int:
    """All of a mean, rounded down."""
    phases_ns = sum(kernels_ns + floor_ns(cost) for kernels_ns, cost in mean.phases)
    return phases_ns + mean.last_ns


@dataclass(frozen=True)
class DataBounds:
    """Of one problem, with what candidates share kept."""

    problem: Problem
    shards: ShardSizes
    _traffic: dict[tuple[object, ...], StageTraffic] = field(default_factory=dict)
    _optimizer: dict[tuple[object, ...], int] = field(default_factory=dict)
    _accumulate: dict[tuple[object, ...], int] = field(default_factory=dict)

    def all_traffic(self, candidate: Candidate, cuts: Cuts) -> Traffic | None:
        """Of all stages, for playing a schedule with it."""
        if not self._is_sharded(candidate):
            return None
        stages = self.stages(candidate, cuts)
        groups = [*(unit for stage in stages for unit in stage.units), *(s.root for s in stages)]
        columns = dict(zip(GroupTraffic._fields, np.array(groups, np.int64).T.copy(), strict=True))
        run, ends_run = self._runs(candidate, cuts)
        overlaps = self.problem.cluster.backend != "gloo"
        is_alone, zero = candidate.pp == 1, candidate.zero
        return Traffic(
            **columns,
            is_beside=np.array(
                [
                    overlaps and candidate.shard_ranks > 1,
                    overlaps and not scatters_codes(candidate),
                ]
            ),
            run=run,
            ends_run=ends_run,
            keeps_near=candidate.reshard_ranks > 0,
            frees_after_forward=zero == 3,
            frees_after_backward=is_alone and zero == 3,
            reduces_always=is_alone and zero > 1,
            loss=self.problem.trainer.overlap_loss,
        )

    def _runs(self, candidate: Candidate, cuts: Cuts) -> tuple[Int, NDArray[np.bool_]]:
        """The first unit of what each unit is gathered with, and whether it is the last of it."""
        last = len(self.problem.graph.units) - 1
        run, ends_run = np.arange(last + 1), np.ones(last + 1, np.bool_)
        for cut in cuts:
            for units in runs_of(*cut, last, candidate.blocks_per_group):
                run[units.start : units.stop] = units.start
                ends_run[units.start : units.stop - 1] = False
        return run, ends_run

    def _is_sharded(self, candidate: Candidate) -> bool:
        return kind_of(self.problem, candidate) == SHARDED

    def traffic(self, candidate: Candidate, start: int, stop: int) -> StageTraffic:
        """Of the stage with these units."""
        return self.stages(candidate, ((start, stop),))[0]

    def stages(self, candidate: Candidate, cuts: Cuts) -> list[StageTraffic]:
        """Of all stages."""
        if not self._is_sharded(candidate):
            return [StageTraffic()] * len(cuts)
        among = self._among(candidate)
        count = candidate.num_microbatches(self.problem.training.global_batch)
        key = candidate.tp, among, _times(candidate, count)
        found = []
        for cut in cuts:
            known = self._traffic.get((cut, key))
            if known is None:
                start, stop = cut
                known = self._traffic[cut, key] = self._stage_traffic(start, stop, *key)
            found.append(known)
        return found

    def _among(self, candidate: Candidate) -> _Among:
        per_node, ranks = self.problem.devices_per_node, candidate.reshard_ranks
        replicas = candidate.dp_replicate, group_nodes(candidate, "dp_replicate", per_node)
        return (
            (candidate.shard_ranks, shard_nodes(candidate, per_node)),
            replicas if candidate.codec == "none" else _ALONE,
            (ranks, near_nodes(candidate, per_node) if ranks else 0),
            candidate.blocks_per_group,
            candidate.codec if scatters_codes(candidate) else "none",
        )

    def _stage_traffic(
        self, start: int, stop: int, tp: int, among: _Among, times: tuple[int, int, int, int]
    ) -> StageTraffic:
        shard, _, _, blocks, _ = among
        groups = self.shards.groups(start, stop, tp, shard[0])
        if blocks > 1:
            last = len(self.problem.graph.units) - 1
            groups = joined(groups, runs_of(start, stop, last, blocks))
        alike = {size: self._group(size, among) for size in set(groups.values())}
        units = [alike.get(groups.get(unit, GroupSize()), NOTHING) for unit in range(start, stop)]
        root = alike[groups[ROOT]]
        gathers, nears, root_gathers, reduces = times
        blocks_ns = sum(unit.reduce_ns for unit in units)
        summed_ns = root.sum_ns + sum(unit.sum_ns for unit in units)
        gathered_ns = sum(gathers * unit.gather_ns + nears * unit.near_ns for unit in units)
        return StageTraffic(
            units=units,
            root=root,
            gather_ns=root_gathers * root.gather_ns + gathered_ns,
            reduce_ns=reduces * (root.reduce_ns + blocks_ns) + summed_ns,
        )

    def _group(self, size: GroupSize, among: _Among) -> GroupTraffic:
        if not size.whole:
            return NOTHING
        shard, replicate, near, _, codec = among
        compute, gradient = (
            self.problem.training.compute_bytes,
            self.problem.trainer.gradient_bytes,
        )
        gather_ns = self.problem.memory_op_ns((STORED_BYTES + compute) * size.shard)
        alone_ns = reduce_alone_ns = copied_ns = near_ns = near_alone_ns = keep_ns = 0
        if shard[0] > 1:
            whole = compute * size.shard * shard[0]
            copy_ns = self._copy_ns(GATHER_COPY, 2 * compute * size.whole, "forward")
            alone_ns = self._floor_ns("all_gather", whole, shard)
            gather_ns += alone_ns + copy_ns
            if near[0]:
                keep_ns = self.problem.memory_op_ns(2 * (whole // near[0]))
                near_alone_ns = self._floor_ns("all_gather", whole, near)
                near_ns = keep_ns + near_alone_ns + copy_ns
        if size.trainable_whole:
            moved = (compute + gradient) * size.trainable_whole
            copied_ns = self._copy_ns(REDUCE_COPY, moved, "backward")
            moved = gradient * size.trainable_shard * shard[0]
            reduce_alone_ns = self._floor_ns("reduce_scatter", moved, shard)
            if codec != "none":
                elements = size.trainable_shard * shard[0]
                copied_ns += averaged_ns(scattering(self.problem, codec, elements, *shard))
                reduce_alone_ns = 0
        casts = shard[0] == 1
        return GroupTraffic(
            gather_ns=gather_ns,
            gather_alone_ns=alone_ns,
            cast_ns=copied_ns if casts else 0,
            reduce_ns=0 if casts else copied_ns + reduce_alone_ns,
            sum_ns=self._floor_ns("all_reduce", gradient * size.trainable_shard, replicate),
            reduce_alone_ns=reduce_alone_ns,
            near_ns=near_ns,
            near_alone_ns=near_alone_ns,
            keep_ns=keep_ns,
        )

    def _floor_ns(self, op: str, size_bytes: int, group: tuple[int, int]) -> int:
        """A collective over (ranks, nodes); nothing for one rank."""
        if group[0] == 1 or not size_bytes:
            return 0
        return floor_ns(self.problem.collective(op, size_bytes, *group, by_data=True))

    def _copy_ns(self, target: str, size_bytes: int, phase: str) -> int:
        return self.problem.cost.op(memory_work(target, size_bytes, phase)).ns

    def accumulate_ns(self, candidate: Candidate, start: int, stop: int) -> int:
        """What adding a microbatch's gradients to those before takes."""
        kind = kind_of(self.problem, candidate)
        if kind == COPIED:
            return 0
        whole = kind != SHARDED or candidate.pp > 1 or candidate.zero == 1
        shard = 1 if whole else candidate.shard_ranks
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
        key = (start, stop, candidate.tp, candidate.shard_ranks, candidate.offload)
        if key not in self._optimizer:
            groups = self.shards.groups(start, stop, candidate.tp, candidate.shard_ranks)
            elements = sum(group.trainable_shard for group in groups.values())
            work = optimizer_work(optimizer, elements)
            on_host = candidate.offload == "optimizer"
            step_ns = host_step_ns(self.problem, elements) if on_host else 0
            self._optimizer[key] = step_ns or (self.problem.cost.op(work).ns if elements else 0)
        return self._optimizer[key]
