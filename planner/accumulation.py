"""A graph whose products for weight gradients add to fp32 sums, as Megatron-Core's fused ones do.

Instead of writing a 16-bit gradient the product reads and writes the sum of the microbatches
before it. What of that hides behind the product's own work, `profiles.gemm_cost` knows.
"""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.graph import Amount, Exchange, ModelGraph, Op, UnitCost
from claw_plan.planner.low_precision import PRODUCTS
from claw_plan.profiles.work import DTYPE_BYTES

SUM_BYTES = 4
"""Of an element of the sums."""


def with_fused_accumulation(graph: ModelGraph) -> ModelGraph:
    """The graph with weight gradients accumulated in fp32 by their products."""
    made: dict[tuple[UnitCost, ...], tuple[UnitCost, ...]] = {}
    for each in graph.costs.values():
        made.setdefault(
            each,
            tuple(replace(cost, backward=tuple(map(_summed, cost.backward))) for cost in each),
        )
    return replace(graph, costs={name: made[each] for name, each in graph.costs.items()})


def _summed(item: Op | Exchange) -> Op | Exchange:
    """A product over the tokens, whose depth grows with the batch, makes a weight's gradient."""
    if not isinstance(item, Op) or item.target not in PRODUCTS or not item.dims[3].per_sample:
        return item
    batch, m, n, _ = (dim.fixed for dim in item.dims)
    elements = batch * m * n
    return replace(
        item,
        read_bytes=item.read_bytes + Amount(SUM_BYTES * elements),
        written_bytes=item.written_bytes
        + Amount((SUM_BYTES - DTYPE_BYTES.get(item.dtype, 2)) * elements),
    )
