"""A graph whose linear layers multiply in fp8 or fp4, as Transformer Engine runs them.

Matrix products of blocks with weights change their dtype and get kernels that quantise their
operands; attention, embeddings, the head and everything bound by memory stay in 16 bits.
Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv 2209.05433, section 5).
"""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.graph import Amount, Exchange, ModelGraph, Op, UnitCost

PRODUCTS = ("aten.mm", "aten.addmm", "claw_plan.grouped_mm")
"""Products with weights; attention's own are `aten.bmm`."""

QUANTISE = "claw_plan.quantise"

QUANTISED_BYTES = 4
"""Moved for each element that is quantised: two read, one written, and one more for the transposed
copy that the backward product takes."""


def with_linear_dtype(graph: ModelGraph, dtype: str, scaling: str = "") -> ModelGraph:
    """The graph with the linear layers of all blocks in `dtype` ('float8' or 'float4').

    Products whose rows are scaled one by one ('row') run no faster than in 16 bits: torchtitan's
    are 18 to 23 % slower than bf16 with their quantisation.
    """
    dtype = "" if scaling == "row" else dtype
    last = len(graph.units) - 1
    blocks = {unit.structure for index, unit in enumerate(graph.units) if 0 < index < last}
    made: dict[tuple[UnitCost, ...], tuple[UnitCost, ...]] = {}
    costs = {}
    for variant, each in graph.costs.items():
        if each not in made:
            made[each] = tuple(
                _lowered(cost, dtype) if index in blocks else cost
                for index, cost in enumerate(each)
            )
        costs[variant] = made[each]
    return replace(graph, costs=costs)


def _lowered(cost: UnitCost, dtype: str) -> UnitCost:
    return replace(
        cost,
        forward=tuple(item for op in cost.forward for item in _quantised(op, dtype, False)),
        backward=tuple(item for op in cost.backward for item in _quantised(op, dtype, True)),
        num_recomputed=None,
    )


def _quantised(item: Op | Exchange, dtype: str, backward: bool) -> tuple[Op | Exchange, ...]:
    if not isinstance(item, Op) or item.target not in PRODUCTS:
        return (item,)
    batch, m, _, k = item.dims
    # The first operand: forward the input; backward the gradient, for each of its two products.
    share = QUANTISED_BYTES // 2 if backward else QUANTISED_BYTES
    elements = _product(m, k, max(batch.at(1), 1))
    half = Amount(*(share * part // 2 for part in elements))
    quantise = Op(
        kind="memory",
        target=QUANTISE,
        module=item.module,
        dims=(),
        dtype=item.dtype,
        flops=Amount(),
        read_bytes=half,
        written_bytes=half,
    )
    return quantise, replace(item, dtype=dtype or item.dtype)


def _product(one: Amount, other: Amount, times: int) -> Amount:
    """The product of two dims of which at most one grows with the batch."""
    if other.per_sample:
        one, other = other, one
    factor = other.fixed * times
    return Amount(one.fixed * factor, one.per_sample * factor)
