"""Data-parallel traffic of one stage: gathers before units, reductions after, the optimizer.

`Sharded`: fully_shard gathers each run of blocks before its passes and reduce-scatters its
gradients after; over dp_replicate the shards are then all-reduced. With precision below fp32
parameters are stored in fp32 and fully_shard makes the working copies, so then it is used whatever
dp_shard is. `lower_whole` has replicas without shards; `lower_zero` adds the third kind,
Megatron's, and chooses among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import Parameter
from claw_plan.planner.offload import host_step_ns
from claw_plan.planner.placement import (
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    expert_shards,
    group_nodes,
    near_nodes,
    shard_nodes,
)
from claw_plan.planner.problem import STORED_BYTES, Problem, optimizer_work
from claw_plan.planner.shards import (
    EXPERTS,
    FIRST,
    ROOT,
    GroupSize,
    Place,
    ShardSizes,
    joined,
    local_numel,
    runs_of,
    said_of,
    shard_numel,
)
from claw_plan.planner.stage_streams import StageStreams
from claw_plan.profiles.work import OpWork

ACCUMULATED_BYTES = 12
"""Bytes moved for each element when a microbatch's gradient is added to that of those before:
two read, one written, in fp32."""

ACCUMULATE, GATHER_COPY, REDUCE_COPY = (
    "aten.add_",
    "fsdp.split_with_sizes_copy",
    "fsdp.chunk_cat",
)
"""What autograd and fully_shard call for it, and so how a run's measurements name it."""


ACCUMULATED = "accumulate gradients"
"""The name of its span."""


def memory_work(target: str, size_bytes: int, phase: str) -> OpWork:
    """A kernel that moves bytes and is known by its operator's name."""
    return OpWork(
        kind="memory", dims=(), dtype="float32", flops=0, bytes=size_bytes, phase=phase,
        target=target,
    )  # fmt: skip


def _lies_within(parameter: Parameter, last: int) -> bool:
    """Whether blocks alone use it; `last` is the epilogue."""
    return bool(parameter.units) and 0 < min(parameter.units) and max(parameter.units) < last


class DataParallel:
    """What all kinds share: sizes, groups and the end of the step."""

    by_unit = False
    """Whether passes are lowered unit by unit, so that traffic can run beside them."""

    is_executed = True
    """Whether the executor trains so; what else another trainer does is in its constants."""

    def __init__(
        self,
        problem: Problem,
        shards: ShardSizes,
        candidate: Candidate,
        streams: StageStreams,
        start: int,
        stop: int,
        place: Place = FIRST,
    ) -> None:
        self._problem, self._candidate, self._streams = problem, candidate, streams
        self._start, self._stop, self._place = start, stop, place
        self._groups = shards.groups(start, stop, candidate.tp, candidate.shard_ranks, place)
        self._parameters = tuple(shards.stage_parameters(start, stop))
        places = {p.name: place for place, p in enumerate(problem.graph.parameters)}
        self._in_order = sorted((p for _, p in self._parameters), key=lambda p: places[p.name])
        per_node = problem.devices_per_node
        self._replicate_nodes = group_nodes(candidate, "dp_replicate", per_node)
        self._shard_nodes = shard_nodes(candidate, per_node)
        self._expert_ranks = expert_shards(candidate, per_node)
        self._pending_reductions: list[int] = []
        self._complete: dict[int, list[int]] = {}
        self._has_gradients = False

    def begin_forward(self, units: Sequence[int]) -> None:
        """A microbatch's forward starts; `units` in the order they run."""

    def before_unit(self, unit: int, backward: bool) -> None:
        """The unit is about to run."""

    def after_forward(self, unit: int) -> None:
        """The unit's forward was added."""

    def end_forward(self) -> None:
        """All units' forwards were added."""

    def begin_backward(self, units: Sequence[int], is_last: bool) -> None:
        """A microbatch's backward starts; `is_last` when its gradients complete the step's."""

    def after_backward(self, unit: int, is_last: bool) -> None:
        """The unit's backward was added."""

    def end_backward(self, is_last: bool) -> None:
        """All units' backwards were added; from the second on, gradients were added to others."""
        if self._has_gradients:
            size = ACCUMULATED_BYTES * self._accumulated_elements()
            cost = self._problem.cost.op(memory_work(ACCUMULATE, size, "backward"))
            self._streams.run("backward", ACCUMULATED, cost.ns, cost.source)
        self._has_gradients = self._accumulated_elements() > 0

    def _accumulated_elements(self) -> int:
        """Of the gradients that microbatches add up: the whole ones, or their shards."""
        return sum(group.trainable_whole for group in self._groups.values())

    def _trained(self) -> list[Parameter]:
        """The stage's trained parameters in the order of the model."""
        return [p for p in self._in_order if p.trainable]

    def _held(self, parameter: Parameter) -> int:
        """Elements of its gradient on this rank."""
        return local_numel(parameter, self._candidate.tp, self._place)

    def trained(self) -> dict[str, int]:
        """Elements of the gradient of each trained parameter by name."""
        return {parameter.name: self._held(parameter) for parameter in self._trained()}

    def averaged(self, axis: str) -> dict[str, int]:
        """The same of those gradients that are averaged over the axis at the step's end."""
        return {}

    def sequence_parallel(self) -> dict[str, int]:
        """The same of what acted on a slice of the sequence: summed over tp."""
        if self._candidate.tp == 1 or not self._candidate.sequence_parallel:
            return {}
        last = len(self._problem.graph.units) - 1
        return {
            parameter.name: self._held(parameter)
            for parameter in self._trained()
            if parameter.tp_dim is None and _lies_within(parameter, last)
        }

    def complete_after(self) -> dict[str, list[int]]:
        """The tasks that end each trained parameter's gradient, before the step's end begins.

        What is `averaged` or `sequence_parallel` is not complete then.
        """
        ends = [*self._pending_reductions, self._streams.last_task]
        return {
            parameter.name: self._complete.get(self._run_of(group), ends)
            for group, parameter in self._parameters
            if parameter.trainable
        }

    def _run_of(self, group: int) -> int:
        """What is reduced together with a group."""
        return group

    def owned_elements(self) -> int:
        """Elements of the gradients that the optimizer of this rank sees."""
        return sum(group.trainable_shard for group in self._groups.values())

    def step_optimizer(self) -> None:
        """The optimizer, after the last reduction."""
        self.wait_for_reductions()
        self._optimize(self.owned_elements())

    def _optimize(self, elements: int) -> None:
        optimizer = self._problem.training.optimizer
        if elements and optimizer and self._candidate.offload == "optimizer":
            self._streams.run("optimizer", "on the host", host_step_ns(self._problem, elements))
        elif elements and optimizer:
            cost = self._problem.cost.op(optimizer_work(optimizer, elements))
            self._streams.run("optimizer", optimizer, cost.ns, cost.source)

    def wait_for_reductions(self) -> None:
        """What comes next needs the gradients."""
        self._streams.wait_for(self._pending_reductions)
        self._pending_reductions = []

    def _all_reduce(
        self, size_bytes: int, name: str, needs: Sequence[int], *, experts: bool = False
    ) -> None:
        """Over replicas, beside the computation where the library can."""
        axis, ranks = "dp_replicate", (self._candidate.dp_replicate, self._replicate_nodes)
        if experts:
            axis, ranks = EXPERT_REPLICATE, self._expert_ranks[1]
        if ranks[0] == 1 or not size_bytes:
            return
        cost = self._problem.collective("all_reduce", size_bytes, *ranks, by_data=True)
        task = self._streams.background(
            self._streams.reduce, "dp_comm", name, cost, 0, needs, axis=axis
        )
        self._pending_reductions.append(task)


class Sharded(DataParallel):
    """fully_shard: gather, compute, reduce-scatter, run of units by run.

    A run is known by its first unit. Those `_near` lie in shards over `reshard_ranks`.
    """

    by_unit = True

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        last, blocks = len(self._problem.graph.units) - 1, self._candidate.blocks_per_group
        runs = runs_of(self._start, self._stop, last, blocks)
        self._groups = joined(self._groups, runs)
        self._run = {unit: run for run in runs for unit in run}
        self._gathered: set[int] = set()
        self._near: set[int] = set()
        near, per_node = self._candidate.reshard_ranks, self._problem.devices_per_node
        self._near_ranks = near, near_nodes(self._candidate, per_node) if near else 0
        self._order: list[int] = []
        self._marks: list[int] = []

    @override
    def _held(self, parameter: Parameter) -> int:
        ranks = self._candidate.shard_ranks
        return shard_numel(parameter, self._candidate.tp, ranks, self._place)

    @override
    def _run_of(self, group: int) -> int:
        return self._run[group].start if group in self._run else group

    @override
    def averaged(self, axis: str) -> dict[str, int]:
        whole = () if axis == EXPERT_REPLICATE else self._trained()
        return {p.name: 1 for p in whole if not p.shape}

    @override
    def begin_forward(self, units: Sequence[int]) -> None:
        self._begin(units)

    @override
    def begin_backward(self, units: Sequence[int], is_last: bool) -> None:
        self._begin(units)

    def _begin(self, units: Sequence[int]) -> None:
        self._order = [ROOT, *units]
        self._marks = [self._streams.last_task]
        self._wait_for_gather(ROOT)

    @override
    def before_unit(self, unit: int, backward: bool) -> None:
        self._wait_for_gather(self._run[unit].start)
        if EXPERTS - unit in self._groups:
            self._wait_for_gather(EXPERTS - unit)

    def _wait_for_gather(self, group: int) -> None:
        """The gather may start once the run two before has run: one is fetched ahead."""
        if group in self._gathered:
            return
        self._gathered.add(group)
        size = self._groups.get(group, GroupSize())
        if not size.whole:
            return
        ahead = self._marks[-2] if len(self._marks) > 1 else self._marks[-1]
        needs = [ahead] if self._streams.overlaps else []
        task = self._gather(group, size, [need for need in needs if need >= 0])
        self._streams.wait_for([task])

    def _gather(self, group: int, size: GroupSize, needs: Sequence[int]) -> int:
        problem, (axis, shard, nodes) = self._problem, self._shard_group(group)
        compute, is_near = problem.training.compute_bytes, group in self._near
        self._near.discard(group)
        name = f"gather {said_of(group)}"
        # Cast the shard into the gather's buffer, then copy each parameter out of it.
        cast_ns = problem.memory_op_ns((STORED_BYTES + compute) * size.shard)
        if shard == 1:
            return self._copy(name, cast_ns, needs)
        if is_near:  # as it was gathered before, so in the precision of the kernels
            cast_ns = problem.memory_op_ns(2 * compute * self._near_elements(size))
        copied = memory_work(GATHER_COPY, 2 * compute * size.whole, "forward")
        copy_ns = cast_ns + problem.cost.op(copied).ns
        ranks, nodes = self._near_ranks if is_near else (shard, nodes)
        cost = problem.collective(
            "all_gather", compute * size.shard * shard, ranks, nodes, by_data=True
        )
        return self._streams.background(
            self._streams.gather, "dp_comm", name, cost, copy_ns, needs, axis=axis
        )

    def _shard_group(self, group: int) -> tuple[str, int, int]:
        """Axis, ranks and nodes of those that shard a group."""
        if group <= EXPERTS:
            return (EXPERT_SHARD, *self._expert_ranks[0])
        return "dp_shard", self._candidate.shard_ranks, self._shard_nodes

    def _near_elements(self, size: GroupSize) -> int:
        """What a rank keeps of a group between passes."""
        return size.shard * self._candidate.shard_ranks // self._candidate.reshard_ranks

    def _copy(self, name: str, duration_ns: int, needs: Sequence[int]) -> int:
        self._streams.wait_for(needs)
        return self._streams.run("other", name, duration_ns)

    @override
    def after_forward(self, unit: int) -> None:
        run = self._run[unit]
        if unit != run[-1]:
            return
        if self._candidate.zero == 3:
            self._gathered -= {run.start, EXPERTS - unit}
            self._keep_near(run.start)
        self._marks.append(self._streams.last_task)

    def _keep_near(self, group: int) -> None:
        """Copies the part of the gathered group that the rank keeps until it gathers it again."""
        size = self._groups.get(group)
        if size is not None and self._candidate.reshard_ranks:
            self._near.add(group)
            moved = 2 * self._problem.training.compute_bytes * self._near_elements(size)
            self._copy(f"keep unit {group}", self._problem.memory_op_ns(moved), ())

    @override
    def after_backward(self, unit: int, is_last: bool) -> None:
        if unit != self._run[unit].start:
            return
        self._marks.append(self._streams.last_task)
        if self._reduces(is_last):
            self._reduce(EXPERTS - unit, is_last)
            self._reduce(unit, is_last)
        if self._frees(is_last):
            self._gathered -= {unit, EXPERTS - unit}

    @override
    def end_backward(self, is_last: bool) -> None:
        if self._reduces(is_last):
            self._reduce(ROOT, is_last)
        if self._frees(is_last):
            self._gathered.discard(ROOT)
        super().end_backward(is_last)

    def _accumulated_elements(self) -> int:
        if not self._reduces(is_last=False):
            return super()._accumulated_elements()
        return sum(group.trainable_shard for group in self._groups.values())

    def _frees(self, is_last: bool) -> bool:
        """Whether parameters are cut again after a backward; a pipeline keeps them to the last."""
        return is_last or (self._candidate.pp == 1 and self._candidate.zero == 3)

    def _reduces(self, is_last: bool) -> bool:
        """Whether gradients are scattered after a backward; else whole ones add up."""
        return is_last or (self._candidate.pp == 1 and self._candidate.zero > 1)

    def _reduce(self, group: int, is_last: bool) -> None:
        size = self._groups.get(group, GroupSize())
        if not size.trainable_whole:
            return
        problem, (axis, shard, nodes) = self._problem, self._shard_group(group)
        reduced = problem.trainer.gradient_bytes
        compute = problem.training.compute_bytes
        # Copy (and cast) the gradients into the reduction's buffer.
        copied = memory_work(REDUCE_COPY, (compute + reduced) * size.trainable_whole, "backward")
        copy_ns, name = problem.cost.op(copied).ns, said_of(group)
        if shard == 1:
            needs = [self._copy(f"cast gradients {name}", copy_ns, ())]
        else:
            whole, said = size.trainable_shard * shard, f"reduce {name}"
            needs = self._scatter(whole, said, copy_ns, axis, shard, nodes)
        if is_last:  # shards are summed over the replicas once a step
            size_bytes = reduced * size.trainable_shard
            self._all_reduce(size_bytes, f"all-reduce {name}", needs, experts=group <= EXPERTS)
            self._complete[group] = self._pending_reductions[-1:] or needs

    def _scatter(self, elements: int, name: str, copy_ns: int, axis: str, *on: int) -> list[int]:
        """Each rank gets its part of so many; `on` are ranks and nodes. What comes after waits."""
        size_bytes, streams = self._problem.trainer.gradient_bytes * elements, self._streams
        cost = self._problem.collective("reduce_scatter", size_bytes, *on, by_data=True)
        task = streams.background(
            streams.reduce, "dp_comm", name, cost, copy_ns, [streams.last_task], axis=axis
        )
        self._pending_reductions.append(task)
        return [task]
