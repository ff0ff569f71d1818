"""Buckets follow the optimizer's order; what is left out of one comes back as zeros."""

from __future__ import annotations

import torch
import torch.nn as nn

from claw_plan.executor.optimizers.buckets import Bucket, buckets_of


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def test_a_bucket_ends_once_it_is_full_and_where_the_dtype_changes() -> None:
    first = parameters(3, 3, 1)
    frozen = nn.Parameter(torch.zeros(9), requires_grad=False)
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    found = buckets_of([*first[:2], frozen, first[2], other], 24, "group0")
    assert [bucket.key for bucket in found] == ["group0.0", "group0.1", "group0.2"]
    held = [[parameter.numel() for parameter in bucket.parameters] for bucket in found]
    assert held == [[3, 3], [1], [2]]


def test_what_is_split_lies_in_the_vector() -> None:
    bucket = Bucket("b", (nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))))
    flat = bucket.flat([torch.arange(6.0).view(2, 3), torch.arange(6.0, 10.0)])
    assert flat.tolist() == list(range(10))
    first, second = bucket.split(flat)
    assert (first.shape, second.tolist()) == ((2, 3), [6.0, 7.0, 8.0, 9.0])
    first[1, 2] = 50.0
    assert flat[5] == 50.0


def test_what_is_left_out_comes_back_as_zeros() -> None:
    bucket = Bucket("b", parameters(5))
    vector = torch.arange(1.0, 6.0)
    assert bucket.packed(vector) is vector
    bucket.leave_out(torch.tensor([True, False, True, True, False]))
    assert bucket.packed(vector).tolist() == [1.0, 3.0, 4.0]
    assert bucket.unpacked(bucket.packed(vector)).tolist() == [1.0, 0.0, 3.0, 4.0, 0.0]
    bucket.leave_out(torch.tensor([True] * 5))
    assert bucket.packed(vector) is vector
