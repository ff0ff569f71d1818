from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.tensor_parallel import TensorParallelModel
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.planner.vocabulary_parallel import EMBEDDING, HEAD, divide_vocabulary

VOCAB, DIM = 31, 12
TABLE = TensorParallelRule(module="table", style=EMBEDDING, heads=VOCAB, weight_dims={"weight": 0})
PROJECTION = TensorParallelRule(
    module="project", style=HEAD, heads=VOCAB, weight_dims={"weight": 0, "bias": 0}
)
random = torch.Generator().manual_seed(3)
TOKENS, LABELS = torch.randint(0, VOCAB, (2, 3, 9), generator=random)


class Scaled(nn.Embedding):
    """More than a lookup, as Gemma's is."""

    def forward(self, tokens):
        return super().forward(tokens) * DIM**0.5


class Language(nn.Module):
    """`also` holds the head's bias under another name, as BERT does; `shift` is in no module."""

    def __init__(self, tied, padding=None):
        super().__init__()
        self.table, self.norm = Scaled(VOCAB, DIM, padding_idx=padding), nn.LayerNorm(DIM)
        self.project = nn.Linear(DIM, VOCAB)
        self.shift = nn.Parameter(torch.randn(VOCAB))
        self.also = nn.Module()
        self.also.bias = self.project.bias
        if tied:
            self.project.weight = self.table.weight

    def forward(self, tokens, labels):
        scores = self.project(self.norm(self.table(tokens))) + self.shift
        return F.cross_entropy(scores.view(-1, VOCAB), labels.view(-1))


def build(tied=True, padding=None):
    torch.manual_seed(0)
    return Language(tied, padding).double()


def divide(model, ranks, rules=(TABLE, PROJECTION)):
    divided = TensorParallelModel(ranks=ranks)
    divide_vocabulary(model, rules, divided)
    return divided


ODD_FIRST = (*range(1, VOCAB, 2), *range(0, VOCAB, 2))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [(), ODD_FIRST])
@pytest.mark.parametrize(("degree", "padding"), [(2, None), (4, 3), (3, 30)])
def test_gradients_are_those_of_one_process(tied, rows, degree, padding, rank_threads):
    whole = build(tied, padding)
    loss = whole(TOKENS, LABELS)
    loss.backward()
    models = [build(tied, padding) for _ in range(degree)]

    def work(rank):
        model = models[rank.rank]
        rules = [replace(rule, rows=rows) for rule in (TABLE, PROJECTION)]
        divided = divide(model, rank, rules)
        found = model(TOKENS, LABELS)
        forward = rank.calls["all_reduce"]
        found.backward()
        assert (forward, rank.calls["all_reduce"]) == (3, 5)
        return found.item(), dict(model.named_parameters()), divided

    results = rank_threads(degree).run(work)
    assert all(abs(found - loss.item()) < 1e-12 for found, _, _ in results)
    divided = results[0][2]
    assert divided.sharded.keys() == {
        "table.weight",
        "project.weight",
        "project.bias",
        "also.bias",
    }
    for name, parameter in whole.named_parameters():
        each = [held[name].grad for _, held, _ in results]
        for gradient in [divided.full_parameter(name, each)] if name in divided.sharded else each:
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12)


def test_weights_are_cut_evenly_within_one_row_and_stay_tied():
    rows = []
    for rank in range(4):
        model = build()
        before = model.table.weight.detach().clone()
        divided = divide(model, StandIn(4, rank))
        assert model.table.weight is model.project.weight
        assert model.also.bias is model.project.bias
        rows.append(model.table.weight.detach())
        assert torch.equal(divided.local_slice("table.weight", before), rows[-1])
    assert [len(part) for part in rows] == [8, 8, 8, 7]
    assert torch.equal(divided.full_parameter("table.weight", rows), before)


def test_rows_are_cut_in_their_order_and_come_back_in_the_tables():
    rules = [replace(rule, rows=ODD_FIRST) for rule in (TABLE, PROJECTION)]
    parts, before = [], build().table.weight.detach().clone()
    for rank in range(4):
        model = build()
        divided = divide(model, StandIn(4, rank), rules)
        parts.append(model.table.weight.detach())
        assert model.project.weight is model.table.weight
        assert torch.equal(divided.local_slice("table.weight", before), parts[-1])
    assert torch.equal(torch.cat(parts), before[list(ODD_FIRST)])
    assert torch.equal(divided.full_parameter("table.weight", parts), before)


def test_remove_puts_everything_back():
    model = build()
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    expected = model(TOKENS, LABELS)
    divide(model, StandIn(2)).remove()
    after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert after == before and "forward" not in vars(model.table)
    assert torch.equal(model(TOKENS, LABELS), expected)


def test_what_lies_on_another_stage_is_left_alone():
    model = build()
    model.table = nn.Identity()
    model.absent = None
    divided = divide(model, StandIn(2), (TABLE, PROJECTION))
    assert divided.sharded.keys() == {"project.weight", "project.bias", "also.bias"}


@pytest.mark.parametrize(("rule", "other"), [(PROJECTION, "table"), (TABLE, "project")])
def test_a_tied_weight_is_not_divided_at_one_end_only(rule, other):
    model = build()
    divided = divide(model, StandIn(2), (rule,))
    with pytest.raises(PlanError, match=rf"{other}.weight is the weight of {rule.module}, which"):
        model(TOKENS, LABELS)
    divided.remove()
    model(TOKENS, LABELS)


def test_an_index_outside_the_vocabulary_is_refused_as_by_torch():
    for rank, token in ((0, -1), (1, VOCAB)):
        model = build()
        divide(model, StandIn(2, rank))
        with pytest.raises(IndexError, match="out of range"):
            model.table(torch.tensor([token]))


def test_more_ranks_than_rows_are_refused():
    with pytest.raises(PlanError, match="table has a vocabulary of 31, which cannot be divided"):
        divide(build(), StandIn(32))
