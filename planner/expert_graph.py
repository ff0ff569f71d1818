"""The graph of a model whose experts `ep` ranks share, made of the graph of the whole model.

A rank holds an ep-th of each block's experts. Its tokens travel to theirs and back: two
all-to-alls in a forward and two in a backward, each of a hidden state for every pair of a token
and one of its experts, and before them the numbers of rows. Routing is taken to be balanced: a
rank's experts get as many rows as it sends, so that kernels do what they did. Where it is not,
the rank with the most rows is waited for: its rows over the mean are what the experts' share of
the step is to be multiplied by.

Assumes: products of the experts take as long for ep times the rows of an ep-th of the experts.
Source of the volume: Lepikhin et al. 2020 (GShard, arXiv 2006.16668, section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import (
    Amount,
    Exchange,
    ExpertRule,
    ModelGraph,
    Op,
    Parameter,
    UnitCost,
)

COUNT_BYTES = 8
"""Of the number of rows for one expert, int64."""

MOVED = ("aten.index", "aten.index", "aten.mul")
"""What `executor.expert_parallel` runs on all rows beside the experts: rows in the order of their
experts, results in the order of their tokens, weighted."""

Items = tuple[Op | Exchange, ...]


def share_experts(graph: ModelGraph, ep: int) -> ModelGraph:
    """The graph of one of `ep` ranks; raises PlanError where they cannot share."""
    if ep == graph.ep:
        return graph
    if graph.no_expert_parallel or graph.ep_divides % ep:
        divides = f"a layer has {graph.ep_divides} experts, or a multiple; pin a divisor"
        raise PlanError(
            f"ep={ep}: {graph.no_expert_parallel or divides} (ep=1 leaves experts whole)"
        )
    holders = expert_modules(graph)
    return replace(
        graph,
        ep=ep,
        parameters=tuple(_held(graph.parameters, holders, ep)),
        costs={name: _costs(graph, each) for name, each in graph.costs.items()},
        assumptions=(
            *graph.assumptions,
            "experts get equally many tokens; where routing is uneven the fullest rank's share "
            "over the mean lengthens the experts' part of the step",
        ),
    )


def expert_modules(graph: ModelGraph) -> dict[str, ExpertRule]:
    """The modules of all blocks that hold experts to share, by their names."""
    return {
        f"{block.name}.{rule.module}": rule
        for block in graph.blocks
        for rule in graph.expert_parallel
        if block.structure in rule.structures
    }


def _held(
    parameters: Sequence[Parameter], holders: Mapping[str, ExpertRule], ep: int
) -> Iterator[Parameter]:
    """What the first rank holds: its part of common tensors, its own of experts in a list."""
    for parameter in parameters:
        found = _holder_of(parameter.name, holders)
        if found is None:
            yield parameter
            continue
        holder, rule = found
        part = replace(parameter, is_expert=True, shared_by=ep)
        if not rule.listed:
            yield replace(part, shape=(part.shape[0] // ep, *part.shape[1:]))
        elif _number(parameter.name, f"{holder}.{rule.listed}.") < rule.experts // ep:
            yield part


def _number(name: str, listed: str) -> int:
    """Which expert of the list the parameter is of."""
    return int(name.removeprefix(listed).partition(".")[0])


def _holder_of(name: str, holders: Mapping[str, ExpertRule]) -> tuple[str, ExpertRule] | None:
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts)))
    return next(((prefix, holders[prefix]) for prefix in prefixes if prefix in holders), None)


def _costs(graph: ModelGraph, costs: Sequence[UnitCost]) -> tuple[UnitCost, ...]:
    found = []
    for structure, cost in enumerate(costs):
        rules = [rule for rule in graph.expert_parallel if structure in rule.structures]
        found.append(reduce(lambda c, rule: _travelling(c, rule, graph.dtype), rules, cost))
    return tuple(found)


def _travelling(cost: UnitCost, rule: ExpertRule, dtype: str) -> UnitCost:
    """The cost with the way to the experts and back around what their module runs."""
    inside = [place for place, item in enumerate(cost.forward) if _is_of(item, rule)]
    rows = _rows(cost.forward[inside[0]], rule)
    counts = _exchange(Amount(COUNT_BYTES * rule.experts), rule)
    there, back = _exchange(rows, rule), _exchange(rows, rule)
    moves = [_moved(target, rows, rule, dtype) for target in MOVED]
    forward = _around(cost.forward, inside, (counts, moves[0], there), (back, *moves[1:]))
    again = cost.num_recomputed
    if again is not None:  # rows that came back are kept for the gradient of their weights
        added = len(forward) - len(cost.forward)
        again = max(inside[-1] + added, again + added if again > inside[-1] else 0)
    inside = [place for place, item in enumerate(cost.backward) if _is_of(item, rule)]
    back, there = _exchange(rows, rule), _exchange(rows, rule)
    return replace(
        cost,
        forward=forward,
        backward=_around(cost.backward, inside, (*moves[1:], back), (there, moves[0])),
        saved_bytes=cost.saved_bytes + rows,
        forward_peak_bytes=cost.forward_peak_bytes + rows + rows,
        backward_peak_bytes=cost.backward_peak_bytes + rows + rows,
        num_recomputed=again,
    )


def _around(items: Items, inside: Sequence[int], before: Items, after: Items) -> Items:
    first, end = inside[0], inside[-1] + 1
    return (*items[:first], *before, *items[first:end], *after, *items[end:])


def _is_of(item: Op | Exchange, rule: ExpertRule) -> bool:
    return f".{rule.module}." in f"{item.module}."


def _rows(first: Op | Exchange, rule: ExpertRule) -> Amount:
    """Bytes of a hidden state for every pair; along a divided sequence a rank has its part."""
    size = rule.rows_per_sample * rule.row_bytes
    is_divided = isinstance(first, Op) and bool(first.written_bytes.split_per_sample)
    return Amount(split_per_sample=size) if is_divided else Amount(per_sample=size)


def _exchange(size: Amount, rule: ExpertRule) -> Exchange:
    return Exchange(op="all_to_all", bytes=size, module=rule.module, axis="ep")


def _moved(target: str, rows: Amount, rule: ExpertRule, dtype: str) -> Op:
    return Op(
        kind="memory",
        target=target,
        module=rule.module,
        dims=(),
        dtype=dtype,
        flops=Amount(),
        read_bytes=rows,
        written_bytes=rows,
    )
