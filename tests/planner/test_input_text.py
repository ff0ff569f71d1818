from __future__ import annotations

import pytest
import torch

from claw_plan.planner.input_text import InputSpec, parse_inputs, random_batch
from claw_plan.profiles.errors import InputError


def test_the_documented_text() -> None:
    assert parse_inputs("idx=int64[B,1024]<50304 x=float32[B, 3, 8]") == (
        InputSpec(name="idx", dtype="int64", shape=("B", 1024), bound=50304.0),
        InputSpec(name="x", dtype="float32", shape=("B", 3, 8)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("idx", r"'idx' is not name=dtype\[B,size,...\]<bound"),
        ("idx=int46[B,2]", "unknown dtype 'int46' of 'idx'; did you mean 'int64'"),
        ("idx=int64[2,B]", r"the first dimension of 'idx' must be B.*\[2,B\]"),
        ("idx=int64[B,B]", "must be B, the batch, and no other"),
        ("idx=int64[B,x]", "'x' in 'idx=int64.B,x.' is not a size"),
        ("x=float32[B,99999999999999]", "is not a size from 1 to 1000000000"),
        ("idx=int64[B,4]<99999999999999999999", "more than int64 can hold"),
        ("idx=int64[B,0]", "'0' in .* is not a size"),
        ("idx=int64[B]<0", "the bound of 'idx' must be above 0"),
        ("a=int64[B] a=int64[B]", "names 'a' twice"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_inputs(text)


def test_values_lie_within_their_bounds() -> None:
    batch = random_batch(
        parse_inputs("a=int64[B,50]<3 b=bool[B,50] c=float32[B]<2 d=int32[B]"), 20
    )
    assert batch["a"].unique().tolist() == [0, 1, 2]
    assert batch["b"].dtype == torch.bool and batch["b"].any() and not batch["b"].all()
    assert 0 <= batch["c"].min() and batch["c"].max() < 2
    assert batch["d"].dtype == torch.int32 and batch["d"].max() <= 1


def test_a_sequence_length_replaces_the_sequence_only() -> None:
    specs = parse_inputs(
        "idx=int64[B,8] mask=bool[B,1,8,8] h=float32[B,8,8] image=float32[B,3,8,8]"
    )
    shapes = {name: tuple(t.shape) for name, t in random_batch(specs, 2, 4).items()}
    assert shapes["idx"] == (2, 4)
    assert shapes["mask"] == (2, 1, 4, 4)
    assert shapes["h"] == (2, 4, 8)
    assert shapes["image"] == (2, 3, 8, 8)
