from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank

CPU = torch.device("cpu")


def test_recomputed_blocks_keep_their_names_and_run_twice(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    plan, loaded = open_plan(tiny_plan("full", recompute="full"))
    model = compile_plan(plan, loaded, CPU)
    assert "transformer.h.0.attn.c_attn.weight" in model.parameters
    calls: list[int] = []
    block = model.stages[0].model.get_submodule("transformer.h.0.mlp")
    block.register_forward_pre_hook(lambda module, args: calls.append(1))
    model.forward_backward(loaded.example_batch(8))
    assert len(calls) == 2 * 8  # each microbatch forward and again in backward
