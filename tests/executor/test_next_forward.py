"""Steps inside the next forward: the same bits, at the right place, and refused where they err."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.next_forward import NextForward, why_not

STEPS = 6
SIZES = (2, 1, 3, 2)


class Block(nn.Module):
    """A product and scales; `Odd` uses the second's bias without calling anything."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.shift = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(x) * self.scale


class Odd(nn.Module):
    """Weights that are used outside of the module that holds them, tied, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(7, 5)
        self.first, self.second = Block(), Block()
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.first(self.table(idx)) + self.second.shift.bias
        logits = self.second(x) @ self.table.weight.t()
        return nn.functional.cross_entropy(logits, idx) + 0 * self.spare.sum()


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def batch(step: int) -> torch.Tensor:
    return (torch.arange(11) * (step + 2)) % 7


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MAKERS: list[Make] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:3], "weight_decay": 0.3}, {"params": parameters[3:]}], lr=0.01
    ),
]


def trained(
    group: dist.ProcessGroup, make: Make, defers: Callable[[int], bool] | None
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """Losses, module and optimizer after some steps; None for `defers` trains plainly."""
    replicas = Replicas(Odd(), group, SIZES, order=(1, 0, 3, 2))
    optimizer = make(list(replicas.module.parameters()))
    ahead = None if defers is None else NextForward(replicas, optimizer)
    losses = []
    for step in range(STEPS):
        if ahead is None or defers is None:
            loss = replicas(batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with ahead.step(defers=defers(step)):
                loss = replicas(batch(step))
                loss.backward()
            if not defers(step):
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    if ahead is not None:
        ahead.settle()
    return losses, replicas.module, optimizer


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("defers", [lambda step: True, lambda step: step not in (2, 3)])
def test_bits_are_those_of_a_step_after_the_backward(
    group: dist.ProcessGroup, make: Make, defers: Callable[[int], bool]
) -> None:
    losses, module, optimizer = trained(group, make, None)
    found = trained(group, make, defers)
    assert found[0] == losses
    for mine, other in zip(found[1].parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, other)
    states, others = found[2].state_dict()["state"], optimizer.state_dict()["state"]
    assert states.keys() == others.keys()
    for key, state in others.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(states[key][name], value)


def test_each_bucket_is_updated_where_the_forward_first_needs_it(group: dist.ProcessGroup) -> None:
    replicas = Replicas(Odd(), group, SIZES)
    module = replicas.module
    assert isinstance(module, Odd)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ahead = NextForward(replicas, optimizer)
    seen: dict[str, list[bool]] = {}
    with ahead.step(defers=True):
        replicas(batch(0)).backward()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}

    def changed(where: str) -> Callable[..., None]:
        def look(*_: object) -> None:
            seen[where] = [
                not torch.equal(value, before[name])
                for name, value in module.named_parameters()
                if name in ("table.weight", "first.scale", "second.scale", "second.shift.bias")
            ]

        return look

    for where, child in (("table", module.table), ("first", module.first.shift)):
        child.register_forward_hook(changed(where))
    with ahead.step(defers=True):
        replicas(batch(1)).backward()
    # Parameters by name: spare, table.weight, first.*, second.*; buckets hold, from the last on,
    # second.shift, second.scale, first.*, and table.weight with spare.
    assert seen["table"] == [True, False, False, False]
    # The bias of second.shift is used right after first, before second is called.
    assert seen["first"] == [True, True, False, True]
    ahead.settle()


def test_what_needs_all_gradients_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert why_not(torch.optim.AdamW(parameters), None, may_miss=False) == ""
    assert "norm of all gradients" in why_not(torch.optim.AdamW(parameters), 1.0, may_miss=False)
    assert "LBFGS is not known" in why_not(torch.optim.LBFGS(parameters), None, may_miss=False)
    assert "may miss" in why_not(torch.optim.SGD(parameters), None, may_miss=True)
