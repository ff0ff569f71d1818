from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.whole_model import SINGLE

CPU = torch.device("cpu")


def test_lower_precision_is_computed_by_fsdp_and_stored_in_single(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    plan, loaded = open_plan(tiny_plan("bf16", precision="bfloat16"))
    model = compile_plan(plan, loaded, CPU)
    assert isinstance(model.stages[0], FSDPModule)
    assert {p.dtype for p in model.trainable()} == {torch.float32}
    seen: list[torch.dtype] = []
    layer = model.stages[0].model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model.train_step(loaded.example_batch(8))
    assert set(seen) == {torch.bfloat16}
    single = compile_plan(plan, loaded, CPU, precision=SINGLE)
    layer = single.stages[0].model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    single.train_step(loaded.example_batch(8))
    assert seen[-1] == torch.float32
