"""What changes of a graph when its linear layers multiply in fp8, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.graph import PLAIN, ModelGraph, Op
from claw_plan.planner.low_precision import QUANTISE, with_linear_dtype
from claw_plan.planner.reference_model import Division
from claw_plan.planner.reference_trace import trace_reference
from claw_plan.profiles.training_row import Dimensions, MixtureOfExperts

DIMS = Dimensions(
    layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=1024, seq_len=32
)
TOKENS = 3 * 32


@pytest.fixture(scope="module")
def dense() -> ModelGraph:
    return trace_reference(DIMS, Division(fused_attention=False), "bfloat16")


def ops(graph: ModelGraph, unit: int, *, backward: bool = False) -> list[Op]:
    cost = graph.cost(unit, PLAIN)
    return [x for x in (cost.backward if backward else cost.forward) if isinstance(x, Op)]


def quantised_bytes(graph: ModelGraph, unit: int, *, backward: bool = False) -> list[int]:
    return [
        op.read_bytes.at(3) + op.written_bytes.at(3)
        for op in ops(graph, unit, backward=backward)
        if op.target == QUANTISE
    ]


def test_products_with_weights_change_and_nothing_else(dense):
    lower = with_linear_dtype(dense, "float8")
    for backward in (False, True):
        before = ops(dense, 1, backward=backward)
        after = [op for op in ops(lower, 1, backward=backward) if op.target != QUANTISE]
        assert [replace(op, dtype="bfloat16") for op in after] == before
        changed = {op.target for op in after if op.dtype == "float8"}
        assert changed == {"aten.mm"}  # attention's own are aten.bmm
        assert sum(op.dtype == "float8" for op in after) == (8 if backward else 4)
    for end in (0, 3):
        assert lower.cost(end) == dense.cost(end)
    assert lower.flops(5) == dense.flops(5)


def test_every_operand_is_quantised_once_a_pass(dense):
    """Four bytes an element of the input: qkv h, out h, up h, down 4h a token."""
    lower = with_linear_dtype(dense, "float8")
    assert quantised_bytes(lower, 1) == [4 * TOKENS * width for width in (64, 64, 64, 256)]
    # Backward each gradient enters two products; two bytes an element for each.
    backward = sum(quantised_bytes(lower, 1, backward=True))
    gradients = TOKENS * (192 + 64 + 256 + 64)
    weights = [op for op in ops(dense, 1, backward=True) if op.target == "aten.mm"]
    first = sum(op.dims[1].at(3) * op.dims[3].at(3) for op in weights)
    assert backward == 2 * first and first >= gradients


def test_experts_are_quantised_group_by_group():
    moe = MixtureOfExperts(experts=4, topk=2, expert_ffn=96)
    graph = trace_reference(replace(DIMS, moe=moe, ffn=0), Division(), "bfloat16")
    lower = with_linear_dtype(graph, "float4")
    grouped = [op for op in ops(lower, 1) if "grouped" in op.target]
    assert {op.dtype for op in grouped} == {"float4"}
    attention_and_router = [4 * TOKENS * 64] * 3
    experts = [4 * 2 * TOKENS * 64, 4 * 2 * TOKENS * 96]
    assert quantised_bytes(lower, 1) == attention_and_router + experts
