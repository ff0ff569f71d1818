"""What computation loses to traffic beside it, and what of each task's time is told."""

from __future__ import annotations

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.pass_time import Stretch
from claw_plan.planner.stage_streams import Pause, StageStreams, View, add_stage_streams
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.task_graph import TaskGraphBuilder


def streams_with(overlap_loss: float, *, overlaps: bool = True) -> StageStreams:
    builder = TaskGraphBuilder()
    compute, gather, reduce, sends = (builder.stream(name, 0) for name in "cgrs")
    return StageStreams(
        builder=builder,
        compute=compute,
        gather=gather,
        reduce=reduce,
        sends=sends,
        links={"intra": [builder.link("port", 1e9)]},
        cores=(),
        overlaps=overlaps,
        overlap_loss=overlap_loss,
    )


def traffic(duration_ns: int) -> CollectiveCost:
    return CollectiveCost(
        latency_ns=duration_ns, bytes=0, rate_cap_bytes_per_s=1.0, link="intra", source="measured"
    )


def kernels(duration_ns: int, exchange: CollectiveCost | None = None) -> Stretch:
    return Stretch(
        compute_ns=duration_ns,
        source="fitted",
        parts_ns={"memory": duration_ns},
        exchange=exchange,
        exchange_parts_ns={"tp": 7.0} if exchange else {},
    )


def durations(streams: StageStreams) -> list[int]:
    start, finish = finish_times_ns(streams.builder.build())
    return (finish - start).tolist()


@pytest.mark.parametrize(
    ("beside_ns", "lost_ns"),
    [(0, [0, 0]), (600, [150, 0]), (1000, [250, 0]), (1400, [250, 100]), (9000, [250, 250])],
)
def test_a_share_of_the_shorter_of_computation_and_traffic_is_lost(beside_ns, lost_ns):
    """A quarter; what the first kernels do not meet is still there for the second."""
    streams = streams_with(0.25)
    if beside_ns:
        streams.background(streams.gather, "dp_comm", "gather", traffic(beside_ns), 0, [])
    for _ in lost_ns:
        streams.run_pass("forward", "0F0", kernels(1000))
    found = durations(streams)[-2:]
    assert found == [1000 + lost for lost in lost_ns]
    told = [streams.parts[task] for task in sorted(streams.parts)]
    assert told == [({"memory": 1000}, lost) for lost in lost_ns]


def test_traffic_that_stops_computation_costs_it_nothing_more():
    streams = streams_with(0.25, overlaps=False)
    streams.background(streams.gather, "dp_comm", "gather", traffic(600), 0, [])
    streams.run_pass("forward", "0F0", kernels(1000))
    assert durations(streams) == [600, 1000]
    assert finish_times_ns(streams.builder.build())[1].tolist() == [600, 1600]


def test_kernels_come_before_their_exchanges():
    streams = streams_with(0.0)
    streams.run_pass("forward", "0F0", kernels(1000, traffic(300)))
    streams.run_pass("forward", "0F1", kernels(0, traffic(40)))
    graph = streams.builder.build()
    assert graph.kind == ("forward", "tp_comm", "tp_comm")
    assert finish_times_ns(graph)[1].tolist() == [1000, 1300, 1340]
    assert [streams.parts[task][0] for task in (1, 2)] == [{"tp": 7.0}] * 2


def test_a_wait_marks_the_next_task_only():
    streams = streams_with(0.0)
    far = streams.background(streams.gather, "dp_comm", "gather", traffic(500), 0, [])
    streams.wait_for([far])
    streams.run("forward", "a", 10)
    streams.run("forward", "b", 10)
    assert finish_times_ns(streams.builder.build())[0].tolist() == [0, 500, 510]


def test_every_pipeline_rank_has_streams_and_ports_of_its_own(toys):
    builder = TaskGraphBuilder()
    problem, candidate = toys.problem(), Candidate(pp=3)
    found = add_stage_streams(builder, [View(problem, candidate, rank) for rank in range(3)])
    ids = [
        (each.compute, each.gather, each.reduce, each.sends, *each.links.values())
        for each in found
    ]
    assert len({stream for each in ids for stream in each[:4]}) == 12
    assert len({link for each in ids for link in each[4:]}) == 6
    assert len({id(each.parts) for each in found}) == 1  # one account of the whole step


def test_a_backward_is_cut_where_something_begins_inside_it():
    """At a fifth and at its end; what is lost beside traffic, a quarter, is shared out."""
    streams = streams_with(0.25)
    streams.background(streams.gather, "dp_comm", "gather", traffic(500), 0, [])
    seen = []
    streams.pauses = [Pause(share, lambda: seen.append(streams.last_task)) for share in (0.2, 1.0)]
    streams.run_pass("recompute", "r", kernels(100))
    streams.run_pass("backward", "b", kernels(1000))
    streams.run_pass("backward", "c", kernels(1000))
    assert seen == [2, 3]
    assert durations(streams) == [500, 125, 250, 800 + 50, 1000]
    assert [streams.parts[task] for task in (2, 3, 4)] == [
        ({"memory": 200.0}, 50),
        ({"memory": 800.0}, 50),
        ({"memory": 1000.0}, 0),
    ]
