from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.executor.trace_readers.kineto import read_kineto
from claw_plan.executor.trace_readers.rank_trace import KINDS, PHASES, RankTrace
from claw_plan.profiles.errors import InputError

EVENT: dict[str, Any] = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1}


def read(*events: Any, **head: Any) -> RankTrace:
    return read_kineto([*head.items(), *(("traceEvents", one) for one in events)], "t.json")


def test_times_are_nanoseconds_from_the_base() -> None:
    trace = read(EVENT | {"ts": 12.5, "dur": 0.25}, baseTimeNanoseconds=1_000_000)
    assert trace.activities.start_ns.tolist() == [1_012_500]
    assert trace.activities.end_ns.tolist() == [1_012_750]


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({"ts": 1.0, "dur": -1.0}, "1 events end before they start"),
        ({"ts": float("nan"), "dur": 1.0}, "have no time"),
        ({"ts": 1.0, "dur": float("inf")}, "have no time"),
        ({"ts": "1", "dur": 1}, "have no time"),
        ({"ts": None}, "have no time"),
        ({"ts": 10**400, "dur": 1}, "no plausible time"),
        ({"ts": 1, "dur": 10**60}, "no plausible time"),
    ],
)
def test_a_broken_time_is_left_out_and_said(times: dict[str, Any], said: str) -> None:
    trace = read(EVENT | times, EVENT | {"ts": 3, "dur": 4})
    assert len(trace.activities) == 1
    assert any(said in warning for warning in trace.warnings)


def test_what_is_no_event_is_left_out_and_said() -> None:
    trace = read(7, EVENT | {"ts": 3, "dur": 4}, {"ph": "B", "ts": 1}, EVENT | {"cat": ["x"]})
    assert "1 events are no events: left out" in trace.warnings
    assert len(trace.activities) == 1


def test_a_trace_without_anything_is_refused() -> None:
    with pytest.raises(InputError, match=r"t\.json: no operator, kernel or step in it"):
        read()
    with pytest.raises(InputError, match="end before they start"):
        read(EVENT | {"ts": 3, "dur": -4})


def test_phases_of_a_cpu_are_those_of_its_callers() -> None:
    trace = read(
        EVENT | {"name": "aten::mm", "ts": 0, "dur": 10},
        EVENT | {"name": "autograd::engine::evaluate_function: MmBackward0", "ts": 20, "dur": 20},
        EVENT | {"name": "aten::mm", "ts": 22, "dur": 10},
        {
            **EVENT,
            "cat": "user_annotation",
            "name": "Optimizer.step#AdamW.step",
            "ts": 50,
            "dur": 9,
        },
        EVENT | {"name": "aten::mul_", "ts": 51, "dur": 5},
    )
    rows = [
        (KINDS[k], PHASES[p], e - s)
        for s, e, k, p in zip(
            *(
                column.tolist()
                for column in (
                    trace.activities.start_ns,
                    trace.activities.end_ns,
                    trace.activities.kind,
                    trace.activities.phase,
                )
            ),
            strict=True,
        )
    ]
    assert rows == [
        ("gemm", "forward", 10_000),
        ("host", "backward", 2_000),
        ("gemm", "backward", 10_000),
        ("host", "backward", 8_000),
        ("optimizer", "optimizer", 5_000),
    ]
    assert not trace.is_gpu and "no GPU events" in trace.warnings[-1]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [
        "aten::mm", "ncclKernel_AllReduce_RING_LL_Sum_float(x)", "nccl:all_reduce", "gloo:recv",
        "record_param_comms", "ProfilerStep#3", "cudaLaunchKernel", "Optimizer.step#SGD.step",
        "c10d::recv_", "Memcpy HtoD", "DataLoader", "autograd::engine::evaluate_function: A",
    ]
)  # fmt: skip
ARGS = st.dictionaries(
    st.sampled_from(
        [
            "Input Dims", "Input type", "Concrete Inputs", "correlation", "stream", "device",
            "Collective name", "In msg nelems", "Out msg nelems", "Group size", "dtype",
            "Process Group Ranks", "Process Group Name", "Dst Rank",
        ]
    ),
    ANYTHING | st.integers(0, 3) | st.sampled_from(["Float", "allreduce", "[0, 1]", "[0, ...]"]),
)  # fmt: skip
WILD = st.fixed_dictionaries(
    {
        "ph": st.just("X") | ANYTHING,
        "cat": st.sampled_from(
            ["cpu_op", "kernel", "cuda_runtime", "user_annotation", "gpu_memcpy"]
        )
        | ANYTHING,
        "name": NAMES | ANYTHING,
        "pid": st.integers(0, 2) | ANYTHING,
        "tid": st.integers(0, 2) | ANYTHING,
        "ts": st.integers(0, 50) | SCALARS,
        "dur": st.integers(0, 30) | SCALARS,
        "args": ARGS | ANYTHING,
    }
)
HEADS = st.fixed_dictionaries(
    {},
    optional={
        "distributedInfo": st.dictionaries(
            st.sampled_from(["rank", "world_size", "pg_config", "backend"]),
            ANYTHING
            | st.lists(
                st.fixed_dictionaries(
                    {"pg_name": ANYTHING, "pg_size": ANYTHING, "ranks": ANYTHING}
                ),
                max_size=2,
            ),
        )
        | ANYTHING,
        "deviceProperties": ANYTHING,
        "baseTimeNanoseconds": ANYTHING,
    },
)


@settings(max_examples=150, deadline=None)
@given(st.lists(WILD, max_size=12), HEADS)
def test_any_events_are_read_or_refused(events: list[Any], head: dict[str, Any]) -> None:
    try:
        trace = read(*events, **head)
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert (trace.activities.end_ns >= trace.activities.start_ns).all()
    assert all(one.end_ns >= one.start_ns for one in trace.collectives)
    assert trace.steps and all(step.end_ns >= step.start_ns for step in trace.steps)


def test_the_example_of_the_format_is_read(tmp_path: Path) -> None:
    text = json.dumps([EVENT | {"ts": 1, "dur": 2}])
    assert len(read(*json.loads(text)).activities) == 1
