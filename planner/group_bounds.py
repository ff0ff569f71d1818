"""Bounds on all groups of a space: times by table look-up, then cuts and memory for the promising.

The crudest bound of a group, its work divided as evenly as no cut can, needs one figure for each
microbatch, tensor-parallel degree and recompute. The next needs the cut of its chain, and with it
comes a floor of its memory: what every member holds, however its data parallelism is done. A
group above that floor is pruned whole.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.cut_bound import bound_any_cut, cuts_below
from claw_plan.planner.graph import Parameter
from claw_plan.planner.group_table import SCHEDULE_NAMES, SOME, Int, numbered
from claw_plan.planner.memory_states import CONTEXT_BYTES
from claw_plan.planner.pipeline_bound import CUT, WORK, Chain, Pipelines, bound_pipelines
from claw_plan.planner.problem import STORED_BYTES
from claw_plan.planner.schedules import SCHEDULES, least_in_flight
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import local_numel, shard_numel
from claw_plan.planner.space import Space
from claw_plan.planner.stage_path import Cuts
from claw_plan.planner.supported import RECOMPUTE

RUN = 512
"""Groups cut together: few enough to leave the rest alone, enough for one compiled call."""


class GroupBounds:
    """Bounds of the groups of one space, rows as in its table."""

    def __init__(self, scorer: Scorer, space: Space) -> None:
        self._scorer, self._space = scorer, space
        self._problem, self._table = scorer.problem, space.table
        table = self._table
        splits = np.array([SCHEDULES[name].splits_backward for name in SCHEDULE_NAMES])
        self._splits = splits[table.schedule]
        self._places_v = np.array([SCHEDULES[name].places_v for name in SCHEDULE_NAMES])
        self._is_recomputed = table.recompute != RECOMPUTE.index("none")
        self._times_rows, self._times = numbered(
            table.tp, table.sequence_parallel, table.microbatch_size, table.recompute,
            (self._splits & ~self._is_recomputed).astype(np.int64), table.tp_nodes,
        )  # fmt: skip
        self._held_rows, self._held = numbered(
            table.tp, table.sequence_parallel, table.microbatch_size, table.recompute
        )
        self._stored_rows, self._stored = numbered(table.tp, table.dp)
        self._whole_rows, self._whole = numbered(table.tp)

    @cached_property
    def even_ns(self) -> Int:
        """The crudest bound of every group, as `Bounds.even_ns`."""
        if not len(self._table):
            return np.zeros(0, np.int64)
        whole = self._table.recompute_blocks == 0
        ends = self._chain.times_ns[self._times, :, -1]
        total = np.where(whole, ends[:, CUT], ends[:, WORK])
        work = self._table.microbatches * -(-total // self._table.pp)
        return np.where(self._splits, work, np.maximum(total, work))

    def cut(self, rows: Int, blocks: Int | None = None) -> tuple[Int, NDArray[np.bool_]]:
        """The path bound of the best cut of each row, and whether memory does not rule it out.

        `blocks` are how many run again in each; without it a row of several groups gets the time
        of the least and the memory of the most.
        """
        longest, may_fit = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        bound_pipelines(self._chain, self._pipelines(rows, blocks), longest, may_fit)
        return longest, may_fit > 0

    def any_cut(self, rows: Int, blocks: Int, limits_ns: Int) -> Int:
        """A bound of the path of any cut of each group, sought up to its limit."""
        least = self.even_ns[rows].copy()
        if len(rows):
            bound_any_cut(self._chain, self._pipelines(rows, blocks), limits_ns, least)
        return least

    def cuts_below(
        self, row: int, blocks: int, limit_ns: int, most_cuts: int, most_steps: int
    ) -> tuple[list[tuple[int, Cuts]] | None, int]:
        """All cuts of a group that may be shorter than the limit; the steps of finding them.

        With their paths; None where there are more than `most_cuts`, or it takes more than
        `most_steps`.
        """
        stages = int(self._table.pp[row] * self._table.stages_per_rank[row])
        found = np.empty((most_cuts, stages + 2), np.int64)
        some = self._pipelines(np.array([row]), np.array([blocks]))
        number, steps = cuts_below(self._chain, some, 0, limit_ns, most_steps, found)
        if number < 0:
            return None, steps
        rows = found[:number].tolist()
        return [(entry[-1], tuple(pairwise(entry[:-1]))) for entry in rows], steps

    def _pipelines(self, rows: Int, blocks: Int | None) -> Pipelines:
        table = self._table
        again = table.recompute_blocks[rows] if blocks is None else blocks
        layout_rows, layout = numbered(
            table.schedule[rows], table.pp[rows], table.microbatches[rows],
            table.stages_per_rank[rows],
        )  # fmt: skip
        return Pipelines(
            pp=table.pp[rows],
            stages_per_rank=table.stages_per_rank[rows],
            microbatches=table.microbatches[rows],
            places_v=self._places_v[table.schedule[rows]],
            splits=self._splits[rows],
            is_recomputed=self._is_recomputed[rows],
            runs_again=np.where(again == SOME, 1, again),
            remakes=np.where(again == SOME, 0, again),
            capacity_bytes=self._free_bytes(rows),
            times=self._times[rows],
            held=self._held[rows],
            stored=self._stored[rows],
            whole=self._whole[rows],
            layout=layout,
            flights=self._flights(rows[layout_rows]),
        )

    def least(self, chosen: NDArray[np.bool_]) -> tuple[int, int] | None:
        """The least path bound of the chosen groups, and its row; cuts only where needed."""
        rows = np.flatnonzero(chosen)
        rows = rows[np.argsort(self.even_ns[rows], kind="stable")]
        least: tuple[int, int] | None = None
        for start in range(0, len(rows), RUN):
            run = rows[start : start + RUN]
            if least is not None and self.even_ns[run[0]] >= least[0]:
                break
            longest, _ = self.cut(run)
            first = int(longest.argmin())
            if least is None or longest[first] < least[0]:
                least = int(longest[first]), int(run[first])
        return least

    def _flights(self, rows: Int) -> Int:
        table = self._table
        flights = np.zeros((len(rows), int(table.pp[rows].max())), np.int64)
        for index, row in enumerate(rows.tolist()):
            pp = int(table.pp[row])
            name, count = SCHEDULE_NAMES[table.schedule[row]], int(table.microbatches[row])
            per_rank = int(table.stages_per_rank[row])
            flights[index, :pp] = least_in_flight(name, pp, count, per_rank)
        return flights

    def _free_bytes(self, rows: Int) -> Int:
        """What a rank may use beside what every rank holds."""
        distinct, which = np.unique(self._table.num_devices[rows], return_inverse=True)
        problem, memory = self._problem, self._scorer.memory
        context = 0 if problem.device.kind == "cpu" else CONTEXT_BYTES
        base = context + problem.graph.buffer_bytes
        free = [
            memory.capacity_bytes(Candidate(dp_replicate=count)) - base
            for count in distinct.tolist()
        ]
        return np.array(free, np.int64)[which]

    def _base(self, row: int) -> Candidate:
        return self._space.group(row).base

    @cached_property
    def _chain(self) -> Chain:
        stored, shard = self._sharded_bytes()
        return Chain(
            edges=np.array(self._problem.graph.edges, np.int64),
            times_ns=self._unit_times(),
            held_bytes=self._unit_bytes(),
            stored_bytes=stored,
            whole_bytes=self._whole_bytes(),
            shard_bytes=shard,
        )

    def _unit_times(self) -> Int:
        """Running totals in the columns that `pipeline_bound` names."""
        units = self._problem.graph.units
        structures = [unit.structure for unit in units]
        floors = self._scorer.bounds.times
        bases = [self._base(row) for row in self._times_rows.tolist()]
        floors.prepare(bases)
        # [variant, structure, column]; structures are numbered in the order of the chain.
        times = np.array([list(floors.floors(base).values()) for base in bases], np.int64)
        forward, whole, inputs, weights, again = np.moveaxis(times, 2, 0)
        work = forward + np.minimum(whole, inputs + weights)
        columns = [forward, whole, inputs, weights, work, work + again, again]
        each = np.stack(columns, axis=1)[:, :, structures]
        totals = np.zeros((*each.shape[:2], len(units) + 1), np.int64)
        np.cumsum(each, axis=2, out=totals[:, :, 1:])
        return totals

    def _unit_bytes(self) -> Int:
        """Running totals of what a microbatch keeps, without and with recompute."""
        units = self._problem.graph.units
        last = len(units) - 1
        # The ends keep other things than blocks, whatever their structures.
        kinds = [-1 if unit == 0 else -2 if unit == last else units[unit].structure
                 for unit in range(last + 1)]  # fmt: skip
        first, which = np.unique(np.array(kinds), return_index=True, return_inverse=True)[1:]
        held = [
            [[self._held_by(again, unit) for unit in first.tolist()] for again in variants]
            for variants in map(self._without_and_with, self._held_rows.tolist())
        ]
        each = np.array(held, np.int64).reshape(-1, 2, len(first))[:, :, which]
        totals = np.zeros((*each.shape[:2], last + 2), np.int64)
        np.cumsum(each, axis=2, out=totals[:, :, 1:])
        return totals

    def _without_and_with(self, row: int) -> tuple[Candidate, Candidate]:
        base = self._base(row)
        without = replace(base, recompute="none", recompute_blocks=0)
        return without, replace(base, recompute_blocks=0)

    def _held_by(self, candidate: Candidate, unit: int) -> int:
        return self._scorer.memory.units(candidate, unit, unit + 1)[0].holds

    def _sharded_bytes(self) -> tuple[Int, Int]:
        """Parameters as all of dp shards them, and their gradients."""
        copy_bytes = self._problem.training.compute_bytes
        copies = self._problem.trainer.keeps_compute_copy
        stored, shard = [], []
        for row in self._stored_rows.tolist():
            tp, dp = int(self._table.tp[row]), int(self._table.dp[row]) * self._table.cp
            parts = [(kind, shard_numel(kind, tp, dp)) for kind, _ in self._kinds]
            stored.append(
                [
                    min(STORED_BYTES * part, copy_bytes * local_numel(kind, tp))
                    if copies
                    else STORED_BYTES * part
                    for kind, part in parts
                ]
            )
            shard.append([self._gradient_bytes * kind.trainable * part for kind, part in parts])
        return self._over_units(stored), self._over_units(shard)

    def _whole_bytes(self) -> Int:
        """Gradients of which every rank holds the whole."""
        degrees = self._table.tp[self._whole_rows].tolist()
        element_bytes = self._gradient_bytes
        return self._over_units(
            [
                [element_bytes * kind.trainable * local_numel(kind, tp) for kind, _ in self._kinds]
                for tp in degrees
            ]
        )

    @property
    def _gradient_bytes(self) -> int:
        return min(STORED_BYTES, self._problem.trainer.gradient_bytes)

    def _over_units(self, of_kind: list[list[int]]) -> Int:
        """Running totals over the units of a figure of each kind of parameter."""
        counts = np.stack([counts for _, counts in self._kinds]) if self._kinds else None
        figures = np.array(of_kind, np.int64)
        units = len(self._problem.graph.units)
        each = np.zeros((len(figures), units), np.int64) if counts is None else figures @ counts
        return np.concatenate([np.zeros((len(figures), 1), np.int64), each.cumsum(1)], axis=1)

    @cached_property
    def _kinds(self) -> list[tuple[Parameter, Int]]:
        """One parameter of each kind, and how many each unit is the first to use."""
        found: dict[tuple[object, ...], tuple[Parameter, Int]] = {}
        for parameter in self._problem.graph.parameters:
            divided = parameter.tp_dim, parameter.partial_dims
            key = parameter.shape, divided, parameter.trainable, parameter.is_expert
            if key not in found:
                found[key] = parameter, np.zeros(len(self._problem.graph.units), np.int64)
            found[key][1][min(parameter.units, default=0)] += 1
        return list(found.values())
