"""What the reference is trusted for; its agreement with the engine is tested in test_engine."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.simulator.reference import _Flow, finish_times_ns_reference, share_max_min
from claw_plan.simulator.task_graph import TaskGraphBuilder


def rates(capacity: list[int], *flows: tuple[list[int], int]) -> list[int]:
    env = simpy.Environment()
    under_way = [_Flow(links=links, left=1, cap=cap, finished=env.event()) for links, cap in flows]
    share_max_min(under_way, capacity)
    return [flow.rate for flow in under_way]


@pytest.mark.parametrize(
    ("capacity", "flows", "expected"),
    [
        ([10], [([0], 99)], [10]),
        ([10], [([0], 4)], [4]),
        ([10], [([0], 99)] * 3, [3, 3, 3]),  # whole units only
        ([10], [([0], 2), ([0], 99)], [2, 8]),
        # Link 0 gives 5 to each of its two; what the long flow leaves on the others is taken.
        ([10, 20, 30], [([0, 1, 2], 99), ([0], 99), ([1], 99), ([2], 99)], [5, 5, 15, 25]),
        ([2], [([0], 99)] * 5, [1, 1, 1, 1, 1]),  # never less than a unit
        ([10], [([0, 0], 99), ([0], 99)], [3, 3]),  # the first crosses twice: three crossings
    ],
)
def test_max_min(capacity, flows, expected):
    assert rates(capacity, *flows) == expected


@given(
    st.lists(st.integers(1000, 10**7), min_size=3, max_size=3),
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, unique=True), st.integers(1, 10**7)),
        min_size=1,
        max_size=20,
    ),
)
def test_no_link_is_overdrawn_and_every_flow_has_its_reason(capacity, flows):
    """Max-min by its definition: a flow is at its cap, or on a full link where none gets more."""
    got = rates(capacity, *flows)
    used = [
        sum(rate for rate, (links, _) in zip(got, flows, strict=True) if link in links)
        for link in range(3)
    ]
    assert all(total <= most for total, most in zip(used, capacity, strict=True))
    for rate, (links, cap) in zip(got, flows, strict=True):
        highest = [
            max(other for other, (crossed, _) in zip(got, flows, strict=True) if link in crossed)
            for link in links
        ]
        full = [capacity[link] - used[link] < len(flows) for link in links]
        assert rate == cap or any(
            is_full and rate == most for is_full, most in zip(full, highest, strict=True)
        )


def test_it_runs_a_pipeline_of_two():
    builder = TaskGraphBuilder()
    first, second = builder.stream("compute", 0), builder.stream("compute", 1)
    sent = builder.add(first, 5, kind="forward", name="F0")
    builder.add(second, 4, [sent], kind="forward", name="F0")
    start, finish = finish_times_ns_reference(builder.build())
    assert (start.tolist(), finish.tolist()) == ([0, 5], [5, 9])
