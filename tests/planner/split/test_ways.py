from itertools import product
from math import prod

import pytest
import torch
import torch.nn as nn

from claw_plan.planner.block_calls import BlockCall
from claw_plan.planner.split.costs import SplitCosts
from claw_plan.planner.split.graph import SplitGraph, split_graph
from claw_plan.planner.split.program import Choice, cost_of, solve
from claw_plan.planner.split.ways import Setting, split_program

SEQ = 8


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        batch, seq, width = h.shape
        q, k, v = self.qkv(h).split(width, dim=2)
        q, k, v = (
            x.view(batch, seq, self.heads, width // self.heads).transpose(1, 2) for x in (q, k, v)
        )
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, seq, width))


class Block(nn.Module):
    def __init__(self, width: int = 24, heads: int = 12, inner: int = 96) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.attention(self.first(h))
        return h + self.down(torch.nn.functional.gelu(self.up(self.second(h))))


def flow(block: nn.Module, width: int = 24, batch: int = 1) -> SplitGraph:
    hidden = torch.zeros(batch, SEQ, width, requires_grad=True)
    return split_graph(BlockCall(block=block, args=(hidden,), kwargs={}))


def costs(per_flop: int = 10, launch: int = 0, message: int = 100) -> SplitCosts:
    return SplitCosts(
        op_ns=lambda work: launch + per_flop * work.flops + work.bytes,
        collective_ns=lambda op, size: message,
        gradient_ns=lambda size: message,
    )


def best(graph: SplitGraph, priced: SplitCosts | None = None, **setting: object) -> Choice:
    program = split_program(graph, Setting(**setting), priced or costs())  # type: ignore[arg-type]
    choice = solve(program)
    assert choice is not None
    return choice


def styles(graph: SplitGraph, choice: Choice, setting: Setting) -> dict[str, str]:
    """How the weights are divided, by name."""
    program = split_program(graph, setting, costs())
    return {
        step.name: str(way.gives[0])
        for step, way in zip(program.steps, choice.ways, strict=True)
        if not step.inputs and step.name.endswith("weight") and way.gives[0].kind == "cut"
    }


BOTH = {
    "attention.qkv.weight": "cut(0, 3 pieces)",
    "attention.out.weight": "cut(1)",
    "up.weight": "cut(0)",
    "down.weight": "cut(1)",
}
MLP = {name: how for name, how in BOTH.items() if "attention" not in name}


@pytest.mark.parametrize("degree", [2, 4])
def test_megatrons_columns_and_rows(degree: int) -> None:
    graph = flow(Block())
    assert styles(graph, best(graph, degree=degree), Setting(degree=degree)) == BOTH


def test_heads_that_do_not_divide_stay_whole_and_columns_do_not() -> None:
    graph = flow(Block(heads=12))
    assert styles(graph, best(graph, degree=8), Setting(degree=8)) == MLP


def test_columns_that_do_not_divide_stay_whole_and_heads_do_not() -> None:
    graph = flow(Block(heads=4, inner=98))
    found = styles(graph, best(graph, degree=4), Setting(degree=4))
    assert found == {name: how for name, how in BOTH.items() if "attention" in name}


def test_kernels_that_last_as_long_as_their_launch_are_not_divided() -> None:
    graph = flow(Block())
    choice = best(graph, costs(per_flop=0, launch=10**6, message=10**5), degree=2)
    assert styles(graph, choice, Setting(degree=2)) == {}


def test_of_a_block_the_matrices_that_pay_are_divided() -> None:
    graph = flow(Block(inner=96))
    # Ten a flop, three products a matrix in both passes, half saved by two ranks: up and down
    # 10 x 3 x 2 x 8 x 24 x 96 x 2 / 2 = 1.11 million; qkv and out, half of that, with both
    # products of the scores, 10 x 3 x 2 x 8 x (24 x 24 x 4 + 8 x 24 x 2) / 2 = .65 million. Each
    # region costs two messages.
    for message, expected in ((250_000, BOTH), (450_000, MLP), (700_000, {})):
        choice = best(graph, costs(message=message), degree=2)
        assert styles(graph, choice, Setting(degree=2)) == expected


def test_along_the_sequence_a_region_is_gathered_and_scattered() -> None:
    graph = flow(Block())
    asked: list[str] = []

    def collective(op: str, size: int) -> int:
        asked.append(op)
        return 100

    priced = SplitCosts(
        op_ns=lambda w: 10 * w.flops, collective_ns=collective, gradient_ns=lambda n: 10**6
    )
    setting = Setting(degree=2, sequence=True)
    assert styles(graph, best(graph, priced, degree=2, sequence=True), setting) == BOTH
    assert {"all_gather", "reduce_scatter"} <= set(asked)


@pytest.mark.slow
def test_samples_are_never_divided() -> None:
    """That is data parallelism's; each change of the batch's dimension would be free here."""
    graph = flow(Block(), batch=2)
    for runnable_only in (True, False):
        choice = best(graph, degree=2, batch=2, runnable_only=runnable_only)
        assert all(
            state.kind != "cut" or state.dim != 0 or state.parts % 2 == 0
            for way, step in zip(
                choice.ways,
                split_program(
                    graph, Setting(degree=2, batch=2, runnable_only=runnable_only), costs()
                ).steps,
                strict=True,
            )
            for state in way.gives
            if step.inputs and not step.name.endswith(("weight", "bias"))
        )


@pytest.mark.slow
def test_more_freedom_is_never_slower() -> None:
    graph = flow(Block())
    free = best(graph, degree=2, runnable_only=False)
    assert free.time_ns <= best(graph, degree=2).time_ns


class Half(nn.Module):
    """The first half of an MLP, small enough for all assignments."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(h))


@pytest.mark.parametrize("runnable_only", [True, False])
@pytest.mark.parametrize("message", [1, 50, 2000])
def test_all_assignments_of_a_real_block(runnable_only: bool, message: int) -> None:
    graph = flow(Half(), width=4)
    setting = Setting(degree=2, runnable_only=runnable_only)
    program = split_program(graph, setting, costs(per_flop=1, message=message))
    assert prod(len(step.ways) for step in program.steps) > 200
    ways = product(*(step.ways for step in program.steps))
    fastest = min(time for each in ways if (time := cost_of(program, each)) is not None)
    choice = solve(program)
    assert choice is not None and choice.time_ns == fastest
