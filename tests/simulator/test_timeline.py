from __future__ import annotations

import pytest

from claw_plan.simulator.timeline import MEASURED, SIMULATED, MemorySample, Span, Timeline


def span(rank: int, kind: str, start_ns: int, end_ns: int) -> Span:
    return Span(rank=rank, stream="s", kind=kind, name="n", start_ns=start_ns, end_ns=end_ns)


def test_busy_time_counts_what_overlaps_once():
    timeline = Timeline(
        origin=MEASURED,
        spans=(
            span(0, "forward", 0, 10),
            span(0, "backward", 5, 20),
            span(0, "backward", 6, 8),
            span(0, "forward", 30, 31),
            span(0, "dp_comm", 0, 99),
            span(1, "forward", 0, 50),
        ),
    )
    assert timeline.busy_ns(0, ["forward", "backward"]) == 21
    assert timeline.busy_ns(0, ["forward"]) == 11
    assert timeline.busy_ns(2, ["forward"]) == 0
    assert timeline.step_time_ns == 99
    assert timeline.ranks == (0, 1)
    assert timeline.spans[1].duration_ns == 15


def test_peak_memory_is_the_largest_sample_of_the_rank():
    memory = (
        MemorySample(rank=0, time_ns=0, bytes=7),
        MemorySample(rank=1, time_ns=0, bytes=99),
        MemorySample(rank=0, time_ns=5, bytes=3),
    )
    timeline = Timeline(origin=SIMULATED, spans=(), memory=memory)
    assert [timeline.peak_memory_bytes(rank) for rank in (0, 1, 2)] == [7, 99, 0]
    assert timeline.step_time_ns == 0


def test_the_origin_is_one_of_two():
    with pytest.raises(ValueError, match="origin"):
        Timeline(origin="guessed", spans=())
