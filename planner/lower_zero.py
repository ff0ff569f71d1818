"""Megatron's data parallelism, and the choice of the kind a candidate asks for.

`CopiedParameters`: every rank holds all parameters in the compute precision and accumulates their
gradients whole; they are reduced once a step, beside the last backward pass. With zero=1 each rank
then owns a part: gradients are reduce-scattered, the optimizer works on the part, and the
parameters are gathered at the start of the next step, beside its first forward passes. Experts
have fewer replicas than the rest and are reduced among those.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054); Megatron-Core's DistributedOptimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower_data import (
    ACCUMULATE,
    ACCUMULATED,
    DataParallel,
    Sharded,
    memory_work,
)
from claw_plan.planner.lower_encoded import EncodedShards
from claw_plan.planner.lower_ordered import Ordered
from claw_plan.planner.lower_whole import Whole
from claw_plan.planner.placement import expert_groups, replica_nodes
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.planner.shards import FIRST, Place, ShardSizes, local_numel
from claw_plan.planner.stage_streams import StageStreams
from claw_plan.profiles.work import DTYPE_BYTES

DENSE, EXPERT = 0, 1


class CopiedParameters(DataParallel):
    """Every rank holds all parameters; zero=1 shards what the optimizer keeps."""

    is_executed = False

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
        super().__init__(problem, shards, candidate, streams, start, stop, place)
        self._trainer = problem.trainer
        self._is_sharded = candidate.zero == 1 and candidate.shard_ranks > 1
        # Where only some of the replicas share the states, gradients are summed over all of them.
        self._is_partial = self._is_sharded and candidate.dp_replicate > 1
        self._elements = self._count(candidate.tp)
        self._replicas = self._find_replicas()
        self._arrived: dict[int, int] = {}
        self._is_first = True
        self._reduced_in_pass = False

    def _count(self, tp: int) -> dict[int, tuple[int, int]]:
        """Trainable elements of each unit of the stage, dense ones and experts'."""
        found = {unit: [0, 0] for unit in range(self._start, self._stop)}
        for _, parameter in self._parameters:
            if parameter.trainable:
                own = [unit for unit in parameter.units if unit in found]
                kind = EXPERT if parameter.is_expert else DENSE
                found[min(own, default=self._start)][kind] += local_numel(parameter, tp)
        return {unit: (dense, expert) for unit, (dense, expert) in found.items()}

    def _find_replicas(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(ranks, nodes) that hold the same dense parameters, and the same experts."""
        candidate, per_node = self._candidate, self._problem.devices_per_node
        dense = candidate.dp * candidate.cp, replica_nodes(candidate, per_node)
        return dense, expert_groups(candidate, per_node)[1]

    @override
    def sequence_parallel(self) -> dict[str, int]:
        # The reference transformer is traced divided: what it holds whole are norms and biases.
        found = super().sequence_parallel()
        whole = {p.name for p in self._trained() if len(p.shape) == 1}
        return {name: size for name, size in found.items() if name in whole}

    @override
    def begin_forward(self, units: Sequence[int]) -> None:
        self.by_unit = self._is_first and self._is_sharded and self._trainer.gathers_beside
        if self.by_unit:
            for unit in units:
                self._arrived[unit] = self._exchange_unit(
                    "all_gather", self._gathered_bytes(unit), unit, [], beside=True
                )

    def _gathered_bytes(self, unit: int) -> int:
        """Of an element: blocks whose products take fp8 are gathered as such."""
        is_block = 0 < unit < len(self._problem.graph.units) - 1
        if is_block and self._trainer.gathers_float8:
            return DTYPE_BYTES["float8"]
        return self._problem.training.compute_bytes

    @override
    def before_unit(self, unit: int, backward: bool) -> None:
        task = self._arrived.pop(unit, -1)
        if task >= 0:
            self._streams.wait_for([task])

    @override
    def end_forward(self) -> None:
        self._is_first = self.by_unit = False

    @override
    def begin_backward(self, units: Sequence[int], is_last: bool) -> None:
        self.by_unit = is_last and self._trainer.reduces_beside and self._replicas[DENSE][0] > 1

    @override
    def after_backward(self, unit: int, is_last: bool) -> None:
        if self.by_unit:
            self._reduce(unit, [self._streams.last_task], beside=True)

    @override
    def end_backward(self, is_last: bool) -> None:
        self._reduced_in_pass = self._reduced_in_pass or self.by_unit
        self.by_unit = False
        if not self._trainer.fuses_accumulation and self._has_gradients:
            self._accumulate()
        self._has_gradients = True

    def _accumulate(self) -> None:
        """A microbatch's gradients are added to those before: two read, one written."""
        elements = sum(sum(counts) for counts in self._elements.values())
        size = 3 * self._trainer.gradient_bytes * elements
        work = memory_work(ACCUMULATE, size, "backward")
        ns = round(self._problem.cost.op(work).ns * self._trainer.memory_scale)
        if ns:
            task = self._streams.run("backward", ACCUMULATED, ns)
            self._streams.parts[task] = ({"memory": float(ns)}, 0)

    @override
    def step_optimizer(self) -> None:
        units = range(self._start, self._stop)
        if not self._reduced_in_pass:
            for unit in units:
                self._reduce(unit, [], beside=False)
        self.wait_for_reductions()
        owners = self._owners()
        elements = sum(
            -(-counts[kind] // owners[kind])
            for counts in self._elements.values()
            for kind in (DENSE, EXPERT)
        )
        self._optimize(elements)
        if self._is_sharded and not self._trainer.gathers_beside:
            for unit in units:
                self._exchange_unit(
                    "all_gather", self._gathered_bytes(unit), unit, [], beside=False
                )
        lingering = round(self._trainer.zero_rank_ns * (owners[DENSE] - 1))
        if lingering and self._start == 0:
            task = self._streams.run("dp_comm", "each rank's part", lingering)
            self._streams.parts[task] = ({"zero": float(lingering)}, 0)

    def _owners(self) -> tuple[int, int]:
        """Ranks that share the optimizer's states of dense parameters, and of experts."""
        if not self._is_sharded:
            return 1, 1
        dense = self._candidate.shard_ranks
        return dense, min(dense, self._replicas[EXPERT][0])

    def _reduce(self, unit: int, needs: Sequence[int], *, beside: bool) -> None:
        whole = not self._is_sharded or self._is_partial
        op = "all_reduce" if whole else "reduce_scatter"
        self._exchange_unit(op, self._trainer.gradient_bytes, unit, needs, beside=beside)

    def _exchange_unit(
        self, op: str, element_bytes: int, unit: int, needs: Sequence[int], *, beside: bool
    ) -> int:
        """A collective over all replicas of what the unit holds; the last task, -1 if none."""
        task = -1
        streams = self._streams
        groups = self._replicas
        if op == "all_gather" and self._is_partial:
            groups = tuple((n, self._shard_nodes) for n in self._owners())  # type: ignore[assignment]
        for (ranks, nodes), elements in zip(groups, self._elements[unit], strict=True):
            if ranks == 1 or not elements:
                continue
            cost = self._problem.collective(
                op, element_bytes * elements, ranks, nodes, by_data=True
            )
            name = f"{op} unit {unit}"
            if not beside:
                task = streams.exchange("dp_comm", name, cost)
                continue
            stream = streams.gather if op == "all_gather" else streams.reduce
            task = streams.background(stream, "dp_comm", name, cost, 0, needs)
            if op != "all_gather":
                self._pending_reductions.append(task)
        return task


def make_data_parallel(
    problem: Problem,
    shards: ShardSizes,
    candidate: Candidate,
    streams: StageStreams,
    start: int,
    stop: int,
    place: Place = FIRST,
) -> DataParallel:
    """The kind the candidate, the precision and the trainer ask for."""
    kind: type[DataParallel]
    if candidate.schedule in ASYNCHRONOUS:
        kind = Whole
    elif problem.trainer.keeps_compute_copy and (candidate.zero < 2 or candidate.dp_shard == 1):
        kind = CopiedParameters
    elif candidate.shard_ranks > 1 or problem.training.is_mixed:
        kind = Sharded if candidate.codec == "none" else EncodedShards
    else:
        kind = Ordered if candidate.bucket_order else Whole
    return kind(problem, shards, candidate, streams, start, stop, place)
