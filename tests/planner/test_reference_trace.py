"""The reference transformer against closed forms, published sizes and the planner's own trace.

Letters in formulas: s sequence, b batch, h hidden, a heads, L layers, V vocabulary, t ranks of tp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from claw_plan.planner.graph import PLAIN, SEQUENCE, TENSOR, Exchange, ModelGraph, Op, UnitCost
from claw_plan.planner.model_source import load_model
from claw_plan.planner.reference_model import Division
from claw_plan.planner.reference_trace import kinds_of_layers, trace_reference
from claw_plan.planner.trace import trace
from claw_plan.profiles.published_fields import load_yaml
from claw_plan.profiles.published_training import read_training
from claw_plan.profiles.training_row import Dimensions, LatentAttention, MixtureOfExperts

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT.parent / "shared" / "data" / "training.yaml"

GPT = Dimensions(
    layers=3, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=1024, seq_len=32,
    learned_positions=True,
)  # fmt: skip
MOE = replace(
    GPT, learned_positions=False, ffn=0,
    moe=MixtureOfExperts(experts=8, topk=2, expert_ffn=96, dense_layers=1, dense_ffn=256),
)  # fmt: skip
S, H, A, L, V = 32, 64, 4, 3, 1024
UNFUSED = Division(fused_attention=False)


def ops(cost: UnitCost, *, backward: bool = False) -> list[Op]:
    items = cost.backward if backward else cost.forward
    return [item for item in items if isinstance(item, Op)]


def exchanges(cost: UnitCost, batch: int = 1) -> list[list[tuple[str, str, int]]]:
    return [
        [(x.axis, x.op, x.bytes.at(batch)) for x in items if isinstance(x, Exchange)]
        for items in (cost.forward, cost.backward)
    ]


def products(cost: UnitCost, batch: int, tp: int = 1) -> Counter[tuple[object, ...]]:
    """Dims of matrix products (whichever operand comes first) and of attention."""
    found: Counter[tuple[object, ...]] = Counter()
    for backward in (False, True):
        for op in ops(cost, backward=backward):
            dims = [dim.at(batch, tp) for dim in op.dims]
            if op.kind == "gemm":
                found[backward, "gemm", *sorted(dims)] += 1
            elif op.kind == "attention":
                found[backward, *dims] += 1
    return found


@pytest.mark.parametrize("division", [Division(), UNFUSED])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_forward_flops_are_megatrons(division, batch):
    """24 b s h^2 (1 + s / 6h) a layer and 2 b s h V for the logits (arXiv 2104.04473, app.)."""
    graph = trace_reference(GPT, division, "bfloat16")
    layer = 24 * batch * S * H**2 + 4 * batch * S**2 * H
    assert graph.flops(batch)[0] == L * layer + 2 * batch * S * H * V


def test_a_step_without_recompute_is_korthikantis():
    """72 b L s h^2 (1 + s/6h + V/12hL), arXiv 2205.05198, eq. 7: backward twice the forward."""
    graph = trace_reference(GPT, UNFUSED, "bfloat16")
    assert 12 * sum(graph.flops(5)) == 72 * 5 * S * H * (12 * L * H + 2 * L * S + V)


def test_flash_attention_multiplies_five_times_backward():
    """Two S x S products forward, five backward (arXiv 2205.14135); all else twice."""
    forward, backward = trace_reference(GPT, Division(), "bfloat16").flops(3)
    attention = 4 * 3 * S**2 * H * L
    assert backward == 2 * (forward - attention) + attention * 5 // 2


def test_parameters_are_counted_by_formula():
    """V h + s h embeddings, L (12 h^2 + 2 h), a norm, V h for the head where it is not tied."""
    whole = V * H + S * H + L * (12 * H**2 + 2 * H) + H
    assert trace_reference(GPT, Division(), "float32").num_parameters == whole + V * H
    tied = replace(GPT, tied=True)
    assert trace_reference(tied, Division(), "float32").num_parameters == whole
    halves = trace_reference(GPT, Division(tp=2), "float32").num_parameters
    assert halves == V * H + S * H + L * (6 * H**2 + 2 * H) + H


def test_deepseek_v3_has_671_billion_parameters_of_which_37_are_active():
    """arXiv 2412.19437, section 4.2; the configuration file of its weights."""
    moe = MixtureOfExperts(
        experts=256, topk=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3, dense_ffn=18432
    )
    mla = LatentAttention(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_head_dim=128
    )
    dims = Dimensions(
        layers=61, hidden=7168, heads=128, kv_heads=128, head_dim=128, ffn=0, vocab=129280,
        seq_len=64, activation="swiglu", norm="rms", moe=moe, mla=mla,
    )  # fmt: skip
    graph = trace_reference(dims, Division(), "bfloat16")
    assert graph.num_parameters == pytest.approx(671.03e9, rel=1e-4)
    experts = sum(p.numel for p in graph.parameters if p.is_expert)
    active = graph.num_parameters - experts * (256 - 8) // 256
    assert active == pytest.approx(37.5e9, rel=0.01)
    # Of a token's step 2 flops a parameter that multiplies it; the embedding is looked up.
    tokens = 64
    scores = 2 * tokens**2 * 128 * (128 + 64 + 128) * 61
    assert graph.flops(1)[0] == pytest.approx(
        2 * tokens * (active - 129280 * 7168) + scores, rel=1e-3
    )


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_block_keeps_what_korthikanti_counts(batch):
    """s b h (34 + 5 a s / h), arXiv 2205.05198, eq. 2, less what is not kept or counted here.

    Of the 34: 2 enter the block (its input), 2 are dropout's masks. Of the 5: 1 is such a mask.
    Added: mean and variance of two norms in float32, and the scalar of the dropout.
    """
    cost = trace_reference(GPT, UNFUSED, "bfloat16").cost(1)
    assert cost.input_bytes.at(batch) == 2 * S * batch * H
    published = S * batch * H * 34 + 5 * A * S**2 * batch
    less = (2 + 2) * S * batch * H + A * S**2 * batch
    assert cost.saved_bytes.at(batch) == published - less + 2 * S * batch * 8 + 2


def test_flash_attention_keeps_no_scores():
    """Instead of 4 a s^2 b: one float32 a row and head, and the scalar is gone."""
    unfused = trace_reference(GPT, UNFUSED, "bfloat16").cost(1).saved_bytes.at(2)
    fused = trace_reference(GPT, Division(), "bfloat16").cost(1).saved_bytes.at(2)
    assert unfused - fused == 2 * (4 * A * S**2) + 2 - 2 * (4 * A * S)


@pytest.mark.parametrize(("sequence", "whole"), [(False, 6), (True, 4)])
@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallel_ranks_keep_their_part(sequence, whole, t):
    """s b h (10 + 24/t + 5 a s / h t), eq. 3: 24/t is divided, of the 10 are 2 the input, 2 masks.

    With the sequence divided, Megatron keeps its part of what the norms put out and gathers it
    again in backward; here as in torch the gathered tensors stay: 4 whole, 2/t a norm's input.
    """
    division = replace(UNFUSED, tp=t, sequence_parallel=sequence)
    dims = replace(GPT, heads=8, kv_heads=8, head_dim=8)  # of one head q, k and v lie in one
    cost = trace_reference(dims, division, "bfloat16").cost(1)
    norms = 2 * S * 8 // (t if sequence else 1)
    inputs = 2 * S * H // t if sequence else 0
    scores = 4 * 8 * S**2 // t
    assert cost.saved_bytes.at(1) == S * H * whole + inputs + 24 * S * H // t + scores + norms + 2


@pytest.fixture(scope="module")
def found_by_the_planner() -> ModelGraph:
    config = f"vocab_size={V}, block_size={S}, n_layer={L}, n_head={A}, n_embd={H}"
    model = load_model(
        ROOT / "examples" / "gpt.py",
        build=f"GPT(GPTConfig({config}))",
        inputs=f"idx=int64[B,{S}]<{V} targets=int64[B,{S}]<{V}",
    )
    return trace(model, seq_len=S, dtype="float32")


@pytest.mark.parametrize(
    ("variant", "tp"), [(PLAIN, 1), (TENSOR, 2), (TENSOR, 4), (SEQUENCE, 2), (SEQUENCE, 4)]
)
def test_megatron_by_hand_is_what_the_planner_finds(found_by_the_planner, variant, tp):
    """The same kernels of the same sizes, the same exchanges, the same bytes kept."""
    division = Division(tp=tp, sequence_parallel=variant == SEQUENCE)
    by_hand = trace_reference(replace(GPT, tied=True), division, "float32")
    ours, found = by_hand.cost(2), found_by_the_planner.cost(2, variant)
    for batch in (1, 3):
        assert products(ours, batch) == products(found, batch, tp)
        assert exchanges(ours, batch) == exchanges(found, batch)
        assert ours.saved_bytes.at(batch) == found.saved_bytes.at(batch, tp)
        assert ours.input_bytes.at(batch) == found.input_bytes.at(batch, tp)


def test_the_vocabulary_is_divided_too():
    """Embedding and logits: one sum each way, arXiv 1909.08053, section 3."""
    graph = trace_reference(GPT, Division(tp=2), "bfloat16")
    sums = [("tp", "all_reduce", 2 * S * H)]
    assert exchanges(graph.cost(0)) == [sums, []]
    assert exchanges(graph.cost(L + 1)) == [[], sums]
    logits = max(ops(graph.cost(L + 1)), key=lambda op: op.flops.at(1))
    assert [dim.at(1) for dim in logits.dims] == [1, S, V // 2, H]


def test_experts_multiply_topk_times_their_width():
    """Of MOE's three layers the first is dense: kinds of blocks are traced apart."""
    graph = trace_reference(MOE, Division(), "bfloat16")
    assert [unit.structure for unit in graph.units] == [0, 1, 2, 2, 3]
    grouped = [op for op in ops(graph.cost(2)) if "grouped" in op.target]
    assert sum(op.flops.at(3) for op in grouped) == 2 * (4 * 3 * S * H * 96)  # topk x dense
    assert [[dim.at(3) for dim in op.dims] for op in grouped] == [
        [8, 3 * S * 2 // 8, 96, H],
        [8, 3 * S * 2 // 8, H, 96],
    ]


@pytest.mark.parametrize("ep", [2, 4])
def test_tokens_go_to_their_experts_and_back(ep):
    """topk s b h elements each way, in both passes; a rank holds an ep-th of the experts."""
    graph = trace_reference(MOE, Division(ep=ep), "bfloat16")
    sent = ("ep", "all_to_all", 2 * S * 3 * H * 2)
    assert exchanges(graph.cost(2), batch=3) == [[sent, sent], [sent, sent]]
    experts = sum(p.numel for p in graph.parameters if p.is_expert)
    assert experts == 2 * (8 // ep) * 2 * H * 96
    alone = trace_reference(MOE, Division(), "bfloat16")
    assert graph.flops(2) == alone.flops(2)  # a balanced router: others' tokens replace its own


def test_context_parallel_ranks_gather_keys_and_values():
    """Of grouped queries only the key and value heads go round; half the rows stay."""
    dims = replace(GPT, kv_heads=2, learned_positions=False)
    ring = trace_reference(dims, Division(cp=2), "bfloat16").cost(1)
    one = 2 * S * 2 * 16  # bytes of the whole keys: s, two heads of 16
    gathers, reductions = exchanges(ring)
    assert gathers == [("cp", "all_gather", one)] * 2
    assert reductions == [("cp", "reduce_scatter", one)] * 2
    attention = next(op for op in ops(ring) if op.kind == "attention")
    assert [dim.at(1) for dim in attention.dims] == [1, 4, 2, S // 2, S, 16, 1]


def test_context_parallel_ranks_may_exchange_heads_instead():
    a2a = trace_reference(GPT, Division(cp=2, cp_kind="a2a"), "bfloat16").cost(1)
    part = ("cp", "all_to_all", 2 * (S // 2) * H)
    assert exchanges(a2a) == [[part] * 4, [part] * 4]  # q, k, v and the result
    attention = next(op for op in ops(a2a) if op.kind == "attention")
    assert [dim.at(1) for dim in attention.dims] == [1, 2, 2, S, S, 16, 1]


def test_windows_are_spread_evenly_and_dense_layers_come_first():
    dims = replace(GPT, layers=6, sliding_window=8, sliding_window_layers=3)
    assert [window for window, _ in kinds_of_layers(dims)] == [0, 8, 0, 8, 0, 8]
    assert [dense for _, dense in kinds_of_layers(MOE)] == [True, False, False]
    assert kinds_of_layers(GPT) == [(0, True)] * 3


def test_a_window_counts_as_a_causal_square_of_its_size():
    dims = replace(GPT, layers=2, sliding_window=8, sliding_window_layers=1)
    graph = trace_reference(dims, Division(), "bfloat16")
    full, window = (
        next(op.flops.at(1) for op in ops(graph.cost(unit)) if op.kind == "attention")
        for unit in (1, 2)
    )
    assert window * S == full * 16


def test_one_block_stands_for_all_of_its_kind():
    one = trace_reference(replace(GPT, layers=1), Division(), "bfloat16")
    many = trace_reference(replace(GPT, layers=40), Division(), "bfloat16")
    assert many.cost(40) == one.cost(1)
    names = [parameter.name for parameter in many.parameters if 17 in parameter.units]
    assert names and all(name.startswith("blocks.16.") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="published runs are not beside the project")
def test_published_models_have_their_published_size():
    data = load_yaml(PUBLISHED)
    derived = {
        row["id"]: row["derived"].get("params_total_b") for row in data if "vocab" in row["model"]
    }
    expected = {
        # Positions are left out there, and lengths are no matter.
        replace(row.dimensions, seq_len=64, learned_positions=False): derived[row.id]
        for row in read_training(PUBLISHED, data).training
        if derived.get(row.id)
    }
    assert len(expected) > 50
    wrong = {}
    for dims, billions in expected.items():
        found = trace_reference(dims, Division(), "bfloat16").num_parameters / 1e9
        if found != pytest.approx(billions, rel=1e-3, abs=1e-3):
            wrong[dims] = (found, billions)
    assert not wrong


def test_fewer_tokens_than_experts():
    """Two samples give a rank 32 * 2 / 2 * 4 rows for 256 experts, four give one row each."""
    moe = MixtureOfExperts(experts=256, topk=4, expert_ffn=64)
    graph = trace_reference(replace(MOE, moe=moe), Division(tp=2), "bfloat16")
    assert ops(graph.cost(1, PLAIN))
