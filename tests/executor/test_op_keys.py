from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.recorder import StepRecorder
from claw_plan.planner.graph import Op
from claw_plan.planner.problem import op_work
from claw_plan.planner.trace import trace
from claw_plan.profiles.work import CollectiveWork, OpWork


def recorder_here(**options: bool) -> StepRecorder:
    cpu = torch.device("cpu")
    world = dist.group.WORLD
    groups = {str(world.group_name): "dp_shard"} if world is not None else {}
    return StepRecorder(0, cpu, groups, {"dp_shard": 1}, **options)


def works(recorder: StepRecorder) -> list[OpWork]:
    return [work for work in recorder.samples if isinstance(work, OpWork)]


def test_a_product_is_keyed_by_its_shape() -> None:
    recorder = recorder_here(times_work=True)
    with recorder, recorder.span("forward", "0F0"):
        torch.ones(3, 5) @ torch.ones(5, 7)
    [work] = [work for work in works(recorder) if work.kind == "gemm"]
    assert (work.dims, work.dtype, work.phase) == ((1, 3, 7, 5), "float32", "forward")
    assert (work.flops, work.bytes) == (2 * 3 * 7 * 5, 4 * (15 + 35 + 21))


def test_attention_is_one_kind_whatever_kernel_runs() -> None:
    q, k, v = (torch.ones(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    recorder = recorder_here(times_work=True)
    with recorder:
        with recorder.span("forward", "0F0"):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with recorder.span("backward", "0B0"):
            out.sum().backward()
    forward, backward = [work for work in works(recorder) if work.kind == "attention"]
    assert forward.dims == backward.dims == (2, 4, 4, 8, 8, 16, 1)
    square = 2 * 4 * 8 * 8 * 16
    assert (forward.flops, backward.flops) == (4 * square, 10 * square)
    assert (forward.target, backward.target) == (
        "claw_plan.attention",
        "claw_plan.attention_backward",
    )
    assert (forward.phase, backward.phase) == ("forward", "backward")


def test_a_step_has_all_kernels_that_the_planner_asks_for(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    plan, loaded = open_plan(tiny_plan("keys", global_batch=2, microbatch_size=2))
    compiled = compile_plan(plan, loaded, torch.device("cpu"))
    compiled.recorder = recorder = recorder_here(times_work=True)
    compiled.train_step(loaded.example_batch(2))
    graph = trace(loaded, seq_len=16, dtype="float32")
    asked = {
        op_work(item, 2, 1, backward)
        for unit in range(len(graph.units))
        for backward in (False, True)
        for item in (graph.cost(unit).backward if backward else graph.cost(unit).forward)
        if isinstance(item, Op)
    }
    assert asked <= set(works(recorder))


def test_collectives_are_keyed_by_their_full_buffer(alone: Rank) -> None:
    recorder = recorder_here(times_work=True)
    whole, part = torch.ones(8), torch.ones(8)
    with recorder:
        dist.all_reduce(whole)
        dist.reduce_scatter_single(part, whole)
        dist.all_gather_single(whole, part)
    found = {w.op: w for w in recorder.samples if isinstance(w, CollectiveWork)}
    assert set(found) == {"all_reduce", "reduce_scatter", "all_gather"}
    assert {work.bytes for work in found.values()} == {32}
    assert {(w.group_size, w.nodes, w.backend) for w in found.values()} == {(1, 1, "gloo")}
