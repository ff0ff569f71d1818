"""Weight gradients that are added to sums by the products that make them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from claw_plan.planner.accumulation import with_fused_accumulation
from claw_plan.planner.graph import Op
from claw_plan.planner.reference_model import Division
from claw_plan.planner.reference_trace import trace_reference
from claw_plan.profiles.training_row import Dimensions, MixtureOfExperts

DENSE = Dimensions(
    layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=1024, seq_len=32
)
EXPERTS = replace(DENSE, ffn=0, moe=MixtureOfExperts(experts=8, topk=2, expert_ffn=96))


@pytest.mark.parametrize("dims", [DENSE, EXPERTS])
@pytest.mark.parametrize("sum_bytes", [2, 4])
def test_each_weight_is_read_and_written_as_a_sum(dims, sum_bytes):
    """Of each element of a block's matrices the sum is read, and written instead of 16 bits."""
    graph = trace_reference(dims, Division(), "bfloat16")
    summed = with_fused_accumulation(graph, sum_bytes)
    matrices = sum(p.numel for p in graph.parameters if 1 in p.units and len(p.shape) > 1)
    read = written = 0
    for before, after in zip(graph.cost(1).backward, summed.cost(1).backward, strict=True):
        if isinstance(before, Op) and isinstance(after, Op):
            read += after.read_bytes.at(3) - before.read_bytes.at(3)
            written += after.written_bytes.at(3) - before.written_bytes.at(3)
    assert (read, written) == (sum_bytes * matrices, (sum_bytes - 2) * matrices)


def test_nothing_else_changes():
    graph = trace_reference(DENSE, Division(), "bfloat16")
    summed = with_fused_accumulation(graph, 4)
    assert summed.flops(3) == graph.flops(3)
    for unit in range(4):
        assert summed.cost(unit).forward == graph.cost(unit).forward
        assert replace(summed.cost(unit), backward=()) == replace(graph.cost(unit), backward=())
