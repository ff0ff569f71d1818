"""Changed bits are found on all ranks alike; rank, bucket and step are named, none is invented."""

from __future__ import annotations

from typing import Any

import pytest

from claw_plan.executor.communication.algorithms import NAMES


@pytest.mark.slow
def test_bits_flipped_on_the_way_are_seen_by_all_and_the_ranks_named(
    on_four_ranks: list[dict[str, Any]],
) -> None:
    for found in on_four_ranks:
        seen = found["checks"]
        assert seen["clean"] == dict.fromkeys(NAMES, "")
        assert set(seen["flipped"]) == {*NAMES} - {"native"}
        for name, message in seen["flipped"].items():
            assert message.startswith("step 1: bits of bucket 0 changed on the way from rank "), (
                name
            )
            assert "to rank 2: a card" in message, name
            assert message == on_four_ranks[0]["checks"]["flipped"][name]


@pytest.mark.slow
def test_a_rank_whose_result_differs_is_named_with_bucket_and_step(
    on_four_ranks: list[dict[str, Any]],
) -> None:
    for found in on_four_ranks:
        told = "step 3: bucket 1 of rank 3 differs from that of the others"
        assert found["checks"]["settled"].startswith(told)


@pytest.mark.slow
def test_steps_wait_for_no_check_and_end_two_steps_later(
    on_four_ranks: list[dict[str, Any]],
) -> None:
    for found in on_four_ranks:
        after_one, after_two = found["checks"]["unsettled"]
        assert after_one == ""
        assert after_two.startswith("step 3: bucket 1 of rank 3")
