"""How the candidates of a group differ: in how data parallelism is done, and plain schedules.

A `Group` fixes what each rank computes. Its members differ in how dp is divided into replicas and
shards, what is sharded, how parameters are gathered, where the optimizer runs. They are counted
without being made; the search makes them when it opens the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from claw_plan.planner.averaging_choices import AveragingChoices
from claw_plan.planner.candidate import MESH_ORDER, Candidate
from claw_plan.planner.group_table import Group
from claw_plan.planner.placement import outcome, stride_of, tp_nodes
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import SCHEDULES
from claw_plan.planner.supported import (
    OFFLOAD,
    order_refusal,
    refusal,
    shares_experts,
)

BLOCKS_PER_GROUP = (1, 2, 4)
"""Blocks that are gathered together; more of them are offered by --fix."""

ORDERS = tuple(
    tuple(text.split())
    for text in (
        " ".join(MESH_ORDER),
        "dp_replicate dp_shard cp pp tp",
        "dp_replicate pp dp_shard cp tp",
        "pp tp dp_replicate dp_shard cp",
        "tp pp dp_replicate dp_shard cp",
        "dp_replicate dp_shard cp tp pp",
        "tp dp_replicate dp_shard cp pp",
    )
)
"""All orders of pp, tp and data parallelism as a whole, replicas outside shards, and that in which
pipelines of shards are replicated: each axis comes to lie on neighbours, next to them, and apart.
Others are offered by --fix."""

FINER = ("recompute_blocks", "reshard_ranks", "blocks_per_group", "mesh_order")
"""Knobs that are offered where there are not too many groups, or one is pinned."""

MEMBER_KNOBS = (
    "dp_replicate", "dp_shard", "zero", "schedule", "offload", "reshard_ranks", "blocks_per_group",
    "mesh_order", "bucket_bytes", "collective", "codec",
)  # fmt: skip
"""By which the candidates of a group differ."""

Way = tuple[str, int, str]
"""schedule, zero and offload: how members of a group differ beside dp_shard."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class Degrees(NamedTuple):
    """Of a group, with the nodes that its tensor-parallel groups span."""

    pp: int
    tp: int
    dp: int
    tp_nodes: int


class Members:
    """The members of a problem's groups that agree with the pinned knobs `fix`.

    Without `refines` those of `FINER` are at their plain values unless pinned.
    """

    def __init__(
        self,
        problem: Problem,
        fix: Mapping[str, Any],
        *,
        refines: bool = True,
        codecs: Sequence[str] = (),
    ) -> None:
        self._problem, self._fix, self._refines = problem, fix, refines
        self._ways = cache(self._find_ways)
        self._gatherings = cache(self._find_gatherings)
        self._averagings = cache(AveragingChoices(problem, fix, codecs).of)
        self._laid = cache(self._find_laid)
        self._counted = cache(self._count)
        pinned = fix.get("mesh_order")
        several = refines and not problem.trainer.keeps_compute_copy
        several = several and problem.graph.ep == problem.graph.cp == 1
        self.orders = (pinned,) if pinned else ORDERS if several else ORDERS[:1]

    def blocks_of_a_stage(self, stages: int) -> int:
        """Of the largest, if they are as equal as can be."""
        return -(-len(self._problem.graph.blocks) // stages)

    def spans(self, pp: int, tp: int, dp: int) -> dict[int, int]:
        """The numbers of nodes a tensor-parallel group may span, by the first order that has it.

        All orders of one number compute alike.
        """
        found: dict[int, int] = {}
        for place, order in enumerate(self.orders):
            base = Candidate(pp=pp, tp=tp, dp_replicate=dp, mesh_order=order)
            nodes = tp_nodes(base, self._problem.devices_per_node)
            if nodes not in found.values():
                found[place] = nodes
        return found

    def of(self, group: Group) -> list[Candidate]:
        """The candidates of a group, in order."""
        base, several = group.base, group.microbatches > 1
        most = most_together(self.blocks_of_a_stage(base.pp * base.stages_per_rank))
        nodes = tp_nodes(base, self._problem.devices_per_node)
        degrees = Degrees(base.pp, base.tp, base.dp, nodes)
        return [
            replace(laid, schedule=schedule, zero=zero, offload=offload, **gathering, **averaging)
            for shard in self._shards(base.dp)
            for order in self._laid(degrees, shard)
            for laid in [
                replace(base, dp_shard=shard, dp_replicate=base.dp // shard, mesh_order=order)
            ]
            for schedule, zero, offload in self._ways(
                base.pp > 1, base.tp > 1, shard > 1, shard < base.dp, several, base.schedule
            )
            for gathering in self._gatherings(stride_of(laid, "dp_shard"), shard, zero, most)
            for averaging in self._averagings(
                base.pp > 1, base.tp, shard, base.dp // shard, offload
            )
        ]

    def schedules(self, group: Group) -> list[str]:
        """The schedules of a group's candidates."""
        base, several = group.base, group.microbatches > 1
        return list(
            dict.fromkeys(
                schedule
                for shard in self._shards(base.dp)
                for schedule, _, _ in self._ways(
                    base.pp > 1, base.tp > 1, shard > 1, shard < base.dp, several, base.schedule
                )
            )
        )

    def count(self, degrees: Degrees, microbatches: int, schedule: str, together: int) -> int:
        """How many a group has whose stages have up to so many blocks to gather together."""
        if len(self.orders) == 1:  # then it counts that there is a pipeline, not how long it is
            degrees = degrees._replace(pp=min(degrees.pp, 2))
        return self._counted(degrees, microbatches > 1, schedule, together)

    def _count(self, degrees: Degrees, several: bool, schedule: str, together: int) -> int:
        pp, tp, dp, _ = degrees
        total = 0
        for shard in self._shards(dp):
            ways = self._ways(pp > 1, tp > 1, shard > 1, shard < dp, several, schedule)
            replicas = dp // shard
            for order in self._laid(degrees, shard):
                stride = stride_of(
                    Candidate(
                        pp=pp, tp=tp, dp_shard=shard, dp_replicate=dp // shard, mesh_order=order
                    ),
                    "dp_shard",
                )
                total += sum(
                    len(self._gatherings(stride, shard, zero, together))
                    * len(self._averagings(pp > 1, tp, shard, replicas, offload))
                    for _, zero, offload in ways
                )
        return total

    def _find_laid(self, degrees: Degrees, shard: int) -> list[tuple[str, ...]]:
        """The orders of the mesh with so many shards, one of each outcome."""
        pp, tp, dp, nodes = degrees
        if len(self.orders) == 1:
            only = self.orders[0]
            laid = Candidate(
                dp_shard=shard, dp_replicate=dp // shard, mesh_order=only, **self._divided
            )
            return [] if order_refusal(laid) else [only]
        problem = self._problem
        found: dict[tuple[object, ...], tuple[str, ...]] = {}
        per_node = problem.devices_per_node
        by_host = problem.cluster.backend == "gloo" or not problem.is_uniform
        for order in self.orders:
            laid = Candidate(
                pp=pp, tp=tp, dp_shard=shard, dp_replicate=dp // shard, mesh_order=order
            )
            if tp_nodes(laid, per_node) != nodes:
                continue
            decided = (
                outcome(laid, per_node, by_host=by_host),
                self._near(stride_of(laid, "dp_shard"), shard),
            )
            found.setdefault(decided, order)
        return list(found.values())

    def _shards(self, dp: int) -> list[int]:
        """What dp_shard may be."""
        return [
            shard
            for shard in divisors(dp)
            if self._pinned("dp_shard", shard) and self._pinned("dp_replicate", dp // shard)
            if shares_experts(dp, shard, self._problem.graph.ep)
        ]

    def _find_gatherings(
        self, stride: int, shard: int, zero: int, together: int
    ) -> list[dict[str, Any]]:
        """`reshard_ranks` and `blocks_per_group`; a trainer that keeps copies has neither.

        Neighbours on dp_shard are so many devices apart.
        """
        ranks, blocks = [0], [1]
        cp = self._problem.graph.cp
        plain = not self._problem.trainer.keeps_compute_copy and not self._shares
        if shard * cp > 1 and plain:
            near = self._near(stride, shard) if self._refines and cp == 1 else 0
            ranks.append(self._fix.get("reshard_ranks") or near)
            some = BLOCKS_PER_GROUP if self._refines else (1,)
            blocks = [number for number in some if number <= max(1, together)]
            blocks = [self._fix.get("blocks_per_group", number) for number in blocks]
        return [
            {"reshard_ranks": near, "blocks_per_group": number}
            for near in dict.fromkeys(ranks)
            for number in dict.fromkeys(blocks)
            if self._pinned("reshard_ranks", near)
            and self._pinned("blocks_per_group", number)
            and not refusal(
                Candidate(
                    dp_shard=shard,
                    zero=zero,
                    reshard_ranks=near,
                    blocks_per_group=number,
                    **self._divided,
                )
            )
        ]

    def _near(self, stride: int, shard: int) -> int:
        """The most of dp_shard's neighbours that always lie within a node, fewer than all."""
        per_node = self._problem.devices_per_node
        return max(
            (ranks for ranks in divisors(shard)[:-1] if per_node % (ranks * stride) == 0),
            default=1,
        )

    def _find_ways(
        self,
        pipelined: bool,
        divided: bool,
        sharded: bool,
        replicated: bool,
        several: bool,
        schedule: str,
    ) -> list[Way]:
        """What is offered of a composition; it depends on which axes act, not on how far."""
        stages = SCHEDULES[schedule].fewest_stages
        experts: dict[str, Any] = {"ep": 2, "etp": 1 + divided} if self._shares else {}
        axes = Candidate(
            pp=1 + pipelined,
            tp=1 + divided,
            dp_shard=1 + sharded,
            dp_replicate=1 + replicated,
            stages_per_rank=stages,
            **experts,
            **self._divided,
        )
        is_plain = schedule == "1F1B" and pipelined and several
        schedules = ("1F1B", "GPipe") if is_plain else (schedule,)
        return [
            (name, zero, offload)
            for name in schedules
            if self._pinned("schedule", name)
            for zero in self._zero_choices(
                pipelined, sharded or self._problem.graph.cp > 1, several
            )
            for offload in self._offload_choices()
            if not refusal(replace(axes, schedule=name, zero=zero, offload=offload))
        ]

    def _zero_choices(self, pipelined: bool, sharded: bool, several: bool) -> list[int]:
        """What dp_shard may shard: zero=1 differs from 2 only where microbatches add up."""
        if not sharded:
            return [Candidate().zero]
        if pipelined:
            choices = [3, 1]
        else:
            choices = [3, 2, 1] if several else [3, 2]
        return [zero for zero in choices if self._pinned("zero", zero)]

    def _offload_choices(self) -> list[str]:
        """On CPUs the host's memory is the device's: nothing to gain, but it may be pinned."""
        pinned = self._fix.get("offload")
        if pinned is not None:
            return [pinned]
        return [Candidate().offload] if self._problem.device.kind == "cpu" else list(OFFLOAD)

    @property
    def _shares(self) -> bool:
        """Whether ranks share experts."""
        return self._problem.graph.ep > 1

    @property
    def _divided(self) -> dict[str, Any]:
        """The knobs that say how ranks share sequences."""
        graph = self._problem.graph
        return {"cp": graph.cp, "cp_comm_type": graph.cp_comm_type}

    def _pinned(self, knob: str, value: Any) -> bool:
        return knob not in self._fix or self._fix[knob] == value


def most_together(blocks: int) -> int:
    """The most blocks offered to be gathered together where a stage has so many."""
    return max((number for number in BLOCKS_PER_GROUP if number <= blocks), default=1)
