"""What a rank of cp computes, keeps and exchanges, in closed form."""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import Exchange, ModelGraph, Op, UnitCost
from claw_plan.planner.model_source import load_model
from claw_plan.planner.trace_context import trace_context

BATCH, LENGTH, WIDTH, HEADS, FLOAT = 3, 32, 16, 4, 4
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
BUILD = f"GPT(GPTConfig(vocab_size=61, block_size={LENGTH}, n_layer=3, n_head=4, n_embd={WIDTH}))"
INPUTS = f"idx=int64[B,{LENGTH}]<61 targets=int64[B,{LENGTH}]<61"


def traced(cp: int, kind: str = "all_gather") -> ModelGraph:
    model = load_model(GPT, build=BUILD, inputs=INPUTS)
    return trace_context(model, seq_len=None, dtype="float32", cp=cp, kind=kind)


def block(graph: ModelGraph) -> UnitCost:
    return graph.costs["plain"][graph.units[1].structure]


def exchanges(items: tuple[Op | Exchange, ...]) -> list[tuple[str, int, str]]:
    return [(i.op, i.bytes.at(BATCH, 1), i.axis) for i in items if isinstance(i, Exchange)]


def flops(graph: ModelGraph) -> int:
    return sum(
        item.flops.at(BATCH, 1)
        for unit in graph.units
        for items in (graph.costs["plain"][unit.structure],)
        for item in (*items.forward, *items.backward)
        if isinstance(item, Op)
    )


@pytest.fixture(scope="module")
def whole() -> ModelGraph:
    return traced(1)


HIDDEN = BATCH * LENGTH * WIDTH * FLOAT


@pytest.mark.parametrize("cp", [2, 4])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(
    whole: ModelGraph, cp: int
) -> None:
    graph = traced(cp)
    assert (graph.cp, graph.cp_comm_type) == (cp, "all_gather")
    assert flops(whole) == cp * flops(graph)
    assert exchanges(block(graph).forward) == [("all_gather", 2 * HIDDEN, "cp")]
    assert exchanges(block(graph).backward) == [("reduce_scatter", 2 * HIDDEN, "cp")]
    assert block(graph).input_bytes.at(BATCH, 1) == HIDDEN // cp
    # Beside a cp-th of all, gathered keys and values are kept: own ones lie beside the queries.
    saved = [block(g).saved_bytes.at(BATCH, 1) for g in (whole, graph)]
    assert saved[1] - saved[0] // cp == 2 * HIDDEN


@pytest.mark.parametrize("cp", [2, 4])
def test_heads_are_exchanged_four_times_each_way(whole: ModelGraph, cp: int) -> None:
    graph = traced(cp, "a2a")
    assert flops(whole) == cp * flops(graph)
    ways = [("all_to_all", HIDDEN // cp, "cp")] * 4
    assert exchanges(block(graph).forward) == exchanges(block(graph).backward) == ways


def test_the_loss_is_added_up_both_ways(whole: ModelGraph) -> None:
    last = traced(2).costs["plain"][whole.units[-1].structure]
    assert exchanges(last.forward) == exchanges(last.backward) == [("all_reduce", FLOAT, "cp")]


def test_why_not() -> None:
    with pytest.raises(PlanError, match=r"4 heads do not divide by cp=8; use cp_comm_type=all_"):
        traced(8, "a2a")
    with pytest.raises(PlanError, match=r"a sequence of 32 does not divide into 2 x 32 chunks"):
        traced(32)


SCAN = """
import torch, torch.nn as nn, torch.nn.functional as F

class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        h = self.table(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(h.flatten(0, 1), y.flatten())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, h):
        return h + self.up(h).cumsum(1)
"""


def test_what_mixes_positions_otherwise_is_named(tmp_path: Path) -> None:
    file = tmp_path / "scan.py"
    file.write_text(SCAN)
    model = load_model(file, build="Scan()", inputs="x=int64[B,8]<4 y=int64[B,8]<4")
    with pytest.raises(PlanError, match="cumsum in the sequence runs along the divided dim"):
        trace_context(model, seq_len=None, dtype="float32", cp=2, kind="all_gather")
