import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

from claw_plan.planner.block_calls import BlockCall
from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.split import graph as module
from claw_plan.planner.split.graph import SplitGraph, split_graph


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        torch.sin(h)  # of no use to anybody
        return h + self.down(torch.relu(self.up(h)))


def flow(block: nn.Module, *args: torch.Tensor) -> SplitGraph:
    return split_graph(BlockCall(block=block, args=args, kwargs={}))


def test_the_operators_that_the_result_depends_on_in_order() -> None:
    graph = flow(Mlp(), torch.zeros(3, 4, requires_grad=True))
    assert [op.name for op in graph.ops] == [
        *("aten.t", "aten.mm", "aten.relu", "aten.t", "aten.mm", "aten.add"),
    ]
    names = [graph.tensors[number].parameter for number in graph.sources()]
    assert sorted(names) == ["", "down.weight", "up.weight"]
    assert graph.tensors[graph.hidden].shape == graph.tensors[graph.result].shape == (3, 4)


def test_a_view_of_a_parameter_is_one_and_depends_on_no_sample() -> None:
    graph = flow(Mlp(), torch.zeros(3, 4, requires_grad=True))
    product = graph.ops[1]
    given, turned = (graph.tensors[number] for number in product.inputs)
    assert (turned.parameter, turned.shape, turned.of_hidden) == ("up.weight", (4, 8), False)
    assert given.of_hidden and given.needs_grad and not given.parameter
    assert product.works[0].flops == 2 * 3 * 4 * 8


def test_fake_tensors_show_the_same() -> None:
    real = flow(Mlp(), torch.zeros(3, 4, requires_grad=True))
    with FakeTensorMode():
        fake = flow(Mlp(), torch.zeros(3, 4, requires_grad=True))
    assert [(op.name, op.inputs, op.outputs) for op in fake.ops] == [
        (op.name, op.inputs, op.outputs) for op in real.ops
    ]


class Writes(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        result = h * 2
        result[0].zero_()
        return result + 1


def test_a_write_that_another_tensor_shows_is_refused() -> None:
    with pytest.raises(TensorParallelError, match="writes into a view"):
        flow(Writes(), torch.zeros(3, 4))


def test_a_write_into_the_tensor_itself_is_a_new_one() -> None:
    class Quiet(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return (h * 2).add_(1).relu_()

    graph = flow(Quiet(), torch.zeros(3, 4))
    assert [op.name for op in graph.ops] == ["aten.mul", "aten.add_", "aten.relu_"]
    assert len({op.outputs for op in graph.ops}) == 3


def test_a_loop_over_positions_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OPERATORS", 3)
    with pytest.raises(TensorParallelError, match="more than 3 operators"):
        flow(Mlp(), torch.zeros(3, 4))


def test_a_block_that_does_not_read_its_input_is_refused() -> None:
    class Constant(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return torch.ones(3)

    with pytest.raises(TensorParallelError, match="does not read the hidden state"):
        flow(Constant(), torch.zeros(3, 4))
