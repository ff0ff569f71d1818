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
    for rank in hooked:
        found = rank["reduced_shards"]
        torch.testing.assert_close(found["fp16"], found["own"], rtol=2e-3, atol=1e-5)
        # Of int8 the error of an element is at most a 254th of the largest in its block.
        error = (found["int8"] - found["own"]).abs().max()
        most = max(other["reduced_shards"]["own"].abs().max() for other in hooked)
        assert 0 < error <= 10 * most / 254
