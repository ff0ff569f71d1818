from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import (
    DOUBLE,
    SINGLE,
    ParallelModel,
    build_whole,
    cast_floats,
    compile_plan,
    first_names,
)
from claw_plan.executor.ranks import Rank

CPU = torch.device("cpu")


@pytest.fixture
def compiled(tiny_plan: Callable[..., Path], alone: Rank) -> ParallelModel:
    return compile_plan(*open_plan(tiny_plan("compiled")), CPU)


def test_weights_are_those_of_the_seed(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("seed"))
    one, other = (build_whole(plan, loaded).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    double = build_whole(plan, loaded, DOUBLE).state_dict()
    assert all(torch.equal(one[name].double(), double[name]) for name in one)


def test_tied_parameters_go_by_their_first_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert first_names(model) == {"a.weight": "a.weight", "b.weight": "a.weight"}


def test_only_floats_are_cast() -> None:
    batch = cast_floats({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)}, torch.double)
    assert (batch["x"].dtype, batch["n"].dtype) == (torch.float64, torch.int64)


def test_a_step_learns_and_clears_its_gradients(compiled: ParallelModel) -> None:
    batch = {
        "idx": torch.arange(128).view(8, 16) % 61,
        "targets": torch.arange(1, 129).view(8, 16) % 61,
    }
    losses = [compiled.train_step(batch) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert all(parameter.grad is None for parameter in compiled.trainable())


def test_microbatches_accumulate_to_the_mean_of_the_batch(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    gradients = []
    for size in (2, 8):
        plan, loaded = open_plan(tiny_plan(f"size-{size}", microbatch_size=size))
        model = compile_plan(plan, loaded, CPU, precision=DOUBLE)
        model.forward_backward(loaded.example_batch(8))
        gradients.append([p.grad.clone() for p in model.trainable() if p.grad is not None])
    for few, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(few, whole, rtol=0, atol=1e-14)


def test_lower_precision_is_computed_by_fsdp_and_stored_in_single(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    plan, loaded = open_plan(tiny_plan("bf16", precision="bfloat16"))
    model = compile_plan(plan, loaded, CPU)
    assert isinstance(model.stage, FSDPModule)
    assert {p.dtype for p in model.trainable()} == {torch.float32}
    seen: list[torch.dtype] = []
    layer = model.stage.model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model.train_step(loaded.example_batch(8))
    assert set(seen) == {torch.bfloat16}
    single = compile_plan(plan, loaded, CPU, precision=SINGLE)
    layer = single.stage.model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    single.train_step(loaded.example_batch(8))
    assert seen[-1] == torch.float32


def test_recomputed_blocks_keep_their_names_and_run_twice(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    plan, loaded = open_plan(tiny_plan("full", recompute="full"))
    model = compile_plan(plan, loaded, CPU)
    assert "transformer.h.0.attn.c_attn.weight" in model.parameters
    calls: list[int] = []
    block = model.stage.model.get_submodule("transformer.h.0.mlp")
    block.register_forward_pre_hook(lambda module, args: calls.append(1))
    model.forward_backward(loaded.example_batch(8))
    assert len(calls) == 2 * 8  # each microbatch forward and again in backward
