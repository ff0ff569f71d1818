"""Probes: all ranks get one answer. What is fitted is `benchmark_gloo.fit_line`'s to prove."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from claw_plan.executor.communication.group import create_group
from claw_plan.executor.communication.probe import probe_links
from claw_plan.executor.errors import ExecutionError


@pytest.mark.slow
def test_all_ranks_measure_the_same(on_four_ranks: list[dict[str, Any]]) -> None:
    first = on_four_ranks[0]["groups"]
    for found in on_four_ranks:
        assert found["groups"]["links"] == first["links"]
        assert found["groups"]["pairs"] == first["pairs"]
    for level in ("intra", "inter"):
        assert first["links"][level]["latency_ns"] > 0
        assert first["links"][level]["bytes_per_s"] > 0
    for i, row in enumerate(first["pairs"]):
        assert [seconds > 0 for seconds in row] == [i != j for j in range(4)]
        assert row == [first["pairs"][j][i] for j in range(4)]


def test_one_rank_has_no_links() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = create_group()
        assert group is not None
        with pytest.raises(ExecutionError, match="one rank has no links"):
            probe_links(group)
    finally:
        dist.destroy_process_group()
