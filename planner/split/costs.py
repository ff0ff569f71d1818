"""Nanoseconds of an operator under a split and of a change of state, forward and backward.

A kernel's local work is the traced work with the divided dimension (or the flops and bytes) a
`degree`th, asked of the cost model at that shape; no kernel is shorter than its launch. Backward,
a product is one product for each operand with a gradient, attention five products instead of two
(Dao et al. 2022), and what is bound by bytes moves as many again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from claw_plan.planner.op_work import Work
from claw_plan.planner.split.axes import Axis
from claw_plan.planner.split.graph import FlowOp, FlowTensor, SplitGraph
from claw_plan.planner.split.states import Change, State
from claw_plan.profiles.work import OpWork

CONV_DIMS = {"batch": 0, "row": 1, "column": 2, "channels": 2, "groups": 2}
GEMM_DIMS = {"batch": 0, "rows": 1, "column": 2, "row": 3}
"""Which of the dims of `OpWork` an axis divides."""

ATTENTION_BACKWARD = Fraction(5, 2)


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """`op_ns` times one kernel, `collective_ns` one collective (name, full bytes) of the group.

    `gradient_ns` is a parameter's gradient summed over the group: once a step, with all others in
    one message, so without a latency of its own.
    """

    op_ns: Callable[[OpWork], int]
    collective_ns: Callable[[str, int], int]
    gradient_ns: Callable[[int], int]

    def way_ns(
        self,
        op: FlowOp,
        graph: SplitGraph,
        needs: tuple[State, ...],
        gives: tuple[State, ...],
        axis: Axis | None,
        degree: int,
    ) -> int:
        """Both passes of the operator with its tensors in these states."""
        if not op.works:
            return 0
        states = [*zip(op.inputs, needs, strict=True), *zip(op.outputs, gives, strict=True)]
        share = _share_of_bytes(graph, states, degree)
        is_divided = any(state.kind == "cut" for _, state in states)
        trained = [n for n in op.inputs if graph.tensors[n].needs_grad]
        has_backward = bool(trained) and any(graph.tensors[n].needs_grad for n in op.outputs)
        total = 0
        for work in op.works:
            local = _local(op, work, axis, degree if is_divided else 1, share)
            total += self.op_ns(local)
            if has_backward:
                total += sum(map(self.op_ns, _backward(local, len(trained))))
        return total

    def change_ns(self, change: Change, tensor: FlowTensor, degree: int) -> int:
        """Both passes of a change of state."""
        if tensor.parameter:
            return self.gradient_ns(tensor.num_bytes) if change.backward else 0
        total = 0
        for op in change:
            if op:
                size = tensor.num_bytes // (degree if op == "all_to_all" else 1)
                total += self.collective_ns(op, size)
        return total


def _share_of_bytes(graph: SplitGraph, states: list[tuple[int, State]], degree: int) -> Fraction:
    """The part of its tensors' bytes that a rank's kernel sees."""
    whole = sum(graph.tensors[number].num_bytes for number, _ in states)
    local = Fraction(0)
    for number, state in states:
        local += Fraction(graph.tensors[number].num_bytes, degree if state.kind == "cut" else 1)
    return local / whole if whole else Fraction(1)


def _local(op: FlowOp, work: Work, axis: Axis | None, degree: int, share: Fraction) -> OpWork:
    dims = list(work.dims)
    if degree > 1 and axis is not None:
        if work.kind == "gemm" and axis.label in GEMM_DIMS:
            place = GEMM_DIMS[axis.label]
            dims[place] = -(-dims[place] // degree)
        elif work.kind == "conv" and axis.label in CONV_DIMS:
            dims[CONV_DIMS[axis.label]] = -(-dims[CONV_DIMS[axis.label]] // degree)
        elif work.kind == "attention":
            dims[1] = -(-dims[1] // degree)
            dims[2] = -(-dims[2] // degree)
    return OpWork(
        kind=work.kind,
        dims=tuple(dims),
        dtype=work.dtype,
        flops=-(-work.flops // degree),
        bytes=int((work.read_bytes + work.written_bytes) * share),
        target=op.name,
    )


def _backward(forward: OpWork, trained: int) -> Iterator[OpWork]:
    """Kernels of the derivative, as far as the forward tells."""
    if forward.kind == "attention":
        flops = int(forward.flops * ATTENTION_BACKWARD)
        yield _like(forward, forward.dims, flops, forward.bytes * 2)
    elif forward.kind == "gemm":
        batch, m, n, k = forward.dims
        for dims in ((batch, m, k, n), (batch, k, n, m))[: max(1, min(2, trained))]:
            yield _like(forward, dims, forward.flops, forward.bytes)
    elif forward.kind == "conv":
        for _ in range(min(2, trained)):
            yield _like(forward, forward.dims, forward.flops, forward.bytes)
    else:
        yield _like(forward, (), 0, forward.bytes)


def _like(forward: OpWork, dims: tuple[int, ...], flops: int, size: int) -> OpWork:
    return OpWork(
        kind=forward.kind,
        dims=dims,
        dtype=forward.dtype,
        flops=flops,
        bytes=size,
        phase="backward",
        target=forward.target,
    )
