"""Every translation against the whole, on ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.planner.candidate import ALL_GATHER, ALL_TO_ALL, CP_COMM_TYPES
from claw_plan.planner.context_parallel import divide_context, whole_loss
from claw_plan.planner.context_parallel_division import sequence_division
from claw_plan.planner.context_parallel_ranks import ContextStandIn
from claw_plan.planner.errors import PlanError, TensorParallelError
from claw_plan.planner.head_shard import HeadShard, opened


class Rank:
    """The collectives of `ContextRanks` between threads."""

    def __init__(self, board: Any, rank: int) -> None:
        self._board, self.rank, self.degree = board, rank, board.degree

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        everybody: list[torch.Tensor] = self._board.exchange(self.rank, tensor.detach())
        return everybody

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(tensor)).sum(0)[self.rank]

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([sent[self.rank] for sent in self._all(tensor)])


OnRanks = Callable[[int, Callable[[Rank], Any]], list[Any]]


@pytest.fixture(scope="module")
def on_ranks(rank_threads: Any) -> OnRanks:
    """What the work of each rank answers."""

    class Board(rank_threads):  # type: ignore[misc]
        rank_type = Rank

    return lambda degree, work: Board(degree).run(work)


Inputs = dict[str, tuple[torch.Tensor, int | None]]


def assert_same_as_whole(
    on_ranks: OnRanks,
    function: Callable[..., torch.Tensor],
    inputs: Inputs,
    kind: str,
    degree: int = 2,
) -> None:
    """Values, and gradients averaged over the ranks; inputs are (tensor, divided dim or None)."""
    wholes = {name: tensor.clone() for name, (tensor, _) in inputs.items()}
    for tensor in wholes.values():
        tensor.requires_grad_(tensor.is_floating_point())
    expected = function(**wholes)
    weight = torch.randn(expected.shape, dtype=expected.dtype)
    (expected * weight).sum().backward()

    def work(rank: Rank) -> dict[str, torch.Tensor]:
        division = sequence_division(kind, rank)
        own = {name: tensor.detach().clone() for name, tensor in wholes.items()}
        for tensor in own.values():
            tensor.requires_grad_(tensor.is_floating_point())
        given = {
            name: tensor if dim is None else division.held(division.divide(tensor, dim), dim)
            for (name, (_, dim)), tensor in zip(inputs.items(), own.values(), strict=True)
        }
        result = function(**given)
        if isinstance(result, HeadShard):
            dim, parts = result.divided.dim, result.divided.parts
            torch.testing.assert_close(
                result.local, division.own_part(expected.detach(), dim, parts)
            )
            loss = (result * weight).sum()
        else:
            torch.testing.assert_close(result, expected.detach())
            loss = (result * weight).sum()
        assert not isinstance(loss, HeadShard)
        loss.backward()
        return {
            name: torch.zeros_like(t) if t.grad is None else t.grad
            for name, t in own.items()
            if t.is_floating_point()
        }

    found = on_ranks(degree, work)
    for name, tensor in wholes.items():
        if tensor.is_floating_point():
            mean = torch.stack([gradients[name] for gradients in found]).mean(0)
            torch.testing.assert_close(mean, tensor.grad)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


QKV: Inputs = {name: (normal(2, 4, 8, 3), 2) for name in "qkv"}
GROUPED: Inputs = QKV | {name: (normal(2, 2, 8, 3), 2) for name in "kv"}
SHARED: Inputs = QKV | {name: (normal(2, 1, 8, 3), 2) for name in "kv"}
LONGER: Inputs = QKV | {name: (normal(2, 4, 16, 3), 2) for name in "kv"}
WHOLE_QUERIES: Inputs = QKV | {"q": (normal(2, 4, 5, 3), None)}
MASK = torch.rand(8, 8) > 0.4
MASK[:, 0] = True


def attention(**settings: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, **mask: F.scaled_dot_product_attention(
        q, k, v, mask.get("mask"), **settings
    )


ATTENTIONS: dict[str, tuple[Callable[..., torch.Tensor], Inputs]] = {
    "all positions": (attention(), QKV),
    "causal": (attention(is_causal=True), QKV),
    "scaled": (attention(is_causal=True, scale=0.3), QKV),
    "grouped": (attention(is_causal=True, enable_gqa=True), GROUPED),
    "of one key head": (attention(enable_gqa=True), SHARED),
    "cross": (attention(), LONGER),
    "of whole queries": (attention(), WHOLE_QUERIES),
    "masked": (attention(), QKV | {"mask": (MASK, None)}),
    "biased by head": (attention(), QKV | {"mask": (normal(1, 4, 8, 8), None)}),
    "biased by divided rows": (attention(), QKV | {"mask": (normal(1, 1, 8, 8), 2)}),
    "biased by divided keys": (attention(), QKV | {"mask": (normal(2, 1, 1, 8), 3)}),
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", CP_COMM_TYPES)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(on_ranks: OnRanks, name: str, kind: str, degree: int) -> None:
    function, inputs = ATTENTIONS[name]
    assert_same_as_whole(on_ranks, function, inputs, kind, degree)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / 3**0.5
    causal = torch.ones(8, 8, dtype=torch.bool).tril().view(1, 1, 8, 8)
    return scores.masked_fill(~causal[:, :, :8, :8], -torch.inf).softmax(-1) @ v


def einsum_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", scores, v)


def biased_product(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    left, right = (x.reshape(8, 8, 3) for x in (q, k))
    return bias.baddbmm(batch1=left, batch2=right.transpose(1, 2), beta=1.0, alpha=0.5)


def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q @ (k.transpose(-2, -1) @ v)


STATE, WEIGHT = (normal(2, 8, 6), 1), normal(6, 5)
TARGETS = torch.randint(0, 5, (2, 8))
TARGETS[0, :3] = -100


def cross_entropy(**settings: Any) -> Callable[..., torch.Tensor]:
    return lambda x, w: F.cross_entropy((x @ w).view(-1, 5), TARGETS.view(-1), **settings)


TABLE, BIAS = normal(8, 6), normal(5)

OTHERS: dict[str, tuple[Callable[..., torch.Tensor], Inputs]] = {
    "plain attention": (plain_attention, QKV),
    "attention by einsum": (einsum_attention, QKV),
    "scores with a bias": (
        biased_product, {"q": QKV["q"], "k": QKV["k"], "bias": (normal(8, 1, 8), None)},
    ),
    "linear attention": (linear_attention, QKV),
    "a table of positions": (lambda x, t: x + t, {"x": STATE, "t": (TABLE, None)}),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x.view(-1, 6), w).view(2, 8, 5),
        {"x": STATE, "w": (WEIGHT, None), "b": (BIAS, None)},
    ),
    "norm": (lambda x: F.layer_norm(x, (6,)), {"x": STATE}),
    "mean over positions": (lambda x: x.mean(1), {"x": STATE}),
    "mean over all": (lambda x: x.square().mean(), {"x": STATE}),
    "mean over width": (lambda x: x.mean(-1, keepdim=True), {"x": STATE}),
    "sum over several": (lambda x: x.sum((0, 1)), {"x": STATE}),
    "first position": (lambda x: x[:, 0], {"x": STATE}),
    "last position": (lambda x: x[..., -1, :], {"x": STATE}),
    "a position by select": (lambda x: x.select(1, 5), {"x": STATE}),
    "width by index": (lambda x: x[:, :, 2:4], {"x": STATE}),
    "chunks of the width": (lambda x: x.chunk(2, -1)[1], {"x": STATE}),
    "cross entropy": (cross_entropy(), {"x": STATE, "w": (WEIGHT, None)}),
    "smoothed": (cross_entropy(label_smoothing=0.1), {"x": STATE, "w": (WEIGHT, None)}),
    "summed": (cross_entropy(reduction="sum"), {"x": STATE, "w": (WEIGHT, None)}),
    "of each token": (cross_entropy(reduction="none"), {"x": STATE, "w": (WEIGHT, None)}),
    "weighted": (
        cross_entropy(weight=torch.rand(5, dtype=torch.float64)),
        {"x": STATE, "w": (WEIGHT, None)},
    ),
    "classes second": (
        lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS.clamp(-100, 4)), {"x": STATE},
    ),
    "mse": (lambda x, y: F.mse_loss(x, y), {"x": STATE, "y": (normal(2, 8, 6), None)}),
    "mse of two parts": (lambda x, y: F.mse_loss(x, y), {"x": STATE, "y": (normal(2, 8, 6), 1)}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_translations(on_ranks: OnRanks, name: str) -> None:
    function, inputs = OTHERS[name]
    assert_same_as_whole(on_ranks, function, inputs, ALL_GATHER)


REFUSED: dict[str, tuple[Callable[..., Any], Inputs, str]] = {
    "a shift of positions": (lambda x: x[:, 1:], {"x": STATE}, "takes a run of positions"),
    "halves of the positions": (
        lambda x: x.split(4, 1), {"x": STATE}, "split in the sequence takes runs of positions",
    ),
    "a sum so far": (lambda x: x.cumsum(1), {"x": STATE}, "cumsum .* along the divided"),
    "a convolution": (
        lambda x: F.conv1d(x.transpose(1, 2), torch.zeros(6, 6, 3, dtype=torch.float64)),
        {"x": STATE}, "conv1d .* has no divided form",
    ),
    "a class token": (
        lambda x: torch.cat((x, torch.zeros(2, 1, 6)), 1), {"x": STATE}, "one after another",
    ),
    "softmax over positions": (lambda x: x.softmax(1), {"x": STATE}, "along the divided"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_other_ranks_tokens_is_refused_by_name(on_ranks: OnRanks, name: str) -> None:
    function, inputs, words = REFUSED[name]
    with pytest.raises(TensorParallelError, match=words):
        assert_held(on_ranks, function, inputs, ALL_GATHER)


def assert_held(
    on_ranks: OnRanks, function: Callable[..., Any], inputs: Inputs, kind: str
) -> None:
    def work(rank: Rank) -> None:
        division = sequence_division(kind, rank)
        function(
            **{
                name: t if dim is None else division.held(division.divide(t, dim), dim)
                for name, (t, dim) in inputs.items()
            }
        )

    on_ranks(2, work)


def test_heads_are_exchanged_around_the_operator_alone(on_ranks: OnRanks) -> None:
    with pytest.raises(TensorParallelError, match="use cp_comm_type=all_gather"):
        assert_held(on_ranks, plain_attention, QKV, ALL_TO_ALL)
    odd: Inputs = {name: (normal(1, 3, 8, 2), 2) for name in "qkv"}
    with pytest.raises(TensorParallelError, match=r"3 heads do not divide by cp=2"):
        assert_held(on_ranks, attention(), odd, ALL_TO_ALL)


def test_a_sequence_that_has_no_chunks_is_refused_with_the_rule() -> None:
    division = sequence_division(ALL_GATHER, ContextStandIn(2))
    with pytest.raises(PlanError, match="a sequence of 6 does not divide into 2 x 2 chunks"):
        division.divide(torch.zeros(1, 6), 1)


class Decoder(nn.Module):
    """Tokens in, one loss of all positions out; position and rows of a table by name nowhere."""

    def __init__(self, *, tokens: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6) if tokens else None
        self.places = nn.Parameter(normal(16, 6))
        self.block = nn.ModuleList([Layer()])
        self.head = nn.Linear(6, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.table(x) if self.table is not None else x
        hidden = hidden + self.places[: hidden.shape[1]]
        for block in self.block:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, 2, 3).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("kind", CP_COMM_TYPES)
def test_a_whole_model_has_the_gradients_of_one_process(
    on_ranks: OnRanks, kind: str, tokens: bool
) -> None:
    torch.manual_seed(0)
    model = Decoder(tokens=tokens).double()
    x = torch.randint(0, 11, (2, 8)) if tokens else normal(2, 8, 6)
    y = torch.randint(0, 11, (2, 8))
    expected = model(x, y)
    expected.backward()
    states, shapes = model.state_dict(), list[tuple[int, ...]]()

    def work(rank: Rank) -> dict[str, torch.Tensor]:
        own = Decoder(tokens=tokens).double()
        own.load_state_dict(states)
        own.head.register_forward_hook(
            lambda module, args, out: shapes.append(tuple(opened(out).shape))
        )
        divided = divide_context(own, list(own.block), kind, rank)
        loss = whole_loss(own(x, y), rank.degree)
        torch.testing.assert_close(loss.detach(), expected.detach())
        loss.backward()
        divided.remove()
        assert torch.equal(own(x, y), expected)
        return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}

    found = on_ranks(2, work)
    assert (2, 4, 11) in shapes, "each rank has half of the tokens' scores"
    for name, parameter in model.named_parameters():
        mean = torch.stack([gradients[name] for gradients in found]).mean(0)
        torch.testing.assert_close(mean, parameter.grad, atol=1e-12, rtol=1e-12)


def test_a_loss_of_each_position_is_no_loss() -> None:
    division = sequence_division(ALL_GATHER, ContextStandIn(2))
    each = division.held(torch.zeros(1, 4), 1)
    with pytest.raises(PlanError, match="answer with their mean"):
        whole_loss(each, 2)
    assert whole_loss(torch.ones(()), 2) == 1


def test_a_model_without_a_sequence_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    divide_context(model, [model[0]], ALL_GATHER, ContextStandIn(2))
    with pytest.raises(PlanError, match="no hidden state"):
        model(torch.zeros(4, 3))
