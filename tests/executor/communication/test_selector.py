"""The selector on real ranks: they agree on everything, and sums stay right through changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from claw_plan.executor.communication.algorithms import NAMES


@pytest.mark.slow
def test_ranks_change_together_and_only_between_steps(
    on_four_ranks: list[dict[str, Any]],
) -> None:
    seen = [found["selects"] for found in on_four_ranks]
    assert all(found == seen[0] for found in seen)
    assert seen[0]["is_right"]
    assert seen[0]["bandwidth"]
    used = list(zip(*seen[0]["used"], strict=True))
    for algorithms in used:
        assert set(algorithms) <= set(NAMES)
    # The fallback, whatever the model says of it, and the backend's own, which has no model. On a
    # busy machine a size may not come to both in time.
    assert {"tree", "native"} <= set().union(*used)
    changes = [
        (step, size, before[place], after[place])
        for step, (before, after) in enumerate(pairwise(seen[0]["used"]), start=1)
        for place, size in enumerate((4000, 1_200_000))
        if before[place] != after[place]
    ]
    told = [event for event in seen[0]["events"] if "after" in event]
    kept = ("step", "size_bytes", "before", "after")
    assert [
        tuple(event[name] for name in kept)
        for event in told
        if event["before"] != event["after"] and event["step"] < len(seen[0]["used"])
    ] == changes
    # Once only do trials of a size end with what was tried last; then nothing changes.
    assert all(not event["is_trial"] for event in told if event["before"] == event["after"])
    for event in told:
        assert event["reason"].startswith("on trial; " if event["is_trial"] else "fastest; ")
        assert f"{event['after']} " in event["reason"]


@pytest.mark.slow
def test_a_link_that_becomes_slow_is_seen_and_all_ranks_choose_anew(
    on_four_ranks: list[dict[str, Any]],
) -> None:
    seen = [found["slows"] for found in on_four_ranks]
    assert all(found == seen[0] for found in seen)
    # 2 MB/s, of which a ring's round uses all; this machine's own rate is a thousand times that.
    assert 1e6 < seen[0]["after"] < 3e6 < seen[0]["before"] / 3
    events = seen[0]["events"]
    reasons = [event["reason"] for event in events if "after" not in event]
    assert any("as a rule, and now" in reason for reason in reasons)
    tried = {event["after"] for event in events if event.get("is_trial")}
    assert {"tree", "native", "ring"} <= tried | {event.get("before") for event in events}
    settled = [event for event in events if not event.get("is_trial", True)]
    for event in settled:  # the first of the times that it names is the least
        assert event["reason"].startswith(f"fastest; {event['after']} ")


@pytest.mark.slow
def test_links_are_measured_at_first_and_when_a_bandwidth_falls(
    on_four_ranks: list[dict[str, Any]],
) -> None:
    probes = [event for event in on_four_ranks[0]["selects"]["events"] if "after" not in event]
    assert (probes[0]["step"], probes[0]["reason"]) == (0, "before the first step")
    # No link of this machine carries a terabyte a second.
    assert "below 1000 GB/s" in probes[1]["reason"]
