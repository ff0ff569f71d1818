import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner import head_shard_ops, head_shard_views
from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.head_shard import HANDLERS, Division, HeadShard, Layout, slice_piecewise
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.planner.vocabulary_parallel_loss import Chunk

assert HANDLERS["view"] is head_shard_views._view and HANDLERS["add"] is head_shard_ops._pointwise

TOKENS, IGNORED = 6, 4


def scores_of(classes, dtype=torch.float64):
    random = torch.Generator().manual_seed(classes)
    return 5 * torch.randn(2, TOKENS // 2, classes, dtype=dtype, generator=random)


def targets_of(classes):
    targets = torch.randint(0, classes, (2, TOKENS // 2), generator=torch.Generator())
    targets[0, 1] = min(IGNORED, classes - 1)
    return targets


def shard(part, classes, rank, dim=-1):
    layout = Layout(
        division=Division(ranks=rank, where="head"),
        dim=dim % part.ndim,
        columns=frozenset(("head",)),
        extent=classes,
    )
    return HeadShard(part, layout)


def check(rank_threads, loss, classes, degree, atol=1e-12):
    """The loss and its gradient on divided scores equal those on whole ones."""
    whole, targets = scores_of(classes).requires_grad_(), targets_of(classes)
    expected = loss(whole, targets)
    expected.sum().backward()

    def work(rank):
        own = slice_piecewise(whole.detach(), -1, parts=1, degree=degree, rank=rank.rank)
        own = own.clone().requires_grad_()
        found = loss(shard(own, classes, rank), targets)
        forward = rank.calls.total()
        found.sum().backward()
        return found.detach(), own.grad, forward, rank.calls.total() - forward

    results = rank_threads(degree).run(work)
    gradient = torch.cat([own for _, own, _, _ in results], -1)
    torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=atol)
    for found, *_ in results:
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=atol)
    return results[0][2:]


def rows(function, **options):
    return lambda s, t: function(s.flatten(0, 1), t.flatten(), **options)


def shifted(scores, targets):
    """As Hugging Face's models do: labels shifted and padded, scores cast and flattened."""
    labels = F.pad(targets, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    flat = scores.to(torch.float64).view(-1, scores.shape[-1])
    return F.cross_entropy(flat, labels, ignore_index=-100, reduction="sum") / 7


def sliced(scores, targets):
    scores = scores[:, :-1, :].contiguous()
    return F.cross_entropy(scores.view(-1, scores.size(-1)), targets[:, 1:].reshape(-1))


def soft_capped(scores, targets):
    return rows(F.cross_entropy)(30 * torch.tanh(scores / 30), targets)


LOSSES = {
    "plain": rows(F.cross_entropy),
    "sum": rows(F.cross_entropy, reduction="sum"),
    "each": rows(F.cross_entropy, reduction="none"),
    "ignoring": rows(F.cross_entropy, ignore_index=IGNORED),
    "smoothed": rows(F.cross_entropy, label_smoothing=0.1, ignore_index=IGNORED),
    "classes second": lambda s, t: F.cross_entropy(s.transpose(1, 2), t),
    "shifted by padding": shifted,
    "shifted by slicing": sliced,
    "soft cap": soft_capped,
    "module": lambda s, t: torch.nn.CrossEntropyLoss()(s.permute(0, 2, 1), t),
    "log_softmax, nll": lambda s, t: F.nll_loss(
        F.log_softmax(s, dim=-1).flatten(0, 1), t.flatten(), ignore_index=IGNORED
    ),
    "log_softmax of dim 1": lambda s, t: F.nll_loss(
        s.transpose(1, 2).log_softmax(1), t, reduction="none"
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_divided_scores_are_those_of_whole_ones(name, rank_threads):
    forward, backward = check(rank_threads, LOSSES[name], 13, 4)
    # Largest; sum and target together, or one after the other; log_softmax sums gradients.
    assert (forward, backward) == ((3, 1) if "log_softmax" in name else (2, 0))


@given(
    degree=st.sampled_from([1, 2, 3, 4]),
    classes=st.integers(5, 40),
    smoothing=st.sampled_from([0.0, 0.25]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
@settings(max_examples=15, deadline=None)
def test_any_number_of_classes_on_any_number_of_ranks(
    rank_threads, degree, classes, smoothing, reduction
):
    loss = rows(
        F.cross_entropy, label_smoothing=smoothing, reduction=reduction, ignore_index=IGNORED
    )
    check(rank_threads, loss, classes, degree)


def test_large_scores_do_not_overflow(rank_threads):
    check(rank_threads, lambda s, t: LOSSES["plain"](s * 1e5, t), 13, 2, atol=1e-6)


def test_bfloat16_adds_up_in_float32():
    scores, target = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.long)
    found = F.cross_entropy(shard(scores, 4096, StandIn(1)), target)
    expected = F.cross_entropy(scores, target)
    assert found.dtype == expected.dtype == torch.bfloat16 and found.item() == expected.item()


@pytest.mark.parametrize(("target", "rank"), [(-1, 0), (13, 1)])
def test_a_target_outside_the_vocabulary_is_refused_as_by_torch(target, rank):
    part = torch.zeros(1, (7, 6)[rank])
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        F.cross_entropy(shard(part, 13, StandIn(2, rank)), torch.tensor([target]))


REFUSED = {
    "argmax": (lambda s, t: s.argmax(-1), "argmax in head runs along the divided dimension"),
    "softmax": (lambda s, t: s.softmax(-1), "softmax in head runs along the divided dimension"),
    "weights": (
        lambda s, t: F.cross_entropy(s, t, weight=torch.ones(13)),
        "cross_entropy in head weighs the classes",
    ),
    "probabilities": (
        lambda s, t: F.cross_entropy(s, torch.ones(4, 13)),
        "cross_entropy in head is given probabilities as targets",
    ),
    "another dimension": (
        lambda s, t: F.cross_entropy(s.view(2, 2, 13), t.view(2, 2)),
        "cross_entropy in head runs over another dimension than the divided one",
    ),
    "some classes": (lambda s, t: s[:, :10], "takes 0:10 of the divided dimension"),
    "twice": (lambda s, t: s.repeat(1, 2), "changes the size of the divided vocabulary"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_need_the_other_ranks_classes_is_refused_by_name(name):
    function, message = REFUSED[name]
    scores = shard(torch.zeros(4, 7), 13, StandIn(2))
    with pytest.raises(TensorParallelError, match=message):
        function(scores, torch.zeros(4, dtype=torch.long))


def test_chunks_are_even_within_one_and_cover_the_vocabulary():
    chunks = [Chunk.of(StandIn(4, rank), "", 257) for rank in range(4)]
    assert [(c.start, c.stop) for c in chunks] == [(0, 65), (65, 129), (129, 193), (193, 257)]
    found, elsewhere = chunks[1].locate(torch.tensor([64, 65, 128, 129]))
    assert found.tolist() == [0, 0, 63, 0] and elsewhere.tolist() == [True, False, False, True]
