"""Means of gradients on three real ranks: in DistributedDataParallel's buckets, and by themselves.

Nothing that a codec leaves out is lost, and what was saved of it goes on exactly.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from claw_plan.profiles.coded_means import part_bounds

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]
"""Of each rank, what each case found."""


def test_whole_gradients_are_those_of_no_hook_to_the_last_bit(hooked: Found) -> None:
    for rank in hooked:
        found = rank["hooked_gradients"]
        for whole, plain in zip(found["whole"], found["plain"], strict=True):
            assert torch.equal(whole, plain)


def test_another_algorithm_differs_by_the_order_of_sums(hooked: Found) -> None:
    found = hooked[0]["hooked_gradients"]
    for ring, plain in zip(found["ring"], found["plain"], strict=True):
        torch.testing.assert_close(ring, plain, rtol=1e-5, atol=1e-6)


def test_a_codec_begins_once_the_buckets_are_final(hooked: Found) -> None:
    for rank in hooked:
        found, first = rank["hooked_gradients"], hooked[0]["hooked_gradients"]
        assert torch.equal(found["one_bit"][0], found["plain"][0])
        for step in (1, 2):
            assert torch.equal(found["one_bit"][step], first["one_bit"][step])
            assert not torch.allclose(found["one_bit"][step], found["plain"][step], rtol=0.1)


@pytest.mark.parametrize("codec", ["one_bit", "top_k:0.1"])
def test_what_came_is_what_went_less_the_errors(hooked: Found, codec: str) -> None:
    """Sum of means = mean of sums - mean of the workers' errors - the servers' errors."""
    found = [rank["sums_of_means"][codec] for rank in hooked]
    bounds = part_bounds(len(found[0]["came"]), len(found))
    servers = torch.cat([one["errors"]["b.server.residual"] for one in found])
    assert [len(one["errors"]["b.server.residual"]) for one in found] == [
        end - begin for begin, end in pairwise(bounds)
    ]
    workers = torch.stack([one["errors"]["b.worker.residual"] for one in found]).mean(0)
    went = torch.stack([one["went"] for one in found]).mean(0)
    for one in found:
        assert torch.equal(one["came"], found[0]["came"])
    left = went - workers - servers
    torch.testing.assert_close(found[0]["came"], left, rtol=0, atol=1e-5)


def test_saved_errors_go_on_to_the_last_bit(hooked: Found) -> None:
    for rank in hooked:
        made, loaded, forgot = rank["kept_errors"]["means"]
        assert torch.equal(made, loaded)
        assert not torch.equal(made, forgot)
    names = ["server.residual", "worker.residual"]
    assert hooked[0]["kept_errors"]["keys"] == [f"a.{key}.{n}" for key in "bc" for n in names]
