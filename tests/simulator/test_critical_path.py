"""Chains of tasks on graphs drawn by hand and at random."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.simulator.critical_path import critical_path
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder


def path_of(graph: TaskGraph) -> list[int]:
    return critical_path(graph, *finish_times_ns(graph))


def test_the_longer_of_two_branches():
    """a (10) feeds b (5) and c (7) on other streams, both feed d: a, c, d."""
    builder = TaskGraphBuilder()
    streams = [builder.stream(name, 0) for name in "xyz"]
    a = builder.add(streams[0], 10, kind="other", name="a")
    b = builder.add(streams[1], 5, [a], kind="other", name="b")
    c = builder.add(streams[2], 7, [a], kind="other", name="c")
    d = builder.add(streams[0], 1, [b, c], kind="other", name="d")
    assert path_of(builder.build()) == [a, c, d]


def test_a_busy_stream_is_waited_for_like_a_need():
    builder = TaskGraphBuilder()
    one, other = builder.stream("one", 0), builder.stream("other", 0)
    builder.add(other, 3, kind="other", name="feeds the last")
    first = builder.add(one, 8, kind="other", name="first")
    last = builder.add(one, 2, [0], kind="other", name="last")
    assert path_of(builder.build()) == [first, last]


def test_of_tasks_that_end_together_the_first():
    builder = TaskGraphBuilder()
    streams = [builder.stream(name, 0) for name in "xyz"]
    a = builder.add(streams[0], 4, kind="other", name="a")
    b = builder.add(streams[1], 4, kind="other", name="b")
    c = builder.add(streams[2], 4, [b, a], kind="other", name="c")
    assert path_of(builder.build()) == [a, c]


def test_a_flow_lasts_as_long_as_it_shares_its_link():
    """Two flows of 10 bytes at 1 byte/ns share a link: 20 ns each, then 1 ns."""
    builder = TaskGraphBuilder()
    streams = [builder.stream(name, 0) for name in "xy"]
    link = builder.link("wire", 1e9)
    for stream in streams:
        builder.add(
            stream, 0, kind="other", name="flow", work_bytes=10, rate_cap_bytes_per_s=1e9,
            links=[link],
        )  # fmt: skip
    builder.add(streams[1], 1, kind="other", name="after")
    graph = builder.build()
    start, finish = finish_times_ns(graph)
    chain = path_of(graph)
    assert chain == [1, 2]
    assert [int(finish[task] - start[task]) for task in chain] == [20, 1]


def test_no_tasks_no_chain():
    assert path_of(TaskGraphBuilder().build()) == []


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_chain_touches_and_adds_up_to_the_step(graphs, data):
    graph = data.draw(graphs)
    start, finish = finish_times_ns(graph)
    chain = critical_path(graph, start, finish)
    assert start[chain[0]] == 0 and finish[chain[-1]] == finish.max()
    for earlier, later in pairwise(chain):
        assert finish[earlier] == start[later]
        needs = graph.need[graph.need_start[later] : graph.need_start[later + 1]]
        assert earlier in needs or graph.stream[earlier] == graph.stream[later]
    assert sum(int(finish[task] - start[task]) for task in chain) == finish.max()
