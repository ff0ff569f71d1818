"""Ranges as a Kineto trace shows them: what runs inside which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranges import Ranges, name_ranges
from claw_plan.executor.ranks import Rank
from claw_plan.executor.recompute import recompute

CPU = torch.device("cpu")
WIDTHS = (3, 5, 7)


class Chain(nn.Module):
    """Blocks of different widths, so that a product's shape tells whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)) for width in WIDTHS
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def traced(step: Callable[[], Any]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    return list(seen.events())


def ranges_of(event: Any) -> Iterator[str]:
    """The names of what an event runs inside, inmost first."""
    while event is not None:
        yield event.name
        event = event.cpu_parent


def where_products_run(events: list[Any]) -> dict[int, list[str]]:
    """Width of a block to the range around each of its products, in order."""
    found: dict[int, list[str]] = {width: [] for width in WIDTHS}
    for event in events:
        if event.name in ("aten::mm", "aten::addmm"):
            [width] = {n for shape in event.input_shapes for n in shape}.intersection(WIDTHS) or [
                0
            ]
            inside = [name for name in ranges_of(event) if "block" in name]
            if width:
                found[width].append(inside[0] if inside else "")
    return found


@pytest.mark.parametrize("recomputes", [False, True])
def test_products_run_in_the_ranges_of_their_block(*, recomputes: bool) -> None:
    model, ranges = Chain(), Ranges(CPU)
    for index, block in enumerate(model.blocks):
        if recomputes:
            recompute(block, "full")
        ranges.name_unit(f"block {index}", block)

    def step() -> None:
        for _ in range(2):
            loss = model(torch.ones(4, 2))
            with ranges.around("backward"):
                loss.backward()

    again = ["backward block {}"] * 2 * recomputes
    once = ["forward block {}"] * 2 + again + ["backward block {}"] * 4
    found = where_products_run(traced(step))
    for index, width in enumerate(WIDTHS):
        wanted = [name.format(index) for name in once * 2]
        assert sorted(found[width]) == sorted(wanted)


@pytest.mark.parametrize("part", ["inputs", "weights"])
def test_no_part_of_a_backward_leaves_a_range_open(part: str) -> None:
    """What autograd is asked for is all that it visits."""
    model, ranges = Chain(), Ranges(CPU)
    for index, block in enumerate(model.blocks):
        ranges.name_unit(f"block {index}", block)
    x = torch.ones(4, 2, requires_grad=True)
    asked = [x] if part == "inputs" else [model.blocks[1][0].weight]

    def step() -> None:
        for _ in range(2):
            hidden = x
            for block in model.blocks:
                hidden = block(hidden)
            with ranges.around("backward"):
                torch.autograd.grad(hidden.mean(), asked)

    names = [event.name for event in traced(step)]
    wanted = [0, 1, 2] if part == "inputs" else [1, 2]
    assert [names.count(f"backward block {index}") for index in range(3)] == [
        2 * (index in wanted) for index in range(3)
    ]
    assert ranges._backward is None  # profilers end by themselves what was left open
    if part == "inputs":
        assert not x._backward_hooks


@pytest.mark.slow
def test_a_step_of_a_plan_is_named_part_by_part(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    plan, loaded = open_plan(tiny_plan("named", microbatch_size=4))
    compiled = compile_plan(plan, loaded, CPU)
    blocks = [compiled.stages[0].model.get_submodule(name) for name in plan.blocks]
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)
    batch = loaded.example_batch(8, None)
    plain = {event.name for event in traced(lambda: compiled.train_step(batch))}
    compiled.ranges = name_ranges(compiled.stages, plan.blocks, CPU)
    names = [event.name for event in traced(lambda: compiled.train_step(batch))]
    own = {"forward 0F0", "backward 0B0", "forward 0F1", "backward 0B1", "optimizer"}
    own |= {f"{kind} {block}" for kind in ("forward", "backward") for block in plan.blocks}
    assert {name for name in names if name not in plain} == own
    assert all(names.count(f"backward {block}") == 2 for block in plan.blocks)
