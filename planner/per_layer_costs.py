"""From a traced model and a candidate to `LayerChoices`: the costs of each block's options.

Everything is asked of where the score has it from: `Problem` for passes, `DataBounds` for traffic
on idle links, `MemoryModel` and `ShardSizes` for what is kept and gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import DataBounds
from claw_plan.planner.errors import PlanError
from claw_plan.planner.memory_states import held_parts
from claw_plan.planner.memory_units import UnitMemory
from claw_plan.planner.per_layer import (
    KEEP,
    NODE,
    RESHARD,
    LayerChoices,
    LayerOption,
    LayerTable,
    StepEnds,
)
from claw_plan.planner.problem import STORED_BYTES, variant_of
from claw_plan.planner.score import Scorer
from claw_plan.planner.shards import ROOT, GroupSize
from claw_plan.planner.supported import RECOMPUTE
from claw_plan.simulator.task_graph import Int


def refusal(scorer: Scorer, candidate: Candidate) -> str:
    """Why a candidate has no choices of this kind; empty when it has."""
    if candidate.pp > 1:
        return "layers are chosen one by one only without a pipeline"
    if candidate.dp_shard == 1 or candidate.zero != 3:
        return "layers are chosen one by one only where fully_shard shards parameters (zero=3)"
    if candidate.cp > 1 or candidate.ep > 1:
        return "layers are not chosen one by one under cp and ep"
    if not scorer.problem.graph.blocks:
        return "the model has no blocks to choose for"
    return ""


def layer_choices(scorer: Scorer, candidate: Candidate) -> LayerChoices:
    """The choices of a candidate's blocks. Raises PlanError where there are none."""
    if why := refusal(scorer, candidate):
        raise PlanError(f"{candidate.short()}: {why}")
    costs = _Costs(scorer, candidate)
    options = costs.options()
    return LayerChoices(
        table=costs.table(options),
        ends=costs.ends(),
        options=options,
        capacity_bytes=scorer.memory.capacity_bytes(candidate),
    )


class _Costs:
    """Of one candidate; units are numbered as in the graph."""

    def __init__(self, scorer: Scorer, candidate: Candidate) -> None:
        self._problem, self._shards = scorer.problem, scorer.shards
        self._candidate = candidate
        self._units = len(self._problem.graph.units)
        self._data = DataBounds(self._problem, self._shards)
        near = replace(candidate, reshard_ranks=self._node_ranks())
        self._traffic = self._data.traffic(near, 0, self._units)
        groups = self._shards.groups(0, self._units, candidate.tp, candidate.shard_ranks)
        self._groups = [groups.get(unit, GroupSize()) for unit in range(self._units)]
        self._root = groups[ROOT]
        self._memory = {
            mode: scorer.memory.units(replace(candidate, recompute=mode), 0, self._units)
            for mode in RECOMPUTE
        }
        self._count = candidate.num_microbatches(self._problem.training.global_batch)
        self._compute_bytes = self._problem.training.compute_bytes
        self._overlaps = self._problem.cluster.backend != "gloo"
        self._static = held_parts(self._problem, self._shards, candidate, [(0, self._units)])

    def options(self) -> tuple[LayerOption, ...]:
        """All of a block, those that keep least first; a node's shards where they are larger."""
        kinds = (RESHARD, NODE, KEEP) if self._node_ranks() else (RESHARD, KEEP)
        options = [LayerOption(*option) for option in product(RECOMPUTE, kinds)]
        held = self._of_options(options, self._held)[1]
        order = sorted(range(len(options)), key=lambda index: (held[index], index))
        return tuple(options[index] for index in order)

    def _node_ranks(self) -> int:
        """Ranks of the shard group that are on one node; 0 where all or hardly any are."""
        ranks = self._problem.devices_per_node // self._candidate.tp
        total = self._candidate.shard_ranks
        return ranks if 1 < ranks < total and total % ranks == 0 else 0

    def table(self, options: Sequence[LayerOption]) -> LayerTable:
        """Costs by unit and option."""
        compute = self._of_options(options, self._compute_ns)
        gather = self._of_options(options, self._gather_ns)
        moved = np.array([unit.reduce_ns + unit.sum_ns for unit in self._traffic.units], np.int64)
        if not self._overlaps:  # what the cores move stops what they compute
            each = np.array([unit.reduce_ns for unit in self._traffic.units], np.int64)
            compute += gather + each[:, None]
            gather, moved = np.zeros_like(gather), np.zeros_like(moved)
        buffers = [STORED_BYTES * group.trainable_whole for group in (*self._groups, GroupSize())]
        gradients = self._gradient_bytes()
        return LayerTable(
            compute_ns=compute,
            gather_ns=gather,
            reduce_ns=moved,
            held_bytes=self._of_options(options, self._held),
            forward_bytes=self._of_options(options, self._forward_bytes),
            kernel_bytes=self._of_options(
                options,
                lambda unit, option: (
                    self._kernel_bytes(unit, option) + gradients[unit] + buffers[unit + 1]
                ),
            ),
            reduced_bytes=np.array(
                [
                    gradients[unit] + buffers[unit] + self._reduced_bytes(unit)
                    for unit in range(self._units)
                ],
                np.int64,
            ),
            coming_bytes=self._of_options(
                options, lambda unit, option: (option.parameters != KEEP) * self._whole(unit)
            ),
        )

    def _of_options(
        self, options: Sequence[LayerOption], of: Callable[[int, LayerOption], int]
    ) -> Int:
        """A table [unit, option]; prologue and epilogue have the plain option's value in all."""
        plain, last = LayerOption("none", RESHARD), self._units - 1
        return np.array(
            [
                [of(unit, option if 0 < unit < last else plain) for option in options]
                for unit in range(self._units)
            ],
            np.int64,
        )

    def _whole(self, unit: int) -> int:
        return self._compute_bytes * self._groups[unit].whole

    def _kept(self, unit: int, option: LayerOption) -> int:
        """Gathered parameters that stay from forward to backward."""
        if option.parameters == NODE:
            shards = self._candidate.shard_ranks // self._node_ranks()
            return self._compute_bytes * shards * self._groups[unit].shard
        return self._whole(unit) if option.parameters == KEEP else 0

    def _of(self, unit: int, option: LayerOption) -> UnitMemory:
        return self._memory[option.recompute][unit]

    def _held(self, unit: int, option: LayerOption) -> int:
        return self._of(unit, option).holds + self._kept(unit, option)

    def _forward_bytes(self, unit: int, option: LayerOption) -> int:
        """The unit and the one after it gathered; gradients of earlier microbatches."""
        memory = self._of(unit, option)
        following = self._whole(unit + 1) if unit + 1 < self._units else 0
        gathered = self._whole(unit) + following
        return memory.holds + memory.forward_peak + gathered + self._before()

    def _kernel_bytes(self, unit: int, option: LayerOption) -> int:
        memory = self._of(unit, option)
        own = self._compute_bytes * self._groups[unit].trainable_whole
        return (
            memory.holds + memory.remade + memory.backward_peak + own + self._whole(unit)
            + self._tail(unit)
        )  # fmt: skip

    def _reduced_bytes(self, unit: int) -> int:
        group = self._groups[unit]
        own = self._compute_bytes * group.trainable_whole
        tail = self._compute_bytes * self._shards.unit_whole(self._units - 1, self._candidate.tp)
        return max(own, STORED_BYTES * group.trainable_shard) + tail

    def _tail(self, unit: int) -> int:
        """Gradients of the epilogue's parameters, once its backward has run."""
        if unit == self._units - 1:
            return 0
        return self._compute_bytes * self._shards.unit_whole(self._units - 1, self._candidate.tp)

    def _all_shards(self) -> int:
        shards = sum(group.trainable_shard for group in self._groups)
        return STORED_BYTES * (self._root.trainable_shard + shards)

    def _before(self) -> int:
        """Gradients of the microbatches before."""
        return self._all_shards() if self._count > 1 else 0

    def _gradient_bytes(self) -> list[int]:
        """Reduced gradients while each unit's backward runs."""
        found, made = [0] * self._units, 0
        for unit in reversed(range(self._units)):
            found[unit] = max(self._before(), STORED_BYTES * made)
            made += self._groups[unit].trainable_shard
        return found

    def _compute_ns(self, unit: int, option: LayerOption) -> int:
        """Backward and what is run again, and what both lose to the traffic beside them."""
        whole = self._problem.pass_time(unit, *self._size(), True)
        total, kernels = whole.total_ns, whole.compute_ns
        if option.recompute != "none":
            again = self._problem.recompute_time(unit, *self._size(), option.recompute)
            total, kernels = total + again.total_ns, kernels + again.compute_ns
        traffic = self._traffic.units
        beside = self._gather_alone_ns(unit, option)
        if unit + 1 < self._units:
            beside += traffic[unit + 1].reduce_alone_ns
        if option.parameters == NODE:  # copied out in forward, where the next gather may hide it
            total += traffic[unit].keep_ns
        return total + traffic[unit].cast_ns + self._lost(kernels, beside)

    def _lost(self, kernels_ns: int, beside_ns: int) -> int:
        if not self._overlaps:
            return 0
        return round(self._problem.trainer.overlap_loss * min(kernels_ns, beside_ns))

    def _size(self) -> tuple[str, int, int]:
        candidate = self._candidate
        return variant_of(candidate), candidate.microbatch_size, candidate.tp

    def _gather_ns(self, unit: int, option: LayerOption) -> int:
        """Before the backward: over all shards, or those of a node."""
        traffic = self._traffic.units[unit]
        kinds = {RESHARD: traffic.gather_ns, NODE: traffic.near_ns, KEEP: 0}
        return kinds[option.parameters]

    def _gather_alone_ns(self, unit: int, option: LayerOption) -> int:
        """The same without copies."""
        traffic = self._traffic.units[unit]
        kinds = {RESHARD: traffic.gather_alone_ns, NODE: traffic.near_alone_ns, KEEP: 0}
        return kinds[option.parameters]

    def ends(self) -> StepEnds:
        """What is the same for all assignments."""
        candidate, problem, data = self._candidate, self._problem, self._data
        span = (0, self._units)
        always = sum(self._static.values()) + self._compute_bytes * self._root.whole
        root, units = self._traffic.root, self._traffic.units
        forward, after = self._forward_ns(), data.optimizer_ns(candidate, *span)
        reduced = root.reduce_ns + root.sum_ns
        reduces = root.reduce_ns + sum(unit.reduce_ns for unit in units)
        if not self._overlaps:
            forward, after = forward + root.reduce_ns, after + root.sum_ns
            after += sum(unit.sum_ns for unit in units)
            reduced = reduces = 0
        return StepEnds(
            num_microbatches=self._count,
            forward_ns=forward,
            accumulate_ns=data.accumulate_ns(candidate, *span),
            root_reduce_ns=reduced,
            reduces_ns=reduces,
            after_ns=after + problem.step_overhead_ns(),
            always_bytes=always,
            end_bytes=self._end_bytes() - self._compute_bytes * self._root.whole,
        )

    def _forward_ns(self) -> int:
        """The root's gather, then each unit beside the gather of the next."""
        total = self._traffic.root.gather_ns
        plain = LayerOption("none", RESHARD)
        gathers = [self._gather_ns(unit, plain) for unit in range(self._units)]
        for unit, following in pairwise([*range(self._units), self._units]):
            time = self._problem.pass_time(unit, *self._size(), False)
            beside = self._gather_alone_ns(unit, plain)
            runs = time.total_ns + self._lost(time.compute_ns, beside)
            coming = gathers[following] if following < self._units else 0
            total += max(runs, coming) if self._overlaps else runs + coming
        return total

    def _end_bytes(self) -> int:
        """The largest moment after the last block's backward, as `memory_moments` has them."""
        root, compute, before = self._root, self._compute_bytes, self._before()
        shards = self._all_shards() - STORED_BYTES * root.trainable_shard
        buffer = STORED_BYTES * root.trainable_whole
        head = compute * self._shards.unit_whole(0, self._candidate.tp)
        largest = max(group.largest for group in (*self._groups, root))
        return max(
            max(before, shards) + compute * root.trainable_whole + buffer,
            max(before, self._all_shards()) + head + buffer,
            self._all_shards() + 2 * STORED_BYTES * largest,
        )
