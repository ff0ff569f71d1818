import math
import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from claw_plan.planner.tensor_parallel_search import find_rules

DIM, HEADS, SEQ, BATCH = 24, 4, 6, 2


class Chain(nn.Module):
    def __init__(self, *layers, between=None, ahead=None):
        super().__init__()
        self.first = ahead or nn.Linear(DIM, DIM)
        self.between = between or (lambda h: h)
        self.layers = nn.ModuleList(layers)

    def forward(self, h):
        h = self.first(h)
        for layer in self.layers:
            h = self.between(layer(h))
        return h


def found(*layers, **options):
    model = Chain(*layers, **options)
    names = [f"layers.{i}" for i in range(len(layers))]
    return find_rules(model, names, lambda: model(torch.randn(BATCH, SEQ, DIM)))


def regions(finding):
    """Each region as 'columns -> row', with a fused column's parts."""
    lines, columns = [], []
    for rule in finding.rules:
        if rule.style == "colwise":
            columns.append(rule.module + (f"*{rule.parts}" if rule.parts > 1 else ""))
        elif rule.style == "rowwise":
            lines.append(f"{' '.join(columns)} -> {rule.module}")
            columns = []
    return lines


class Encoder(nn.Module):
    """A ViT-like block: one tensor of q, k, v and heads, no mask, names of its own."""

    def __init__(self, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_b = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.trio, self.merge = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.wide, self.narrow = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def attend(self, h):
        b, n, d = h.shape
        q, k, v = self.trio(h).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)
        return self.merge((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, h):
        h = h + self.attend(self.ln_a(h))
        return h + self.narrow(F.gelu(self.wide(self.ln_b(h))))


class Interleaved(nn.Module):
    """q, k and v of each head lie together; einsum; the norm comes after (post-norm)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.norm = (
            nn.Linear(DIM, 3 * DIM),
            nn.Linear(DIM, DIM),
            nn.LayerNorm(DIM),
        )

    def forward(self, h):
        b, n, d = h.shape
        q, k, v = self.qkv(h).view(b, n, HEADS, 3 * d // HEADS).chunk(3, dim=-1)
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.norm(h + self.o(y.reshape(b, n, d)))


class Two(nn.Module):
    """Two linears with `act` between them, in a module of their own under a norm."""

    def __init__(self, act=F.gelu, tie=False):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(DIM), act
        self.pair = nn.ModuleDict({"p": nn.Linear(DIM, 48), "q": nn.Linear(48, DIM)})
        if tie:
            self.pair["q"] = nn.Linear(DIM, DIM)
            self.pair["p"] = self.pair["q"]

    def forward(self, h):
        return h + self.pair["q"](self.act(self.pair["p"](self.norm(h))))


def test_a_vision_block_by_flow_alone():
    finding = found(Encoder(), Encoder())
    assert regions(finding) == ["trio*3 -> merge", "wide -> narrow"]
    assert (finding.tp_divides, finding.reason, finding.structures) == (
        4,
        "",
        (("layers.0", "layers.1"),),
    )
    assert "stand in layers.0 itself" in finding.no_sequence_parallel
    heads = {rule.module: rule.heads for rule in finding.rules if rule.style != "region"}
    assert heads == {"trio": 4, "merge": 4, "wide": 96, "narrow": 96}


def test_heads_that_hold_their_own_q_k_v():
    assert regions(found(Interleaved())) == ["qkv -> o"]


def test_the_same_on_fake_tensors():
    with FakeTensorMode():
        assert regions(found(Encoder())) == ["trio*3 -> merge", "wide -> narrow"]


def test_blocks_of_different_structure_have_their_own_rules():
    finding = found(Encoder(), Two())
    assert finding.structures == (("layers.0",), ("layers.1",))
    assert {rule.module: rule.structures for rule in finding.rules if rule.style == "rowwise"} == {
        "merge": (0,),
        "narrow": (0,),
        "pair.q": (1,),
    }
    assert [rule.module for rule in finding.by_block()["layers.1"]] == ["", "pair.p", "pair.q"]


REFUSED = {
    "norm between": (lambda: Two(nn.LayerNorm(48)), "layer_norm in .* along the divided dim"),
    "softmax between": (lambda: Two(lambda t: t.softmax(-1)), "softmax .* along the divided"),
    "mix between": (lambda: Two(lambda t: t.roll(1, -1)), "roll .* has no divided form"),
    "shared linear": (lambda: Two(tie=True), "is used 2 times in a block"),
    "one head": (
        lambda: Encoder(heads=1),
        "sums over the divided dimension|divided differently",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_left_out_with_the_reason(name):
    layer, why = REFUSED[name]
    finding = found(layer())
    assert not any(rule.module.startswith(("pair", "trio")) for rule in finding.rules)
    reasons = [*finding.refused.values()]
    assert reasons
    assert any(re.search(why, reason) for reason in reasons), reasons


def test_a_divided_tensor_that_leaves_the_block_is_refused():
    class Leaks(Two):
        def forward(self, h):
            wide = self.pair["p"](self.norm(h))
            return h + self.pair["q"](wide), wide

    class Taking(Chain):
        def __init__(self, *layers, take):
            super().__init__(*layers)
            self.take = take

        def forward(self, h):
            return self.take(self.layers[0](self.first(h)))

    def found_taking(take):
        model = Taking(Leaks(), take=take)
        return find_rules(model, ["layers.0"], lambda: model(torch.randn(BATCH, SEQ, DIM)))

    assert regions(found_taking(lambda both: both[0])) == ["pair.p -> pair.q"]
    finding = found_taking(lambda both: both[0] + both[1].sum(-1, keepdim=True))
    assert finding.rules == ()
    assert "layers.0.pair.q: sum in layers.0 runs along the divided" in finding.reason
    assert "what its block returns divided" in found_taking(lambda both: both[1]).reason


def test_a_weight_that_another_module_holds_is_refused():
    layer = Two()
    tied = nn.Linear(DIM, 48)
    tied.weight = layer.pair["p"].weight
    model = Chain(layer)
    model.other = tied
    finding = find_rules(model, ["layers.0"], lambda: model(torch.randn(BATCH, SEQ, DIM)))
    assert "pair.p shares its weight with another module" in finding.reason


class Odd(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)

    def forward(self, h):
        return h + self.down(F.relu(self.up(h)))


def test_blocks_without_a_common_degree_leave_the_heavier_divided():
    finding = found(Odd(9), Odd(16), Odd(9), Odd(9))
    assert finding.by_block().keys() == {"layers.0", "layers.2", "layers.3"}
    assert (finding.tp_divides, finding.reason) == (9, "")
    assert finding.refused == {
        "layers.1.down": "its 16 heads or columns have no degree in common with the 9 of heavier "
        "modules"
    }
    assert "layers.1 has no divided linears" in finding.no_sequence_parallel


def test_odd_heads_stay_whole_beside_heavier_modules_that_halve():
    """GPT-2 XL: 25 heads, and 6400 columns that 2, 4 and 8 ranks can share."""
    finding = found(Odd(50), Odd(25))
    assert finding.by_block().keys() == {"layers.0"}
    assert finding.tp_divides == 50
    assert finding.refused == {
        "layers.1.down": "its 25 heads or columns have no even degree in common with the 50 of "
        "heavier modules"
    }


def test_a_degree_that_divides_columns_and_not_heads_divides_the_columns():
    """As of GPT-2 small, 12 heads and 3072 columns over 8 ranks."""
    finding = found(Encoder(heads=6), Encoder(heads=6))
    assert finding.tp_divides == 6 and finding.partial.keys() == {4, 8}
    linears = [rule.module for rule in finding.partial[8] if rule.style != "region"]
    assert linears == ["wide", "narrow"]
    assert finding.by_block(8)["layers.1"] == finding.partial[8]
    assert finding.by_block(2) == finding.by_block()


def test_no_degree_is_partial_where_all_divide():
    assert found(Encoder(heads=8)).partial == {}


class Wrapped(nn.Module):
    """A block whose linears stand in a module of their own; `mix` runs outside of it."""

    def __init__(self, mix=lambda h: h, own=None):
        super().__init__()
        self.norm, self.mix, self.own = nn.LayerNorm(DIM), mix, own
        self.ff = nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, DIM))

    def forward(self, h):
        h = self.mix(h) if self.own is None else self.mix(h, self.own)
        return h + self.ff(self.norm(h))


class Dripping(Chain):
    """The loss takes something from between the blocks."""

    def forward(self, h):
        h = self.layers[0](self.first(h))
        return self.layers[1](h).sum() + h.pow(2).mean()


def test_sequence_parallel_is_found_where_nothing_mixes_positions():
    assert found(Wrapped(), Wrapped()).no_sequence_parallel == ""
    scaled = Wrapped(lambda h, own: h * (1 + own.float()), nn.Parameter(torch.zeros(DIM)))
    assert found(scaled).no_sequence_parallel == ""


MIXES = {
    "a shift along the sequence": (lambda h: h + h.roll(1, 1), "roll in the sequence"),
    "a mean over the sequence": (lambda h: h - h.mean(1, keepdim=True), "mean in the sequence"),
    "positions from a table": (lambda h: h + torch.ones(SEQ, DIM), "joins a whole tensor"),
    "a convolution": (
        lambda h: F.conv1d(h.transpose(1, 2), torch.ones(DIM, 1, 3), padding=1, groups=DIM).mT,
        "conv1d in the sequence",
    ),
}


@pytest.mark.parametrize("name", MIXES)
def test_a_block_that_mixes_positions_outside_its_regions_has_no_sequence_parallel(name):
    mix, why = MIXES[name]
    finding = found(Wrapped(mix))
    assert regions(finding) == ["ff.0 -> ff.2"]
    assert why in finding.no_sequence_parallel


def test_what_uses_the_hidden_state_between_blocks_has_no_sequence_parallel():
    trained = nn.LayerNorm(DIM)
    finding = found(Wrapped(), Wrapped(), between=trained)
    assert "does not come from the blocks' own parameters" in finding.no_sequence_parallel
    model = Dripping(Wrapped(), Wrapped())
    names = ["layers.0", "layers.1"]
    finding = find_rules(model, names, lambda: model(torch.randn(BATCH, SEQ, DIM)))
    assert "mean in the sequence runs over all dimensions" in finding.no_sequence_parallel


def test_a_region_whose_input_goes_elsewhere_too_has_no_sequence_parallel():
    class Peeks(nn.Sequential):
        def forward(self, h):
            return super().forward(h) * h.mean()

    layer = Wrapped()
    layer.ff = Peeks(*layer.ff)
    finding = found(layer)
    assert regions(finding) == ["ff.0 -> ff.2"]
    assert "mean in layers.0.ff" in finding.no_sequence_parallel


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 31, "use_cache": True}
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    build, config, blocks = {
        "llama": ("LlamaForCausalLM", ("LlamaConfig", llama), "model.layers"),
        "gpt2": ("GPT2LMHeadModel", ("GPT2Config", gpt2), "transformer.h"),
        "t5": (
            "T5ForConditionalGeneration",
            ("T5Config", t5 | {"decoder_start_token_id": 0}),
            "decoder.block",
        ),
    }[name]
    model = getattr(transformers, build)(getattr(transformers, config[0])(**config[1], **small))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    names = [f"{blocks}.{i}" for i in range(2)]
    return find_rules(model, names, lambda: model(input_ids=tokens, labels=tokens))


def test_hugging_face_llama():
    finding = hugging_face("llama")
    assert regions(finding) == [
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj -> self_attn.o_proj",
        "mlp.gate_proj mlp.up_proj -> mlp.down_proj",
    ]
    assert (finding.tp_divides, finding.no_sequence_parallel) == (2, "")
    heads = {rule.module: rule.heads for rule in finding.rules if rule.style == "colwise"}
    assert [*heads.values()] == [8, 2, 2, 64, 64]


def test_hugging_face_gpt2():
    finding = hugging_face("gpt2")
    assert regions(finding) == ["attn.c_attn*3 -> attn.c_proj", "mlp.c_fc -> mlp.c_proj"]
    assert (finding.tp_divides, finding.no_sequence_parallel) == (4, "")
    dims = {rule.module: dict(rule.weight_dims) for rule in finding.rules if rule.weight_dims}
    assert dims == {
        "attn.c_attn": {"weight": 1, "bias": 0},  # Conv1D: [inputs, outputs]
        "attn.c_proj": {"weight": 0},
        "mlp.c_fc": {"weight": 1, "bias": 0},
        "mlp.c_proj": {"weight": 0},
    }


def test_hugging_face_t5_with_its_relative_attention():
    """The first block has the table of position biases, which every rank holds whole."""
    finding = hugging_face("t5")
    attention = "layer.{}Attention"
    assert regions(finding) == 2 * [
        *(
            f"{name}.q {name}.k {name}.v -> {name}.o"
            for name in map(attention.format, ("0.Self", "1.EncDec"))
        ),
        "layer.2.DenseReluDense.wi -> layer.2.DenseReluDense.wo",
    ]
    assert math.gcd(finding.tp_divides, 4) == 4
