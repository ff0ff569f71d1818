"""The groups of a space as columns, so that millions of candidates are counted and bound at once.

A row stands for the candidates that compute alike; `space.Space` fills the table and turns a row
into candidates, `group_bounds` bounds all rows together.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.candidate import ALL_GATHER, Candidate
from claw_plan.planner.schedules import SCHEDULES
from claw_plan.planner.supported import RECOMPUTE

Int = NDArray[np.int64]

SCHEDULE_NAMES = tuple(SCHEDULES)

SOME = -1
"""In the column `recompute_blocks`: a row for each number of blocks short of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Candidates that compute alike. `base` carries the shared knobs, dp as dp_replicate.

    Its schedule stands for those that bound alike: 1F1B for GPipe too.
    """

    base: Candidate
    microbatches: int
    size: int


@dataclass(frozen=True, kw_only=True)
class GroupTable:
    """One row a group, or with SOME blocks run again several groups, told apart when needed.

    `schedule` and `recompute` index SCHEDULE_NAMES and RECOMPUTE, `order` the mesh orders of the
    space, in which tensor-parallel groups span `tp_nodes`. `size` is the number of candidates of
    the row. All share sequences among `cp` ranks.
    """

    pp: Int
    tp: Int
    dp: Int
    microbatch_size: Int
    microbatches: Int
    schedule: Int
    stages_per_rank: Int
    order: Int
    tp_nodes: Int
    size: Int
    recompute: Int
    recompute_blocks: Int
    sequence_parallel: Int
    cp: int = 1
    cp_comm_type: str = ALL_GATHER

    def __len__(self) -> int:
        return len(self.pp)

    @cached_property
    def num_devices(self) -> Int:
        """Devices that each group uses."""
        return self.pp * self.tp * self.dp * self.cp

    def group(
        self, row: int, bucket_bytes: int, mesh_order: tuple[str, ...], blocks: int, size: int
    ) -> Group:
        """The group of a row, where so many blocks of each stage run again."""
        base = Candidate(
            pp=int(self.pp[row]),
            tp=int(self.tp[row]),
            dp_replicate=int(self.dp[row]),
            cp=self.cp,
            cp_comm_type=self.cp_comm_type,
            microbatch_size=int(self.microbatch_size[row]),
            schedule=SCHEDULE_NAMES[self.schedule[row]],
            stages_per_rank=int(self.stages_per_rank[row]),
            recompute=RECOMPUTE[self.recompute[row]],
            recompute_blocks=blocks,
            sequence_parallel=bool(self.sequence_parallel[row]),
            bucket_bytes=bucket_bytes,
            mesh_order=mesh_order,
        )
        return Group(base=base, microbatches=int(self.microbatches[row]), size=size)


def table_of(columns: list[Int], cp: int = 1, cp_comm_type: str = ALL_GATHER) -> GroupTable:
    """The table of pieces [field, row] put behind each other."""
    names = [field.name for field in fields(GroupTable) if field.default is MISSING]
    whole = np.concatenate(columns or [np.zeros((len(names), 0), np.int64)], axis=1)
    return GroupTable(**dict(zip(names, whole, strict=True)), cp=cp, cp_comm_type=cp_comm_type)


def numbered(*columns: Int | NDArray[np.bool_]) -> tuple[Int, Int]:
    """The first row of each distinct combination, in order, and which of them each row has.

    Entries are at least -1.
    """
    count = len(columns[0])
    which, values = np.zeros(count, np.int64), 1
    for column in columns:
        radix = int(column.max(initial=0)) + 2
        if values * radix > 4 * count:  # numbers grow sparse: those that are there are renumbered
            which = _dense(which)
            values = int(which.max(initial=-1)) + 1
        which = which * radix + column + 1
        values *= radix
    which = _dense(which)
    rows = np.empty(int(which.max(initial=-1)) + 1, np.int64)
    rows[which[::-1]] = np.arange(len(which))[::-1]  # of several the last written stays
    return rows, which


def _dense(values: Int) -> Int:
    """The place of each value among the distinct ones; without a sort where they are small."""
    most = int(values.max(initial=-1)) + 1
    if most > 4 * len(values):
        return np.unique(values, return_inverse=True)[1].reshape(-1)
    place = np.zeros(most, np.int64)
    place[values] = 1
    return (place.cumsum() - 1)[values]


def product_of(*tables: Int) -> Int:
    """Every combination of columns, one of each table [field, row], the last the fastest."""
    found = tables[0]
    for table in tables[1:]:
        rows, others = found.shape[1], table.shape[1]
        found = np.concatenate([np.repeat(found, others, axis=1), np.tile(table, rows)])
    return found
