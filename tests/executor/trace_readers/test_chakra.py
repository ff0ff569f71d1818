from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.executor.trace_readers.chakra import read_execution_trace
from claw_plan.executor.trace_readers.rank_trace import RankTrace
from claw_plan.profiles.errors import InputError

OLD = {"name": "aten::mm", "id": 5, "input_shapes": [[4, 8], [8, 6]],
       "input_types": ["Tensor(float)", "Tensor(float)"], "inputs": []}  # fmt: skip


def read(*nodes: Any, **head: Any) -> RankTrace:
    return read_execution_trace([*head.items(), *(("nodes", one) for one in nodes)], "et.json")


def test_operators_without_times() -> None:
    trace = read(OLD, {"name": "[pytorch|profiler]"}, start_ts=5, finish_ts=25)
    assert (trace.has_timing, len(trace.activities), trace.steps[0].duration_ns) == (
        False, 0, 20_000,
    )  # fmt: skip
    assert "1 operators and their order, without times" in trace.warnings[0]


def test_collectives_of_either_layout() -> None:
    trace = read(
        {"name": "record_param_comms", "inputs": [[1], 3, "allreduce"],
         "input_shapes": [[1000], [], []], "input_types": ["Tensor(float)", "Int", "String"]},
        {"name": "record_param_comms",
         "inputs": {"values": [], "shapes": [[[64]]], "types": ["GenericList[Tensor(c10::Half)]"]},
         "attrs": [{"name": "collective_name", "type": "string", "value": "_reduce_scatter_base"},
                   {"name": "pg_size", "type": "uint64", "value": 4}]},
    )  # fmt: skip
    assert [(one.op, one.bytes, one.group_size) for one in trace.collectives] == [
        ("all_reduce", 4000, None),
        ("reduce_scatter", 128, 4),
    ]


def test_times_of_chakras_linker_are_used() -> None:
    trace = read(OLD | {"ts": 100, "dur": 7, "tid": 3}, rank=2, world_size=4)
    assert trace.activities.end_ns.tolist() == [107_000]
    assert trace.works[0].work.dims == (1, 4, 6, 8)
    assert (trace.rank, trace.world_size) == (2, 4)


def test_other_nodes_are_refused() -> None:
    with pytest.raises(InputError, match="none of an execution trace"):
        read({"id": 1}, 7)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
ATTRIBUTES = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["pg_size", "dtype"]) | ANYTHING})
)
NODE = st.fixed_dictionaries(
    {"name": st.sampled_from(["aten::mm", "record_param_comms", "x"]) | ANYTHING},
    optional={
        key: ANYTHING
        for key in ("inputs", "input_shapes", "input_types", "ts", "dur", "cat", "tid")
    }
    | {"attrs": ATTRIBUTES | ANYTHING},
)
HEAD = st.dictionaries(st.sampled_from(["start_ts", "finish_ts", "rank", "world_size"]), ANYTHING)


@settings(max_examples=100, deadline=None)
@given(st.lists(NODE, max_size=6), HEAD)
def test_any_nodes_are_read_or_refused(nodes: list[Any], head: dict[str, Any]) -> None:
    try:
        assert read(*nodes, **head).steps
    except InputError as error:
        assert "\n" not in str(error)
