from __future__ import annotations

from typing import Any

from claw_plan.executor.trace_readers.kineto import read_kineto
from claw_plan.executor.trace_readers.rank_trace import KINDS, PHASES, RankTrace


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


def kernel(name: str, start: float, duration: float, correlation: int) -> Any:
    return event("kernel", name, start, duration, device=0, stream=7, correlation=correlation)


def launch(start: float, correlation: int, tid: int = 1) -> Any:
    return event("cuda_runtime", "cudaLaunchKernel", start, 1, tid=tid, correlation=correlation)


def read(*events: Any, **head: Any) -> RankTrace:
    return read_kineto([*head.items(), *(("traceEvents", one) for one in events)], "t.json")


def rows(trace: RankTrace) -> list[tuple[str, str, int, int]]:
    work = trace.activities
    columns = (work.kind, work.phase, work.start_ns, work.end_ns)
    return [
        (KINDS[kind], PHASES[phase], start, end)
        for kind, phase, start, end in zip(*(c.tolist() for c in columns), strict=True)
    ]


def test_a_kernel_has_the_phase_of_the_thread_that_launched_it() -> None:
    trace = read(
        # Written out of order, as Kineto does.
        kernel("gemm", 100, 10, 1),
        kernel("gemm", 120, 20, 2),
        kernel("adam", 150, 5, 3),
        kernel("orphan", 160, 5, 99),
        event("cpu_op", "autograd::engine::evaluate_function: X", 10, 10, tid=2),
        launch(1, 1),
        launch(12, 2, tid=2),
        launch(31, 3),
        event("user_annotation", "Optimizer.step#AdamW.step", 30, 5),
        distributedInfo={"rank": 3, "world_size": 8},
        deviceProperties=[{"name": "NVIDIA H100"}],
    )
    assert rows(trace) == [
        ("gemm", "forward", 100_000, 110_000),
        ("gemm", "backward", 120_000, 140_000),
        ("optimizer", "optimizer", 150_000, 155_000),
        ("memory", "other", 160_000, 165_000),
    ]
    assert (trace.rank, trace.world_size, trace.device, trace.is_gpu) == (
        3,
        8,
        "NVIDIA H100",
        True,
    )


def test_steps_are_the_profilers_marks_each_once() -> None:
    trace = read(
        event("user_annotation", "ProfilerStep#6", 50, 30),
        event("user_annotation", "ProfilerStep#5", 10, 30),
        event("cpu_op", "ProfilerStep#5", 11, 3),
        event("cpu_op", "aten::add", 12, 2),
    )
    assert [(s.number, s.start_ns, s.end_ns) for s in trace.steps] == [
        (5, 10_000, 40_000),
        (6, 50_000, 80_000),
    ]


def test_without_marks_the_recording_is_one_step_and_that_is_said() -> None:
    trace = read(event("cpu_op", "aten::add", 12, 2), event("cpu_op", "aten::add", 40, 3))
    assert [(s.number, s.start_ns, s.end_ns) for s in trace.steps] == [(0, 12_000, 43_000)]
    assert any("no ProfilerStep marks" in said for said in trace.warnings)


def test_the_data_loader_counts_as_input_on_a_gpu_and_on_a_cpu() -> None:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    gpu = read(kernel("k", 30, 5, 1), event("user_annotation", loader, 0, 20))
    assert [row[0] for row in rows(gpu)] == ["input", "memory"]
    cpu = read(event("cpu_op", "aten::stack", 5, 5), event("cpu_op", loader, 0, 20))
    assert [(kind, start, end) for kind, _, start, end in rows(cpu)] == [
        ("input", 0, 5_000),
        ("input", 5_000, 10_000),
        ("input", 10_000, 20_000),
    ]


def test_a_shaped_operator_lasts_as_long_as_its_kernels() -> None:
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
    trace = read(
        event("cpu_op", "aten::mm", 10, 10, **shapes),
        event("cpu_op", "aten::mm", 40, 10, **shapes),
        launch(12, 1),
        launch(15, 2),
        launch(30, 3),
        launch(42, 4),
        kernel("gemm", 100, 7, 1),
        kernel("splitK", 110, 2, 2),
        kernel("other", 120, 50, 3),
        kernel("gemm", 200, 8, 4),
    )
    (timed,) = trace.works
    assert timed.samples_ns == (9_000, 8_000)
    assert (timed.work.dims, timed.work.target) == ((1, 64, 16, 32), "aten.mm")


def test_copies_are_work_and_nccl_kernels_are_not() -> None:
    trace = read(
        event("gpu_memcpy", "Memcpy HtoD", 0, 5, device=0, stream=3, correlation=1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 10, 5, 2),
    )
    assert [row[0] for row in rows(trace)] == ["copy"]
    assert [one.op for one in trace.collectives] == ["all_reduce"]
