"""The end of a step as tasks: what gradients still need, clipping, the optimizer and the loss.

Of each pipeline rank, all its stages together: the sums that neither FSDP nor
DistributedDataParallel make, tied gradients, the norm of all gradients, the optimizer, and the
mean of the loss, for which all ranks meet. They are those of the executor's `finish_gradients`
and `train_step`, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from claw_plan.planner.averaging import AXIS, agrees_on_overflow, at_end, sends_momentum
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower_data import DataParallel
from claw_plan.planner.placement import EXPERT_REPLICATE, expert_shards, group_nodes
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.planner.stage_streams import StageStreams, View
from claw_plan.profiles.cost import CollectiveCost

CLIPPED_BYTES = 12
"""Bytes moved for each element when gradients are clipped: read for the norm, then read and
written once more, in fp32."""

NORM_BYTES, LOSS_BYTES, OVERFLOW_BYTES, AGREED_BYTES = 8, 8, 4, 8
"""What all ranks exchange: the sum of squares and the loss in fp64, an fp32 flag of overflow; of
decoded gradients such a flag and the largest magnitude."""

WORLD, TIED = "world", "tied"
"""The groups beside the mesh's: all ranks, and the stages that hold one parameter."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """A pipeline rank after its last pass."""

    view: View
    streams: StageStreams
    stages: Sequence[DataParallel]


class StepEnd:
    """Adds the end of a step to the streams of all pipeline ranks.

    `problem` is that of all devices together, `num_devices` on so many `hosts`.
    """

    def __init__(
        self, problem: Problem, ranks: Sequence[RankEnd], num_devices: int, hosts: int
    ) -> None:
        self._problem, self.ranks = problem, ranks
        self._num_devices, self._hosts = num_devices, hosts

    def lower(self) -> None:
        """All of it."""
        training = self._problem.training
        is_executed = all(stage.is_executed for rank in self.ranks for stage in rank.stages)
        for rank in self.ranks:
            self._sum_gradients(rank)
        self.tie()
        if agrees_on_overflow(self.ranks[0].view.candidate, training.optimizer):
            self._meet("decoded", AGREED_BYTES)
        if training.precision == "float16" and is_executed:
            self._meet("overflow", OVERFLOW_BYTES)
        if training.clip_norm is not None and is_executed:
            self._clip()
            self._meet("norm", NORM_BYTES)
        for rank in self.ranks:
            for stage in rank.stages:
                stage.step_optimizer()
        if is_executed:
            self._meet("loss", LOSS_BYTES)
        self._add_overhead()

    def lower_alone(self) -> None:
        """What each rank does for itself, where ranks do not meet (`steady_state`)."""
        for rank in self.ranks:
            self._sum_gradients(rank)
        if self._problem.training.clip_norm is not None:
            self._clip()
        for rank in self.ranks:
            for stage in rank.stages:
                stage.step_optimizer()
        self._add_overhead()

    def _clip(self) -> None:
        for rank in self.ranks:
            elements = sum(stage.owned_elements() for stage in rank.stages)
            duration_ns = rank.view.problem.memory_op_ns(CLIPPED_BYTES * elements)
            rank.streams.run("other", "clip", duration_ns)

    def _add_overhead(self) -> None:
        overhead_ns = self._problem.step_overhead_ns()
        for rank in self.ranks if overhead_ns else ():
            rank.streams.run("other", "step overhead", overhead_ns)

    def _sum_gradients(self, rank: RankEnd) -> None:
        """Means over replicas that are left to the step's end, sums over divided sequences."""
        for stage in rank.stages:
            stage.wait_for_reductions()
        for axis in ("cp", "dp_shard", "dp_replicate", EXPERT_REPLICATE):
            sizes = _joined(stage.averaged(axis) for stage in rank.stages)
            if axis == AXIS and rank.view.candidate.codec != "none":
                self._average_codes(rank, sizes)
            else:
                self._all_reduce(rank, "dp_comm", f"gradients over {axis}", axis, sizes)
        sizes = _joined(stage.sequence_parallel() for stage in rank.stages)
        self._all_reduce(rank, "tp_comm", "sequence-parallel gradients", "tp", sizes)
        sizes = _joined(_evened(stage, rank.view) for stage in rank.stages)
        self._all_reduce(rank, "tp_comm", "gradients that a codec made unlike", "tp", sizes)

    def _all_reduce(
        self, rank: RankEnd, kind: str, name: str, axis: str, sizes: Sequence[int]
    ) -> None:
        problem, candidate, _ = rank.view
        if axis == EXPERT_REPLICATE:
            degree, nodes = expert_shards(candidate, problem.devices_per_node)[1]
        else:
            degree = getattr(candidate, axis)
            nodes = group_nodes(candidate, axis, problem.devices_per_node)
        for size in bucket_sizes(sizes, candidate.bucket_bytes) if degree > 1 else ():
            cost = problem.collective("all_reduce", size, degree, nodes, by_data=axis != "tp")
            rank.streams.exchange(kind, name, cost, axis=axis)

    def _average_codes(self, rank: RankEnd, sizes: Sequence[int]) -> None:
        """The same over replicas through the codec; first which gradients there are at all."""
        problem, candidate, _ = rank.view
        if not sizes or candidate.dp_replicate == 1:
            return
        flags = flags_cost(problem, candidate, len(sizes))
        rank.streams.exchange("dp_comm", f"flags over {AXIS}", flags, axis=AXIS)
        for elements, _ in filled(sizes, candidate.bucket_bytes):
            mean = at_end(problem, candidate, elements)
            for kernels_ns, cost in mean.phases:
                rank.streams.run("dp_comm", f"encode over {AXIS}", kernels_ns)
                rank.streams.exchange("dp_comm", f"gradients over {AXIS}", cost, axis=AXIS)
            rank.streams.run("dp_comm", f"decode over {AXIS}", mean.last_ns)

    def tie(self) -> None:
        """The sum of each parameter that several pipeline ranks hold, one after the other."""
        held = [_merged(stage.trained() for stage in rank.stages) for rank in self.ranks]
        for name in sorted({name for own in held for name in own}):
            holders = [r for r, own in zip(self.ranks, held, strict=True) if name in own]
            if len(holders) < 2:
                continue
            size = next(STORED_BYTES * own[name] for own in held if name in own)
            nodes = min(len(holders), self._hosts)
            cost = self._problem.collective("all_reduce", size, len(holders), nodes)
            together(holders, "pp_comm", "tied gradients", cost, TIED)

    def _meet(self, name: str, size_bytes: int) -> None:
        """An all-reduce over all ranks, which starts when the last one has come."""
        count = self._num_devices
        if count > 1:
            cost = self._problem.collective("all_reduce", size_bytes, count, self._hosts)
            together(self.ranks, "dp_comm", name, cost, WORLD)


def together(
    ranks: Sequence[RankEnd], kind: str, name: str, cost: CollectiveCost, axis: str
) -> None:
    """The same exchange on the streams of all these ranks, none before the last is there."""
    ends = [rank.streams.last_task for rank in ranks if rank.streams.last_task >= 0]
    for rank in ranks:
        rank.streams.wait_for(ends)
        rank.streams.exchange(kind, name, cost, axis=axis)


def _evened(stage: DataParallel, view: View) -> Mapping[str, int]:
    """What all tp ranks hold and codes of what lies beside it make unlike: averaged over tp."""
    candidate, optimizer = view.candidate, view.problem.training.optimizer
    if candidate.tp == 1 or candidate.codec == "none" or sends_momentum(candidate, optimizer):
        return {}
    divided = {p.name for p in view.problem.graph.parameters if p.tp_dim is not None}
    left_out = divided.union(stage.sequence_parallel())
    return {name: size for name, size in stage.trained().items() if name not in left_out}


def _merged(stages: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sizes by name; of a parameter that several stages hold the first counts."""
    found: dict[str, int] = {}
    for sizes in stages:
        for name, size in sizes.items():
            found.setdefault(name, size)
    return found


def _joined(stages: Iterable[Mapping[str, int]]) -> list[int]:
    return list(_merged(stages).values())


def bucket_sizes(sizes: Sequence[int], bucket_bytes: int) -> Iterator[int]:
    """Bytes of the buckets into which the executor's `reduce_gradients` packs gradients.

    A bucket ends with a flag for each gradient.
    """
    for elements, gradients in filled(sizes, bucket_bytes):
        yield STORED_BYTES * (elements + gradients)


def filled(sizes: Sequence[int], bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Elements and gradients of each bucket, which is full once it holds `bucket_bytes`."""
    held, gradients = 0, 0
    for size in sizes:
        held, gradients = held + size, gradients + 1
        if STORED_BYTES * held >= bucket_bytes:
            yield held, gradients
            held = gradients = 0
    if gradients:
        yield held, gradients


def flags_cost(problem: Problem, candidate: Candidate, gradients: int) -> CollectiveCost:
    """Of telling all replicas which of so many gradients some rank's backward reached."""
    nodes = group_nodes(candidate, AXIS, problem.devices_per_node)
    size_bytes, ranks = STORED_BYTES * gradients, candidate.dp_replicate
    return problem.collective("all_reduce", size_bytes, ranks, nodes, by_data=True)
