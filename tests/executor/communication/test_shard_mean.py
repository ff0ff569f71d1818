"""Means of equal parts on three real ranks, by themselves and as fully_shard's reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


def test_what_came_is_what_went_less_the_workers_errors(hooked: Found) -> None:
    found = [rank["means_of_parts"] for rank in hooked]
    came = torch.cat([one["came"] for one in found])
    errors = torch.stack([one["errors"]["b.worker.residual"] for one in found])
    assert all([*one["errors"]] == ["b.worker.residual"] for one in found)
    went = torch.stack([one["went"] for one in found])
    torch.testing.assert_close(came, (went - errors).mean(0), rtol=0, atol=1e-5)


def test_fully_shard_gets_its_parts_of_the_means(hooked: Found) -> None:
    most = max(rank["reduced_shards"]["own"].abs().max() for rank in hooked)
    for rank in hooked:
        found = rank["reduced_shards"]
        # Half an ulp of fp16, and of int8 a 254th of the largest of a block of one rank.
        for codec, share in (("fp16", 2.0**-11), ("int8", 1 / 254)):
            error = (found[codec] - found["own"]).abs().max()
            assert 0 < error <= 10 * share * most
