from __future__ import annotations

import torch

from claw_plan.planner.autograd_graph import is_leaf, nodes_of, watch_leaf_gradients, ways_around
from claw_plan.planner.torch_private import last_sequence_number


def test_every_node_is_visited_once() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    root = (y + y).sum().grad_fn
    names = [type(node).__name__ for node in nodes_of(root)]
    assert sorted(names) == ["AccumulateGrad", "AddBackward0", "MulBackward0", "SumBackward0"]
    assert [is_leaf(node) for node in nodes_of(root)].count(True) == 1


def test_ways_around_a_cut() -> None:
    weight = torch.ones(2, requires_grad=True)
    numbers, hidden = {}, {}
    first = weight * 2
    side = first * 3
    x = first * 5
    numbers[0], hidden[0] = last_sequence_number(), x.grad_fn
    x = x * weight
    numbers[1], hidden[1] = last_sequence_number(), x.grad_fn
    # The leaf may be used on both sides of a cut, the hidden state many times.
    straight = (x * weight + x).sum()
    assert ways_around(straight.grad_fn, numbers, hidden) == {}
    around = ways_around((x + side).sum().grad_fn, numbers, hidden)
    assert around == {1: numbers[0] - 1, 2: numbers[0] - 1}


def test_an_earlier_hidden_state_goes_around_later_cuts_only() -> None:
    weight = torch.ones(2, requires_grad=True)
    numbers, hidden, states = {}, {}, [weight * 2]
    for unit in range(3):
        numbers[unit], hidden[unit] = last_sequence_number(), states[-1].grad_fn
        states.append(states[-1] * weight)
    loss = (states[-1] + states[0]).sum()
    assert ways_around(loss.grad_fn, numbers, hidden) == {2: numbers[0], 3: numbers[0]} | {}


def test_every_contribution_to_a_leaf_is_seen() -> None:
    one, two = (torch.ones(2, requires_grad=True) for _ in range(2))
    loss = (one * two + one.view(1, 2) * 3).sum()
    seen: dict[int, list[float]] = {}
    watch_leaf_gradients(
        loss.grad_fn, lambda leaf, grad: seen.setdefault(leaf, []).append(grad.sum().item())
    )
    loss.backward()
    assert {leaf: sorted(values) for leaf, values in seen.items()} == {
        id(one): [2.0, 6.0],
        id(two): [2.0],
    }
