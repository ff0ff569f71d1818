import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from claw_plan.planner.vocabulary_parallel import EMBEDDING, HEAD
from claw_plan.planner.vocabulary_parallel_search import find_vocabulary

VOCAB, DIM, SEQ = 40, 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, h):
        return h + self.down(F.gelu(self.up(h)))


class Language(nn.Module):
    """Tokens, positions and the ends; subclasses say what differs."""

    def __init__(self):
        super().__init__()
        self.a, self.p = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.z = nn.Linear(DIM, VOCAB, bias=False)

    def hidden(self, tokens):
        h = self.a(tokens) + self.p(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return h

    def scores(self, h):
        return self.z(h)

    def forward(self, tokens):
        scores = self.scores(self.hidden(tokens))
        return F.cross_entropy(scores.view(-1, VOCAB), tokens.view(-1))


class Tied(Language):
    def __init__(self):
        super().__init__()
        self.z.weight = self.a.weight


class WithBias(Language):
    """The bias is added outside the head's module; every rank takes its part of it."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def scores(self, h):
        return self.z(h) + self.bias


def find(model, tp_divides=2, **call):
    batch = call or {"tokens": torch.randint(0, VOCAB, (2, SEQ))}
    return find_vocabulary(
        model, ["layers.0", "layers.1"], lambda: model(**batch), tp_divides=tp_divides
    )


def rules_of(finding):
    return {(rule.module, rule.style, rule.heads) for rule in finding.rules}


BOTH = {("a", EMBEDDING, VOCAB), ("z", HEAD, VOCAB)}


@pytest.mark.parametrize("kind", [Language, Tied, WithBias])
def test_tables_read_at_the_inputs_and_the_head_of_the_loss_are_found(kind):
    finding = find(kind())
    assert rules_of(finding) == BOTH and not finding.refused
    assert all(dict(rule.weight_dims) == {"weight": 0} for rule in finding.rules)


def test_shapes_are_enough():
    with FakeTensorMode():
        model, tokens = Tied(), torch.randint(0, VOCAB, (2, SEQ))
        assert rules_of(find(model, tokens=tokens)) == BOTH


def test_the_model_is_as_before():
    model = Tied()
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    find(model)
    after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert before == after and not any("forward" in vars(module) for module in model.modules())


class Products(Tied):
    """The head is a product with the table's weight in the model's own forward."""

    def scores(self, h):
        return h @ self.a.weight.t()


class Sampled(Tied):
    def forward(self, tokens):
        scores = self.scores(self.hidden(tokens))
        loss = F.cross_entropy(scores.view(-1, VOCAB), tokens.view(-1))
        return loss + 0 * scores.argmax(-1).sum()


class Regression(Language):
    def forward(self, tokens):
        return self.scores(self.hidden(tokens)).square().mean()


class Renormalised(Language):
    def __init__(self):
        super().__init__()
        self.a.max_norm = 1.0


REFUSED = [
    (Products, set(), {"a.weight": "it is also used by t in the model's own forward"}),
    (Sampled, set(), {"a.weight": "argmax in z runs along the divided dimension"}),
    (Regression, {("a", EMBEDDING, VOCAB)}, {"z.weight": "mean in z runs over all dimensions"}),
    (
        Renormalised,
        {("z", HEAD, VOCAB)},
        {"a.weight": "a looks it up with max_norm"},
    ),
]


@pytest.mark.parametrize(("kind", "rules", "refused"), REFUSED)
def test_what_cannot_be_divided_stays_whole_with_the_reason(kind, rules, refused):
    finding = find(kind())
    assert rules_of(finding) == rules
    assert finding.refused.keys() == refused.keys()
    for name, why in refused.items():
        assert why in finding.refused[name]


def test_small_tables_are_not_worth_an_exchange():
    class Typed(Language):
        def __init__(self):
            super().__init__()
            self.wide = nn.Parameter(torch.zeros(100 * VOCAB * DIM))

    finding = find(Typed())
    assert not finding.rules and not finding.refused


def test_fewer_rows_than_ranks_stay_whole():
    finding = find(Language(), tp_divides=64)
    assert not finding.rules
    assert finding.refused == dict.fromkeys(("a.weight", "z.weight"), "it has 40 rows only")
