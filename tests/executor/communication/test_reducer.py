"""Buckets of given boundaries: gradients of DistributedDataParallel, in one order everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.nn as nn

from claw_plan.executor.communication.reducer import make_buckets
from claw_plan.executor.errors import ExecutionError

RANKS = 4
PROGRAM = Path(__file__).with_name("rank_reducer.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes saw."""
    folder = tmp_path_factory.mktemp("reducer")
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(RANKS), str(folder)])
        for rank in range(RANKS)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * RANKS
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one bucket", "microbatches", "two ranks", "three ranks"])
def test_bits_are_those_of_ddp_where_the_sums_are(seen: list[dict[str, Any]], case: str) -> None:
    """In one bucket they are made over the same layout, between two ranks in any layout."""
    found = [rank[case] for rank in seen if case in rank]
    assert len(found) == (3 if case == "three ranks" else RANKS)
    assert all(each["equal"] for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a bucket each", "uneven"])
def test_gradients_of_other_boundaries_are_those_of_ddp(
    seen: list[dict[str, Any]], case: str
) -> None:
    assert all(rank[case]["error"] < 1e-6 for rank in seen)


@pytest.mark.slow
def test_buckets_leave_in_one_order_whatever_is_complete_first(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["other order"]["order"] == [0, 1, 2, 3, 4, 5]
        assert rank["other order"]["error"] < 1e-6


@pytest.mark.slow
def test_a_mean_of_ones_own_takes_the_place_of_the_all_reduce(seen: list[dict[str, Any]]) -> None:
    assert all(rank["coded"]["error"] < 1e-6 for rank in seen)


@pytest.mark.slow
def test_what_some_ranks_do_not_reach_counts_as_zeros_there(seen: list[dict[str, Any]]) -> None:
    spares = {rank["missed"]["spare"] for rank in seen}
    assert len(spares) == 1 and spares.pop() != 0
    assert all(rank["missed"]["error"] < 1e-6 for rank in seen)


@pytest.mark.slow
def test_what_should_be_reached_and_is_not_is_named(seen: list[dict[str, Any]]) -> None:
    assert all("reached no gradient of spare.factor" in rank["missed"]["said"] for rank in seen)


@pytest.mark.slow
def test_after_a_backward_that_was_given_up_the_next_is_right(seen: list[dict[str, Any]]) -> None:
    assert all(rank["given up"]["error"] < 1e-6 for rank in seen)


def test_buckets_hold_neighbours_from_the_last_parameter_to_the_first() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[0].bias.requires_grad_(False)
    buckets = make_buckets(module, (2, 1))
    assert [[tuple(p.shape) for p in b.parameters] for b in buckets] == [[(1,), (1, 3)], [(3, 2)]]
    assert [bucket.buffer.numel() for bucket in buckets] == [4, 6]
    assert buckets[0].views[1].data_ptr() == buckets[0].buffer[1:].data_ptr()


@pytest.mark.parametrize("sizes", [(), (3,), (5,), (4, 0)])
def test_buckets_that_hold_not_each_once_are_refused(sizes: tuple[int, ...]) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with pytest.raises(ExecutionError, match="4 trained parameters once each"):
        make_buckets(module, sizes)


def test_a_bucket_of_two_dtypes_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double())
    with pytest.raises(ExecutionError, match="float32 on cpu and torch"):
        make_buckets(module, (4,))
    assert [bucket.buffer.dtype.itemsize for bucket in make_buckets(module, (2, 2))] == [8, 4]
