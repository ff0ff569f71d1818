"""Questions to the autograd graph between forward and backward.

Where may a chain of units be cut? Only where everything differentiable that later units read
passes through the hidden state between them. And which storages become parameters' gradients?
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

import torch

from claw_plan.planner.torch_private import sequence_number


def nodes_of(root: Any) -> Iterator[Any]:
    """Every node that `root` reaches, once."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                stack.append(parent)


def is_leaf(node: Any) -> bool:
    """Whether the node accumulates the gradient of a leaf, a parameter."""
    return hasattr(node, "variable")


def ways_around(
    root: Any, last_numbers: dict[int, int], passed_on: dict[int, Any]
) -> dict[int, int]:
    """For each unit that later units reach by another way than through the hidden state: a node.

    Args:
        root: the loss's node.
        last_numbers: for each unit but the last, the sequence number of its last node.
        passed_on: for each unit but the last, the node of the hidden state that leaves it.

    Returns:
        The unit before which a cut is impossible, and the number of the latest node before it
        whose output goes around the cut.
    """
    units = sorted(last_numbers)
    bounds = [last_numbers[unit] for unit in units]
    found: dict[int, int] = {}
    for node in nodes_of(root):
        if is_leaf(node):
            continue
        own = bisect_left(bounds, sequence_number(node))
        for parent, _ in node.next_functions:
            if parent is None or is_leaf(parent):
                continue
            number = sequence_number(parent)
            for cut in range(bisect_left(bounds, number), own):
                if parent is not passed_on[units[cut]]:
                    after = units[cut] + 1
                    found[after] = max(number, found.get(after, -1))
    return found


def watch_leaf_gradients(root: Any, arrived: Callable[[int, torch.Tensor], None]) -> None:
    """In the coming backward, calls `arrived` with every gradient and the id of its parameter."""

    def watch(position: int, leaf: int) -> Callable[[Any, Any], None]:
        def hook(grad_inputs: Any, grad_outputs: Any) -> None:
            if isinstance(grad_inputs[position], torch.Tensor):
                arrived(leaf, grad_inputs[position])

        return hook

    for node in nodes_of(root):
        for position, (parent, _) in enumerate(node.next_functions):
            if parent is not None and is_leaf(parent):
                node.register_hook(watch(position, id(parent.variable)))


def watch_leaves(root: Any, complete: Callable[[int], None]) -> None:
    """In the coming backward, calls `complete` with the id of each parameter whose gradient is.

    In the order in which hooks of data parallelism see them.
    """

    def watch(leaf: int) -> Callable[[Any, Any], None]:
        return lambda grad_inputs, grad_outputs: complete(leaf)

    for node in nodes_of(root):
        if is_leaf(node):
            node.register_hook(watch(id(node.variable)))
