"""A graph whose products for weight gradients add to sums, as Megatron-Core's fused ones do.

Instead of writing a 16-bit gradient the product reads and writes the sum of the microbatches
before it. What of that hides behind the product's own work, `profiles.gemm_cost` knows.
"""

from __future__ import annotations

from dataclasses import replace

from claw_plan.planner.graph import Amount, Exchange, ModelGraph, Op, UnitCost
from claw_plan.planner.low_precision import PRODUCTS
from claw_plan.profiles.work import DTYPE_BYTES


def with_fused_accumulation(graph: ModelGraph, sum_bytes: int) -> ModelGraph:
    """The graph with weight gradients added by their products to sums of so many bytes each."""
    made: dict[tuple[UnitCost, ...], tuple[UnitCost, ...]] = {}
    for each in graph.costs.values():
        made.setdefault(
            each,
            tuple(
                replace(cost, backward=tuple(_summed(item, sum_bytes) for item in cost.backward))
                for cost in each
            ),
        )
    return replace(graph, costs={name: made[each] for name, each in graph.costs.items()})


def _summed(item: Op | Exchange, sum_bytes: int) -> Op | Exchange:
    """A product over the tokens, whose depth grows with the batch, makes a weight's gradient."""
    if not isinstance(item, Op) or item.target not in PRODUCTS or not item.dims[3].per_sample:
        return item
    batch, m, n, _ = (dim.fixed for dim in item.dims)
    elements = batch * m * n
    return replace(
        item,
        read_bytes=item.read_bytes + Amount(sum_bytes * elements),
        written_bytes=item.written_bytes
        + Amount((sum_bytes - DTYPE_BYTES.get(item.dtype, 2)) * elements),
    )
