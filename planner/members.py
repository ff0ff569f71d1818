"""How the candidates of a group differ: in how data parallelism is done, and plain schedules.

A `Group` fixes what each rank computes. Its members differ in how dp is divided into replicas and
shards, what is sharded, how parameters are gathered, where the optimizer runs. They are counted
without being made; the search makes them when it opens the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.group_table import Group
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import SCHEDULES
from claw_plan.planner.supported import OFFLOAD, refusal

BLOCKS_PER_GROUP = (1, 2, 4)
"""Blocks that are gathered together; more of them are offered by --fix."""

FINER = ("recompute_blocks", "reshard_ranks", "blocks_per_group")
"""Knobs that are offered where there are not too many groups, or one is pinned."""

MEMBER_KNOBS = (
    "dp_replicate", "dp_shard", "zero", "schedule", "offload", "reshard_ranks", "blocks_per_group",
)  # fmt: skip
"""By which the candidates of a group differ."""

Way = tuple[str, int, str]
"""schedule, zero and offload: how members of a group differ beside dp_shard."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class Members:
    """The members of a problem's groups that agree with the pinned knobs `fix`.

    Without `refines` those of `FINER` are at their plain values unless pinned.
    """

    def __init__(self, problem: Problem, fix: Mapping[str, Any], *, refines: bool = True) -> None:
        self._problem, self._fix, self._refines = problem, fix, refines
        self._ways = cache(self._find_ways)
        self._gatherings = cache(self._find_gatherings)
        self.count = cache(self._count)

    def blocks_of_a_stage(self, stages: int) -> int:
        """Of the largest, if they are as equal as can be."""
        return -(-len(self._problem.graph.blocks) // stages)

    def of(self, group: Group) -> list[Candidate]:
        """The candidates of a group, in order."""
        base, several = group.base, group.microbatches > 1
        most = self.blocks_of_a_stage(base.pp * base.stages_per_rank)
        return [
            replace(
                base,
                dp_shard=shard,
                dp_replicate=base.dp // shard,
                schedule=schedule,
                zero=zero,
                offload=offload,
                reshard_ranks=ranks,
                blocks_per_group=blocks,
            )
            for shard in self._shards(base.dp)
            for schedule, zero, offload in self._ways(
                base.pp > 1, base.tp > 1, shard > 1, shard < base.dp, several, base.schedule
            )
            for ranks, blocks in self._gatherings(base.tp, shard, zero, most_together(most))
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

    def _count(
        self, pipelined: bool, tp: int, dp: int, microbatches: int, schedule: str, together: int
    ) -> int:
        """How many a group has whose stages have up to so many blocks to gather together."""
        return sum(
            len(self._gatherings(tp, shard, zero, together))
            for shard in self._shards(dp)
            for _, zero, _ in self._ways(
                pipelined, tp > 1, shard > 1, shard < dp, microbatches > 1, schedule
            )
        )

    def _shards(self, dp: int) -> list[int]:
        """What dp_shard may be."""
        return [
            shard
            for shard in divisors(dp)
            if self._pinned("dp_shard", shard) and self._pinned("dp_replicate", dp // shard)
        ]

    def _find_gatherings(
        self, tp: int, shard: int, zero: int, together: int
    ) -> list[tuple[int, int]]:
        """`reshard_ranks` and `blocks_per_group`; a trainer that keeps copies has neither."""
        ranks, blocks = [0], [1]
        if shard > 1 and not self._problem.trainer.keeps_compute_copy:
            near = self._near(tp, shard) if self._refines else 0
            ranks.append(self._fix.get("reshard_ranks") or near)
            some = BLOCKS_PER_GROUP if self._refines else (1,)
            blocks = [number for number in some if number <= max(1, together)]
            blocks = [self._fix.get("blocks_per_group", number) for number in blocks]
        return [
            (near, number)
            for near in dict.fromkeys(ranks)
            for number in dict.fromkeys(blocks)
            if self._pinned("reshard_ranks", near)
            and self._pinned("blocks_per_group", number)
            and not refusal(
                Candidate(dp_shard=shard, zero=zero, reshard_ranks=near, blocks_per_group=number)
            )
        ]

    def _near(self, tp: int, shard: int) -> int:
        """The most of dp_shard's neighbours that always lie within a node, fewer than all."""
        per_node = self._problem.devices_per_node
        return max(
            (ranks for ranks in divisors(shard)[:-1] if per_node % (ranks * tp) == 0), default=1
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
        axes = Candidate(
            pp=1 + pipelined,
            tp=1 + divided,
            dp_shard=1 + sharded,
            dp_replicate=1 + replicated,
            stages_per_rank=stages,
        )
        is_plain = schedule == "1F1B" and pipelined and several
        schedules = ("1F1B", "GPipe") if is_plain else (schedule,)
        return [
            (name, zero, offload)
            for name in schedules
            if self._pinned("schedule", name)
            for zero in self._zero_choices(pipelined, sharded, several)
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

    def _pinned(self, knob: str, value: Any) -> bool:
        return knob not in self._fix or self._fix[knob] == value


def most_together(blocks: int) -> int:
    """The most blocks offered to be gathered together where a stage has so many."""
    return max((number for number in BLOCKS_PER_GROUP if number <= blocks), default=1)
