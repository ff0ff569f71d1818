from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from claw_plan.planner.errors import TraceError
from claw_plan.planner.graph import Amount, ModelGraph, Op, UnitCost
from claw_plan.planner.model_source import load_model
from claw_plan.planner.trace import trace
from claw_plan.profiles.errors import InputError

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent / "models"
SMALL = "vocab_size=64, block_size=16, n_head=2, n_embd=8"


def stack(build: str, **options: Any) -> ModelGraph:
    return trace(
        load_model(MODELS / "stack.py", build=build), seq_len=None, dtype="float32", **options
    )


def small_gpt(layers: int, **options: Any) -> ModelGraph:
    model = load_model(
        ROOT / "examples" / "gpt.py",
        build=f"GPT(GPTConfig({SMALL}, n_layer={layers}))",
        inputs="idx=int64[B,16]<64 targets=int64[B,16]<64",
    )
    return trace(model, seq_len=16, dtype="float32", **options)


def unit_flops(graph: ModelGraph, unit: int, batch: int = 1) -> tuple[int, int]:
    cost = graph.cost(unit)
    forward, backward = (
        sum(op.flops.at(batch) for op in ops if isinstance(op, Op))
        for ops in (cost.forward, cost.backward)
    )
    return forward, backward


def amounts(cost: UnitCost) -> list[Any]:
    """All numbers of a cost, without the names of modules."""
    found: list[Any] = []
    for field in fields(cost):
        value = getattr(cost, field.name)
        if isinstance(value, Amount | int):
            found.append(value)
        else:
            found += [
                (op.kind, op.target, op.dtype, op.dims, op.flops, op.read_bytes, op.written_bytes)
                for op in value
            ]
    return found


@pytest.mark.slow
def test_nanogpt_124m() -> None:
    graph = trace(load_model(ROOT / "examples" / "gpt.py"), seq_len=1024, dtype="float32")
    assert graph.num_parameters == 124_475_904
    tied = graph.parameters[0]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert tied.units == (0, 13)
    assert [unit.name for unit in graph.units[1:-1]] == [f"transformer.h.{i}" for i in range(12)]
    batch, seq, dim, layers = 4, 1024, 768, 12
    weights = layers * 12 * dim**2 + 50304 * dim
    products, attention = 2 * batch * seq * weights, layers * 4 * batch * seq**2 * dim
    assert graph.flops(batch) == (products + attention, 2 * products + attention * 5 // 2)
    assert graph.cut_refused == {} and graph.assumptions == ()
    assert graph.inputs == {"idx": ("int64", (1024,)), "targets": ("int64", (1024,))}
    # Weights: names of parameters stand once each in the whole graph.
    names = [name for parameter in graph.parameters for name in parameter.names]
    assert len(names) == len(set(names)) == 12 * 12 + 5


@pytest.mark.slow
def test_resnet_50() -> None:
    graph = trace(load_model(MODELS / "resnet.py"), seq_len=None, dtype="float32")
    assert graph.num_parameters == 25_557_032
    # 53 norms: mean and variance in float32, a count in int64.
    assert graph.buffer_bytes == 2 * 4 * 26_560 + 53 * 8
    products = 3 * 64 * 49 * 112**2 + 2048 * 1000
    inputs, size, stem = 64, 56, 3 * 64 * 49 * 112**2
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for index in range(depth):
            before = size
            size = size // 2 if stage and not index else size
            products += inputs * width * before**2 + width * width * 9 * size**2
            products += width * 4 * width * size**2
            products += inputs * 4 * width * size**2 if not index else 0
            inputs = 4 * width
    # The images need no gradient: the stem's convolution has one product in backward, not two.
    assert graph.flops(3) == (2 * 3 * products, 2 * 3 * (2 * products - stem))
    assert len(graph.blocks) == 16 and graph.blocks[3].name == "layer2.0"
    assert graph.cut_refused == {}
    kinds = {op.kind for cost in graph.costs["plain"] for op in cost.forward}
    assert kinds == {"conv", "memory", "gemm"}


@pytest.mark.slow
def test_depth_folds_exactly() -> None:
    folded, whole = small_gpt(8), small_gpt(8, fold=False)
    assert folded.parameters == whole.parameters
    for unit in range(len(whole.units)):
        assert amounts(folded.cost(unit)) == amounts(whole.cost(unit))
    shallow = small_gpt(2)
    for unit in range(len(whole.units)):
        of_two = {0: 0, 1: 1, 9: 3}.get(unit, 2)
        assert amounts(whole.cost(unit)) == amounts(shallow.cost(of_two))


@pytest.mark.slow
def test_the_batch_scales_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_gpt(2)
    monkeypatch.setattr("claw_plan.planner.trace.BATCH_SIZES", (7, 11, 16))
    other = small_gpt(2)
    assert [amounts(c) for c in graph.costs["plain"]] == [amounts(c) for c in other.costs["plain"]]


def test_half_precision_halves_what_is_kept() -> None:
    full = stack("Stack()")
    half = trace(load_model(MODELS / "stack.py", build="Stack()"), seq_len=None, dtype="bfloat16")
    assert half.flops(2) == full.flops(2)
    assert half.dtype == "bfloat16" and {p.dtype for p in half.parameters} == {"bfloat16"}
    assert half.cost(1).input_bytes == Amount(0, 32) and full.cost(1).input_bytes == Amount(0, 64)


def test_recurrent_layers_show_their_products() -> None:
    graph = stack("Recurrent()")
    cells = 6 * 2 * 2 * (16 + 16) * 4 * 16  # steps, layers, products of the input and the state
    assert unit_flops(graph, 0, 3)[0] == 3 * cells


def test_real_tensors_are_the_same_at_every_trace() -> None:
    before = torch.random.get_rng_state()
    assert stack("Scattered(2)").costs == stack("Scattered(2)").costs
    assert torch.equal(before, torch.random.get_rng_state())


def test_unlike_blocks_with_equal_modules_are_traced_in_full() -> None:
    graph = stack("Alternating(8)")
    flops = [unit_flops(graph, unit)[0] for unit in range(1, 9)]
    assert flops == [flops[0], 2 * flops[0]] * 4


def test_a_forward_that_counts_its_blocks_is_traced_in_full() -> None:
    graph = stack("Counting(8)")
    assert len(graph.blocks) == 8
    assert unit_flops(graph, 5) == unit_flops(graph, 2)


def test_a_block_that_runs_often_is_no_chain() -> None:
    graph = stack("Shared(2)")
    assert [unit.name for unit in graph.units] == ["prologue", "epilogue"]
    assert graph.flops(3)[0] == 3 * (5 * 2 * 2 * 16 * 64 + 2 * 16)
    assert graph.cut_refused == {1: "the model has no chain of blocks to cut between"}


def test_skip_connections_refuse_the_cuts_they_cross() -> None:
    graph = stack("Skipping(4)")
    assert set(graph.cut_refused) == {3, 4}
    assert "blocks.0" in graph.cut_refused[3]


def test_frozen_parameters() -> None:
    graph = stack("Frozen()")
    trainable = {p.name: p.trainable for p in graph.parameters}
    assert not trainable["blocks.1.up.weight"] and trainable["blocks.2.up.weight"]
    # Nothing before the first trainable block has a backward pass at all.
    assert graph.cost(1).backward == graph.cost(2).backward == ()
    assert graph.cost(3).backward and graph.cost(1).saved_bytes == Amount()
    assert not graph.may_miss


def test_values_read_while_building() -> None:
    graph = stack("Dropping()")
    assert not graph.assumptions
    assert unit_flops(graph, 2) == unit_flops(stack("Stack()"), 2)


def test_values_that_decide_need_real_tensors() -> None:
    graph = stack("Undecided(2)")
    assert graph.flops(2)[0] == 2 * (2 * 2 * 16 * 64 + 2 * 16)
    assert len(graph.assumptions) == 2
    assert graph.assumptions[0].startswith("the model's values decide how it goes on")
    assert graph.assumptions[1].startswith("never used, so without a gradient: blocks.1.norm")
    assert "real tensors" in graph.no_tensor_parallel
    assert graph.may_miss
    assert stack("Pairwise()").may_miss  # its head has no part in the loss


def test_too_large_for_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("claw_plan.planner.fake_build.REAL_LIMIT_BYTES", 100)
    with pytest.raises(TraceError, match="too large to be traced on real tensors"):
        stack("Undecided(2)")


def test_programs_that_change_with_the_batch_are_taken_in_proportion() -> None:
    graph = stack("Growing(8)")
    assert any("in proportion to those of a batch of 5" in text for text in graph.assumptions)
    assert graph.flops(5)[0] == 5 * (5 * 2 * 2 * 16 * 64 + 2 * 16)


def test_losses_over_pairs_are_named() -> None:
    graph = stack("Pairwise(2)")
    sentence, _ = graph.assumptions
    assert "do not grow in proportion to the batch" in sentence and "aten.mm" in sentence


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("Untrained()", "not trainable as it stands; its loss has no gradient: .* no_grad"),
        ("Stack().requires_grad_(False)", "none of its parameters requires a gradient"),
        ("Raising()", r"running its forward failed: RuntimeError: .*\(stack.py line \d+\)"),
    ],
)
def test_what_cannot_be_trained_is_refused(build: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        stack(build)


def test_an_unknown_dtype() -> None:
    with pytest.raises(InputError, match="float32, bfloat16, float16, but got 'int8'"):
        trace(load_model(MODELS / "stack.py", build="Stack()"), seq_len=None, dtype="int8")


def test_the_fingerprint_is_of_the_structure() -> None:
    one = stack("Stack(4)")
    assert one.fingerprint == stack("Stack(4)", fold=False).fingerprint
    assert (
        len({one.fingerprint, stack("Stack(5)").fingerprint, stack("Frozen()").fingerprint}) == 3
    )


def test_torch_is_left_as_it_was() -> None:
    stack("Undecided(2)")
    assert torch.is_grad_enabled() and torch.ones(2).sum().item() == 2.0
    assert not torch._C._len_torch_dispatch_stack()
