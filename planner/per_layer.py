"""`LayerChoices`: recompute and resharding layer by layer, scored from a table of costs.

For a candidate that shards by fully_shard without a pipeline, each block chooses how much of its
forward is run again, and what its parameters do between forward and backward: go back to shards,
to shards within the node, or stay (fully_shard's `reshard_after_forward`, which is an argument of
each module). Costs are the project's own: passes of `Problem`, sizes of `memory_units` and
`shards`, collectives of the cost model; `per_layer_costs` makes the table.

**Time.** On idle links, as `lower_data.Sharded` lays a step out: the gather of the next unit runs
beside the unit before it, so a unit lasts the longer of both; reductions run on a stream of their
own:

    backward = sum over units, last first, of max(compute[u], gather[u - 1])
    reduced  = max(reduced, end of u's compute) + reduce[u]

What computation loses to traffic beside it is counted for traffic that ends within the pass.
**Memory.** `memory_moments._sharded`, moment by moment. With need[u] what units from u on need
beyond what those before hold,

    need[u] = max(forward[u], kernels[u] + coming[u - 1], reduced[u] + coming[u - 1],
                  held[u] + need[u + 1])

Assumes: one microbatch in flight; traffic does not meet traffic. Tests hold both sums to
`Bounds.candidate_ns` and `MemoryModel` where all blocks choose alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from claw_plan.planner.choices import Assignment, Features, Scores
from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

RESHARD, NODE, KEEP = "reshard", "node", "keep"
"""fully_shard's reshard_after_forward: True, the devices of a node, False."""


class LayerOption(NamedTuple):
    """One choice of a block."""

    recompute: str
    parameters: str


class LayerTable(NamedTuple):
    """Costs of each unit [unit] or of its options [unit, option]; module's docstring."""

    compute_ns: Int
    gather_ns: Int
    reduce_ns: Int
    held_bytes: Int
    forward_bytes: Int
    kernel_bytes: Int
    reduced_bytes: Int
    coming_bytes: Int


class StepEnds(NamedTuple):
    """What a step has beside the backward of a microbatch, the same for all assignments.

    `always_bytes` are there at every moment, `end_bytes` with those is the largest moment after
    the last backward.
    """

    num_microbatches: int
    forward_ns: int
    accumulate_ns: int
    root_reduce_ns: int
    reduces_ns: int
    after_ns: int
    always_bytes: int
    end_bytes: int

    def step_ns(self, backward_ns: Int, reduced_ns: Int) -> Int:
        """The step from a microbatch's backward and the end of its reductions.

        Reductions of all microbatches follow each other, so either those of the first hold up
        all others, or those of the last are on time.
        """
        more = self.num_microbatches - 1
        micro_ns = self.forward_ns + backward_ns
        starts_ns = more * micro_ns + max(0, more - 1) * self.accumulate_ns
        computed = (more + 1) * micro_ns + more * self.accumulate_ns
        reduced = self.forward_ns + reduced_ns + np.maximum(more * self.reduces_ns, starts_ns)
        return np.maximum(computed, reduced) + self.after_ns


@dataclass(frozen=True, kw_only=True)
class LayerChoices:
    """The choices of every block. Prologue and epilogue have one option."""

    table: LayerTable
    ends: StepEnds
    options: tuple[LayerOption, ...]
    capacity_bytes: int

    @property
    def num_blocks(self) -> int:
        """Variables."""
        return len(self.table.reduce_ns) - 2

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every block has all options."""
        return (len(self.options),) * self.num_blocks

    @property
    def start(self) -> Assignment:
        """All blocks with the option that takes least memory."""
        return (0,) * self.num_blocks

    def uniform(self, option: LayerOption) -> Assignment:
        """All blocks alike."""
        return (self.options.index(option),) * self.num_blocks

    def scores(self, assignments: Int) -> Scores:
        """Times and missing memory of assignments [row, block]."""
        rows = len(assignments)
        time_ns, peak_bytes = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        reduced_ns = np.zeros(rows, np.int64)
        _walk(self.table, assignments, time_ns, reduced_ns, peak_bytes)
        reduced_ns = np.maximum(reduced_ns, time_ns) + self.ends.root_reduce_ns
        peak_bytes = np.maximum(peak_bytes, self.ends.end_bytes) + self.ends.always_bytes
        return Scores(
            self.ends.step_ns(time_ns, reduced_ns),
            np.maximum(0, peak_bytes - self.capacity_bytes),
        )

    def solve(self) -> Assignment | None:
        """The optimum, by `per_layer_exact`."""
        from claw_plan.planner.per_layer_exact import best_layers

        return best_layers(self)

    @cached_property
    def features(self) -> Features:
        """Per option: time and memory beyond the least, and what it is; per block: its place,
        its share of the model, how short memory is.
        """
        table, blocks = self.table, self.num_blocks
        inner = slice(1, blocks + 1)
        mean_ns = max(1.0, float(table.compute_ns[inner].mean()))
        held = table.held_bytes[inner].astype(np.float64)
        room = max(1, self.capacity_bytes - self.ends.always_bytes)
        place = np.linspace(0.0, 1.0, blocks)[:, None] * np.ones(len(self.options))
        short = np.full(held.shape, min(2.0, held.max(1).sum() / room))
        kinds = [
            np.broadcast_to([float(getattr(o, name) == value) for o in self.options], held.shape)
            for name, value in (("recompute", "full"), ("recompute", "none"), ("parameters", KEEP))
        ]
        columns = [
            (table.compute_ns[inner] - table.compute_ns[inner].min(1, keepdims=True)) / mean_ns,
            table.gather_ns[inner] / mean_ns,
            held / room * blocks,
            held.max(1, keepdims=True) / max(1.0, held.max()) * np.ones(held.shape),
            place,
            short,
            *kinds,
        ]
        return np.stack(columns, axis=2).astype(np.float32)


@compiled
def _walk(
    table: LayerTable, assignments: Int, time_ns: Int, reduced_ns: Int, peak_bytes: Int
) -> None:
    """The backward of each row: its end, the end of its reductions, its largest moment."""
    units = table.reduce_ns.size
    for row in range(len(assignments)):
        now = reduced = need = 0
        option = 0
        for unit in range(units - 1, -1, -1):
            below = assignments[row, unit - 2] if 1 < unit else 0
            gather = table.gather_ns[unit - 1, below] if unit else 0
            coming = table.coming_bytes[unit - 1, below] if unit else 0
            compute = table.compute_ns[unit, option]
            if table.reduce_ns[unit]:
                reduced = max(reduced, now + compute) + table.reduce_ns[unit]
            now += max(compute, gather)
            need = max(
                table.held_bytes[unit, option] + need,
                table.forward_bytes[unit, option],
                table.kernel_bytes[unit, option] + coming,
                table.reduced_bytes[unit] + coming,
            )
            option = below
        time_ns[row], reduced_ns[row], peak_bytes[row] = now, reduced, need
