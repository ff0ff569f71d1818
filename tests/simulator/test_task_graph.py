from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from claw_plan.simulator.errors import SimulationError
from claw_plan.simulator.task_graph import (
    MAX_FLOW_BYTES,
    MAX_RATE_UNITS,
    WORK_UNITS_PER_BYTE,
    TaskGraph,
    TaskGraphBuilder,
    rate_units,
)


def one_flow(work_bytes: int = 8, rate_bytes_per_s: float = 1e9) -> TaskGraph:
    builder = TaskGraphBuilder()
    stream, link = builder.stream("comm", 3), builder.link("nvlink", rate_bytes_per_s)
    first = builder.add(stream, 1, kind="forward", name="a", alloc_bytes=5)
    builder.add(
        stream,
        2,
        [first],
        kind="dp_comm",
        name="b",
        cost_source="measured",
        work_bytes=work_bytes,
        rate_cap_bytes_per_s=rate_bytes_per_s,
        links=[link],
        free_bytes=5,
    )
    return builder.build()


def test_the_builder_lays_tasks_out_as_arrays():
    graph = one_flow()
    assert len(graph) == 2
    assert (graph.streams, graph.ranks, graph.links) == (("comm",), (3,), ("nvlink",))
    assert graph.delay_ns.tolist() == [1, 2]
    assert graph.work_bytes.tolist() == [0, 8]
    assert graph.rate_cap.tolist() == [0, 10**7]
    assert (graph.link_start.tolist(), graph.link.tolist()) == ([0, 0, 1], [0])
    assert (graph.need_start.tolist(), graph.need.tolist()) == ([0, 0, 1], [0])
    assert (graph.alloc_bytes.tolist(), graph.free_bytes.tolist()) == ([5, 0], [0, 5])
    assert graph.cost_source == ("", "measured")


def test_rates_are_whole_units_and_at_least_one():
    assert [rate_units(r) for r in (1, 100, 199, 200, 1e9)] == [1, 1, 1, 2, 10**7]


def test_the_largest_flow_at_the_highest_rate_fits_in_64_bits():
    assert MAX_FLOW_BYTES * WORK_UNITS_PER_BYTE + MAX_RATE_UNITS <= np.iinfo(np.int64).max


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay_ns": -1}, "not negative"),
        ({"work_bytes": 1, "rate_cap_bytes_per_s": 1e9}, "need a link"),
        ({"work_bytes": 1, "links": [0]}, "has a rate cap"),
        ({"needs": [0]}, "earlier tasks only"),
        ({"needs": [-1]}, "earlier tasks only"),
    ],
)
def test_the_builder_refuses(arguments, message):
    builder = TaskGraphBuilder()
    builder.link("nvlink", 1e9)
    with pytest.raises(ValueError, match=message):
        builder.add(
            **{"stream": builder.stream("s", 0), "delay_ns": 0} | arguments, kind="other", name="x"
        )


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_link_has_a_capacity(rate):
    with pytest.raises(ValueError, match="a link has a capacity"):
        TaskGraphBuilder().link("nvlink", rate)


def ints(*values: int):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("work_bytes", ints(0, MAX_FLOW_BYTES + 1), f"has {MAX_FLOW_BYTES + 1}"),
        ("delay_ns", ints(0, -7), "delay_ns is at least 0, but one task or link has -7"),
        ("rate_cap", ints(0, 0), "rate_cap is 1 to"),
        ("capacity", ints(0), "capacity is 1 to"),
        ("stream", ints(0, 1), "stream is 0 to 0"),
        ("link", ints(1), "link is 0 to 0"),
        ("need", ints(2), "need is 0 to 1"),
        ("need_start", ints(0, 2, 1), "need_start does not cut need into 2 rows"),
        ("link_start", ints(0, 1, 1), "has a link to go over"),
        ("link_start", ints(0, 1), "link_start has 2 entries, but there are 3"),
        ("delay_ns", ints(1), "delay_ns has 1 entries, but there are 2"),
        ("name", ("a",), "name has 1 entries"),
    ],
)
def test_a_graph_is_checked_at_birth(column, values, message):
    with pytest.raises(SimulationError, match=message):
        replace(one_flow(), **{column: values})


def test_flows_beyond_the_range_are_refused():
    assert one_flow(MAX_FLOW_BYTES).work_bytes[1] == MAX_FLOW_BYTES
    with pytest.raises(SimulationError, match="work_bytes is 0 to 920000000000"):
        one_flow(MAX_FLOW_BYTES + 1)
    with pytest.raises(SimulationError, match="capacity is 1 to"):
        one_flow(rate_bytes_per_s=2e17)
