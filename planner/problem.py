"""`Problem`: what is given when a candidate is judged: model, cluster, costs and settings.

Everything after the trace and before the plan takes a Problem and a Candidate. Times of units
are worked out here once for each (unit, microbatch, tensor-parallel degree) and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.expert_graph import share_experts
from claw_plan.planner.graph import PLAIN, SEQUENCE, TENSOR, ModelGraph, Op
from claw_plan.planner.pass_time import (
    INPUTS,
    WEIGHTS,
    Groups,
    PassTime,
    PassTimer,
    exchange_scale,
    items_of,
    kernel_part,
    kernel_scale,
)
from claw_plan.profiles.cluster import Cluster, Device, Node
from claw_plan.profiles.cost import CollectiveCost, CostModel, scaled
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.work import DTYPE_BYTES, CollectiveWork, OpWork

STORED_BYTES = 4
"""Bytes of a stored parameter, gradient or optimizer state element: fp32 whatever the compute
precision (executor/compile.py)."""

OPTIMIZER_STATES = {"adamw": 2, "lamb": 2, "sgd": 0}
"""fp32 tensors an optimizer keeps for each parameter: two moments, or none (no momentum)."""


OPTIMIZER_BYTES = {"adamw": 28, "lamb": 116, "sgd": 12}
"""Bytes moved for each fp32 parameter in a step. AdamW reads parameter, gradient and two moments
and writes all but the gradient (7 x 4); SGD reads two and writes one (3 x 4). LAMB is several
kernels (executor.optimizers.lamb): moments (32), their quotient (44), decay (12), norms (8), the
scaled step (20)."""

WHOLE_PARAMETERS = {"tp": 1, "dp_shard": 1, "cp": 1, "ep": 1, "offload": "none"}
"""With these knobs every rank that updates a parameter holds all of it, as LAMB's norms need."""


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

    `memory_headroom` is the fraction of each device's memory that a plan must leave free,
    `clip_norm` the largest norm of all gradients, None for any.
    """

    global_batch: int
    seq_len: int | None
    precision: str
    optimizer: str
    memory_headroom: float
    seed: int = 0
    clip_norm: float | None = None

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element in the precision of the kernels."""
        return DTYPE_BYTES[self.precision]

    @property
    def is_mixed(self) -> bool:
        """Whether kernels run in a lower precision than parameters are stored in."""
        return self.precision != "float32"


def variant_of(candidate: Candidate) -> str:
    """Which of a unit's costs a candidate uses."""
    if candidate.tp == 1:
        return PLAIN
    return SEQUENCE if candidate.sequence_parallel else TENSOR


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Model, cluster, cost model and training settings.

    `is_apart` asks for a step in which replicas of 0/1 Adam do not meet.
    """

    graph: ModelGraph
    cluster: Cluster
    cost: CostModel
    training: Training
    trainer: Trainer = NEUTRAL
    is_apart: bool = False
    _passes: dict[tuple[int, str, int, int, str, Groups], PassTime] = field(
        default_factory=dict, init=False
    )
    _collectives: dict[tuple[CollectiveWork, bool], CollectiveCost] = field(
        default_factory=dict, init=False
    )
    _parts: dict[int, Problem] = field(default_factory=dict, init=False)
    _sharing: dict[int, Problem] = field(default_factory=dict, init=False)

    @cached_property
    def device(self) -> Device:
        """The slowest kind of device: every rank of a plan is taken to be one."""
        devices = (node.device for node in self.cluster.nodes)
        return min(devices, key=lambda d: d.peak_flops_per_s.get(self.training.precision, 0.0))

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all nodes are equal."""
        first, *others = self.cluster.nodes
        return all(node is first or node == first for node in others)

    @cached_property
    def hosts(self) -> tuple[Node, ...]:
        """The node of each host: of `devices_per_node` neighbours, so large nodes are several."""
        devices = [node for node in self.cluster.nodes for _ in range(node.device_count)]
        return tuple(devices[:: self.devices_per_node])

    def among(self, hosts: Sequence[int]) -> Problem:
        """What ranks on these hosts alone, of all, take for their work."""
        if self.is_uniform:
            return self
        nodes = {id(self.hosts[number]): self.hosts[number] for number in hosts}
        return self._with_cost(self.cost.among([*nodes.values()]))

    @cached_property
    def quickest(self) -> Problem:
        """With each piece of work where it is done soonest: no plan takes less."""
        return self if self.is_uniform else self._with_cost(self.cost.quickest())

    def for_ep(self, ep: int) -> Problem:
        """With experts that so many ranks share; raises PlanError where they cannot."""
        if ep == self.graph.ep:
            return self
        if ep not in self._sharing:
            self._sharing[ep] = replace(self, graph=share_experts(self.graph, ep))
        return self._sharing[ep]

    def with_batch(self, batch: int) -> Problem:
        """With another number of samples a step; passes and exchanges take what they took."""
        return self._beside(training=replace(self.training, global_batch=batch))

    @cached_property
    def apart(self) -> Problem:
        """The same of steps in which replicas do not meet."""
        return self._beside(is_apart=True)

    def _beside(self, **changes: Any) -> Problem:
        """With the times that are known already."""
        other = replace(self, **changes)
        for known in ("_passes", "_collectives"):
            object.__setattr__(other, known, getattr(self, known))
        return other

    def _with_cost(self, cost: CostModel) -> Problem:
        if cost is self.cost:
            return self
        return self._parts.setdefault(id(cost), replace(self, cost=cost))

    @cached_property
    def devices_per_node(self) -> int:
        """Devices of the smallest node."""
        return min(node.device_count for node in self.cluster.nodes)

    def pass_time(
        self, unit: int, variant: str, batch: int, tp: int, backward: bool, others: Groups = ()
    ) -> PassTime:
        """Time of one pass of a unit for one microbatch; `others` are as `placement.groups_of`."""
        kind = "backward" if backward else "forward"
        return self._pass(unit, variant, batch, tp, kind, others)

    def part_time(
        self, unit: int, variant: str, batch: int, tp: int, part: str, others: Groups = ()
    ) -> PassTime:
        """Time of a part of a backward, INPUTS or WEIGHTS, of a unit for one microbatch."""
        return self._pass(unit, variant, batch, tp, part, others)

    def recompute_time(
        self,
        unit: int,
        variant: str,
        batch: int,
        tp: int,
        mode: str = "full",
        others: Groups = (),
    ) -> PassTime:
        """Time of what activation checkpointing runs again before the unit's backward."""
        return self._pass(unit, variant, batch, tp, mode, others)

    def recomputed_units(self, candidate: Candidate, start: int, stop: int) -> range:
        """Of a stage's units those that run again before their backward."""
        first, end = max(start, 1), min(stop, len(self.graph.units) - 1)
        return range(first, first + candidate.recomputed(max(0, end - first)))

    def _pass(
        self, unit: int, variant: str, batch: int, tp: int, kind: str, others: Groups
    ) -> PassTime:
        structure = self.graph.units[unit].structure
        key = (structure, variant, batch, tp, kind, others)
        known = self._passes.get(key)
        if known is None:
            known = self._passes[key] = self._time_pass(*key)
        return known

    def _time_pass(
        self, structure: int, variant: str, batch: int, tp: int, kind: str, others: Groups
    ) -> PassTime:
        cost, trainer = self.graph.costs_at(variant, tp)[structure], self.trainer
        groups = {"tp": (tp, -(-tp // self.devices_per_node))}
        groups |= {axis: (size, nodes) for axis, size, nodes in others}
        timer = PassTimer(host_ns=trainer.host_ns * self.graph.launches_per_op)
        for item, share in items_of(cost, kind, trainer):
            if isinstance(item, Op):
                work = op_work(item, batch, tp, kind in ("backward", INPUTS, WEIGHTS))
                answer = self.cost.op(work)
                part = kernel_part(work)
                scale = share * kernel_scale(trainer, part)
                timer.kernel(answer.ns * scale, part, answer.source, share)
            else:
                size, nodes = groups[item.axis]
                found = self.collective(item.op, item.bytes.at(batch, tp), size, nodes)
                factor = share * exchange_scale(trainer, item.axis)
                timer.exchange(scaled(found, factor), item.axis)
        return timer.time()

    def collective(
        self,
        op: str,
        size_bytes: int,
        group_size: int,
        nodes: int,
        *,
        by_data: bool = False,
        beside: int = 0,
    ) -> CollectiveCost:
        """Cost of a collective with this cluster's library; `by_data` for data parallelism's.

        `beside` ranks of a node do the same at once, 0: all of them.
        """
        work = CollectiveWork(
            op=op,
            bytes=size_bytes,
            group_size=group_size,
            nodes=nodes,
            backend=self.cluster.backend,
            concurrent=beside,
        )
        key = (work, by_data)
        known = self._collectives.get(key)
        if known is None:
            factor = self.trainer.dp_scale if by_data else 1.0
            cost = scaled(self.cost.collective(work), factor)
            known = self._collectives[key] = replace(cost, moves=(work,))
        return known

    def message(self, size_bytes: int, nodes: int) -> CollectiveCost:
        """Cost of a message between two ranks.

        On gloo alone on its host's way out, which tasks divide (`host_links`); a GPU's part of the
        NICs is its own whatever others do.
        """
        alone = nodes > 1 and self.cluster.backend == "gloo"
        return self.collective("send", size_bytes, 2, nodes, beside=1 if alone else 0)

    def step_overhead_ns(self) -> int:
        """What a step costs beside its kernels and traffic."""
        return max(self.cost.step_overhead_ns(), round(self.trainer.step_ns))

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
