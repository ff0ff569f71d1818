import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.planner.linear_modules import linear_calls, shared_parameters


class Conv1D(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, h):
        return torch.addmm(self.bias, h.view(-1, h.size(-1)), self.weight).view(*h.shape[:-1], -1)


class Square(nn.Module):
    """y = x W^T written by hand: the shape does not tell which dimension is the output."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, h):
        return h @ self.w.t()


class Plus(nn.Linear):
    """Looks like a linear, and is more."""

    def forward(self, h):
        return super().forward(h).tanh()


class Scores(nn.Module):
    """One matrix that is not a weight of a product."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, h):
        return h * self.table


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.turned, self.square, self.plus = Conv1D(4, 4), Square(), Plus(4, 4)
        self.scores, self.twice, self.unused = Scores(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, h):
        h = h + self.down(F.silu(self.gate(h)) * self.up(h))
        h = self.square(self.turned(F.layer_norm(h, (4,))))
        return self.twice(self.twice(self.scores(self.plus(h))))


@pytest.fixture(scope="module")
def calls():
    block = Block()
    return linear_calls(block, lambda: block(torch.randn(3, 4, 4)))


def test_modules_come_in_the_order_of_their_calls_and_know_who_feeds_them(calls):
    assert {name: sorted(call.fed_by) for name, call in calls.items()} == {
        "gate": [],
        "up": [],
        "down": ["gate", "up"],
        "turned": ["down"],
        "square": ["turned"],
        "plus": ["square"],
        "scores": ["plus"],
        "twice": ["scores", "twice"],
    }


def test_which_dimension_is_the_output_is_read_off_the_product(calls):
    found = {name: (call.matrix, call.bias, call.outputs_first) for name, call in calls.items()}
    assert found["down"] == ("weight", "bias", True)
    assert found["turned"] == ("weight", "bias", False)
    assert found["square"] == ("w", None, True)


def test_what_is_no_plain_linear_is_refused_with_what_it_does(calls):
    refused = {name: call.refused for name, call in calls.items() if call.refused}
    assert refused == {
        "plus": "plus is not a plain linear (tanh)",
        "scores": "scores is not a plain linear (mul)",
        "twice": "twice is used 2 times in a block",
    }


def test_a_shared_weight_is_refused_and_a_module_under_two_names_is_not_shared():
    block = Block()
    block.down.weight = nn.Parameter(block.up.weight.detach().t().clone())
    assert shared_parameters(block) == frozenset()
    block.again = block.gate
    assert shared_parameters(block) == frozenset()
    block.up.weight = block.gate.weight
    shared = shared_parameters(block)
    assert shared == {id(block.gate.weight)}
    calls = linear_calls(block, lambda: block(torch.randn(3, 4, 4)), shared)
    assert calls["up"].refused == "up shares its weight with another module"


def test_a_frozen_block_still_shows_its_flow():
    block = Block().requires_grad_(False)
    calls = linear_calls(block, lambda: block(torch.randn(3, 4, 4, requires_grad=True)))
    assert sorted(calls["down"].fed_by) == ["gate", "up"]
