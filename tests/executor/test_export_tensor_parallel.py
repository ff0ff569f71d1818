"""Which code the plain form of tensor parallelism is right for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.export_tensor_parallel import plain_styles
from claw_plan.executor.opened_plan import open_plan


def _styles(path: Path, change: Callable[[nn.Module], object] = lambda model: None) -> object:
    plan, loaded = open_plan(path)
    model = loaded.build().double()
    change(model)
    ids = loaded.example_batch(2)["ids"]
    return plain_styles(plan, model, lambda module: module(ids))


def test_columns_and_rows_of_code_that_takes_sizes_as_they_come(
    plain_plan: Callable[..., Path],
) -> None:
    assert _styles(plain_plan("plain", tp=2)) == {
        **{f"attention.{name}": "colwise" for name in "qkv"},
        "attention.out": "rowwise",
        "mlp.0": "colwise",
        "mlp.2": "rowwise",
    }


class Mean(nn.Module):
    """Runs on a part of the width, and computes something else there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True)


def test_code_that_mixes_the_parts_is_found_by_its_numbers(
    plain_plan: Callable[..., Path],
) -> None:
    def change(model: nn.Module) -> None:
        model.blocks[5].mlp[1] = Mean()  # type: ignore[index, union-attr, operator]

    with pytest.raises(ExecutionError, match=r"parts of blocks\.5\.mlp\.2 do not add up"):
        _styles(plain_plan("mixes", tp=2), change)


def test_code_that_names_the_whole_width_is_found_by_its_shapes(
    plain_plan: Callable[..., Path],
) -> None:
    def change(model: nn.Module) -> None:
        model.blocks[0].mlp[1] = nn.LayerNorm(128).double()  # type: ignore[index, union-attr, operator]

    with pytest.raises(ExecutionError, match="counts on the whole width"):
        _styles(plain_plan("counts", tp=2), change)


def test_a_degree_that_does_not_divide_is_refused(plain_plan: Callable[..., Path]) -> None:
    with pytest.raises(ExecutionError, match="not divided evenly by tp=3"):
        _styles(plain_plan("uneven", tp=3, dp_shard=1))
