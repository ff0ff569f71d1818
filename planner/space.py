"""Every way of splitting the training that may be offered, in groups that share a computation.

A `Group` fixes devices, pp, tp, dp, microbatch, recompute and sequence parallelism; its members
differ in how data parallelism is done and in the schedule. The search bounds whole groups and
opens only those that may hold the best, so groups are rows of a table and their members are only
counted until then. Knobs that cannot act are at one value (no schedule to choose without a
pipeline, nothing for `zero` to shard), so every candidate counted is distinct.

Any number of devices may be used that pp, tp and dp multiply to, whole nodes or not; only a
tensor-parallel group spans no more nodes than it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.group_table import (
    SCHEDULE_NAMES,
    Group,
    GroupTable,
    Int,
    product_of,
    table_of,
)
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import INTERLEAVED, SCHEDULES, schedule_refusal
from claw_plan.planner.supported import OFFLOAD, RECOMPUTE, can_grow_from, knob_refusal, refusal
from claw_plan.profiles.cluster import Cluster

MOST_MICROBATCHES = 4096
"""A step of more is not offered: it is simulated task by task, and nobody accumulates so many."""

CANNOT_ACT = (
    "a schedule is chosen only where pp is above 1, and with one microbatch only one that splits "
    "backwards, which is offered together with recompute only where it is pinned, "
    "sequence_parallel only where tp is above 1 and divides the sequence, tp only where its "
    "groups span no more nodes than they must, and a step has at most "
    f"{MOST_MICROBATCHES} microbatches"
)

Way = tuple[str, int, str]
"""schedule, zero and offload: how members of a group differ beside dp_shard."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class Space:
    """The candidates of a problem that agree with the pinned knobs `fix`."""

    def __init__(self, problem: Problem, fix: Mapping[str, Any]) -> None:
        self._problem, self._fix = problem, dict(fix)
        self._check_fix()
        self._count = cache(self._count_members)
        self._ways = cache(self._find_ways)

    def _check_fix(self) -> None:
        """Pinned values that no candidate can have are refused with the values that can."""
        problem = self._problem
        graph, pinned = problem.graph, pinned_candidate(self._fix)
        check_pinned(self._fix, problem.cluster)
        if pinned.tp > 1 and graph.tp_divides % pinned.tp:
            valid = ", ".join(map(str, self.tp_degrees()))
            why = f"the model's heads divide by {valid} only; pin one of these"
            if graph.no_tensor_parallel:
                why = f"no tensor parallelism in this model: {graph.no_tensor_parallel}; pin tp=1"
            raise PlanError(f"--fix tp={pinned.tp}: {why} (dp_shard divides every model)")
        if pinned.pp * pinned.stages_per_rank > (most := self.most_stages()):
            refused = next(iter(graph.cut_refused.values()), "")
            each = f",stages_per_rank={pinned.stages_per_rank}" * (pinned.stages_per_rank > 1)
            why = f"the model's {len(graph.blocks)} blocks make at most {most} stages"
            why += f" ({refused})" * bool(refused)
            if most == 1:
                why = f"no pipeline of this model: {refused or 'one block'}; pin pp=1"
            raise PlanError(f"--fix pp={pinned.pp}{each}: {why} (dp_shard divides every model)")

    def tp_degrees(self) -> list[int]:
        """Degrees that divide every head count of the model."""
        graph = self._problem.graph
        return [1] if graph.no_tensor_parallel else divisors(graph.tp_divides)

    def most_stages(self) -> int:
        """Pipeline stages the chain can be cut into: one more than there are legal cuts."""
        graph = self._problem.graph
        return 1 + sum(unit not in graph.cut_refused for unit in range(2, len(graph.blocks) + 1))

    def groups(self) -> Iterator[Group]:
        """All groups, one by one."""
        return (self.group(row) for row in range(len(self.table)))

    def group(self, row: int) -> Group:
        """The group of a row of the table."""
        return self.table.group(row, self._fix.get("bucket_bytes", Candidate().bucket_bytes))

    @cached_property
    def table(self) -> GroupTable:
        """All groups."""
        shares, pieces = self._shares(), []
        for pp in range(1, min(self.most_stages(), self._problem.cluster.num_devices) + 1):
            if self._pinned("pp", pp):
                runs = self._runs(pp, shares)
                pieces += [self._rows(pp, tp, runs[tp > 1]) for tp in self._offered_tp()]
        return table_of([piece for piece in pieces if piece.shape[1]])

    def _shares(self) -> list[tuple[int, int, int]]:
        """(dp, microbatch size, microbatches), every way of sharing out the batch."""
        batch = self._problem.training.global_batch
        return [
            (dp, size, batch // (dp * size))
            for dp in divisors(batch)
            if dp <= self._problem.cluster.num_devices
            for size in divisors(batch // dp)
            if batch // (dp * size) <= MOST_MICROBATCHES and self._pinned("microbatch_size", size)
        ]

    def _runs(self, pp: int, shares: list[tuple[int, int, int]]) -> list[Int]:
        """Columns dp to size of GroupTable, without tensor parallelism and with it."""
        layouts = {count: self._layouts(pp, count) for count in {share[2] for share in shares}}
        rows = [
            (*share, schedule, stages)
            for share in shares
            for schedule, stages in layouts[share[2]]
        ]
        found = []
        for divided in (False, True):
            sized = [
                (
                    dp, size, count, SCHEDULE_NAMES.index(schedule), stages,
                    self._count(pp > 1, divided, dp, min(count, 2), schedule),
                )
                for dp, size, count, schedule, stages in rows
            ]  # fmt: skip
            columns = np.array(sized, dtype=np.int64).reshape(-1, 6).T
            found.append(columns[:, columns[-1] > 0])
        return found

    def _offered_tp(self) -> list[int]:
        return [tp for tp in self.tp_degrees() if self._pinned("tp", tp)]

    def _rows(self, pp: int, tp: int, runs: Int) -> Int:
        """The rows of one pp and tp, columns as in GroupTable."""
        most = self._problem.cluster.num_devices
        if not self._lies_close(tp):
            most = min(most, self._problem.devices_per_node)
        runs = runs[:, pp * tp * runs[0] <= most]
        recompute = [
            index for index, mode in enumerate(RECOMPUTE) if self._pinned("recompute", mode)
        ]
        choices = list(product(recompute, self._sequence_choices(tp)))
        degrees = np.array([[pp], [tp]], dtype=np.int64)
        dials = np.array(choices, dtype=np.int64).reshape(-1, 2).T
        rows = product_of(degrees, runs, dials)
        if "schedule" not in self._fix:
            splits = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])
            rows = rows[:, ~splits[rows[5]] | (rows[8] == RECOMPUTE.index("none"))]
        return rows

    def _lies_close(self, tp: int) -> bool:
        """Whether no tensor-parallel group of a large cluster spans more nodes than it must."""
        per_node = self._problem.devices_per_node
        wide = Candidate(tp=tp, dp_replicate=per_node)
        return "tp" in self._fix or group_nodes(wide, "tp", per_node) == -(-tp // per_node)

    def _layouts(self, pp: int, microbatches: int) -> list[tuple[str, int]]:
        """Schedules with the stages a rank holds; one for those that are bound alike."""
        if pp == 1:  # every schedule is the same
            return [("1F1B", 1)] if self._pinned("stages_per_rank", 1) else []
        found = []
        for name, schedule in SCHEDULES.items():
            is_same = microbatches == 1 and not schedule.splits_backward and name != "1F1B"
            if name == "GPipe" or is_same:
                continue
            most = min(self.most_stages() // pp, schedule.most_stages or self.most_stages())
            for stages in range(schedule.fewest_stages, most + 1):
                # Of many stages a rank only equal ones are worth their messages; others by --fix.
                uneven = stages > 2 and len(self._problem.graph.blocks) % (pp * stages)
                if uneven and "stages_per_rank" not in self._fix:
                    continue
                if self._pinned("stages_per_rank", stages) and not schedule_refusal(
                    name, pp, microbatches, stages
                ):
                    found.append((name, stages))
        return found

    def _sequence_choices(self, tp: int) -> list[bool]:
        graph, choices = self._problem.graph, [False]
        if tp > 1 and not graph.no_sequence_parallel and (graph.seq_len or 1) % tp == 0:
            choices.append(True)
        return [value for value in choices if self._pinned("sequence_parallel", value)]

    def _shards(self, dp: int) -> list[int]:
        """What dp_shard may be."""
        return [
            shard
            for shard in divisors(dp)
            if self._pinned("dp_shard", shard) and self._pinned("dp_replicate", dp // shard)
        ]

    def _count_members(
        self, pipelined: bool, divided: bool, dp: int, microbatches: int, schedule: str
    ) -> int:
        return sum(
            len(self._ways(pipelined, divided, shard > 1, shard < dp, microbatches > 1, schedule))
            for shard in self._shards(dp)
        )

    def members(self, group: Group) -> list[Candidate]:
        """The candidates of a group, in order."""
        base, several = group.base, group.microbatches > 1
        return [
            replace(
                base,
                dp_shard=shard,
                dp_replicate=base.dp // shard,
                schedule=schedule,
                zero=zero,
                offload=offload,
            )
            for shard in self._shards(base.dp)
            for schedule, zero, offload in self._ways(
                base.pp > 1, base.tp > 1, shard > 1, shard < base.dp, several, base.schedule
            )
        ]

    def count(self, rows: Sequence[int], uses: Callable[[Candidate], bool]) -> int:
        """How many candidates of these groups are `uses`, which asks which axes act."""
        alike: dict[tuple[object, ...], int] = {}
        total = 0
        for row in rows:
            group = self.group(row)
            base = group.base
            key = (
                base.pp > 1, base.tp > 1, base.dp, group.microbatches > 1, base.schedule,
                base.recompute,
            )  # fmt: skip
            if key not in alike:
                alike[key] = sum(uses(candidate) for candidate in self.members(group))
            total += alike[key]
        return total

    def knob_sizes(self) -> dict[str, int]:
        """Distinct values of each knob in the space."""
        table = self.table
        sizes = {
            knob: len(np.unique(getattr(table, knob)))
            for knob in (
                "pp", "tp", "microbatch_size", "recompute", "sequence_parallel", "stages_per_rank",
            )
        }  # fmt: skip
        sizes["devices"] = len(np.unique(table.num_devices))
        values: dict[str, set[object]] = {}
        for row in self._unlike_rows():
            for candidate in self.members(self.group(row)):
                for knob in ("dp_replicate", "dp_shard", "zero", "schedule", "offload"):
                    values.setdefault(knob, set()).add(getattr(candidate, knob))
        sizes |= {knob: len(distinct) for knob, distinct in values.items()}
        return dict(sorted(sizes.items()))

    def _unlike_rows(self) -> list[int]:
        """One group of each set of members."""
        table = self.table
        code = np.zeros(len(table), np.int64)
        several = table.microbatches > 1
        for column in (table.pp > 1, table.tp > 1, table.dp, several, table.schedule):
            code = code * (int(column.max(initial=0)) + 1) + column
        rows: list[int] = np.unique(code, return_index=True)[1].tolist()
        return rows

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

    def explain_empty(self) -> str:
        """Why there is no candidate at all: nearly always a batch that nothing divides."""
        batch = self._problem.training.global_batch
        pinned = ",".join(f"{knob}={value}" for knob, value in self._fix.items())
        why = batch_refusal(self._fix, batch) or self._schedule_refusal(batch)
        return why or (
            f"no candidate agrees with --fix {pinned} on "
            f"{self._problem.cluster.num_devices} devices with a "
            f"global batch of {batch}: {CANNOT_ACT}"
        )

    def _schedule_refusal(self, batch: int) -> str:
        """Why the pinned schedule cannot run the pinned microbatches; or ''."""
        pinned = pinned_candidate(self._fix)
        if not {"schedule", "pp", "microbatch_size"} <= self._fix.keys():
            return ""
        return schedule_refusal(
            pinned.schedule, pinned.pp, pinned.num_microbatches(batch), pinned.stages_per_rank
        )


def pinned_candidate(fix: Mapping[str, Any]) -> Candidate:
    """The pinned knobs, with a schedule that has the stages or stages that the schedule has."""
    chosen = dict(fix)
    if "stages_per_rank" not in fix and fix.get("schedule") in SCHEDULES:
        chosen["stages_per_rank"] = SCHEDULES[fix["schedule"]].fewest_stages
    elif fix.get("stages_per_rank", 1) > 1:
        chosen.setdefault("schedule", INTERLEAVED)
    return Candidate(**chosen)


def check_pinned(fix: Mapping[str, Any], cluster: Cluster) -> None:
    """Refuses pinned knobs that no model could have on the cluster, before one is traced."""
    pinned = pinned_candidate(fix)
    why = knob_refusal(pinned)
    if not why and not can_grow_from(pinned):
        why = refusal(pinned)
    if why:
        raise PlanError(f"--fix {why}")
    if pinned.sequence_parallel and fix.get("tp") == 1:
        raise PlanError("--fix sequence_parallel=true acts with tp above 1 only; pin tp=2 or more")
    if pinned.num_devices > cluster.num_devices:
        raise PlanError(
            f"--fix asks for {pinned.num_devices} devices (pp x dp x tp); "
            f"the cluster {cluster.name!r} has {cluster.num_devices}"
        )


def batch_refusal(fix: Mapping[str, Any], batch: int) -> str:
    """Why the pinned knobs cannot share out the batch, with the nearest that they can; or ''."""
    pinned = Candidate(**fix)
    unit = pinned.dp * fix.get("microbatch_size", 1)
    if batch % unit == 0:
        return ""
    below, above = batch // unit * unit, -(-batch // unit) * unit
    near = f"{below} or {above}" if below else f"{above}"
    return (
        f"a global batch of {batch} is not a multiple of dp={pinned.dp} x "
        f"microbatch_size={fix.get('microbatch_size', 1)} = {unit}; nearest: {near}"
    )
