from __future__ import annotations

import pytest
import torch.nn as nn

from claw_plan.planner.chain import Fold, chain_of, containers, structures


def blocks(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


class Cell(nn.Module):
    def __init__(self, index: int = 0, kind: str = "a", rate: float = 0.0, size: int = 4) -> None:
        super().__init__()
        self.index, self.kind, self.rate = index, kind, rate
        self.linear = nn.Linear(size, size)


class Lists(nn.Module):
    def __init__(self, **lists: nn.Module) -> None:
        super().__init__()
        for name, module in lists.items():
            setattr(self, name, module)


def ids(*modules: nn.Module) -> list[int]:
    return [id(module) for module in modules]


def test_containers_of_one_class_are_found_outermost_first() -> None:
    inner = nn.ModuleList(Cell() for _ in range(2))
    outer = nn.ModuleList(Lists(inner=inner, other=Cell()) for _ in range(2))
    mixed = nn.Sequential(Cell(), nn.ReLU(), nn.ModuleDict({"x": Cell(), "y": Cell()}))
    tables = nn.ModuleList(nn.Embedding(3, 4) for _ in range(3))
    lone = nn.ModuleList([Cell()])
    model = Lists(outer=outer, mixed=mixed, tables=tables, lone=lone)
    found = containers(model)
    assert [container.name for container in found] == ["outer", "mixed.2"]
    assert found[1].block_names == ["mixed.2.x", "mixed.2.y"]


def test_a_chain_is_called_once_each_in_order() -> None:
    model = Lists(a=nn.ModuleList(Cell() for _ in range(3)))
    (container,) = containers(model)
    one, two, three = model.a
    assert chain_of([container], ids(model, one, one.linear, two, three)) == [container]
    assert chain_of([container], ids(one, three, two)) == []
    assert chain_of([container], ids(one, two)) == []
    assert chain_of([container], ids(one, two, three, one)) == []


def test_several_containers_follow_each_other_or_the_larger_wins() -> None:
    model = Lists(
        late=nn.ModuleList(Cell(size=4) for _ in range(2)),
        early=nn.ModuleList(Cell(size=8) for _ in range(2)),
    )
    late, early = containers(model)
    calls = ids(*model.early, *model.late)
    assert chain_of([late, early], calls) == [early, late]
    turns = ids(model.late[0], model.early[0], model.late[1], model.early[1])
    assert chain_of([late, early], turns) == [early]


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        ([{"index": 5}, {"index": 6}, {"index": 7}], [0, 0, 0]),
        ([{"index": 5}, {"index": 5}, {"index": 9}], [0, 0, 2]),
        ([{"kind": "a"}, {"kind": "b"}, {"kind": "a"}], [0, 1, 0]),
        ([{"rate": 0.0}, {"rate": 0.1}, {"rate": 0.2}], [0, 1, 1]),
        ([{"size": 4}, {"size": 4}, {"size": 8}], [0, 0, 2]),
    ],
)
def test_which_blocks_are_alike(options: list[dict[str, object]], alike: list[int]) -> None:
    model = Lists(a=nn.ModuleList(Cell(**each) for each in options))  # type: ignore[arg-type]
    found = structures(containers(model)[0])
    assert [found.index(each) for each in found] == alike


def test_a_frozen_block_is_unlike() -> None:
    model = Lists(a=nn.ModuleList(Cell() for _ in range(2)))
    model.a[1].requires_grad_(False)
    one, two = structures(containers(model)[0])
    assert one != two


def test_a_fold_keeps_the_first_two_and_the_last() -> None:
    kinds = "aabaaaab"
    model = Lists(a=nn.ModuleList(Cell(kind=kind) for kind in kinds))
    all_blocks = list(model.a)
    fold = Fold.of(containers(model)[0], 2)
    assert fold.kept == [0, 1, 2, 6, 7]
    assert fold.stands_for == [0, 1, 2, 1, 1, 1, 6, 7]
    assert fold.alike == [(1, 6)]
    fold.apply()
    assert list(model.a) == [all_blocks[index] for index in fold.kept]
    assert model.a[3] is all_blocks[6]
    fold.undo()
    assert list(model.a) == all_blocks


def test_a_fold_of_three_does_not_rest_on_the_last() -> None:
    fold = Fold.of(containers(Lists(a=nn.ModuleList(Cell() for _ in range(8))))[0], 3)
    assert (fold.kept, fold.alike) == ([0, 1, 2, 7], [(1, 2)])
    assert fold.stands_for == [0, 1, 2, 1, 1, 1, 1, 7]


def test_no_fold_keeps_all() -> None:
    container = containers(Lists(a=nn.ModuleList(Cell() for _ in range(8))))[0]
    fold = Fold.of(container, None)
    assert (fold.kept, fold.alike, fold.stands_for) == (list(range(8)), [], list(range(8)))
    assert Fold.of(containers(nn.Sequential(*blocks(3)))[0], 2).alike == []


class Pairs(nn.Module):
    """As lucidrains' transformers: `for first, second in self.layers`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([Cell(size=4), nn.ReLU(), nn.ModuleList([Cell(size=8)])])
            for _ in range(count)
        )


def test_the_modules_of_listed_lists_are_the_blocks() -> None:
    model = Pairs(3)
    (container,) = containers(model)
    assert container.block_names == [
        f"layers.{index}.{own}" for index in range(3) for own in ("0", "2.0")
    ]
    modules = [block for _, block in container.children]
    calls = ids(*modules)
    assert chain_of([container], [id(model), *calls]) == [container]
    assert chain_of([container], [calls[1], calls[0], *calls[2:]]) == []
    assert containers(Lists(a=nn.ModuleList([nn.ModuleList(), nn.ModuleList()]))) == []


def test_lists_are_folded_whole() -> None:
    model = Pairs(8)
    entries = list(model.layers)
    fold = Fold.of(containers(model)[0], 2)
    assert fold.kept == [0, 1, 2, 3, 14, 15]
    assert fold.stands_for == [0, 1, 2, 3, *[2, 3] * 5, 14, 15]
    assert fold.alike == [(2, 14), (3, 15)]
    fold.apply()
    assert list(model.layers) == [entries[0], entries[1], entries[7]]
    fold.undo()
    assert list(model.layers) == entries
