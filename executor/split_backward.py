"""A stage's backward in two parts: gradients of its inputs now, those of its weights later.

The graph is cut where it branches towards weights. In the first part autograd runs from the
outputs to the inputs only, and hooks keep the gradient that arrives at each branching node; the
second part starts autograd there. PyTorch's own split (torch/distributed/pipelining/_backward.py)
is not used, for two silent faults:

- it asks the module for its parameters, and fully_shard has exchanged them by then if the block
  was resharded after forward: their gradients are lost;
- it follows branches off the way from inputs to outputs only, so an output that depends on weights
  alone (T5's position bias, which the next stage reads) gives these no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
Leaves: TypeAlias = frozenset[Any]
"""Nodes that accumulate the gradient of their `variable`, which torch's types do not know."""


@dataclass
class _Branch:
    """Where autograd starts again: a node, the gradients that arrive there, and the leaves.

    `is_passed` where the first part goes through the node, so that its gradients are all there.
    """

    node: Node
    leaves: Leaves
    is_passed: bool
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The hook of the first part."""
        self.gradients = {i: grad for i, grad in enumerate(gradients) if grad is not None}


class LateWeights:
    """The second part of a backward; `run` adds to the gradients of the weights, once."""

    def __init__(self, branches: Sequence[_Branch]) -> None:
        self._groups = _share_leaves([branch for branch in branches if branch.gradients])

    def run(self) -> None:
        """Accumulates the weights' gradients and lets go of the graph."""
        groups, self._groups = self._groups, []
        keeps_graph = any(len(group) > 1 for group in groups)
        for group in groups:
            handles = []
            # From one branch autograd may come by another of its group: that one's gradients
            # have all been counted, so what arrives again is exchanged for them.
            if len(group) > 1:
                handles = [
                    branch.node.register_prehook(_again(branch))
                    for branch in group
                    if branch.is_passed
                ]
            try:
                torch.autograd.backward(
                    [GradientEdge(b.node, i) for b in group for i in b.gradients],
                    [grad for b in group for grad in b.gradients.values()],
                    retain_graph=keeps_graph,
                    inputs=[
                        leaf.variable for leaf in frozenset().union(*(b.leaves for b in group))
                    ],
                )
            finally:
                for handle in handles:
                    handle.remove()


def _again(branch: _Branch) -> Any:
    def exchange(gradients: Sequence[torch.Tensor | None]) -> Gradients:
        return tuple(branch.gradients.get(i) for i in range(len(gradients)))

    return exchange


def split_backward(
    outputs: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[object],
) -> tuple[Gradients, LateWeights]:
    """The gradients of the inputs (None where one has none), and the weights' part for later.

    Without `output_gradients` the outputs are losses. The outputs let go of their graph.
    """
    roots = [
        (get_gradient_edge(output), gradient)
        for output, gradient in zip(
            outputs, output_gradients or [torch.ones_like(o) for o in outputs], strict=True
        )
        if output.requires_grad and gradient is not None
    ]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    branches = _branches([edge.node for edge, _ in roots], wanted)
    on_way = []
    for edge, gradient in roots:
        branch = branches.get(edge.node)
        if branch is not None and not branch.is_passed:
            known = branch.gradients.get(edge.output_nr)
            branch.gradients[edge.output_nr] = gradient if known is None else known + gradient
        else:
            on_way.append((edge, gradient))
    handles = [b.node.register_prehook(b.keep) for b in branches.values() if b.is_passed]
    try:
        found = iter(
            torch.autograd.grad(
                [edge for edge, _ in on_way],
                wanted,
                [gradient for _, gradient in on_way],
                retain_graph=True,
                allow_unused=True,
            )
            if on_way and wanted
            else [None] * len(wanted)
        )
    finally:
        for handle in handles:
            handle.remove()
    ids = {id(x) for x in wanted}
    gradients = tuple(next(found) if id(x) in ids else None for x in inputs)
    for output in outputs:
        if output.grad_fn is not None and not output._is_view():  # a leaf stays trainable
            output.detach_()
    return gradients, LateWeights(list(branches.values()))


def _branches(roots: Sequence[Node], inputs: Sequence[torch.Tensor]) -> dict[Node, _Branch]:
    """Where the graph leaves the way from roots to inputs towards leaves that are no inputs."""
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    on_way: set[Node] = set()
    leaves: dict[Node, Leaves] = {}
    for node in _children_first(roots):
        children = [child for child, _ in node.next_functions if child is not None]
        if node in ends or not on_way.isdisjoint(children):
            on_way.add(node)
        if node in ends:
            leaves[node] = frozenset()
        elif hasattr(node, "variable"):
            leaves[node] = frozenset([node])
        else:
            off = [leaves[child] for child in children if child not in on_way]
            leaves[node] = frozenset().union(*off)
    starts = {node for node in roots if node not in on_way}
    return {
        node: _Branch(node=node, leaves=leaves[node], is_passed=node in on_way)
        for node in on_way | starts
        if leaves[node]
    }


def _children_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node of the graph after all that it leads to."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]


def _share_leaves(branches: Sequence[_Branch]) -> list[list[_Branch]]:
    """Branches that lead to a common leaf stay together; others autograd runs apart."""
    groups: list[tuple[set[Node], list[_Branch]]] = []
    for branch in branches:
        leaves, members = set(branch.leaves), [branch]
        rest = []
        for group in groups:
            if group[0].isdisjoint(leaves):
                rest.append(group)
            else:
                leaves |= group[0]
                members = [*group[1], *members]
        groups = [*rest, (leaves, members)]
    return [members for _, members in groups]
