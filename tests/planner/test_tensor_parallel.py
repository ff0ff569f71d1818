import threading
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from claw_plan.planner.errors import PlanError, TensorParallelError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.sequence_parallel import divide_sequence
from claw_plan.planner.tensor_parallel import apply_rules
from claw_plan.planner.tensor_parallel_search import find_rules
from claw_plan.planner.tp_autograd import StandIn

VOCAB, BATCH, SEQ, DIM, HEADS = 31, 2, 8, 24, 4
TOKENS = torch.randint(0, VOCAB, (2, BATCH, SEQ), generator=torch.Generator().manual_seed(7))


class FusedAttention(nn.Module):
    """Sizes written out, attention by hand, a mask in a buffer."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.register_buffer("mask", torch.ones(SEQ, SEQ).tril().view(1, 1, SEQ, SEQ))

    def forward(self, h):
        b, s, d = h.size()
        q, k, v = self.mix(h).split(d, dim=2)
        q, k, v = (t.view(b, s, HEADS, d // HEADS).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (d // HEADS) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :s, :s] == 0, float("-inf"))
        y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, s, d))


class GroupedAttention(nn.Module):
    """Grouped queries, a trained norm of every head, no biases."""

    def __init__(self):
        super().__init__()
        self.a, self.z = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.b, self.c = (nn.Linear(DIM, DIM // 2, bias=False) for _ in range(2))
        self.head_norm = nn.LayerNorm(DIM // HEADS)

    def forward(self, h):
        b, s, _ = h.shape
        q, k, v = (
            f(h).view(b, s, -1, DIM // HEADS).transpose(1, 2) for f in (self.a, self.b, self.c)
        )
        y = F.scaled_dot_product_attention(
            self.head_norm(q), k, v, is_causal=True, enable_gqa=True
        )
        return self.z(y.transpose(1, 2).reshape(b, s, -1))


class SharedKeys(nn.Module):
    """One head of keys and values for all queries, and a trained bias of every head, as T5 has."""

    def __init__(self, repeats):
        super().__init__()
        self.a, self.z = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.b, self.c = (nn.Linear(DIM, DIM // HEADS) for _ in range(2))
        self.bias, self.repeats = nn.Parameter(torch.randn(HEADS, SEQ, SEQ)), repeats

    def forward(self, h):
        b, s, _ = h.shape
        q, k, v = (
            f(h).view(b, s, -1, DIM // HEADS).transpose(1, 2) for f in (self.a, self.b, self.c)
        )
        if self.repeats:
            k, v = (t.expand(b, HEADS, s, -1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, self.bias, enable_gqa=not self.repeats)
        return self.z(y.transpose(1, 2).reshape(b, s, -1))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.back = nn.Linear(DIM, 96), nn.Linear(48, DIM)

    def forward(self, h):
        gate, up = self.both(h).chunk(2, dim=-1)
        return self.back(F.silu(gate) * up)


class Turned(nn.Module):
    """A linear with its weight the other way round, as GPT-2 has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.shift = nn.Parameter(torch.randn(outputs))

    def forward(self, h):
        size = (*h.size()[:-1], self.w.shape[1])
        return torch.addmm(self.shift, h.view(-1, h.size(-1)), self.w).view(size)


def turned_mlp():
    return nn.Sequential(Turned(DIM, 48), nn.GELU(), Turned(48, DIM))


def plain_mlp():
    return nn.Sequential(nn.Linear(DIM, 48), nn.ReLU(), nn.Linear(48, DIM))


class Layer(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.n1, self.mixer, self.n2, self.ff = (
            nn.LayerNorm(DIM),
            attention(),
            nn.LayerNorm(DIM),
            mlp(),
        )

    def forward(self, h):
        h = h + self.mixer(self.n1(h))
        return h + self.ff(self.n2(h))


class FlatLayer(nn.Module):
    """All linears in the block itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 48), nn.Linear(48, DIM)

    def forward(self, h):
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Model(nn.Module):
    def __init__(self, layer, layers=2, recompute=False):
        super().__init__()
        self.embed, self.recompute = nn.Embedding(VOCAB, DIM), recompute
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        h = self.embed(tokens)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.recompute else layer(h)
        return self.head(h)


LAYERS = {
    "fused, written by hand": lambda: Layer(FusedAttention, turned_mlp),
    "grouped and gated": lambda: Layer(GroupedAttention, Gated),
    "flat": FlatLayer,
}


def build(layer, **options):
    torch.manual_seed(0)
    return Model(layer, **options).double()


def loss_of(model):
    return F.cross_entropy(model(TOKENS[0]).flatten(0, 1), TOKENS[1].flatten())


def found(model, forward=None):
    names = [f"layers.{i}" for i in range(len(model.layers))]
    return find_rules(model, names, forward or (lambda: loss_of(model)))


def train_on(rank, model, rules, sequence_parallel):
    divided = apply_rules(model, rules, rank, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        divide_sequence([model.get_submodule(name) for name in rules], rules, rank)
    loss = loss_of(model)
    forward = Counter(rank.calls)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    calls = forward, rank.calls - forward
    for name in divided.sequence_parallel_parameters:
        gradients[name] = rank.all_reduce(gradients[name], "")
    return loss.item(), gradients, divided, calls


def check_parity(rank_threads, layer, degree, sequence_parallel, **options):
    whole, probe = build(layer), build(layer)
    loss = loss_of(whole)
    loss.backward()
    rules = found(probe).by_block()
    models = [build(layer, **options) for _ in range(degree)]
    results = rank_threads(degree).run(
        lambda rank: train_on(rank, models[rank.rank], rules, sequence_parallel)
    )
    divided = results[0][2]
    assert len(divided.sharded) > 0
    for name, parameter in whole.named_parameters():
        each = [gradients[name] for _, gradients, _, _ in results]
        for gradient in [divided.full_parameter(name, each)] if name in divided.sharded else each:
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12)
    assert all(abs(result[0] - loss.item()) < 1e-12 for result in results)
    return results[0][3]


@pytest.fixture
def parity(rank_threads):
    return partial(check_parity, rank_threads)


@pytest.mark.parametrize("degree", [2, 4])
def test_fused_attention_by_hand_and_turned_weights_train_like_one_process(parity, degree):
    forward, backward = parity(LAYERS["fused, written by hand"], degree, False)
    assert forward == backward == {"all_reduce": 2 * 2}  # two regions in each of two layers


def test_grouped_queries_and_a_fused_gate_train_like_one_process(parity):
    forward, backward = parity(LAYERS["grouped and gated"], 2, False)
    assert forward == {"all_reduce": 4}
    assert backward == {"all_reduce": 4 + 2 * 2}  # and the head norm's weight and bias per layer


@pytest.mark.parametrize("repeats", [False, True])
def test_keys_that_all_heads_share_and_biases_of_heads_train_like_one_process(parity, repeats):
    layer = partial(Layer, partial(SharedKeys, repeats), plain_mlp)
    rules = [r for r in found(build(layer)).rules if r.style != "region"]
    names = [rule.module.rpartition(".")[2] for rule in rules]
    assert names == ["a", "z", "0", "2"]
    parity(layer, 2, False)
    assert "linear in" in found(build(layer)).no_sequence_parallel


@pytest.mark.parametrize("name", ["fused, written by hand", "grouped and gated"])
def test_sequence_parallel_trains_like_one_process(parity, name):
    forward, _ = parity(LAYERS[name], 2, True)
    assert forward == {"all_gather": 4 + 1, "reduce_scatter": 4}  # one gather after the last block


def test_linears_in_the_block_itself_train_like_one_process(parity):
    assert parity(FlatLayer, 2, False) == ({"all_reduce": 2}, {"all_reduce": 2})


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_blocks_train_like_one_process(parity, sequence_parallel):
    parity(LAYERS["fused, written by hand"], 2, sequence_parallel, recompute=True)


def test_a_fault_in_the_backward_pass_would_be_seen(monkeypatch, parity, rank_threads):
    monkeypatch.setattr(
        rank_threads.rank_type,
        "all_reduce",
        lambda self, t, where: self.board.exchange(0, t)[0].clone(),
    )
    with pytest.raises((AssertionError, threading.BrokenBarrierError)):
        parity(FlatLayer, 2, False)


def rules_of_flat():
    return {"layers.0": found(build(FlatLayer, layers=1)).by_block()["layers.0"]}


def test_remove_puts_everything_back():
    model = build(FlatLayer, layers=1)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    loss = loss_of(model).item()
    divided = apply_rules(model, rules_of_flat(), StandIn(4, 1))
    assert model.layers[0].up.weight.shape == (12, DIM)
    assert model.layers[0].down.weight.shape == (DIM, 12)
    assert torch.equal(
        divided.local_slice("layers.0.up.bias", build(FlatLayer, layers=1).layers[0].up.bias),
        model.layers[0].up.bias,
    )
    divided.remove()
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert loss_of(model).item() == loss
    assert "forward" not in model.layers[0].up.__dict__


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_planning_reports_every_collective_with_the_bytes_of_the_full_buffer(sequence_parallel):
    seen = []
    with FakeTensorMode():
        model = Model(LAYERS["fused, written by hand"], layers=1)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
        rules = found(model, lambda: model(tokens)).by_block()
        ranks = StandIn(
            4, exchange=lambda op, num_bytes, where: seen.append((op, num_bytes, where))
        )
        apply_rules(model, rules, ranks, sequence_parallel=sequence_parallel)
        if sequence_parallel:
            divide_sequence(list(model.layers), rules, ranks)
        model(tokens).sum().backward()
    full = BATCH * SEQ * DIM * 4
    mixer, ff = "layers.0.mixer", "layers.0.ff"
    if not sequence_parallel:
        assert seen == [("all_reduce", full, where) for where in (mixer, ff, ff, mixer)]
        return
    assert seen == [
        *(("all_gather", full, mixer), ("reduce_scatter", full, mixer)),
        *(("all_gather", full, ff), ("reduce_scatter", full, ff)),
        ("all_gather", full, ""),  # after the last block; backward keeps the own part
        *(("all_gather", full, ff), ("reduce_scatter", full, ff)),
        *(("all_gather", full, mixer), ("reduce_scatter", full, mixer)),
        ("all_gather", full, ""),  # the gradient of the scatter before the first block
    ]


def test_a_degree_that_does_not_divide_names_those_that_do():
    with pytest.raises(
        PlanError, match=r"48 heads or columns of up, but got 5; valid are 1, 2, 3, 4"
    ):
        apply_rules(build(FlatLayer, layers=1), rules_of_flat(), StandIn(5))


def test_sequence_parallel_needs_a_module_around_the_linears():
    with pytest.raises(PlanError, match=r"up and down in a module of their own"):
        apply_rules(build(FlatLayer), rules_of_flat(), StandIn(2), sequence_parallel=True)


def test_a_sequence_that_does_not_divide_is_refused():
    model = build(LAYERS["fused, written by hand"], layers=1)
    rules = found(model).by_block()
    apply_rules(model, rules, StandIn(4), sequence_parallel=True)
    divide_sequence(list(model.layers), rules, StandIn(4))
    with pytest.raises(PlanError, match=r"a sequence of 6 .* does not divide by 4"):
        model(TOKENS[0][:, :6])


def test_a_row_that_is_given_a_whole_tensor_says_so():
    model = build(FlatLayer, layers=1)
    row = TensorParallelRule(module="down", style="rowwise", heads=48, weight_dims={"weight": 1})
    column = TensorParallelRule(module="up", style="colwise", heads=48, weight_dims={"weight": 0})
    apply_rules(model, {"layers.0": (column, row)}, StandIn(2))
    with pytest.raises(
        TensorParallelError, match=r"down must be given .* but got a whole \[2, 48\]"
    ):
        model.layers[0].down(torch.zeros(2, 48).double())
