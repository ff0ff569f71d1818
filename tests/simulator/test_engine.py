from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from claw_plan.simulator import engine as engine_module
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.errors import Deadlock, SimulationError
from claw_plan.simulator.reference import finish_times_ns_reference
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

ENGINES = [finish_times_ns, finish_times_ns_reference]
both = pytest.mark.parametrize("engine", ENGINES, ids=["compiled", "reference"])

GB = 1e9  # bytes a second; 1 GB/s is one byte a nanosecond


def delays(*tasks: tuple[int, int, tuple[int, ...]]) -> TaskGraph:
    """Pure delays: (stream, delay_ns, needs)."""
    builder = TaskGraphBuilder()
    for stream in range(1 + max((task[0] for task in tasks), default=-1)):
        builder.stream(f"s{stream}", stream)
    for index, (stream, delay_ns, needs) in enumerate(tasks):
        builder.add(stream, delay_ns, needs, kind="other", name=f"t{index}")
    return builder.build()


def flows(
    capacities: list[float],
    *tasks: tuple[int, list[int], float],
    delay_ns: int = 10,
    delay_of_second_ns: int = 10,
) -> TaskGraph:
    """Flows on a stream each: (bytes, links, cap)."""
    builder = TaskGraphBuilder()
    links = [builder.link(f"l{i}", capacity) for i, capacity in enumerate(capacities)]
    for index, (size, crossed, cap) in enumerate(tasks):
        builder.add(
            builder.stream(f"s{index}", index),
            delay_of_second_ns if index == 1 else delay_ns,
            kind="dp_comm",
            name=f"f{index}",
            work_bytes=size,
            rate_cap_bytes_per_s=cap,
            links=[links[i] for i in crossed],
        )
    return builder.build()


@both
def test_a_stream_runs_its_tasks_in_order(engine):
    start, finish = engine(delays((0, 5, ()), (1, 3, ()), (0, 7, ())))
    assert start.tolist() == [0, 0, 5]
    assert finish.tolist() == [5, 3, 12]


@both
def test_a_task_takes_its_stream_when_its_needs_are_done(engine):
    # Task 2 heads stream 1 after 3 ns but waits for task 0; task 3 waits behind it.
    graph = delays((0, 9, ()), (1, 3, ()), (1, 2, (0,)), (1, 1, ()))
    start, finish = engine(graph)
    assert start.tolist() == [0, 0, 9, 11]
    assert finish.tolist() == [9, 3, 11, 12]


@both
def test_tasks_of_no_time_pass_on_at_once(engine):
    start, finish = engine(delays((0, 4, ()), (1, 0, (0,)), (2, 0, (1, 0)), (0, 0, (2, 2))))
    assert start.tolist() == [0, 4, 4, 4]
    assert finish.tolist() == [4, 4, 4, 4]


@both
def test_an_empty_graph_takes_no_time(engine):
    start, finish = engine(TaskGraphBuilder().build())
    assert start.tolist() == finish.tolist() == []


@both
@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        # Alone: 10 ns, then 1000 bytes at 1 byte/ns.
        (flows([GB, 10 * GB], (1000, [0, 1], 10 * GB)), [1010]),
        # Its cap of 0.3 byte/ns: 1000 / 0.3 = 3333.3, rounded up.
        (flows([GB], (1000, [0], 0.3 * GB)), [3344]),
        # 500 bytes each at 0.5, then the other 500 of the second at 1.
        (flows([GB], (500, [0], 10 * GB), (1000, [0], 10 * GB)), [1010, 1510]),
        # The first is held at 0.2 by its cap, which leaves 0.8 to the second.
        (flows([GB], (200, [0], 0.2 * GB), (800, [0], 10 * GB)), [1010, 1010]),
        # Max-min: f0 and f1 get half of link 0, so f2 has 2 - 0.5 on link 1 until f1 ends.
        (
            flows([GB, 2 * GB], (500, [0], 9 * GB), (500, [0, 1], 9 * GB), (1600, [1], 9 * GB)),
            [1010, 1010, 1060],
        ),
        # The second joins at 110: 100 bytes are gone, 100 + 300 remain; halves until 310.
        (flows([GB], (200, [0], GB), (300, [0], GB), delay_of_second_ns=110), [310, 510]),
        # A link crossed twice carries the bytes twice: half the rate.
        (flows([GB], (1000, [0, 0], GB)), [2010]),
        # Three flows over a link of 1 unit (100 bytes/s): each gets 1 unit all the same.
        (flows([100], *[(1, [0], GB)] * 3), [10_000_010] * 3),
        # Of two equally scarce links of 3 bytes/ns / 2 = 1.5 the lower is filled first: the same.
        (flows([3 * GB] * 2, (1500, [0], 9 * GB), (1500, [0, 1], 9 * GB), (1500, [1], 9 * GB)),
         [1010, 1010, 1010]),
    ],
)  # fmt: skip
def test_flows_share_links_max_min(engine, graph, expected):
    _, finish = engine(graph)
    assert finish.tolist() == expected


@both
def test_a_flow_holds_its_stream(engine):
    builder = TaskGraphBuilder()
    stream, link = builder.stream("comm", 0), builder.link("nvlink", GB)
    flow = {"work_bytes": 100, "rate_cap_bytes_per_s": GB, "links": [link]}
    builder.add(stream, 5, kind="dp_comm", name="first", **flow)
    builder.add(stream, 5, kind="dp_comm", name="second", **flow)
    start, finish = engine(builder.build())
    assert start.tolist() == [0, 105]
    assert finish.tolist() == [105, 210]


@both
def test_a_graph_that_waits_for_itself_is_a_deadlock(engine):
    graph = delays((0, 1, ()), (0, 1, ()), (1, 1, ()), (1, 1, ()))
    # Task 1 (stream 0) needs 3, which stands behind 2 (stream 1), which needs 1.
    stuck = replace(graph, need_start=np.array([0, 0, 1, 2, 2]), need=np.array([3, 1]))
    with pytest.raises(Deadlock) as error:
        engine(stuck)
    assert str(error.value) == (
        "tasks wait for each other; rank 0 s0: 't1' waits for 't3'; rank 1 s1: 't2' waits for 't1'"
    )


@both
def test_time_beyond_64_bits_is_refused(engine):
    most = np.iinfo(np.int64).max
    with pytest.raises(SimulationError, match="a step lasts at most"):
        engine(delays((0, most - 10, ()), (0, 11, ())))
    _, finish = engine(delays((0, most - 10, ()), (0, 9, ())))
    assert finish[-1] == most - 1


@both
def test_a_flow_that_would_end_too_late_may_still_speed_up(engine):
    # Alone on a link of one unit f0 would need 9.2e18 ns; with f1 on it too, no longer in range
    # of 64 bits, were the sum taken. The cap keeps both at one unit, so both end in range.
    graph = flows([100], (920 * 10**9, [0], 100), (1, [0], 100))
    _, finish = engine(graph)
    assert finish.tolist() == [920 * 10**16 + 10, 10_000_010]


def assert_equal(graph: TaskGraph) -> None:
    ours, theirs = finish_times_ns(graph), finish_times_ns_reference(graph)
    assert ours[0].tolist() == theirs[0].tolist()
    assert ours[1].tolist() == theirs[1].tolist()


large = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@settings(large, max_examples=15)
@given(data=st.data())
def test_both_engines_agree_to_the_nanosecond(graphs, data):
    assert_equal(data.draw(graphs))


@pytest.mark.slow
@settings(large, max_examples=100)
@given(data=st.data())
def test_both_engines_agree_on_many_graphs(graphs, data):
    assert_equal(data.draw(graphs))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_streams_are_fifo_and_needs_come_first(small_graphs, data):
    graph = data.draw(small_graphs)
    start, finish = finish_times_ns(graph)
    for stream in range(len(graph.streams)):
        tasks = np.flatnonzero(graph.stream == stream)
        assert all(finish[a] <= start[b] for a, b in pairwise(tasks))
    for task in range(len(graph)):
        needs = graph.need[graph.need_start[task] : graph.need_start[task + 1]]
        assert all(finish[need] <= start[task] for need in needs)
        assert finish[task] >= start[task] + graph.delay_ns[task]


def test_the_graph_is_left_as_it_was():
    graph = flows([GB], (500, [0], GB), (1000, [0], GB))
    work, delay = graph.work_bytes.copy(), graph.delay_ns.copy()
    first, second = finish_times_ns(graph), finish_times_ns(graph)
    assert first[1].tolist() == second[1].tolist()
    assert (graph.work_bytes == work).all() and (graph.delay_ns == delay).all()


@pytest.mark.slow
def test_the_engine_compiles_where_nothing_can_be_kept(tmp_path):
    """A copy of the rooms with a file in place of every folder that numba would write to."""
    for room in ("profiles", "simulator"):
        folder = tmp_path / "claw_plan" / room
        folder.mkdir(parents=True)
        for source in Path(engine_module.__file__).parents[1].joinpath(room).glob("*.py"):
            shutil.copy(source, folder)
        (folder / "__pycache__").touch()
    home = tmp_path / "home"
    home.touch()
    script = (
        "from claw_plan.simulator import engine, task_graph\n"
        "b = task_graph.TaskGraphBuilder()\n"
        "b.add(b.stream('s', 0), 7, kind='other', name='t')\n"
        "print(engine.__file__)\n"
        "print(engine.finish_times_ns(b.build())[1].tolist())\n"
    )
    run = subprocess.run(
        [sys.executable, "-B", "-c", script],
        env={"PYTHONPATH": str(tmp_path), "HOME": str(home), "XDG_CACHE_HOME": str(home)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    copied = tmp_path / "claw_plan" / "simulator" / "engine.py"
    assert (run.returncode, run.stdout) == (0, f"{copied}\n[7]\n"), run.stderr
