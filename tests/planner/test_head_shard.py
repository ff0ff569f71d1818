import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from claw_plan.planner import head_shard_ops, head_shard_views
from claw_plan.planner.errors import PiecesNeeded, TensorParallelError
from claw_plan.planner.head_shard import (
    HANDLERS,
    Division,
    HeadShard,
    Layout,
    join_piecewise,
    slice_piecewise,
)
from claw_plan.planner.tp_autograd import StandIn

assert HANDLERS["view"] is head_shard_views._view and HANDLERS["add"] is head_shard_ops._pointwise


def shards_of(whole, dim, degree, parts=1):
    return [
        HeadShard(
            slice_piecewise(whole, dim, parts=parts, degree=degree, rank=rank),
            Layout(
                division=Division(ranks=StandIn(degree, rank), where="attn"),
                dim=dim % whole.ndim,
                parts=parts,
                columns=frozenset({"q"}),
            ),
        )
        for rank in range(degree)
    ]


def leaves(value):
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, tuple) else [value]


def assert_same_as_whole(function, wholes, degree):
    """`wholes` are (tensor, divided dim, parts); None for the dim means that all ranks hold it."""
    expected = leaves(function(*(tensor for tensor, _, _ in wholes)))
    divided = [
        [tensor] * degree if dim is None else shards_of(tensor, dim, degree, parts)
        for tensor, dim, parts in wholes
    ]
    # One Division per rank, as the shards of one region have.
    for rank in range(degree):
        first = next(d[rank] for d in divided if isinstance(d[rank], HeadShard))
        for d in divided:
            if isinstance(d[rank], HeadShard):
                d[rank] = HeadShard(
                    d[rank].local,
                    Layout(
                        division=first.divided.division,
                        dim=d[rank].divided.dim,
                        parts=d[rank].divided.parts,
                        columns=d[rank].divided.columns,
                    ),
                )
    results = [leaves(function(*(d[rank] for d in divided))) for rank in range(degree)]
    for index, want in enumerate(expected):
        got = [result[index] for result in results]
        assert all(g.shape == want.shape for g in got)
        layout = got[0].divided
        joined = join_piecewise([g.local for g in got], layout.dim, parts=layout.parts)
        torch.testing.assert_close(joined, want, rtol=0, atol=1e-12)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@st.composite
def attention_shapes(draw):
    degree = draw(st.sampled_from([2, 3, 4]))
    sizes = [draw(st.integers(1, 3)) for _ in range(4)]
    batch, seq, group, dim = sizes
    return degree, batch, seq + 1, degree * group, 2 * dim


@given(attention_shapes())
@settings(max_examples=30, deadline=None)
def test_attention_from_a_fused_column_with_sizes_written_out(shapes):
    degree, batch, seq, heads, dim = shapes
    width = heads * dim

    def forward(qkv):
        q, k, v = qkv.split(width, dim=2)
        q, k, v = (t.view(batch, seq, heads, dim).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).contiguous().view(batch, seq, width)

    assert_same_as_whole(forward, [(rand(batch, seq, 3 * width), 2, 3)], degree)


@given(attention_shapes())
@settings(max_examples=30, deadline=None)
def test_attention_written_by_hand(shapes):
    degree, batch, seq, heads, dim = shapes
    mask = torch.ones(seq, seq).tril().view(1, 1, seq, seq)

    def forward(q, k, v):
        q, k, v = (t.reshape(batch, seq, heads, -1).permute(0, 2, 1, 3) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(mask[:, :, :seq, :seq] == 0, float("-inf"))
        weights = F.dropout(F.softmax(scores, dim=-1), 0.0)
        return (weights @ v).transpose(1, 2).flatten(2)

    wholes = [(rand(batch, seq, heads * dim), 2, 1) for _ in range(3)]
    assert_same_as_whole(forward, wholes, degree)


@given(attention_shapes(), st.integers(1, 3), st.booleans())
@settings(max_examples=30, deadline=None)
def test_grouped_queries_with_rotary(shapes, group, by_expand):
    degree, batch, seq, kv_heads, dim = shapes
    heads = kv_heads * group
    cos, sin = rand(1, 1, seq, dim), rand(1, 1, seq, dim)

    def turn(t):
        first, second = t[..., : dim // 2], t[..., dim // 2 :]
        return t * cos + torch.cat((-second, first), dim=-1) * sin

    def spread(t):
        if not by_expand:
            return t.repeat_interleave(group, dim=1)
        t = t[:, :, None, :, :].expand(batch, kv_heads, group, seq, dim)
        return t.reshape(batch, heads, seq, dim)

    def forward(q, k, v):
        q = turn(q.view(batch, seq, -1, dim).transpose(1, 2))
        k = turn(k.view(batch, seq, -1, dim).transpose(1, 2))
        v = v.view(batch, seq, -1, dim).transpose(1, 2)
        grouped = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.5)
        repeated = F.scaled_dot_product_attention(q, spread(k), spread(v))
        return (grouped + repeated).transpose(1, 2).reshape(batch, seq, -1)

    kv = [(rand(batch, seq, kv_heads * dim), 2, 1) for _ in range(2)]
    assert_same_as_whole(forward, [(rand(batch, seq, heads * dim), 2, 1), *kv], degree)


def x(parts=1):
    return (rand(2, 3, 24), 2, parts)


def heads_first():
    return (rand(2, 4, 3, 6), 1, 1)


OPS = {
    "gelu": (F.gelu, [x()]),
    "silu and gate": (lambda a, b: F.silu(a) * b, [x(), x()]),
    "glu of a fused gate": (lambda a: F.glu(a, dim=-1), [x(2)]),
    "chunk": (lambda a: a.chunk(2, -1), [x(2)]),
    "narrow": (lambda a: a.narrow(2, 8, 16), [x(3)]),
    "slices of pieces": (lambda a: (a[..., :8], a[:, 1:, 8:24]), [x(3)]),
    "split in unequal sums of pieces": (lambda a: a.split([8, 16], dim=2), [x(3)]),
    "other dim split": (lambda a: a.split(2, dim=1), [x()]),
    "scalars": (lambda a: 2 * a / 3 - 1 + a**2, [x()]),
    "in place": (lambda a: a.clone().mul_(2).add_(1), [x()]),
    "whole mask": (lambda a, m: torch.where(m > 0, a, 0.0), [x(), (rand(3, 1), None, 1)]),
    "slopes of each head": (lambda a, s: a * s, [heads_first(), (rand(4, 1, 1), None, 1)]),
    "pieces of a whole bias": (lambda a, s: a + s, [x(3), (rand(24), None, 1)]),
    "softmax": (lambda a: a.softmax(-1), [heads_first()]),
    "sums": (lambda a: (a.sum(-1), a.mean(dim=(2, 3), keepdim=True), a.sum(0)), [heads_first()]),
    "stable softmax": (
        lambda a: (a - a.max(dim=-1, keepdim=True).values).exp(),
        [heads_first()],
    ),
    "norm of each head": (
        lambda a, w: F.layer_norm(a, (6,), w) + F.rms_norm(a, [6], w),
        [heads_first(), (rand(6), None, 1)],
    ),
    "linear of each head": (lambda a, w: F.linear(a, w), [heads_first(), (rand(5, 6), None, 1)]),
    "rows times a whole": (lambda a, w: a.transpose(1, 2) @ w, [x(), (rand(3, 5), None, 1)]),
    "einsum": (
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b),
        [heads_first(), heads_first()],
    ),
    "batched by heads": (
        lambda a, b: torch.bmm(a.reshape(8, 3, 6), b.reshape(8, 3, 6).transpose(1, 2)),
        [heads_first(), heads_first()],
    ),
    "one tensor of q, k, v and heads": (
        lambda a: (
            a.view(2, 3, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0),
            tuple(a.view(2, 3, 3, 4, 2).permute(2, 0, 3, 1, 4)),
            a.view(2, 3, 3, 4, 2)[:, :, 1],
        ),
        [x(3)],
    ),
    "heads of q, k, v": (lambda a: a.view(2, 3, 4, 6).chunk(3, dim=-1), [x()]),
    "unflatten, squeeze, movedim": (
        lambda a: a.unflatten(2, (4, -1)).unsqueeze(0).movedim(3, 0).squeeze(),
        [x()],
    ),
    "stack and index": (lambda a, b: torch.stack((a, b), 1)[:, 0, ..., None], [x(), x()]),
    "cat of pieces": (lambda a, b: torch.cat((a, b), -1), [x(), x()]),
    "repeat": (lambda a: a.repeat(1, 2, 1), [x()]),
    "half and back": (lambda a: a.to(torch.float32).type_as(a).to(a.dtype).double(), [x(3)]),
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", OPS)
def test_an_operation_on_shards_is_the_shard_of_the_operation(name, degree):
    function, wholes = OPS[name]
    if name == "half and back":
        wholes = [(tensor.float().double(), dim, parts) for tensor, dim, parts in wholes]
    assert_same_as_whole(function, wholes, degree)


REFUSED = {
    "norm over the divided dimension": lambda a: F.layer_norm(a, (24,)),
    "softmax over it": lambda a: a.softmax(-1),
    "sum of everything": lambda a: a.sum(),
    "mean over it": lambda a: a.mean(-1),
    "linear over it": lambda a: F.linear(a, rand(5, 24)),
    "product over it": lambda a: a @ rand(24, 5),
    "shift along it": lambda a: a.roll(1, -1),
    "a picked column": lambda a: a[..., 3],
    "a shape that cuts elsewhere": lambda a: a.view(2, 3, 3, 8),
    "written into a whole tensor": lambda a: rand(2, 3, 24).add_(a),
    "a kernel nobody translated": lambda a: torch.fft.fft(a),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_other_ranks_is_refused_by_name(name):
    shard = shards_of(rand(2, 3, 24), 2, 4)[0]
    with pytest.raises(TensorParallelError, match=r"in attn.*the output of q"):
        REFUSED[name](shard)


def test_q_with_k_transposed_over_divided_features_is_refused():
    q = shards_of(rand(2, 3, 8), 2, 2)[0]
    with pytest.raises(TensorParallelError, match="divided differently"):
        q @ q.transpose(1, 2)


def test_pieces_are_asked_for():
    shard = shards_of(rand(2, 3, 24), 2, 2)[0]
    with pytest.raises(PiecesNeeded) as error:
        shard.split(8, dim=2)
    assert (error.value.pieces, error.value.columns) == (3, {"q"})
    with pytest.raises(PiecesNeeded) as error:
        shard[..., :12]
    assert error.value.pieces == 2
    with pytest.raises(PiecesNeeded) as error:
        shard.view(2, 3, 4, 6).permute(2, 0, 1, 3)[1]
    assert error.value.pieces == 4


def test_a_custom_function_is_refused_where_its_gradient_would_be_lost():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    shard = shards_of(rand(2, 3, 24).requires_grad_(), 2, 2)[0]
    with pytest.raises(TensorParallelError, match=r"custom autograd.Function in attn"):
        Double.apply(shard) * 1


def test_degrees_hear_of_the_sizes_they_must_divide():
    sizes = []
    division = Division(ranks=StandIn(2), where="attn", noted=lambda _, size: sizes.append(size))
    shard = HeadShard(rand(2, 3, 12), Layout(division=division, dim=2))
    shard.view(2, 3, 4, 6).transpose(1, 2)
    assert sizes == [24, 4, 4]


def test_a_fake_shard_answers_with_the_whole_shape():
    with FakeTensorMode():
        shard = shards_of(torch.empty(2, 3, 24, dtype=torch.bfloat16), 2, 4)[1]
        assert shard.shape == (2, 3, 24) and shard.size(-1) == 24 and shard.numel() == 144
        result = F.gelu(shard.view(2, 3, 4, 6)).transpose(1, 2)
        assert (result.shape, result.local.shape) == ((2, 4, 3, 6), (2, 1, 3, 6))
        assert result.dtype == torch.bfloat16
    assert repr(shard) == "HeadShard(shape=(2, 3, 24), dim=2, parts=1, degree=4)"


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_slices_join_to_the_whole(parts, degree, chunk, dim):
    shape = [2, 3, 4]
    shape[dim] = parts * degree * chunk
    whole = rand(*shape)
    for at in (dim, dim - 3):
        pieces = [
            slice_piecewise(whole, at, parts=parts, degree=degree, rank=rank)
            for rank in range(degree)
        ]
        assert all(piece.shape[dim] == parts * chunk for piece in pieces)
        assert torch.equal(join_piecewise(pieces, at, parts=parts), whole)
