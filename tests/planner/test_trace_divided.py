from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from claw_plan.planner.graph import PLAIN, SEQUENCE, TENSOR, Amount, Exchange, ModelGraph, Op
from claw_plan.planner.model_source import load_model
from claw_plan.planner.shards import local_numel
from claw_plan.planner.trace import trace

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parent / "models"
DIM, SEQ, BYTES = 48, 24, 4
HIDDEN = SEQ * DIM * BYTES


@pytest.fixture(scope="module")
def gpt() -> ModelGraph:
    config = f"vocab_size=66, block_size={SEQ}, n_head=6, n_embd={DIM}, n_layer=4"
    model = load_model(
        ROOT / "examples" / "gpt.py",
        build=f"GPT(GPTConfig({config}))",
        inputs=f"idx=int64[B,{SEQ}]<66 targets=int64[B,{SEQ}]<66",
    )
    return trace(model, seq_len=SEQ, dtype="float32")


def flops(graph: ModelGraph, unit: int, variant: str, tp: int) -> int:
    cost = graph.cost(unit, variant)
    ops = (op for op in (*cost.forward, *cost.backward) if isinstance(op, Op))
    return sum(op.flops.at(3, tp) for op in ops)


def exchanges(graph: ModelGraph, unit: int, variant: str) -> list[list[tuple[str, Amount]]]:
    cost = graph.cost(unit, variant)
    return [
        [(op.op, op.bytes) for op in ops if isinstance(op, Exchange)]
        for ops in (cost.forward, cost.backward)
    ]


def test_all_flops_are_divided(gpt: ModelGraph) -> None:
    assert gpt.tp_divides == 6 and gpt.no_tensor_parallel == gpt.no_sequence_parallel == ""
    for variant in (TENSOR, SEQUENCE):
        for tp in (2, 3, 6):
            for unit in range(1, 5):
                whole = flops(gpt, unit, PLAIN, 1)
                assert flops(gpt, unit, variant, tp) * tp == whole
            assert flops(gpt, 5, variant, tp) * tp == flops(gpt, 5, PLAIN, 1)


def test_attention_heads_and_widths_are_divided(gpt: ModelGraph) -> None:
    (attention,) = (
        op for op in gpt.cost(2, TENSOR).forward if isinstance(op, Op) and op.kind == "attention"
    )
    assert [dim.at(5, 3) for dim in attention.dims] == [5, 2, 2, SEQ, SEQ, DIM // 6, 1]


def test_two_collectives_a_pass_of_the_hidden_state(gpt: ModelGraph) -> None:
    hidden = Amount(0, HIDDEN)
    both = [("all_reduce", hidden)] * 2
    assert exchanges(gpt, 2, TENSOR) == [both, both]
    pair = [("all_gather", hidden), ("reduce_scatter", hidden)] * 2
    assert exchanges(gpt, 2, SEQUENCE) == [pair, pair]
    # The chain's first block scatters, which is free forward; its last gathers.
    lookup = [("all_reduce", hidden)]
    assert exchanges(gpt, 0, SEQUENCE) == [lookup, [("all_gather", hidden)]]
    assert exchanges(gpt, 4, SEQUENCE) == [[*pair, ("all_gather", hidden)], pair]


def test_the_ends_exchange_looked_up_rows_and_three_numbers_a_token(gpt: ModelGraph) -> None:
    hidden, number = Amount(0, HIDDEN), SEQ * BYTES
    largest, sums = ("all_reduce", Amount(0, number)), ("all_reduce", Amount(0, 2 * number))
    assert exchanges(gpt, 0, TENSOR) == [[("all_reduce", hidden)], []]
    for variant in (TENSOR, SEQUENCE):
        assert exchanges(gpt, 5, variant) == [[largest, sums], [("all_reduce", hidden)]]


def test_what_a_block_keeps_is_divided(gpt: ModelGraph) -> None:
    plain = gpt.cost(2).saved_bytes
    small = 2 * SEQ * 2 * BYTES  # mean and deviation of two norms
    tensor, sequence = (gpt.cost(2, variant).saved_bytes for variant in (TENSOR, SEQUENCE))
    # Undivided: ln_1's and ln_2's outputs, and the sum between.
    assert tensor.at(1, 2) == (plain.at(1) - 3 * HIDDEN - small) // 2 + 3 * HIDDEN + small
    # With sequence parallelism the norms' outputs are kept gathered (and divided as well, by
    # the norm that makes them), the rest in parts.
    assert sequence.at(1, 2) < tensor.at(1, 2)
    assert gpt.cost(2, SEQUENCE).input_bytes == Amount(0, 0, 0, HIDDEN)
    assert gpt.cost(2, TENSOR).input_bytes == Amount(0, HIDDEN)


def test_parameters_know_their_divided_dimension(gpt: ModelGraph) -> None:
    dims = {parameter.name: parameter.tp_dim for parameter in gpt.parameters}
    for layer in range(4):
        name = f"transformer.h.{layer}"
        assert dims[f"{name}.attn.c_attn.weight"] == dims[f"{name}.attn.c_attn.bias"] == 0
        assert dims[f"{name}.attn.c_proj.weight"] == 1
        assert dims[f"{name}.attn.c_proj.bias"] is dims[f"{name}.ln_1.weight"] is None
    assert dims["transformer.wte.weight"] == 0  # and the tied head's
    assert dims["transformer.wpe.weight"] is dims["transformer.ln_f.weight"] is None
    assert [(rule.module, rule.style, rule.heads) for rule in gpt.vocabulary_parallel] == [
        ("transformer.wte", "embedding", 66),
        ("lm_head", "head", 66),
    ]


def test_a_model_without_blocks_has_none() -> None:
    model = load_model(MODELS / "stack.py", build="Shared(2)")
    graph = trace(model, seq_len=None, dtype="float32")
    assert set(graph.costs) == {PLAIN} and graph.tensor_parallel == ()
    assert graph.no_tensor_parallel == graph.no_sequence_parallel == "there is no chain of blocks"


def config(tmp_path: Path, **entries: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_llama(tmp_path: Path) -> None:
    hidden, ffn, layers, vocabulary = 64, 128, 6, 256
    folder = config(
        tmp_path, model_type="llama", hidden_size=hidden, intermediate_size=ffn,
        num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=layers,
        vocab_size=vocabulary, max_position_embeddings=32,
    )  # fmt: skip
    graph = trace(load_model(folder), seq_len=32, dtype="bfloat16")
    block = hidden * (hidden + 2 * hidden // 2 + hidden) + 3 * hidden * ffn
    weights = layers * block + vocabulary * hidden
    assert graph.num_parameters == weights + vocabulary * hidden + (2 * layers + 1) * hidden
    products, attention = 2 * 3 * 32 * weights, layers * 4 * 3 * 32 * 32 * hidden
    assert graph.flops(3) == (products + attention, 2 * products + attention * 5 // 2)
    assert graph.tp_divides == 4 and not graph.cut_refused
    for tp in (2, 4):
        for unit in range(1, layers + 1):
            assert flops(graph, unit, TENSOR, tp) * tp == flops(graph, unit, PLAIN, 1)
    attentions = [
        op for op in graph.cost(1).forward if isinstance(op, Op) and op.kind == "attention"
    ]
    assert [dim.at(3) for dim in attentions[0].dims] == [3, 8, 4, 32, 32, 8, 1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_keeps_what_it_keeps_on_real_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = config(
        tmp_path, model_type="llama", hidden_size=64, intermediate_size=128,
        num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=5, vocab_size=256,
        max_position_embeddings=32,
    )  # fmt: skip
    model = load_model(folder)
    graph = trace(model, seq_len=32, dtype=str(dtype).removeprefix("torch."))
    costs = [graph.cost(unit) for unit in range(len(graph.units))]
    kept = sum(cost.saved_bytes.at(2) + cost.input_bytes.at(2) for cost in costs)

    module, batch = model.build().to(dtype), model.example_batch(2, 32)
    own = [*module.parameters(), *module.buffers(), *batch.values()]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(**batch)
    real = sum(t.untyped_storage().nbytes() for key, t in held.items() if key not in known)
    assert kept == real


@pytest.mark.slow
def test_gpt2(tmp_path: Path) -> None:
    folder = config(
        tmp_path, model_type="gpt2", n_layer=6, n_embd=64, n_head=4, vocab_size=256,
        n_positions=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    graph = trace(load_model(folder), seq_len=32, dtype="float32")
    weights = 6 * 12 * 64**2 + 256 * 64
    products, attention = 2 * 2 * 32 * weights, 6 * 4 * 2 * 32 * 32 * 64
    assert graph.flops(2) == (products + attention, 2 * products + attention * 5 // 2)
    assert graph.parameters[0].names == ("transformer.wte.weight", "lm_head.weight")
    assert graph.tp_divides == 4 and not graph.cut_refused


@pytest.mark.slow
def test_mixtral(tmp_path: Path) -> None:
    folder = config(
        tmp_path, model_type="mixtral", hidden_size=64, intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=5, vocab_size=256,
        max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    graph = trace(load_model(folder), seq_len=32, dtype="float32")
    tokens = 2 * 32
    block = 64 * (64 + 2 * 32 + 64) + 4 * 64 + 2 * 3 * 64 * 128  # 2 of 4 experts work on a token
    products = 2 * tokens * (5 * block + 256 * 64)
    attention = 5 * 4 * 2 * 32 * 32 * 64
    forward, backward = graph.flops(2)
    assert forward == products + attention
    assert backward == 2 * products + attention * 5 // 2
    assert len({unit.structure for unit in graph.blocks[1:-1]}) == 1
    experts = next(p for p in graph.parameters if p.name.endswith("0.mlp.experts.gate_up_proj"))
    assert experts.shape == (4, 256, 64)
    assert experts.tp_dim == 1  # the inner size
    assert not any("whole" in said for said in graph.assumptions)  # but for the small router


@pytest.mark.slow
def test_t5(tmp_path: Path) -> None:
    folder = config(
        tmp_path, model_type="t5", d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=5,
        vocab_size=256, decoder_start_token_id=0, pad_token_id=0, n_positions=32,
    )  # fmt: skip
    graph = trace(load_model(folder), seq_len=32, dtype="float32")
    assert [unit.name for unit in graph.blocks] == [
        *(f"encoder.block.{index}" for index in range(5)),
        *(f"decoder.block.{index}" for index in range(5)),
    ]
    shared = graph.parameters[0]
    assert shared.names[0] == "shared.weight" and len(shared.names) == 4
    assert shared.units == (0, 6, 11)
    # Relative positions are shared by all blocks of a stack, and the encoder's output by all of
    # the decoder: the model can be cut before the first block, between the stacks and at the end.
    assert set(range(1, 12)) - set(graph.cut_refused) == {1, 6, 11}
    forward, backward = (
        sum(op.flops.at(2) for op in ops if isinstance(op, Op) and op.kind == "gemm")
        for ops in (graph.cost(3).forward, graph.cost(3).backward)
    )
    assert forward == 2 * 2 * 32 * (4 * 64 * 64 + 2 * 64 * 128) and backward == 2 * forward


IMAGES = """
import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = x.flatten(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build_model():
    return Net()


def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 2, 3, 16)}
"""


def test_what_is_inexact_is_said_without_a_sequence_too(tmp_path: Path) -> None:
    """With one head a rank the heads lie together already and nothing is copied."""
    (tmp_path / "images.py").write_text(IMAGES)
    graph = trace(load_model(tmp_path / "images.py"), seq_len=None, dtype="float32")
    assert graph.tp_divides == 4
    assert any("exact at degree 2 only" in said for said in graph.assumptions)
    assert graph.no_sequence_parallel == "the model's inputs have no sequence"


PAIRS = """
import torch
import torch.nn as nn


class Forward(nn.Module):
    def __init__(self, width, name):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)))

    def forward(self, x):
        return getattr(self, self.name)(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(
            nn.ModuleList([Forward(32, "a"), Forward(48, "b")]) for _ in range(5)
        )

    def forward(self, x):
        x = self.first(x)
        for a, b in self.layers:
            x = x + a(x)
            x = x + b(x)
        return x.square().mean()


def example_batch(size):
    return {"x": torch.randn(size, 3, 16)}
"""


def test_rules_name_the_structures_of_their_own_blocks(tmp_path: Path) -> None:
    """Blocks of lists of lists, which are unlike in turns; x goes around every one of them."""
    (tmp_path / "net.py").write_text(PAIRS)
    graph = trace(load_model(tmp_path / "net.py", build="Net()"), seq_len=None, dtype="float32")
    names = [f"layers.{index}.{own}" for index in range(5) for own in (0, 1)]
    assert [unit.name for unit in graph.blocks] == names
    rules = [rule for rule in graph.tensor_parallel if rule.style != "region"]
    for unit in graph.blocks:
        own = {rule.module for rule in rules if unit.structure in rule.structures}
        letter = "ab"[int(unit.name[-1])]
        assert own == {f"{letter}.0", f"{letter}.2"}, unit
    assert graph.tp_divides == 16 and graph.cut_refused.keys() >= set(range(2, 11))


def test_a_degree_that_divides_only_the_mlp_has_costs_of_its_own(gpt: ModelGraph) -> None:
    """6 heads and 192 columns: at 4 one all-reduce a block, and attention as it is undivided."""
    assert gpt.partial.keys() == {4, 8} and gpt.takes_tp(4) and not gpt.takes_tp(5)
    assert {rule.module for rule in gpt.rules_at(4)} == {"mlp", "mlp.c_fc", "mlp.c_proj"}
    assert gpt.rules_at(2) == gpt.tensor_parallel
    cost = gpt.cost(2, TENSOR, 4)
    moved = [op.bytes.at(3, 4) for op in cost.forward if isinstance(op, Exchange)]
    assert moved == [3 * HIDDEN]
    (attention,) = (op for op in cost.forward if isinstance(op, Op) and op.kind == "attention")
    assert [dim.at(5, 4) for dim in attention.dims] == [5, 6, 6, SEQ, SEQ, DIM // 6, 1]
    # c_attn and c_proj hold 4 of 12 parts of a block's weights, fc and proj 8: 4 + 8/4 of 12.
    by_name = {parameter.name: parameter for parameter in gpt.parameters}
    weights = [
        by_name[f"transformer.h.1.{name}.weight"]
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert sum(local_numel(weight, 4) for weight in weights) == (4 + 2) * DIM * DIM
    assert sum(local_numel(weight, 2) for weight in weights) == 6 * DIM * DIM
    assert [weight.dim_at(4) for weight in weights] == [None, None, 0, 1]
