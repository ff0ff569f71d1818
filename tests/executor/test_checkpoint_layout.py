"""Boxes of the whole model: every element of a parameter lies on exactly one tensor-parallel rank,
where `local_slice` puts it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.checkpoint_layout import Part, parts_of, runs_of, whole_part, whole_state
from claw_plan.planner.tensor_parallel import ShardedParameter, TensorParallelModel
from claw_plan.planner.tp_autograd import StandIn


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def test_the_whole_state_knows_ties_and_both_kinds_of_buffers() -> None:
    whole = whole_state(Tied())
    assert whole.names["head.weight"] == "table.weight"
    assert whole.names["norm.running_mean"] == "norm.running_mean"
    assert "angles" not in whole.names and whole.shapes["angles"] == (4,)
    assert whole.shapes["table.weight"] == (7, 4)
    assert whole.shapes["norm.num_batches_tracked"] == ()
    assert "head.weight" not in whole.shapes


def held(local: torch.Tensor, whole: torch.Tensor, divided: TensorParallelModel) -> Any:
    return SimpleNamespace(
        parameters={"w": local},
        whole=SimpleNamespace(shapes={"w": tuple(whole.shape)}, names={"head": "w"}),
        tensor_parallel=divided,
        experts=None,
    )


@given(
    degree=st.integers(1, 4),
    parts=st.integers(1, 3),
    piece=st.integers(1, 3),
    dim=st.sampled_from([0, 1, -1]),
    name=st.sampled_from(["w", "head"]),
)
def test_pieces_are_where_the_model_has_them(
    degree: int, parts: int, piece: int, dim: int, name: str
) -> None:
    shape = [3, 3]
    shape[dim] = parts * degree * piece
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    joined = torch.full_like(whole, -1)
    how = ShardedParameter(dim=dim, parts=parts, shape=tuple(shape))
    for rank in range(degree):
        divided = TensorParallelModel(ranks=StandIn(degree, rank), sharded={name: how})
        local = divided.local_slice(name, whole)
        for part in parts_of(held(local, whole, divided), "w"):
            assert (part.of_whole(joined) == -1).all()
            part.of_whole(joined).copy_(part.of_local(local))
    assert torch.equal(joined, whole)


class Padded(TensorParallelModel):
    """Cuts 5 rows for 2 ranks as 3 and 2, the second with a row of padding."""

    def local_slice(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([whole[3:], torch.zeros_like(whole[:1])])


def test_padding_is_no_part() -> None:
    how = ShardedParameter(dim=0, parts=1, shape=(5, 2))
    divided = Padded(ranks=StandIn(2, 1), sharded={"w": how})
    [run] = runs_of(divided, "w", (5, 2))
    assert (run.local_start, run.whole_start, run.length) == (0, 3, 2)


def test_an_undivided_parameter_is_one_part() -> None:
    plain = SimpleNamespace(
        parameters={"w": torch.zeros(2, 3), "none": torch.zeros(0, 3)},
        whole=SimpleNamespace(shapes={"w": (2, 3), "none": (0, 3)}, names={}),
        tensor_parallel=None,
        experts=None,
    )
    assert parts_of(plain, "w") == (whole_part((2, 3)),)  # type: ignore[arg-type]
    assert parts_of(plain, "none") == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("starts", [(0, 0), (1, 2)])
def test_a_part_is_a_view(starts: tuple[int, int]) -> None:
    local = torch.zeros(3, 4)
    Part((9, 9), (2, 2), starts).of_local(local).fill_(1)
    assert local.sum() == 4 and local[starts] == 1
