"""`Problem`: what is given when a candidate is judged: model, cluster, costs and settings.

Everything after the trace and before the plan takes a Problem and a Candidate. Times of units
are worked out here once for each (unit, microbatch, tensor-parallel degree) and kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import PLAIN, SEQUENCE, TENSOR, Exchange, ModelGraph, Op
from claw_plan.profiles.cluster import Cluster, Device
from claw_plan.profiles.cost import CollectiveCost, CostModel
from claw_plan.profiles.work import DTYPE_BYTES, CollectiveWork, OpWork

STORED_BYTES = 4
"""Bytes of a stored parameter, gradient or optimizer state element: fp32 whatever the compute
precision (executor/compile.py)."""

OPTIMIZER_STATES = {"adamw": 2, "sgd": 0}
"""fp32 tensors an optimizer keeps for each parameter: two moments, or none (no momentum)."""


OPTIMIZER_BYTES = {"adamw": 28, "sgd": 12}
"""Bytes moved for each fp32 parameter in a step. AdamW reads parameter, gradient and two moments
and writes all but the gradient (7 x 4); SGD reads two and writes one (3 x 4)."""


def optimizer_work(optimizer: str, elements: int) -> OpWork:
    """The optimizer's step over so many fp32 elements."""
    return OpWork(
        kind="optimizer",
        dims=(),
        dtype="float32",
        flops=0,
        bytes=OPTIMIZER_BYTES[optimizer] * elements,
        target=optimizer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, the same for every candidate.

    `memory_headroom` is the fraction of each device's memory that a plan must leave free.
    """

    global_batch: int
    seq_len: int | None
    precision: str
    optimizer: str
    memory_headroom: float
    seed: int = 0

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the precision of the kernels."""
        return DTYPE_BYTES[self.precision]

    @property
    def is_mixed(self) -> bool:
        """Whether kernels run in a lower precision than parameters are stored in."""
        return self.precision != "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """A forward or backward of one unit: computations, each followed by an exchange or None.

    `source_ns` sums the computation by what its cost rests on.
    """

    steps: tuple[tuple[int, CollectiveCost | None], ...]
    source_ns: dict[str, int]

    @property
    def compute_ns(self) -> int:
        """Kernels alone."""
        return sum(compute for compute, _ in self.steps)

    @property
    def exchange_ns(self) -> int:
        """Tensor-parallel collectives alone, on idle links."""
        return sum(exchange.alone_ns for _, exchange in self.steps if exchange is not None)

    @property
    def total_ns(self) -> int:
        """Both, one after the other."""
        return self.compute_ns + self.exchange_ns


def variant_of(candidate: Candidate) -> str:
    """Which of a unit's costs a candidate uses."""
    if candidate.tp == 1:
        return PLAIN
    return SEQUENCE if candidate.sequence_parallel else TENSOR


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Model, cluster, cost model and training settings."""

    graph: ModelGraph
    cluster: Cluster
    cost: CostModel
    training: Training
    _passes: dict[tuple[int, str, int, int, str], PassTime] = field(default_factory=dict)
    _collectives: dict[CollectiveWork, CollectiveCost] = field(default_factory=dict)

    @cached_property
    def device(self) -> Device:
        """The slowest kind of device: every rank of a plan is taken to be one."""
        devices = (node.device for node in self.cluster.nodes)
        return min(devices, key=lambda d: d.peak_flops_per_s.get(self.training.precision, 0.0))

    @cached_property
    def devices_per_node(self) -> int:
        """Devices of the smallest node."""
        return min(node.device_count for node in self.cluster.nodes)

    def pass_time(self, unit: int, variant: str, batch: int, tp: int, backward: bool) -> PassTime:
        """Time of one pass of a unit for one microbatch."""
        return self._pass(unit, variant, batch, tp, "backward" if backward else "forward")

    def recompute_time(self, unit: int, variant: str, batch: int, tp: int) -> PassTime:
        """Time of what activation checkpointing runs again before the unit's backward."""
        return self._pass(unit, variant, batch, tp, "recompute")

    def _pass(self, unit: int, variant: str, batch: int, tp: int, kind: str) -> PassTime:
        structure = self.graph.units[unit].structure
        key = (structure, variant, batch, tp, kind)
        known = self._passes.get(key)
        if known is None:
            known = self._passes[key] = self._time_pass(*key)
        return known

    def _time_pass(self, structure: int, variant: str, batch: int, tp: int, kind: str) -> PassTime:
        cost = self.graph.costs[variant][structure]
        backward = kind == "backward"
        items = cost.backward if backward else cost.forward
        if kind == "recompute":
            items = items[: cost.num_recomputed]
        steps: list[tuple[int, CollectiveCost | None]] = []
        sources: dict[str, int] = {}
        compute_ns = 0
        for item in items:
            if isinstance(item, Op):
                answer = self.cost.op(op_work(item, batch, tp, backward))
                compute_ns += answer.ns
                sources[answer.source] = sources.get(answer.source, 0) + answer.ns
            else:
                steps.append((compute_ns, self._exchange(item, batch, tp)))
                compute_ns = 0
        steps.append((compute_ns, None))
        return PassTime(steps=tuple(steps), source_ns=sources)

    def _exchange(self, exchange: Exchange, batch: int, tp: int) -> CollectiveCost:
        nodes = -(-tp // self.devices_per_node)
        return self.collective(exchange.op, exchange.bytes.at(batch, tp), tp, nodes)

    def collective(self, op: str, size_bytes: int, group_size: int, nodes: int) -> CollectiveCost:
        """Cost of a collective with this cluster's library."""
        work = CollectiveWork(
            op=op,
            bytes=size_bytes,
            group_size=group_size,
            nodes=nodes,
            backend=self.cluster.backend,
        )
        known = self._collectives.get(work)
        if known is None:
            known = self._collectives[work] = self.cost.collective(work)
        return known

    def memory_op_ns(self, size_bytes: int) -> int:
        """Time of a kernel that only moves bytes, such as a copy or a cast."""
        work = OpWork(kind="memory", dims=(), dtype="float32", flops=0, bytes=size_bytes)
        return self.cost.op(work).ns if size_bytes else 0


def op_work(op: Op, batch: int, tp: int, backward: bool) -> OpWork:
    """The key under which a traced op's cost is looked up at a size."""
    return OpWork(
        kind=op.kind,
        dims=tuple(dim.at(batch, tp) for dim in op.dims),
        dtype=op.dtype,
        flops=op.flops.at(batch, tp),
        bytes=op.read_bytes.at(batch, tp) + op.written_bytes.at(batch, tp),
        phase="backward" if backward else "forward",
        target=op.target,
    )
