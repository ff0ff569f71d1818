"""Random task graphs for the properties of both engines and the bound."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

# Ties (zero delays, equal sizes), caps at, above and below the shares of links, and links of so
# few units of 100 bytes/s that rounding shows and flows overdraw them: there engines come apart.
DELAYS_NS = (0, 0, 1, 7, 1000, 49_000)
WORK_BYTES = (0, 0, 1, 1000, 4096, 10_007, 1 << 20)
CAPS_BYTES_PER_S = (1e9, 333_333_300, 1e11, 100, 200, 300, 400, 500)
CAPACITIES_BYTES_PER_S = (1e9, 777_777_700, 100, 300, 500, 700, 1100, 1900)


@st.composite
def task_graphs(draw: st.DrawFn, most_tasks: int = 200) -> TaskGraph:
    """Up to `most_tasks` tasks on up to 16 streams, with flows over up to 3 of up to 8 links."""
    builder = TaskGraphBuilder()
    streams = [builder.stream(f"s{i}", i % 3) for i in range(draw(st.integers(1, 16)))]
    capacities = draw(st.lists(st.sampled_from(CAPACITIES_BYTES_PER_S), min_size=1, max_size=8))
    links = [builder.link(f"l{i}", capacity) for i, capacity in enumerate(capacities)]
    for task in range(draw(st.integers(1, most_tasks))):
        crossed = draw(st.lists(st.sampled_from(links), max_size=3))
        builder.add(
            draw(st.sampled_from(streams)),
            draw(st.sampled_from(DELAYS_NS)),
            draw(st.lists(st.integers(0, task - 1), max_size=3)) if task else (),
            kind="other",
            name=f"t{task}",
            work_bytes=draw(st.sampled_from(WORK_BYTES)) if crossed else 0,
            rate_cap_bytes_per_s=draw(st.sampled_from(CAPS_BYTES_PER_S)),
            links=crossed,
        )
    return builder.build()


@pytest.fixture(scope="session")
def graphs() -> st.SearchStrategy[TaskGraph]:
    return task_graphs()


@pytest.fixture(scope="session")
def small_graphs() -> st.SearchStrategy[TaskGraph]:
    return task_graphs(most_tasks=30)
