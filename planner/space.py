"""Every way of splitting the training that may be offered, in groups that share a computation.

A `Group` fixes devices, pp, tp, dp, microbatch, recompute and sequence parallelism; its members
differ in how data parallelism is done and in the schedule. The search bounds whole groups and
opens only those that may hold the best, so groups are rows of a table and their members are only
counted until then. Knobs that cannot act are at one value (no schedule to choose without a
pipeline, nothing for `zero` to shard), so every candidate counted is distinct.

Any number of devices may be used that pp, tp and dp multiply to, whole nodes or not. In a large
space a tensor-parallel group spans no more nodes than it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.group_table import (
    SCHEDULE_NAMES,
    SOME,
    Group,
    GroupTable,
    Int,
    numbered,
    product_of,
    table_of,
)
from claw_plan.planner.members import (
    FINER,
    MEMBER_KNOBS,
    Degrees,
    Members,
    divisors,
    most_together,
)
from claw_plan.planner.pinned import (
    MOST_MICROBATCHES,
    check_pinned,
    pinned_candidate,
    pinned_for,
    why_none,
)
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import SCHEDULES, schedule_refusal
from claw_plan.planner.supported import RECOMPUTE

MOST_REFINED = 50_000
"""Groups of which the knobs of `members.FINER` are offered too. With more they took minutes for
GPT-3 175B on 1,024 devices, whose 340,000 groups take seconds without."""


class Space:
    """The candidates of a problem that agree with the pinned knobs `fix`.

    Of codecs, which change what is trained, only those named are offered.
    """

    def __init__(
        self, problem: Problem, fix: Mapping[str, Any], codecs: Sequence[str] = ()
    ) -> None:
        self._problem, self.codecs = problem, tuple(codecs)
        self._fix = pinned_for(problem.training.optimizer, fix)
        self._check_fix()

    def _check_fix(self) -> None:
        """Pinned values that no candidate can have are refused with the values that can."""
        problem = self._problem
        graph, pinned = problem.graph, pinned_candidate(self._fix)
        check_pinned(self._fix, problem.cluster)
        if not graph.takes_tp(pinned.tp):
            valid = ", ".join(map(str, divisors(graph.tp_divides)))
            why = f"the model's heads divide by {valid} only; pin one of these"
            if graph.partial:
                some = ", ".join(map(str, sorted(graph.partial)))
                why += f", or tp={some}, which divides some of each block"
            if graph.no_tensor_parallel:
                why = f"no tensor parallelism in this model: {graph.no_tensor_parallel}; pin tp=1"
            raise PlanError(f"--fix tp={pinned.tp}: {why} (dp_shard divides every model)")
        if pinned.pp * pinned.stages_per_rank > (most := self.most_stages):
            refused = next(iter(graph.cut_refused.values()), "")
            each = f",stages_per_rank={pinned.stages_per_rank}" * (pinned.stages_per_rank > 1)
            why = f"the model's {len(graph.blocks)} blocks make at most {most} stages"
            why += f" ({refused})" * bool(refused)
            if most == 1:
                why = f"no pipeline of this model: {refused or 'one block'}; pin pp=1"
            raise PlanError(f"--fix pp={pinned.pp}{each}: {why} (dp_shard divides every model)")

    @property
    def has_codecs(self) -> bool:
        """Whether some candidate may encode gradients."""
        return bool(self.codecs) or self._fix.get("codec", "none") != "none"

    def tp_degrees(self) -> list[int]:
        """Degrees that divide every head count of the model, or at least what pays most."""
        graph = self._problem.graph
        if graph.no_tensor_parallel:
            return [1]
        return sorted({*divisors(graph.tp_divides), *graph.partial})

    @cached_property
    def most_stages(self) -> int:
        """Pipeline stages the chain can be cut into: one more than there are legal cuts."""
        graph = self._problem.graph
        return 1 + sum(unit not in graph.cut_refused for unit in range(2, len(graph.blocks) + 1))

    def groups(self) -> Iterator[Group]:
        """All groups, one by one."""
        return (
            self.group(row, blocks)
            for row in range(len(self.table))
            for blocks in self.blocks_run_again(row)
        )

    def group(self, row: int, blocks: int | None = None) -> Group:
        """The group of a row of the table; of several the one with so many blocks run again.

        Without `blocks` the first, which runs least.
        """
        choices = self.blocks_run_again(row)
        found = self.table.group(
            row,
            self._fix.get("bucket_bytes", Candidate().bucket_bytes),
            self._members.orders[int(self.table.order[row])],
            choices[0] if blocks is None else blocks,
            int(self.table.size[row]) // len(choices),
        )
        return self._sharing_experts(found)

    def _sharing_experts(self, group: Group) -> Group:
        """The group of candidates whose experts as many ranks share as in the problem's graph."""
        ep, base = self._problem.graph.ep, group.base
        return group if ep == 1 else replace(group, base=replace(base, ep=ep, etp=base.tp))

    def blocks_run_again(self, row: int) -> Sequence[int]:
        """The values of `recompute_blocks` of a row."""
        blocks = int(self.table.recompute_blocks[row])
        if blocks != SOME:
            return (blocks,)
        stages = int(self.table.pp[row] * self.table.stages_per_rank[row])
        return range(1, self._members.blocks_of_a_stage(stages))

    @cached_property
    def table(self) -> GroupTable:
        """All groups."""
        return self._lay_out(self._members, refines=True) if self.is_refined else self._coarse

    @cached_property
    def is_refined(self) -> bool:
        """Whether the knobs of `members.FINER` are offered unpinned too."""
        return len(self._coarse) <= MOST_REFINED

    @cached_property
    def _coarse(self) -> GroupTable:
        return self._lay_out(self._made_members(refines=False), refines=False)

    @cached_property
    def _members(self) -> Members:
        return self._made_members(refines=self.is_refined)

    def _made_members(self, *, refines: bool) -> Members:
        return Members(self._problem, self._fix, refines=refines, codecs=self.codecs)

    def _lay_out(self, members: Members, *, refines: bool) -> GroupTable:
        shares, pieces = self._shares(), []
        for pp in range(1, min(self.most_stages, self._problem.cluster.num_devices) + 1):
            if self._pinned("pp", pp):
                runs = self._runs(pp, shares)
                for tp in self._offered_tp():
                    pieces.append(self._rows(pp, tp, runs, members, refines=refines))
        graph = self._problem.graph
        pieces = [piece for piece in pieces if piece.shape[1]]
        return table_of(pieces, graph.cp, graph.cp_comm_type)

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

    def _runs(self, pp: int, shares: list[tuple[int, int, int]]) -> Int:
        """Columns dp to stages_per_rank of GroupTable."""
        layouts = {count: self._layouts(pp, count) for count in {share[2] for share in shares}}
        rows = [
            (*share, SCHEDULE_NAMES.index(schedule), stages)
            for share in shares
            for schedule, stages in layouts[share[2]]
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 5).T

    def _sizes(self, pp: int, tp: int, runs: Int, members: Members) -> Int:
        """The number of members of each of the rows, before recompute is chosen."""
        several = np.minimum(runs[2], 2)
        keys = (runs[0], several, runs[3], runs[4], runs[6])
        first, which = numbered(*keys)
        sizes = []
        for dp, count, schedule, stages, nodes in np.stack(keys)[:, first].T.tolist():
            most = most_together(members.blocks_of_a_stage(pp * stages))
            name = SCHEDULE_NAMES[schedule]
            sizes.append(members.count(Degrees(pp, tp, dp, nodes), count, name, most))
        return np.array(sizes, dtype=np.int64)[which]

    def _offered_tp(self) -> list[int]:
        return [tp for tp in self.tp_degrees() if self._pinned("tp", tp)]

    def _rows(self, pp: int, tp: int, runs: Int, members: Members, *, refines: bool) -> Int:
        """The rows of one pp and tp, columns as in GroupTable."""
        most = self._problem.cluster.num_devices
        if not refines and not self._lies_close(tp):
            most = min(most, self._problem.devices_per_node)
        ranks = pp * tp * self._problem.graph.cp
        runs = self._in_orders(pp, tp, runs[:, ranks * runs[0] <= most], members)
        runs = np.concatenate([runs, self._sizes(pp, tp, runs, members)[None]])
        choices = [
            (*again, sequence)
            for again, sequence in product(
                self._recompute_choices(refines), self._sequence_choices(tp)
            )
        ]
        degrees = np.array([[pp], [tp]], dtype=np.int64)
        dials = np.array(choices, dtype=np.int64).reshape(-1, 3).T
        rows = product_of(degrees, runs, dials)
        size, again = rows[9], rows[11]
        short_of_all = -(-len(self._problem.graph.blocks) // (pp * rows[6])) - 1
        size *= np.where(again == SOME, short_of_all, 1)
        rows = rows[:, size > 0]
        if "schedule" not in self._fix:
            splits = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])
            rows = rows[:, ~splits[rows[5]] | (rows[10] == RECOMPUTE.index("none"))]
        return rows

    def _in_orders(self, pp: int, tp: int, runs: Int, members: Members) -> Int:
        """Each run once for every number of nodes that tensor-parallel groups may span."""
        distinct, which = np.unique(runs[0], return_inverse=True)
        spans = [members.spans(pp, tp, dp) for dp in distinct.tolist()]
        pieces = [np.zeros((7, 0), np.int64)]
        for order in range(len(members.orders)):
            nodes = np.array([span.get(order, 0) for span in spans], dtype=np.int64)[which]
            columns = np.stack([np.full(len(nodes), order, np.int64), nodes])
            pieces.append(np.concatenate([runs, columns])[:, nodes > 0])
        return np.concatenate(pieces, axis=1)

    def _recompute_choices(self, refines: bool) -> list[tuple[int, int]]:
        """Which part of a block runs again, by its place in RECOMPUTE, and of how many blocks."""
        pinned = self._fix.get("recompute_blocks")
        numbers = ((0, SOME) if refines else (0,)) if pinned is None else (pinned,)
        return [
            (index, number)
            for index, mode in enumerate(RECOMPUTE)
            if self._pinned("recompute", mode)
            for number in numbers
            if number == 0 or mode != "none"
        ]

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
            most = min(self.most_stages // pp, schedule.most_stages or self.most_stages)
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
        is_whole = tp > 1 and tp not in graph.partial
        if is_whole and not graph.no_sequence_parallel and (graph.seq_len or 1) % tp == 0:
            choices.append(True)
        return [value for value in choices if self._pinned("sequence_parallel", value)]

    def members(self, group: Group) -> list[Candidate]:
        """The candidates of a group, in order."""
        return self._members.of(group)

    def schedules(self, group: Group) -> list[str]:
        """The schedules of a group's candidates."""
        return self._members.schedules(group)

    def left_out(self) -> str:
        """Which knobs are offered only pinned, and why; or ''."""
        if self.is_refined:
            return ""
        straddling = [str(tp) for tp in self._offered_tp() if not self._lies_close(tp)]
        within = f", and tp={', '.join(straddling)}, whose groups straddle nodes, within one only"
        return (
            f"{', '.join(FINER)}: not searched{within * bool(straddling)}, since "
            f"{len(self.table):,} groups are more than {MOST_REFINED:,}; pin some with --fix"
        )

    def count(self, rows: Sequence[int], uses: Callable[[Candidate], bool]) -> int:
        """How many candidates of these groups are `uses`, which asks which axes act.

        A row of several groups counts as one, as often as it is given.
        """
        alike: dict[tuple[object, ...], int] = {}
        total = 0
        for row in rows:
            group = self.group(row)
            base = group.base
            key = (
                base.pp, base.tp, base.dp, group.microbatches > 1, base.schedule,
                base.stages_per_rank, base.recompute, base.mesh_order,
            )  # fmt: skip
            if key not in alike:
                alike[key] = sum(uses(candidate) for candidate in self.members(group))
            total += alike[key]
        return total

    def knob_sizes(self) -> dict[str, int]:
        """Distinct values of each knob in the space."""
        table = self.table
        sizes = {
            knob: _distinct(getattr(table, knob))
            for knob in (
                "pp", "tp", "microbatch_size", "recompute", "sequence_parallel", "stages_per_rank",
            )
        }  # fmt: skip
        sizes["devices"] = _distinct(table.num_devices)
        sizes["recompute_blocks"] = len(self._run_again())
        values: dict[str, set[object]] = {}
        for row in self._unlike_rows():
            for candidate in self.members(self.group(row)):
                for knob in MEMBER_KNOBS:
                    values.setdefault(knob, set()).add(getattr(candidate, knob))
        sizes |= {knob: len(distinct) for knob, distinct in values.items()}
        return dict(sorted(sizes.items()))

    def _run_again(self) -> set[int]:
        """The values of `recompute_blocks` in the space."""
        table = self.table
        columns = (table.recompute_blocks, table.pp * table.stages_per_rank)
        return {n for row in numbered(*columns)[0].tolist() for n in self.blocks_run_again(row)}

    def _unlike_rows(self) -> list[int]:
        """One group of each set of members."""
        table = self.table
        pp = table.pp if len(self._members.orders) > 1 else table.pp > 1
        columns = (pp, table.tp, table.dp, table.microbatches > 1, table.schedule, table.order)
        rows: list[int] = numbered(*columns)[0].tolist()
        return rows

    def _pinned(self, knob: str, value: Any) -> bool:
        return knob not in self._fix or self._fix[knob] == value

    def explain_empty(self) -> str:
        """Why there is no candidate at all."""
        return why_none(self._fix, self._problem.training.global_batch, self._problem.cluster)


def _distinct(column: Int) -> int:
    """How many values of no great size there are, without a sort."""
    return int(np.count_nonzero(np.bincount(column)))
