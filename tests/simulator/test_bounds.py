from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from claw_plan.simulator.bounds import lower_bound_ns, uncontended_ns
from claw_plan.simulator.simulate import makespan_ns
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

GB = 1e9


def flows(count: int, size: int, cap: float, capacity: float, times: int = 1) -> TaskGraph:
    builder = TaskGraphBuilder()
    link = builder.link("nvlink", capacity)
    for index in range(count):
        builder.add(
            builder.stream(f"s{index}", index),
            10,
            kind="dp_comm",
            name="f",
            work_bytes=size,
            rate_cap_bytes_per_s=cap,
            links=[link] * times,
        )
    return builder.build()


def test_an_empty_graph_takes_nothing():
    assert lower_bound_ns(TaskGraphBuilder().build()) == 0


@pytest.mark.parametrize(
    ("graph", "alone"),
    [
        (flows(1, 1000, 0.3 * GB, GB), 3344),  # 10 + 1000 / 0.3, up
        (flows(1, 1000, 9 * GB, GB), 1010),
        (flows(1, 1000, 9 * GB, GB, times=2), 2010),
        (flows(1, 1000, 9 * GB, 9 * GB, times=2), 233),  # 10 + 1000 / 4.5, up
    ],
)
def test_one_flow_alone_meets_its_bound(graph, alone):
    assert uncontended_ns(graph).tolist() == [alone]
    assert lower_bound_ns(graph) == makespan_ns(graph) == alone


def test_a_full_link_bounds_what_goes_over_it():
    # Eight times 1000 bytes at 1 byte/ns; the latency of 10 ns is not in this bound.
    graph = flows(8, 1000, 9 * GB, GB)
    assert (lower_bound_ns(graph), makespan_ns(graph)) == (8000, 8010)


def test_a_link_of_fewer_units_than_flows_is_overdrawn():
    # Five flows over 1 unit of 100 bytes/s get a unit each: a byte in 1e7 ns, not in 5e7.
    graph = flows(5, 1, GB, 100)
    assert makespan_ns(graph) == 10_000_010
    assert lower_bound_ns(graph) == 10_000_010


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1000), st.lists(st.integers(1, 5))),
        min_size=1,
        max_size=40,
    )
)
def test_it_is_exact_where_nothing_is_shared(tasks):
    builder = TaskGraphBuilder()
    streams = [builder.stream(f"s{i}", i) for i in range(4)]
    for index, (stream, delay_ns, back) in enumerate(tasks):
        needs = [index - step for step in back if step <= index]
        builder.add(streams[stream], delay_ns, needs, kind="other", name="t")
    graph = builder.build()
    assert lower_bound_ns(graph) == makespan_ns(graph)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_it_is_never_above_the_simulation(graphs, data):
    graph = data.draw(graphs)
    assert lower_bound_ns(graph) <= makespan_ns(graph)


def random_contended(seed: int) -> TaskGraph:
    rng = np.random.default_rng(seed)
    builder = TaskGraphBuilder()
    streams = [builder.stream(f"s{i}", i) for i in range(rng.integers(1, 9))]
    links = [
        builder.link(f"l{i}", float(rng.choice([1e9, 3e9, 25e9, 300, 100])))
        for i in range(rng.integers(1, 6))
    ]
    for task in range(int(rng.integers(1, 40))):
        builder.add(
            streams[rng.integers(len(streams))],
            int(rng.choice([0, 1, 5000])),
            [int(need) for need in rng.integers(0, task, rng.integers(3))] if task else (),
            kind="other",
            name="t",
            work_bytes=int(rng.choice([0, 1, 100_000])),
            rate_cap_bytes_per_s=float(rng.choice([1e9, 2e10, 150])),
            links=[int(link) for link in rng.choice(links, rng.integers(1, 4))],
        )
    return builder.build()


@pytest.mark.slow
def test_it_is_never_above_ten_thousand_simulations():
    graphs = (random_contended(seed) for seed in range(10_000))
    above = [
        seed for seed, graph in enumerate(graphs) if lower_bound_ns(graph) > makespan_ns(graph)
    ]
    assert above == []
