"""The graph of one of the ranks that share experts, against counts made by hand.

The mixture has 4 blocks of 4 experts, 12 tokens a sample with 2 experts each, 16 floats a state.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.planner.errors import PlanError
from claw_plan.planner.expert_graph import expert_modules, share_experts
from claw_plan.planner.graph import Exchange, ModelGraph, Op
from claw_plan.planner.model_source import load_model
from claw_plan.planner.trace import trace

MODEL = Path(__file__).parents[1] / "executor" / "expert_model.py"
INPUTS = "ids=int64[B,12]<61"
ROWS, COUNTS = 12 * 2 * 16 * 4, 4 * 8


def traced(kind: str) -> ModelGraph:
    loaded = load_model(MODEL, build=f"Mixture({kind})", inputs=INPUTS)
    return trace(loaded, seq_len=None, dtype="float32")


@pytest.fixture(scope="module")
def fused() -> ModelGraph:
    return traced("Fused")


def exchanged(items: tuple[Op | Exchange, ...]) -> list[tuple[str, str, int]]:
    return [(i.op, i.axis, i.bytes.at(1)) for i in items if isinstance(i, Exchange)]


def test_tokens_travel_there_and_back_in_both_passes(fused: ModelGraph) -> None:
    cost = share_experts(fused, 2).cost(1)
    there = ("all_to_all", "ep", ROWS)
    assert exchanged(cost.forward) == [("all_to_all", "ep", COUNTS), there, there]
    assert exchanged(cost.backward) == [there, there]


def test_what_is_between_is_as_it_was(fused: ModelGraph) -> None:
    before, after = fused.cost(1), share_experts(fused, 2).cost(1)
    kept = [item for item in after.forward if item in before.forward]
    assert kept == list(before.forward)
    first = after.forward.index(before.forward[0])
    assert not exchanged(after.forward[: first + 1])
    # Before the experts stand attention and router, after them the sum with what came in.
    assert isinstance(after.forward[-1], Op)


def test_no_other_unit_is_changed(fused: ModelGraph) -> None:
    shared = share_experts(fused, 4)
    assert shared.cost(0) == fused.cost(0)
    assert shared.cost(5) == fused.cost(5)


def test_a_rank_holds_its_part(fused: ModelGraph) -> None:
    shared = share_experts(fused, 2)
    shapes = {p.name: p.shape for p in shared.parameters if p.is_expert}
    assert shapes["blocks.0.experts.gate_up"] == (2, 40, 16)
    assert shapes["blocks.3.experts.down"] == (2, 16, 20)
    assert len(shapes) == 8
    assert shared.num_parameters == fused.num_parameters


def test_of_a_list_it_holds_its_first(fused: ModelGraph) -> None:
    whole = traced("Listed")
    shared = share_experts(whole, 2)
    numbers = {p.name.split(".")[4] for p in shared.parameters if p.is_expert}
    assert numbers == {"0", "1"}
    assert shared.num_parameters == whole.num_parameters


def test_results_that_came_back_are_kept(fused: ModelGraph) -> None:
    before, after = fused.cost(1), share_experts(fused, 2).cost(1)
    assert after.saved_bytes.at(3) - before.saved_bytes.at(3) == 3 * ROWS


def test_modules_are_named_for_every_block(fused: ModelGraph) -> None:
    assert list(expert_modules(fused)) == [f"blocks.{index}.experts" for index in range(4)]


def test_who_cannot_share_is_told_why(fused: ModelGraph) -> None:
    with pytest.raises(PlanError, match="ep=3: a layer has 4 experts"):
        share_experts(fused, 3)
    dense = load_model(
        Path(__file__).parents[2] / "examples" / "gpt.py",
        build="GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=16))",
        inputs="idx=int64[B,16]<61 targets=int64[B,16]<61",
    )
    with pytest.raises(PlanError, match="no module of the blocks holds experts"):
        share_experts(trace(dense, seq_len=16, dtype="float32"), 2)
