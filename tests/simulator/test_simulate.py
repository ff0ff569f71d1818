from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.simulator.simulate import makespan_ns, simulate
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder
from claw_plan.simulator.timeline import SIMULATED, MemorySample, Span


def samples(*tasks: tuple[int, int, int, int]) -> list[tuple[int, int, int]]:
    """Memory of tasks (rank, delay_ns, alloc, free) on one stream per rank: (rank, ns, bytes)."""
    builder = TaskGraphBuilder()
    streams = [builder.stream("compute", rank) for rank in range(3)]
    for index, (rank, delay_ns, alloc, free) in enumerate(tasks):
        builder.add(
            streams[rank],
            delay_ns,
            kind="other",
            name=f"t{index}",
            alloc_bytes=alloc,
            free_bytes=free,
        )
    return [(s.rank, s.time_ns, s.bytes) for s in simulate(builder.build()).memory]


def two_ranks() -> TaskGraph:
    builder = TaskGraphBuilder()
    first, second = builder.stream("compute", 4), builder.stream("compute", 7)
    sent = builder.add(first, 5, kind="forward", name="2F0", cost_source="measured", alloc_bytes=9)
    builder.add(second, 3, [sent], kind="backward", name="2B0", cost_source="roofline")
    builder.add(first, 2, kind="optimizer", name="step", free_bytes=9)
    return builder.build()


def test_every_task_becomes_a_span():
    timeline = simulate(two_ranks())
    assert timeline.origin == SIMULATED
    assert timeline.spans == (
        Span(rank=4, stream="compute", kind="forward", name="2F0", start_ns=0, end_ns=5,
             cost_source="measured"),
        Span(rank=7, stream="compute", kind="backward", name="2B0", start_ns=5, end_ns=8,
             cost_source="roofline"),
        Span(rank=4, stream="compute", kind="optimizer", name="step", start_ns=5, end_ns=7),
    )  # fmt: skip
    assert timeline.step_time_ns == makespan_ns(two_ranks()) == 8
    assert timeline.memory == (
        MemorySample(rank=4, time_ns=0, bytes=9),
        MemorySample(rank=4, time_ns=7, bytes=0),
    )


def test_nothing_takes_no_time():
    empty = TaskGraphBuilder().build()
    assert makespan_ns(empty) == 0
    assert simulate(empty).spans == simulate(empty).memory == ()


def test_memory_is_counted_per_rank():
    assert samples((0, 2, 10, 0), (1, 3, 4, 4), (0, 1, 5, 15)) == [
        (0, 0, 10), (0, 2, 15), (0, 3, 0), (1, 0, 4), (1, 3, 0),
    ]  # fmt: skip


def test_what_ends_is_freed_before_what_begins_is_allocated():
    # Never 20: the second starts at the nanosecond the first ends.
    assert samples((0, 2, 10, 10), (0, 2, 10, 10)) == [(0, 0, 10), (0, 2, 10), (0, 4, 0)]


def test_a_task_of_no_time_shows_its_peak():
    # At 2: 10 freed, 7 allocated and freed at once, 3 allocated.
    assert samples((0, 2, 10, 10), (0, 0, 7, 7), (0, 1, 3, 0)) == [
        (0, 0, 10), (0, 2, 7), (0, 2, 3),
    ]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_timeline_is_in_order_and_complete(small_graphs, data):
    graph = data.draw(small_graphs)
    timeline = simulate(graph)
    starts = [span.start_ns for span in timeline.spans]
    assert starts == sorted(starts)
    assert sorted(span.name for span in timeline.spans) == sorted(graph.name)
    assert all(0 <= span.start_ns <= span.end_ns for span in timeline.spans)
    assert timeline.step_time_ns == makespan_ns(graph)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)), max_size=20))
def test_memory_that_is_freed_where_it_was_taken_ends_at_zero(tasks):
    got = samples(*[(rank, delay_ns, size, size) for rank, delay_ns, size in tasks])
    assert got == sorted(got, key=lambda sample: sample[:2])
    assert all(used >= 0 for _, _, used in got)
    last = {rank: used for rank, _, used in got}
    assert set(last.values()) <= {0}
    for rank in range(3):  # one task at a time: the peak is the largest task
        peak = max((used for owner, _, used in got if owner == rank), default=0)
        assert peak == max((size for owner, _, size in tasks if owner == rank), default=0)
