"""Collectives joined into one flow last as long as one after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.stage_streams import merge
from claw_plan.profiles.cost import CollectiveCost

COSTS = st.builds(
    CollectiveCost,
    latency_ns=st.integers(0, 10**6),
    bytes=st.integers(0, 10**9),
    rate_cap_bytes_per_s=st.floats(1e6, 1e12),
    link=st.just("intra"),
    source=st.just("analytic"),
)


@given(st.lists(COSTS, min_size=1, max_size=6))
def test_as_long_alone_as_one_after_the_other(costs):
    whole = merge(costs)
    assert whole.bytes == sum(cost.bytes for cost in costs)
    apart = sum(cost.alone_ns for cost in costs)
    assert apart - len(costs) <= whole.alone_ns <= apart + 1  # each alone is rounded up
