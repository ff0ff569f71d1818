from __future__ import annotations

from typing import Any

import pytest

from claw_plan.executor.trace_readers.kineto import read_kineto
from claw_plan.executor.trace_readers.kineto_collectives import op_of
from claw_plan.executor.trace_readers.rank_trace import RankTrace


def event(category: str, name: str, start: float, duration: float, **more: Any) -> Any:
    tid, args = more.pop("tid", 1), more
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def read(*events: Any, **info: Any) -> RankTrace:
    head = [("distributedInfo", {"rank": 0, "world_size": 8, **info})]
    return read_kineto([*head, *(("traceEvents", one) for one in events)], "t.json")


def nccl(name: str, start: float, duration: float, correlation: int, **args: Any) -> Any:
    return event(
        "kernel", name, start, duration, device=0, stream=9, correlation=correlation, **args
    )


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("nccl:_all_gather_base", "all_gather"),
        ("allreduce", "all_reduce"),
        ("gloo:reduce_scatter", "reduce_scatter"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "reduce_scatter"),
        ("ncclDevKernel_Generic_4", "other"),
    ],
)  # fmt: skip
def test_operations_by_any_of_their_names(name: str, op: str) -> None:
    assert op_of(name) == op


def test_a_new_kernel_says_everything_itself() -> None:
    args = {
        "Collective name": "_allgather_base",
        "In msg nelems": 1000,
        "Out msg nelems": 4000,
        "Group size": 4,
        "dtype": "BFloat16",
        "Process Group Name": "3",
        "Process Group Ranks": "[0, 2, 4, 6]",
    }
    (one,) = read(nccl("ncclDevKernel_AllGather_RING_LL(x)", 5, 7, 1, **args)).collectives
    assert (one.op, one.bytes, one.group_size, one.ranks) == ("all_gather", 8000, 4, (0, 2, 4, 6))
    assert (one.start_ns, one.end_ns, one.group) == (5_000, 12_000, "3")


def test_a_cut_list_of_ranks_gives_the_size_and_the_config_the_ranks() -> None:
    args = {"Group size": 40, "Process Group Name": "7", "Process Group Ranks": "[0, 1, ...]"}
    kernel = nccl("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 5, 7, 1, **args)
    (one,) = read(kernel).collectives
    assert (one.group_size, one.ranks, one.bytes) == (40, (), None)
    config = [{"pg_name": "7", "pg_size": 40, "ranks": list(range(40))}]
    (one,) = read(kernel, pg_config=config).collectives
    assert (one.group_size, one.ranks) == (40, tuple(range(40)))


def test_an_old_kernel_is_described_by_the_operator_that_launched_it() -> None:
    dims = {"Input Dims": [[394241]], "Input type": ["float"]}
    trace = read(
        event("cpu_op", "record_param_comms", 10, 20),
        event("user_annotation", "nccl:all_reduce", 12, 15, **dims),
        event("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=5),
        nccl("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 50, 9, 5),
    )
    (one,) = trace.collectives
    assert (one.op, one.bytes, one.group_size, one.issue_ns) == ("all_reduce", 1576964, 8, 20_000)
    assert any("taken to be of all 8 ranks" in said for said in trace.warnings)


def test_gloo_on_a_cpu() -> None:
    dims = {"Input Dims": [[1000]], "Input type": ["float"]}
    config = [{"pg_name": "0", "pg_size": 8, "ranks": list(range(8))}]
    trace = read(
        event("user_annotation", "gloo:all_gather", 30, 10, tid=5, **dims),
        event("cpu_op", "c10d::recv_", 50, 20, **{"Input Dims": [[[10]]], "Input type": ["x"]}),
        event("user_annotation", "gloo:recv", 68, 3, **dims),
        pg_config=config,
    )
    gather, received = trace.collectives
    assert (gather.op, gather.bytes, gather.group_size) == ("all_gather", 32000, 8)
    assert (gather.backend, gather.ranks) == ("gloo", tuple(range(8)))
    # gloo waits in c10d::recv_; its own annotation begins when the message is there.
    assert (received.op, received.start_ns, received.end_ns) == ("recv", 50_000, 71_000)
    assert trace.has_timing


def test_nccl_without_a_gpu_has_no_times() -> None:
    trace = read(event("user_annotation", "nccl:all_reduce", 30, 10))
    assert not trace.has_timing and trace.collectives[0].bytes is None
    assert "1 collectives do not tell their size" in trace.warnings
