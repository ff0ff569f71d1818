"""What each unit of a stage keeps in memory: its traced cost as the trainer and recompute have it.

The trace says what autograd would keep of plain kernels. Megatron keeps less in three places and
more in one (Korthikanti et al. 2022, arXiv 2205.05198, sections 4 and 5):

- sequence parallelism keeps a rank's part of what it gathers, and gathers it again in backward;
- the loss overwrites its fp32 scores with their exponentials and then with their gradients
  (megatron/core/tensor_parallel/cross_entropy.py);
- selective recompute keeps nothing of the softmax and what follows it;
- trainers without a fused attention kernel train with dropout, whose masks are a byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import Amount, Exchange, Op, UnitCost
from claw_plan.planner.pass_time import makes_weights
from claw_plan.planner.problem import Problem, variant_of
from claw_plan.profiles.work import DTYPE_BYTES

GEMM_DIMS = 4
"""Of a product, `profiles.work.OP_KINDS`; attention and convolutions have more."""

PRODUCTS = ("aten.mm", "aten.addmm", "claw_plan.grouped_mm")
ATTENTION, SOFTMAX = "claw_plan.attention", "aten._softmax"
CHEAP = ("aten.glu", "aten.gelu", "aten.native_layer_norm")
"""What Megatron's recompute of norms and of experts' activations runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMemory:
    """Bytes of one unit for one microbatch.

    `holds` from forward to backward, its input included; `remade` before its backward, by
    recompute; peaks beyond those. `late` is kept beside `holds` while the gradients of weights
    wait: the gradients that their products read.
    """

    holds: int
    remade: int
    forward_peak: int
    backward_peak: int
    late: int = 0


def together(units: Sequence[UnitMemory], gradients: Sequence[int]) -> UnitMemory:
    """Units that run one after the other as one unit with the same peaks.

    `gradients` are the bytes that each unit's backward makes. Whoever adds all of them to the
    peak of the backward is told of it without those that were not made yet.
    """
    forward = backward = held = unmade = 0
    for unit, made in zip(units, gradients, strict=True):
        held += unit.holds
        forward = max(forward, held + unit.forward_peak)
        backward = max(backward, held + unit.remade + unit.backward_peak - unmade)
        unmade += made
    return UnitMemory(
        holds=held,
        remade=0,
        forward_peak=forward - held,
        backward_peak=backward - held,
        late=sum(unit.late for unit in units),
    )


def unit_memory(problem: Problem, candidate: Candidate, unit: int) -> UnitMemory:
    """What the unit keeps under the candidate."""
    graph, trainer = problem.graph, problem.trainer
    cost = graph.cost(unit, variant_of(candidate), candidate.tp)
    last = len(graph.units) - 1
    at = _at(candidate)
    saved, forward_peak, backward_peak = (
        at(cost.saved_bytes),
        at(cost.forward_peak_bytes),
        at(cost.backward_peak_bytes),
    )
    if trainer.loss_in_place and unit == last:
        saved, forward_peak, backward_peak = _loss_in_place(cost, at, problem)
    if trainer.keeps_compute_copy and candidate.sequence_parallel:
        gathered = _exchanged(cost, at, "all_gather", "tp")
        saved -= sum(gathered) * (candidate.tp - 1) // candidate.tp if unit != last else 0
        backward_peak += max(gathered, default=0)
    is_block = 0 < unit < last
    if candidate.cp > graph.cp and is_block:  # the stand-in of a published run
        saved -= _passed_on(cost, at, candidate.cp)
    if is_block and not trainer.fused_attention:
        saved += _mask_bytes(cost, at, problem.training.compute_bytes)
    remade = min(saved, _remade(cost, at, candidate.recompute, saved)) if is_block else 0
    return UnitMemory(
        holds=at(cost.input_bytes) + saved - remade,
        remade=remade,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        late=_late(cost, at),
    )


def _late(cost: UnitCost, at: Callable[[Amount], int]) -> int:
    """What arrives at the products that make gradients of weights: batch x outputs x rows."""
    total = 0
    for op in cost.backward:
        if isinstance(op, Op) and len(op.dims) == GEMM_DIMS and makes_weights(op):
            batch, outputs, _, rows = (at(dim) for dim in op.dims)
            # fp4 has no whole number of bytes: a byte is a little too much, the safe side.
            total += batch * outputs * rows * DTYPE_BYTES.get(op.dtype, 1)
    return total


def _at(candidate: Candidate) -> Callable[[Amount], int]:
    return lambda amount: amount.at(candidate.microbatch_size, candidate.tp)


def _exchanged(cost: UnitCost, at: Callable[[Amount], int], op: str, axis: str) -> list[int]:
    """Bytes of each collective of that kind in the forward pass."""
    return [
        at(item.bytes)
        for item in cost.forward
        if isinstance(item, Exchange) and item.op == op and item.axis == axis
    ]


def _passed_on(cost: UnitCost, at: Callable[[Amount], int], cp: int) -> int:
    """What the trace keeps and context parallelism does not.

    A ring keeps a rank's own keys and values. Where heads are exchanged, attention's result is
    kept once, as the exchange back leaves it (TransformerEngine's AttnFuncWithCPAndQKVOA2A).
    """
    others = sum(_exchanged(cost, at, "all_gather", "cp")) * (cp - 1) // cp
    return others + sum(_exchanged(cost, at, "all_to_all", "cp")[-1:])


def _written(cost: UnitCost, at: Callable[[Amount], int], targets: tuple[str, ...]) -> int:
    """Bytes that these operators of the forward pass write."""
    return sum(
        at(item.written_bytes)
        for item in cost.forward
        if isinstance(item, Op) and item.target in targets
    )


def _loss_in_place(
    cost: UnitCost, at: Callable[[Amount], int], problem: Problem
) -> tuple[int, int, int]:
    """Saved bytes and peaks of an epilogue whose loss overwrites its scores.

    Without a fused kernel their exponentials get a buffer of their own.
    """
    ops = [item for item in cost.forward if isinstance(item, Op)]
    head = max(i for i, op in enumerate(ops) if op.target in PRODUCTS)
    logits = at(ops[head].written_bytes)
    compute = problem.training.compute_bytes
    scores = logits // compute * max(compute, problem.trainer.score_bytes)
    kept = sum(at(op.written_bytes) for op in ops[:head])
    buffers = 1 if problem.trainer.fused_loss else 2
    return kept, logits + buffers * scores, scores + logits


def _mask_bytes(cost: UnitCost, at: Callable[[Amount], int], compute_bytes: int) -> int:
    """Masks of dropout after the softmax, after attention and after the MLP."""
    elements = _written(cost, at, (SOFTMAX,)) + 2 * at(cost.input_bytes)
    return elements // compute_bytes


def _remade(cost: UnitCost, at: Callable[[Amount], int], mode: str, saved: int) -> int:
    """Of what a block saves, what recompute makes again instead."""
    if mode == "full":
        return saved
    if mode == "attention":
        # Softmax's result, the same after dropout, and the mask of half as many bytes.
        return _written(cost, at, (SOFTMAX,)) * 5 // 2
    if mode == "half":
        # torchtitan keeps the results of attention and of every other product.
        kept = _written(cost, at, PRODUCTS) // 2 + _written(cost, at, (ATTENTION,))
        return max(0, saved - kept)
    return _written(cost, at, CHEAP) if mode == "moe" else 0
